"""``LM``: a program that grows by ``+``, and runs when it is read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterable, Mapping
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from .. import bridge, cache
from ..checks import count
from ..errors import BlockingError, ProgramError
from ..garbage import seldom
from ..occasions import scope
from ..operators import text_of
from ..requests import Completion, Message, Terms, digest
from ..streams import arriving
from . import rendering
from .batches import check_batch, outcomes, settled
from .blocks import BLOCK, Stamp, note_added
from .evaluation import INSIDE, Stage, read, standing
from .generation import UNFINISHED
from .nodes import Apply, Assign, Gen, Node, Picture, Text, expression
from .outputs import settings
from .runs import Pool, Run, Visit
from .states import Captured, Spent, State
from .watching import Watch

if TYPE_CHECKING:
    from ..models.base import Model

NUMBERING = threading.Lock()
KEPT = 1 << 20  # different nodes that one parent remembers having had
EMPTY: Context = Context()
NOTHING: dict[str, Any] = {}


class Source(NamedTuple):
    """A model, and where the requests of its programs meet."""

    model: Model
    pool: Pool

    def settings(self, node: Gen) -> dict[str, Any]:
        """A gen's parameters, checked, with what keeps the answer in form."""
        params = {**node.params, **settings(node.form, self.model.parameters, self.model)}
        if node.stop_text:
            params.pop("stop", None)
        return self.model.settings(params)


