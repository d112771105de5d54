"""A model: prompts in, text out, over arrays of any shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Self, overload

from msgspec.structs import replace

from ..arrays import Array, Call, is_conversation, is_message
from ..bridge import hosted, wait
from ..calling import Options
from ..errors import PromptError
from ..events import Bursts, Elementwise, Event, Failure, Layer, Snapshot, stack
from ..layers import batched, guarded
from ..layers.batching import By
from ..layers.caching import known
from ..lifting import Lifted, Scalar
from ..programs import LM, Watch
from ..requests import Completion, Message, Request, Terms
from ..signatures import nearest, parse
from ..stops import cut, met, safe
from ..streaming import Stream
from ..targets import Given, Plan, missing
from .parameters import COMMON, Check, checked, form, settled
from .scoring import FORM, Scoring, numbers

ONE_BATCH = "concurrency= bounds the requests under way, and a batch is one of them; leave it out with via="
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TAKES = "give text, or a conversation (a list of dicts with 'role' and 'content')"
SIGNATURE = parse("prompt:(), stop:(m?), choices:(c?) -> ()")
View = Callable[[Completion], Any]


family = attrgetter("family")  # what requests that differ in the sample number alone have in common: they may be one call


text_of = attrgetter("text")  # what a model gives by default


class Way(NamedTuple):
    """Another way to have a model's rows answered: a backend with its own layers. The answers are the same."""

    backend: Elementwise
    layers: tuple[Layer, ...]


def whole(completion: Completion) -> Completion:
    """What ``model.complete`` gives."""
    return completion


def stopped(completion: Completion, stops: Sequence[str], done: bool) -> Completion:
    """A completion as its stop strings leave it, also where a backend does not know them."""
    if not done:
        return replace(completion, text=safe(completion.text, stops))
    if met(completion.text, stops) is None:
        return completion
    return replace(completion, text=cut(completion.text, stops), finish_reason="stop")


def viewed(view: View) -> Layer:
    """Give of each completion what the caller asked for."""

    def seen(row: Request, value: Any, done: bool) -> Any:
        if type(value) is Completion:
            return view(stopped(value, row.params["stop"], done) if "stop" in row.params else value)
        if isinstance(value, Failure):
            return value
        return Failure(TypeError(f"a backend's events hold Completions or Failures, not {type(value).__name__}"))

    def layer(run: Elementwise) -> Elementwise:
        async def viewed_run(rows: Sequence[Any]) -> Bursts:
            async with aclosing(run(rows)) as bursts:
                async for burst in bursts:
                    yield [Event(i, seen(rows[i], value, done), done) for i, value, done in burst]

        return viewed_run

    return layer


