"""A model: prompts in, text out, over arrays of any shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, overload

from ..arrays import Array, Call, is_conversation, is_message
from ..bridge import hosted
from ..calling import Options, Stream
from ..errors import PromptError
from ..events import Bursts, Elementwise, Event, Failure, Layer, stack
from ..layers import batched, guarded
from ..layers.caching import known
from ..lifting import Lifted, Scalar
from ..requests import Completion, Message, Request, Terms
from ..signatures import parse
from ..targets import Given, Plan, missing
from .parameters import COMMON, Check, checked, form
from .scoring import FORM, Scoring, numbers

SIGNATURE = parse("prompt:(), stop:(m?) -> ()")
View = Callable[[Completion], Any]


def family(request: Request) -> str:
    """What requests that differ in the sample number alone have in common: they may be one call."""
    return request.family


def text_of(completion: Completion) -> str:
    """What a model gives by default."""
    return completion.text


def whole(completion: Completion) -> Completion:
    """What ``model.complete`` gives."""
    return completion


def viewed(view: View) -> Layer:
    """Give of each completion what the caller asked for."""

    def layer(run: Elementwise) -> Elementwise:
        async def viewed_run(rows: Sequence[Any]) -> Bursts:
            async with aclosing(run(rows)) as bursts:
                async for burst in bursts:
                    yield [Event(i, v if isinstance(v, Failure) else view(v), done) for i, v, done in burst]

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
        defaults: Mapping[str, Any],
        layers: Sequence[Layer] = (),
        parameters: Mapping[str, Check] = COMMON,
        view: View = text_of,
        scoring: bool = False,
        counts: Any = None,
    ) -> None:
        self.name, self.endpoint, self.parameters, self.view = name, endpoint, parameters, view
        self.backend, self.layers, self.scoring, self.counts = backend, tuple(layers), scoring, counts
        self.defaults = checked(defaults, parameters)
        self.__signature__ = form(parameters)
        self._run = stack(hosted(stack(backend, guarded, *layers)), viewed(view))

    def run(self, rows: Sequence[Request], /) -> Bursts:
        """Ask for all rows."""
        return self._run(rows)

    def prepare(self, calls: Sequence[Call], samples: int | None, terms: Terms) -> list[Any]:
        """The requests of a call, in order. What is missing or not valid text is answered at once."""
        rows: list[Any] = []
        seen: Counter[str] = Counter()
        last: tuple[Mapping[str, Any] | None, dict[str, Any]] = (None, {})
        for call in calls:
            if call.kwargs is not last[0]:
                last = (call.kwargs, {**self.defaults, **checked(call.kwargs, self.parameters)})
            rows += self._draws(call.args[0], last[1], 1 if samples is None else samples, terms, seen)
        return rows

    def _draws(self, prompt: Any, params: dict[str, Any], count: int, terms: Terms, seen: Counter[str]) -> list[Any]:
        """``count`` samples of one prompt."""
        if missing(prompt):
            return [Given(None)] * count
        try:
            first = Request(self.endpoint, self.name, prompt_of(prompt), params, 0, 0, terms)
        except UnicodeEncodeError as error:
            return [Given(Failure(surrogate(error)))] * count
        occurrence = seen[first.stem]
        seen[first.stem] += 1
        return [first.draw(occurrence, sample) if occurrence or sample else first for sample in range(count)]

    def preview(self, rows: Sequence[Request]) -> Plan:
        """How many rows are stored already, and how many calls the others take."""
        keys = {row.key: row for row in rows}
        stored = known(list(keys.values()))
        todo = [row for key, row in keys.items() if key not in stored]
        return Plan(len(rows), sum(row.key in stored for row in rows), len(keys), len({row.family for row in todo}))

    def layered(self, *layers: Layer) -> Model:
        """The same model with more layers round it."""
        return self._with(layers=(*self.layers, *layers))

    def bounded(self, concurrency: int) -> Model:
        """The same model with at most ``concurrency`` requests of one call under way."""
        return self.layered(batched(by=family, concurrency=concurrency))

    def bound(self, owner: object) -> Model:
        """The same: a model is no method."""
        return self

    def _with(self, *, layers: Sequence[Layer] | None = None, view: View | None = None) -> Model:
        return Model(
            self.name,
            self.backend,
            endpoint=self.endpoint,
            defaults=self.defaults,
            layers=self.layers if layers is None else layers,
            parameters=self.parameters,
            view=view or self.view,
            scoring=self.scoring,
            counts=self.counts,
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

    def stream(self, prompt: Any, *, samples: int | None = None, **params: Any) -> Stream[str]:
        """Watch ``(index, text so far, done)`` as it comes."""
        return self._lifted.stream(prompt, samples=samples, **params)

    def plan(self, prompt: Any, *, samples: int | None = None, **params: Any) -> Plan:
        """What a call would do: rows, cached, unique, calls."""
        return self._lifted.plan(prompt, samples=samples, **params)

    @property
    def prefilled_tokens(self) -> int:
        """How many tokens of prompts a local model has read so far. What prompts share counts once."""
        return int(self.counts.prefilled) if self.counts else 0

    def __repr__(self) -> str:
        return f"<model {self.name!r} at {self.endpoint}>"


def prompt_of(value: Any) -> str | tuple[Message, ...]:
    """A prompt, checked: text or a conversation."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
        return str(value)
    if is_conversation(value):
        return tuple(Message.of(turn) for turn in value)
    if is_message(value):
        raise TypeError(f"a prompt is one message, {value!r:.80}; a conversation is a list of messages: put it in a list")
    kind = type(value).__name__
    raise TypeError(f"a prompt is {kind} {value!r:.80}; give text, or a conversation (a list of dicts with 'role', 'content')")


def surrogate(error: UnicodeEncodeError) -> PromptError:
    """What is wrong with a text that can't be encoded."""
    return PromptError(f"the prompt is not valid text: lone surrogate {error.object[error.start]!r} at position {error.start}")