class LM:
    """A program: a model, and what is said to it and by it, in order.

    ``lm + x`` is a new program and changes nothing; ``x`` is text, ``gen(...)`` or another expression, or the call of a
    :func:`program`. Nothing runs before it is read: by ``str(lm)``, ``lm["name"]`` and their like, or by ``await``. Then all
    that it needs runs, once, whoever else reads it; programs that share a beginning share its run.

    >>> import outlines_like as ol
    >>> lm = ol.models.fake(lambda asked: " blue") + "The sky is" + ol.gen("color")
    >>> lm["color"], str(lm)
    (' blue', 'The sky is blue')
    """

    __slots__ = (
        "__weakref__",
        "_counts",
        "_first",
        "_first_scope",
        "_path",
        "context",
        "node",
        "number",
        "params",
        "parent",
        "running",
        "scope",
        "source",
        "stage",
        "stamp",
        "state",
        "terms",
    )

    def __init__(self, source: Source, parent: LM | None, node: Node | None, stamp: Stamp, scope: str = "") -> None:
        self.source, self.parent, self.node, self.stamp, self.scope = source, parent, node, stamp, scope
        self.number = 0
        self.state: State | None = None
        self.running: Run | None = None
        self.terms, self.params = Terms(), NOTHING
        self.context = EMPTY
        self.stage: Stage | None = None
        self._path: str | None = None
        self._first: Node | None = None
        self._first_scope = ""
        self._counts: dict[str, int] | None = None

    @classmethod
    def of(cls, model: Model) -> LM:
        """The empty program of a model."""
        return cls(Source(model, Pool(model.complete.target.run)), None, None, Stamp())._started("", State())

    def _started(self, path: str, state: State) -> Self:
        self._path, self.state = path, state
        return self

    def inner(self, stage: Stage | None) -> LM:
        """Where a program that was added here begins: what was said before, under a name of its own."""
        start = LM(self.source, None, None, self.stamp)._started(self.path, self.before)
        start.stage = stage
        return start

    def at(self, state: State) -> LM:
        """This program as it stands in the middle of its run."""
        return LM(self.source, None, None, self.stamp)._started(self.path, state)

    @property
    def model(self) -> Model:
        """The model that answers."""
        return self.source.model

    @property
    def before(self) -> State:
        """The state that this node goes on from. It has run."""
        assert self.parent is not None
        return self.parent.final

    @property
    def final(self) -> State:
        """The state of a node that has run."""
        assert self.state is not None
        return self.state

    @property
    def title(self) -> str:
        """What this node is, in a word."""
        return self.node.title if isinstance(self.node, Apply) else type(self.node).__name__.lower()

    # Growing

    def __add__(self, other: Any) -> LM:
        return self.grown(other)

    def __radd__(self, other: Any) -> NoReturn:
        raise TypeError(
            f"{other!r:.60} + lm: a program grows on the right; write `lm + ...`, and to put words first `model + ...`"
        )

    def __iadd__(self, other: Any) -> LM:
        """``lm = lm + other``, where there is no way back: a watched program shows such steps when it reads them."""
        grown = self.grown(other)
        here = grown
        while self.stage is not None and here is not self and here.parent is not None and here.parent.alone:
            here.stage, here = self.stage, here.parent
        return grown

    @property
    def alone(self) -> bool:
        """Whether one way only goes on from here."""
        return self._first is not None and self._counts is None

    def grown(self, other: Any) -> LM:
        """The program with ``other`` added; the same as ``lm + other``."""
        lm = self
        for node, stamp in expression(other).placed(BLOCK.get()):
            lm = lm._child(node, stamp)
        note_added()
        return lm

    def _child(self, node: Node, stamp: Stamp) -> LM:
        check(self, node, stamp)
        child = LM(self.source, self, node, stamp, scope())
        child.number = self._numbered(child.scope, node)
        if isinstance(node, Gen):
            child.terms, child.params = cache.terms(), self.source.settings(node)
        elif isinstance(node, Apply):
            child.context = copy_context()
        return child

    def _numbered(self, scope: str, node: Node) -> int:
        """The number of one more child: equal ones are counted in the order in which they are made."""
        with NUMBERING:
            if self._first is None:
                self._first, self._first_scope = node, scope  # most have but one, which needs no comparing
                return 0
            if self._counts is None:
                self._counts = {step_name(self._first_scope, self._first): 1}
            number = self._counts.get(name := step_name(scope, node), 0)
            self._counts[name] = number + 1
            if len(self._counts) > KEPT:
                del self._counts[next(iter(self._counts))]
            return number

    @property
    def path(self) -> str:
        """A name for a gen or a program that is the same in every process: all steps since the one before that has a name."""
        steps: list[Any] = []
        here = self
        while here._path is None and (here is self or not isinstance(here.node, (Gen, Apply))):
            assert here.parent is not None
            assert here.node is not None
            steps.append([here.number, here.scope, *here.node.identity])
            here = here.parent
        if steps:
            self._path = digest([here.path, *reversed(steps)])
        assert self._path is not None
        return self._path

    def set(self, name: str, value: Any) -> LM:
        """The program with a capture set to ``value``."""
        check_name(name)
        return self + Assign(name, value)

    def remove(self, name: str) -> LM:
        """The program without the capture ``name``."""
        check_name(name)
        return self + Assign(name, remove=True)

    def fork(self, n: int) -> list[LM]:
        """``n`` programs that go on from here, each with draws of its own."""
        return [self + Text("") for _ in range(count("n", n, 0))]

    def retry(self) -> LM:
        """The same program, where what has failed may run again. What went well stays."""
        return again(self)

    # Reading

    def _read(self) -> State:
        if self.state is None:
            bridge.wait(read, self, Visit(blocked=self.unblocked("str(lm)")))
        return self.final

    def unblocked(self, what: str) -> asyncio.AbstractEventLoop | None:
        """The loop that a blocking call here would hold up, if it is not the one that has to do the work."""
        loop = running_loop()
        if loop is not None and (loop is INSIDE.get() or bridge.on_loop()):
            raise BlockingError(
                f"{what} would block the event loop inside an async program; write `await lm`, then read it, or "
                "`await lm.get_async(name)`"
            )
        return loop

    async def _settled(self) -> None:
        if self.state is None:
            with arriving():
                await bridge.ask(read(self, Visit(host=asyncio.get_running_loop())))

    def __await__(self) -> Generator[Any, None, LM]:
        yield from self._settled().__await__()
        return self

    async def block_until_ready(self) -> LM:
        """Run what has not run yet; the same as ``await lm``."""
        return await self

    def run(self) -> LM:
        """Run what has not run yet, and block until it is done."""
        self._read()
        return self

    def __str__(self) -> str:
        return self._read().text

    def __len__(self) -> int:
        return len(str(self))

    def __bool__(self) -> bool:
        return True

    __iter__ = None

    def __contains__(self, name: object) -> bool:
        return name in self._captures(name)

    def __getitem__(self, name: str) -> Any:
        return self._captured(name).value

    def _captures(self, name: object) -> Mapping[str, Captured]:
        """All captures; where a step failed, those that stand in spite of it, if ``name`` is one of them."""
        check_name(name)
        try:
            self._read()
        except Exception:
            if name not in standing(self, name):
                raise
        return standing(self, name)

    def _captured(self, name: str) -> Captured:
        return found(self._captures(name), name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a capture, or ``default``."""
        captures = self._captures(name)
        return captures[name].value if name in captures else default

    async def get_async(self, name: str) -> Any:
        """The value of a capture, awaited."""
        check_name(name)
        try:
            await self
        except Exception:
            if name not in standing(self, name):
                raise
        return found(standing(self, name), name).value

    def text(self, name: str) -> Any:
        """The text of a capture as the model wrote it; of a list, a list of texts."""
        return self._captured(name).text

    def completion(self, name: str) -> Completion:
        """The model's answer behind a capture (the last one of a list): text, finish_reason, usage, cached."""
        completion = self._captured(name).completion
        if completion is None:
            raise ProgramError(f"the capture {name!r} is no answer of a model's; only a gen's is")
        return completion  # type: ignore[no-any-return]

    def log_prob(self, name: str) -> float:
        """The log-probability of a generated capture, where its model tells it."""
        value = getattr(self.completion(name), "log_prob", None)
        if value is None:
            raise ProgramError(
                f"{self.model} gives no log-probability for {name!r}; ask for it where it is written, by logprobs=True"
            )
        return float(value)

    @property
    def captures(self) -> dict[str, Any]:
        """The values of all captures."""
        return {name: captured.value for name, captured in self._read().closed().items()}

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, turn by turn."""
        return self._read().messages()

    @property
    def usage(self) -> Spent:
        """What the answers took: tokens read and written, how many of them came from the store, and requests sent."""
        return self._read().spent

    # Watching, and running many

    def stream(self) -> Watch:
        """Watch it run: ``for part in lm.stream() + f(): print(part.delta, end="")``; also with ``async for``."""
        return Watch(self)

    def run_batched(self, programs: Iterable[Any], *, on_error: str = "raise", concurrency: int = 256) -> list[Any]:
        """``[lm + p for p in programs]``, run at the same time, at most ``concurrency`` of them under way.

        With ``on_error="raise"`` the others finish first, then :class:`RowErrors` is raised; "return" leaves the error in its
        place, "missing" leaves None.
        """
        blocked = self.unblocked("lm.run_batched(...)")
        check_batch(on_error, concurrency)
        with seldom(len(programs := list(programs))):
            lms = [self + program for program in programs]
            values = bridge.wait(settled, lms, Visit(blocked=blocked), concurrency)
        return outcomes(values, lms, on_error)

    async def async_run_batched(self, programs: Iterable[Any], *, on_error: str = "raise", concurrency: int = 256) -> list[Any]:
        """The same, awaited. Async programs run in this loop."""
        check_batch(on_error, concurrency)
        visit = Visit(host=asyncio.get_running_loop())
        with arriving(), seldom(len(programs := list(programs))):
            lms = [self + program for program in programs]
            values = await bridge.ask(settled(lms, visit, concurrency))
        return outcomes(values, lms, on_error)

    def __repr__(self) -> str:
        state = "run" if self.state is not None else "not run"
        return f"<lm of {self.model.name!r}, {state}>"

    def _repr_html_(self) -> str:
        return rendering.html(self._read())


def step_name(scope: str, node: Node) -> str:
    """What tells a step from others: on whose behalf it was made, and what it does."""
    return digest([scope, *node.identity])


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_name(name: object) -> None:
    """Captures have names."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a capture is text, not {name!r:.60}; all text so far is str(lm)")