class Model:
    """A model over arrays: ``model("x")`` is a text, ``model(["a", "b"], samples=3)`` an array of shape (2, 3).

    A prompt is a text or a conversation (a list of dicts with "role" and "content"). Keyword arguments are the sampling
    parameters; each may be an array that broadcasts against the prompts. ``model.complete`` gives
    :class:`Completion` records instead of texts.
    """

    signature = SIGNATURE

    def __init__(
        self,
        name: str,
        backend: Elementwise,
        *,
        endpoint: str,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        layers: Sequence[Layer] = (),
        outer: Sequence[Layer] = (),
        ways: Mapping[str, Way] = MappingProxyType({}),
        parameters: Mapping[str, Check] = COMMON,
        view: View = text_of,
        concurrency: int | None = None,
        company: By = family,
        chat: bool | None = None,
        prefill: bool = False,
        scoring: bool = False,
        counts: Any = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        if not any(map(inspect.isasyncgenfunction, (backend, type(backend).__call__))):
            raise TypeError(
                "a backend is an async generator function: it takes requests and yields lists of Event(row, Completion)"
            )
        if not isinstance(name, str) or not name:
            raise ValueError(f"a model's name is {name!r}; it takes a text that is not empty")
        self.name, self.endpoint, self.parameters, self.view = name, endpoint, parameters, view
        self.concurrency, self.company = concurrency, company
        self.backend, self.layers, self.outer = backend, tuple(layers), tuple(outer)
        self.ways = ways
        self.chat, self.prefill = chat, prefill
        self.scoring, self.counts, self._close = scoring, counts, close
        self.defaults = checked(defaults, parameters)
        self.__signature__ = form(parameters)
        self._run = stack(hosted(stack(backend, guarded, *layers, *outer)), viewed(view))

    def run(self, rows: Sequence[Request], /) -> Bursts:
        """Ask for all rows."""
        return self._run(rows)

    def prepare(self, calls: Sequence[Call], samples: int | None, terms: Terms) -> list[Any]:
        """The requests of a call, in order. What is missing or not valid text is answered at once."""
        rows: list[Any] = []
        seen: dict[str, int] = {}
        last: tuple[Mapping[str, Any] | None, dict[str, Any]] = (None, {})
        for call in calls:
            if call.kwargs is not last[0]:
                last = (call.kwargs, self.settings(call.kwargs))
            rows += self._draws(call.args[0], last[1], 1 if samples is None else samples, terms, seen)
        return rows

    def settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters of a call for which ``params`` are given, checked."""
        return settled({**self.defaults, **checked(params, self.parameters)})

    def request(self, prompt: str | tuple[Message, ...], params: dict[str, Any], terms: Terms) -> Request:
        """One call with ``params`` from :meth:`settings`."""
        return Request(self.endpoint, self.name, prompt, params, 0, 0, terms)

    def _draws(self, prompt: Any, params: dict[str, Any], count: int, terms: Terms, seen: dict[str, int]) -> list[Any]:
        """``count`` samples of one prompt."""
        if missing(prompt):
            return [Given(None)] * count
        try:
            first = self.request(prompt_of(prompt), params, terms)
        except PromptError as error:
            return [Given(Failure(error))] * count
        except UnicodeEncodeError as error:
            return [Given(Failure(surrogate(error)))] * count
        occurrence = seen.get(first.stem, 0)
        seen[first.stem] = occurrence + 1
        samples = range(terms.sample, terms.sample + count)
        return [first.draw(occurrence, sample) if occurrence or sample else first for sample in samples]

    def preview(self, rows: Sequence[Request]) -> Plan:
        """How many rows are stored already, and how many calls the others take."""
        keys = {row.key: row for row in rows}
        stored = known(list(keys.values()))
        todo = [row for key, row in keys.items() if key not in stored]
        return Plan(len(rows), sum(row.key in stored for row in rows), len(keys), wait(self._calls, todo))

    async def _calls(self, rows: Sequence[Request]) -> int:
        """How many calls of the backend ``rows`` take, as far as is known of it."""
        return len(set(map(self.company, rows)))

    def layered(self, *layers: Layer) -> Model:
        """The same model with more layers round it."""
        return self._with(outer=(*self.outer, *layers))

    def bounded(self, concurrency: int) -> Model:
        """The same model with at most ``concurrency`` requests of one call under way."""
        if self.backend in [way.backend for way in self.ways.values()]:
            raise ValueError(ONE_BATCH)
        return self._with(outer=(*self.outer, batched(by=self.company, concurrency=concurrency)), concurrency=concurrency)

    def via(self, way: str) -> Model:
        """The same model asked in another way."""
        if way not in self.ways:
            known = (
                f"it can be asked via {', '.join(map(repr, self.ways))}" if self.ways else "only models.openai has a Batch API"
            )
            raise ValueError(f"via={way!r} for {self!r}; {known}")
        if self.concurrency is not None:
            raise ValueError(ONE_BATCH)
        return self._with(way=self.ways[way])

    def bound(self, owner: object) -> Model:
        """The same: a model is no method."""
        return self

    def _with(
        self,
        *,
        way: Way | None = None,
        outer: Sequence[Layer] | None = None,
        view: View | None = None,
        concurrency: int | None = None,
    ) -> Model:
        backend, layers = way or (self.backend, self.layers)
        return Model(
            self.name,
            backend,
            endpoint=self.endpoint,
            defaults=self.defaults,
            layers=layers,
            outer=self.outer if outer is None else outer,
            ways=self.ways,
            parameters=self.parameters,
            view=view or self.view,
            concurrency=concurrency or self.concurrency,
            company=self.company,
            chat=self.chat,
            prefill=self.prefill,
            scoring=self.scoring,
            counts=self.counts,
            close=self._close,
        )

    @cached_property
    def _lifted(self) -> Lifted[str]:
        return Lifted(self, self, Options())

    @cached_property
    def complete(self) -> Lifted[Completion]:
        """The same model, giving :class:`Completion` records: text, finish_reason, usage, cached."""
        other = self._with(view=whole)
        return Lifted(other, other, Options())

    @cached_property
    def scores(self) -> Lifted[Any]:
        """How likely options are: ``model.scores(prompts, ["Yes", "No"])`` gives the logarithm of the probability that each
        option is what follows, in an array with one more axis than the prompts.

        An option may be several tokens long; that the answer ends after it is not asked. Only local models know.
        """
        if not self.scoring:
            raise TypeError(f"{self!r} can't score options; a local model (models.transformers) can")
        scoring = Scoring(self._with(view=numbers).run, self._draws, self.preview)
        return Lifted(scoring, self, Options(), FORM)

    @overload
    def __call__(self, prompt: Scalar, *, samples: None = None, **params: Scalar) -> str: ...
    @overload
    def __call__(self, prompt: Any, *, samples: int, **params: Any) -> Array: ...
    @overload
    def __call__(self, prompt: Sequence[str] | Array, *, samples: int | None = None, **params: Any) -> Array: ...
    @overload
    def __call__(self, prompt: Any, *, samples: int | None = None, **params: Any) -> Any: ...
    def __call__(self, prompt: Any, *, samples: int | None = None, **params: Any) -> Any:
        """Answers in the shape of the prompts, with a trailing axis of ``samples`` if asked."""
        return self._lifted(prompt, samples=samples, **params)

    async def acall(self, prompt: Any, *, samples: int | None = None, **params: Any) -> Any:
        """The same, awaited."""
        return await self._lifted.acall(prompt, samples=samples, **params)

    @overload
    def stream(self) -> Watch: ...
    @overload
    def stream(self, prompt: Any, *, samples: int | None = None, **params: Any) -> Stream[Snapshot[str]]: ...
    def stream(self, *prompt: Any, samples: int | None = None, **params: Any) -> Stream[Snapshot[str]] | Watch:
        """Watch ``(index, text so far, done)`` as it comes. Without a prompt: watch the program that is added to this."""
        if not prompt and not params:
            return self.program.stream()
        return self._lifted.stream(*prompt, samples=samples, **params)

    def plan(self, prompt: Any, *, samples: int | None = None, **params: Any) -> Plan:
        """What a call would do: rows, cached, unique, calls."""
        return self._lifted.plan(prompt, samples=samples, **params)

    @cached_property
    def program(self) -> LM:
        """The empty program: what ``model + x`` begins with."""
        return LM.of(self)

    def __add__(self, other: Any) -> LM:
        return self.program.grown(other)

    def __radd__(self, other: Any) -> NoReturn:
        raise TypeError(f"{other!r:.60} + model: a program begins with its model; write `model + ...`")

    def run_batched(self, programs: Iterable[Any], *, on_error: str = "raise", concurrency: int = 256) -> list[Any]:
        """``[model + p for p in programs]``, run at the same time. See :meth:`LM.run_batched`."""
        return self.program.run_batched(programs, on_error=on_error, concurrency=concurrency)

    async def async_run_batched(self, programs: Iterable[Any], *, on_error: str = "raise", concurrency: int = 256) -> list[Any]:
        """The same, awaited."""
        return await self.program.async_run_batched(programs, on_error=on_error, concurrency=concurrency)

    @property
    def prefilled_tokens(self) -> int:
        """How many tokens of prompts a local model has read so far. What prompts share counts once."""
        return int(getattr(self.counts, "prefilled", 0))

    def close(self) -> None:
        """End what runs for this model, and for others that are the same. The next call starts it anew."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<model {self.name!r} at {self.endpoint}>"


def prompt_of(value: Any) -> str | tuple[Message, ...]:
    """A prompt, checked: text or a conversation."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
        return str(value)
    if is_conversation(value):
        return spoken(map(Message.of, value))
    if is_message(value):
        raise TypeError(f"a prompt is one message, {value!r:.80}; a conversation is a list of messages: put it in a list")
    kind = type(value).__name__
    shown = " ".join(repr(value).split())[:60]
    hint = "make it a list" if isinstance(value, Iterable) and not isinstance(value, (bytes, dict)) else TAKES
    raise TypeError(f"a prompt is {kind} {shown}; {hint if kind != 'DataFrame' else 'pick a column of it'}")


def spoken(turns: Iterable[Message]) -> tuple[Message, ...]:
    """A conversation, if all of its turns have speakers that models know."""
    turns = tuple(turns)
    for place, turn in enumerate(turns):
        if turn.role not in ROLES:
            meant = f"; did you mean {near!r}?" if (near := nearest(turn.role, ROLES)) else ""
            raise PromptError(f"message {place} has the role {turn.role!r}, which is none of {', '.join(ROLES)}{meant}")
    return turns


def surrogate(error: UnicodeEncodeError) -> PromptError:
    """What is wrong with a text that can't be encoded."""
    return PromptError(f"the prompt is not valid text: lone surrogate {error.object[error.start]!r} at position {error.start}")