def found(captures: Mapping[str, Captured], name: str) -> Captured:
    """A capture by its name."""
    if name not in captures:
        has = f"it has {', '.join(map(repr, captures))}" if captures else "it has none"
        raise KeyError(f"this program has no capture {name!r}; {has}")
    return captures[name]


def again(lm: LM) -> LM:
    """A copy of the part of a program that has not run well, on top of what has."""
    failed: list[LM] = []
    here: LM | None = lm
    while here is not None and here.state is None:
        failed.append(here)
        here = here.parent
    for old in reversed(failed):
        new = LM(old.source, here, old.node, old.stamp, old.scope)
        new.number, new.terms, new.params, new.context = old.number, old.terms, old.params, old.context
        here = new
    return here if here is not None else lm


def check(lm: LM, node: Node, stamp: Stamp) -> None:
    """Refuse here and now what the model can't do."""
    if isinstance(node, Apply):
        return
    if lm.model.chat is False:
        check_raw(lm.model, node, stamp)
    elif lm.model.chat and not stamp.turn:
        check_placed(lm.model, node)
    if isinstance(node, Gen) and stamp.turn:
        check_turn(lm, stamp)


def check_raw(model: Model, node: Node, stamp: Stamp) -> None:
    """A raw text model has no turns and no images."""
    if stamp.turn:
        raise ProgramError(f"{model} reads raw text and knows no roles; leave out {stamp.role}(), or use a chat model")
    if isinstance(node, Picture):
        raise ProgramError(f"{model} reads text, not images; use a chat model that does")


def check_placed(model: Model, node: Node) -> None:
    """All that a chat model reads and writes stands in turns."""
    if isinstance(node, (Gen, Picture)) or (isinstance(node, Text) and node.text.strip()):
        role = "assistant" if isinstance(node, Gen) else "user"
        what = f"{node.form.title}(...)" if isinstance(node, Gen) else type(node).__name__.lower()
        raise ProgramError(f"{what} stands outside all turns, but {model} reads conversations; put it in `with {role}(): ...`")


def check_turn(lm: LM, stamp: Stamp) -> None:
    """A model speaks as the assistant, and where it can't go on in the middle of a turn, once in a turn."""
    if stamp.role != "assistant":
        raise ProgramError(f"gen(...) stands in a turn of the {stamp.role}, but the model is the assistant; put it there")
    here: LM | None = lm
    while here is not None and here.node is not None and here.stamp.turn == stamp.turn and not lm.model.prefill:
        if isinstance(here.node, (Gen, Picture)) or (isinstance(here.node, Text) and here.node.text):
            raise ProgramError(UNFINISHED.format(lm.model))
        here = here.parent


text_of.register(LM, str)
