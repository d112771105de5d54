"""Running programs, on the library's loop: only what is read, each node once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..bridge import ERRAND
from ..errors import BlockingError, ProgramError
from ..events import Bursts, Event, Failure
from ..requests import Completion
from ..running import is_async
from ..streams import Mailbox, carrying, interleave
from .blocks import BLOCK, LEDGER
from .generation import answer, partial_piece, prompt
from .nodes import Apply, Assign, Gen, Picture, Text
from .runs import End, Run, Visit
from .states import Captured, Piece, State
from .threads import in_thread

if TYPE_CHECKING:
    from .lm import LM

BACK = (
    "{} read what it had built with `lm += ...`, where its reader saw it, and then returned something else. For a try that "
    "may be given up, write `attempt = lm + ...`"
)
PORTION = 128  # programs begun in one turn of the loop
INSIDE: ContextVar[Any] = ContextVar("INSIDE", default=None)  # the loop that an async program's body runs in


def pending(lm: LM) -> list[LM]:
    """The nodes up to ``lm`` that have not run, in order."""
    todo = []
    here: LM | None = lm
    while here is not None and here.state is None:
        todo.append(here)
        here = here.parent
    return todo[::-1]


def advanced(lm: LM, before: State) -> bool:
    """Give a node its state, if that takes nothing but the state before."""
    match lm.node:
        case Text(text):
            lm.state = before.said(Piece(text, lm.stamp))
        case Picture(content):
            lm.state = before.said(Piece("", lm.stamp, content=content))
        case Assign(name, value, remove):
            lm.state = before.removed(name) if remove else before.assigned(name, Captured(value, str(value)))
    return lm.state is not None


class Walk:
    """A reader's way to a program: one node after the other, as far as they have not run. It takes no task.

    ``done(error)`` is called at the end; the error is None where all went well.
    """

    __slots__ = ("_done", "_run", "_todo", "_visit")

    def __init__(self, lm: LM, visit: Visit, done: End) -> None:
        self._todo, self._visit, self._done = pending(lm)[::-1], visit, done
        self._run: Run | None = None

    def go(self, error: Exception | None = None) -> None:
        """Go on until something has to be waited for."""
        self._run = None
        while self._todo and error is None:
            node = self._todo.pop()
            if node.state is None and not advanced(node, node.before):
                error = self._wait(node)
            if self._run is not None:
                return
        self._done(error)

    def _wait(self, node: LM) -> Exception | None:
        """Wait for a node's run, or have the error that it has failed with."""
        try:
            run = joined(node, self._visit)
        except BlockingError as error:
            return error
        if not run.over:
            self._run = run
            run.enter(self.go)
        return run.error

    def leave(self) -> None:
        """Give up, if the end is not reached."""
        if self._run is not None:
            self._run.leave(self.go)


async def settle(lm: LM, visit: Visit) -> None:
    """Run what ``lm`` needs and has not run yet."""
    over: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    walk = Walk(lm, visit, over.set_result)
    walk.go()
    try:
        if (error := await over) is not None:
            raise error
    finally:
        walk.leave()


async def read(lm: LM, visit: Visit) -> None:
    """Run what ``lm`` needs for somebody who asks for it. A watched program shows what it reads of its own way."""
    if lm.stage is None or lm.state is not None:
        return await settle(lm, visit)
    show = lm.stage.begin(lm)
    try:
        await settle(lm, visit._replace(live=True))
    except asyncio.CancelledError:
        show.cancel()
        raise


async def follow(lm: LM, visit: Visit) -> AsyncGenerator[tuple[LM, State], None]:
    """Every state on the way to ``lm``, each with the node that is running. The last is its own."""
    shown: State | None = None
    for node in pending(lm):
        if node.state is not None or advanced(node, node.before):
            continue
        if node.parent is not None and node.before is not shown and node.before.piece is not None:
            yield node.parent, node.before
        async with aclosing(joined(node, visit).states()) as states:
            async for shown in states:
                yield node, shown
    if lm.state is not None and lm.state is not shown:
        yield lm, lm.state


def joined(lm: LM, visit: Visit) -> Run:
    """The run of a node, begun if it is not under way."""
    if lm.running is None:
        host = visit.host if isinstance(lm.node, Apply) else None
        lm.running = run = Run(lm, host)
        try:
            begin(lm, run, visit)
        except Exception as error:
            run.fail(error)
    if visit.blocked is not None and lm.running.host is visit.blocked and not lm.running.over:
        raise BlockingError("this blocks the event loop in which the program runs that is read; write `await lm` first")
    return lm.running


def begin(lm: LM, run: Run, visit: Visit) -> None:
    """Have a node run."""
    if isinstance(lm.node, Gen):
        request = lm.source.model.request(
            prompt(lm), lm.params, replace(lm.terms, live=visit.live, scope=lm.path, ongoing=True)
        )
        run.stop = lm.source.pool.ask(request, partial(heard, lm, run))
    else:
        task = asyncio.get_running_loop().create_task(applied(lm, run, visit), context=inside(lm, visit))
        run.stop = task.cancel


def heard(lm: LM, run: Run, value: Completion | Failure, done: bool) -> None:
    """Take in what the model says."""
    if isinstance(value, Failure):
        run.fail(value.error)
    elif not done:
        if (piece := partial_piece(lm, value)) is not None:
            run.tell(lm.before.saying(piece))
    else:
        try:
            lm.state = answer(lm, value)
        except Exception as error:
            run.fail(error)
        else:
            run.finish(lm.state)
            lm.running = None


async def applied(lm: LM, run: Run, visit: Visit) -> None:
    """Run a program, then what it built."""
    try:
        built = await (staged if visit.live else unwatched)(lm, run, visit)
        lm.state = built.final
        run.finish(lm.state)
        lm.running = None
    except asyncio.CancelledError:
        run.fail(ProgramError(f"the event loop in which {lm.title} ran has ended"))
        if lm.running is run:
            lm.running = None
        raise
    except Exception as error:
        run.fail(error)


async def unwatched(lm: LM, run: Run, visit: Visit) -> LM:
    """What a program built, run."""
    start = lm.inner(None)
    run.built = built = continued(await called(lm, start, visit), start, lm.node)
    await settle(built, visit)
    return built


async def staged(lm: LM, run: Run, visit: Visit) -> LM:
    """What a program built, run, and told while it runs: also what it reads on its way, if it can't go back from there."""
    stage = Stage(run, visit)
    try:
        start = lm.inner(stage)
        run.built = built = continued(await called(lm, start, visit), start, lm.node)
        await stage.ended()
        if stage.told is not None and stage.told not in way(built):
            raise ProgramError(BACK.format(lm.title))
        await stage.show(built, last=True)
    finally:
        await stage.close()
    return built


def standing(lm: LM, name: object) -> Mapping[str, Captured]:
    """The captures of a program. Where a step failed, those before it; none if that or a later one may write ``name``."""
    here: LM | None = lm
    failed = False
    while here is not None and here.state is None:
        if name in written(here):
            return {}
        run = here.running
        failed = run is not None and run.error is not None
        here = here.parent if not isinstance(here.node, Apply) else run.built if run is not None else None
    return here.final.closed() if here is not None and (failed or here is lm) else {}


def written(lm: LM) -> Iterator[object]:
    """What a step captures by itself, or is part of."""
    match lm.node:
        case Gen(name, stop_text=stop):
            yield from (name, stop)
        case Assign(name):
            yield name
    yield from (block.name for block in lm.stamp.captures)


class Stage:
    """Where a watched program shows what it reads on its way, one thing after the other."""

    def __init__(self, run: Run, visit: Visit) -> None:
        self._run, self._visit = run, visit
        self._turn = asyncio.Lock()
        self._shows: set[asyncio.Task[None]] = set()
        self.told: LM | None = None

    def begin(self, lm: LM) -> asyncio.Task[None]:
        """Show an lm that is read."""
        self._shows.add(show := asyncio.ensure_future(self._in_turn(lm)))
        show.add_done_callback(self._shows.discard)
        return show

    async def _in_turn(self, lm: LM) -> None:
        async with self._turn:
            with suppress(Exception):  # whoever reads it hears of it
                await self.show(lm)

    async def show(self, lm: LM, last: bool = False) -> None:
        """Run an lm and tell what comes of it; the last state of all is told by the run's end."""
        async with aclosing(follow(lm, self._visit)) as states:
            async for node, state in states:
                if not last or state is not lm.state:
                    self.told = node
                    self._run.tell(state)

    async def ended(self) -> None:
        """Wait until all that is read has been shown."""
        await asyncio.gather(*self._shows, return_exceptions=True)

    async def close(self) -> None:
        """Show nothing more."""
        for show in list(self._shows):
            show.cancel()
        await self.ended()


def continued(built: Any, start: LM, node: Any) -> LM:
    """What a program returned, if it goes on from what it was given."""
    if type(built) is not type(start):
        kind = "nothing" if built is None else f"{type(built).__name__} {built!r:.60}"
        raise ProgramError(f"{node.title} returned {kind}; a program returns the lm that it built: `return lm`")
    if start not in way(built):
        raise ProgramError(f"{node.title} returned an lm that does not go on from the one it was given; build on that one")
    return built


def way(lm: LM) -> Iterator[LM]:
    """A program and all that it goes on from, the last first."""
    here: LM | None = lm
    while here is not None:
        yield here
        here = here.parent


def inside(lm: LM, visit: Visit) -> Context:
    """The context in which a program's function runs: that of where it was added, in its turn."""
    context = lm.context.copy()
    context.run(BLOCK.set, lm.stamp)
    context.run(LEDGER.set, None)
    if is_async(lm.node.fn):  # type: ignore[union-attr]
        context.run(ERRAND.set, None)
        context.run(INSIDE.set, visit.host or asyncio.get_running_loop())
    return context


async def called(lm: LM, start: LM, visit: Visit) -> Any:
    """What a program's function returns: a plain one in a thread, an async one in the loop of who reads."""
    node = lm.node
    assert isinstance(node, Apply)
    work = partial(node.fn, start, *node.args, **node.kwargs)
    if not is_async(node.fn):
        return await in_thread(work)
    if visit.host is None or visit.host is asyncio.get_running_loop():
        with carrying():
            return await work()
    return await hosted_by(visit.host, work, copy_context())


async def hosted_by(host: asyncio.AbstractEventLoop, make: Callable[[], Any], context: Context) -> Any:
    """Await ``make()`` on another loop, in ``context``."""

    async def work() -> Any:
        with carrying():
            return await make()

    async def entered() -> Any:
        return await asyncio.get_running_loop().create_task(work(), context=context)

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(entered(), host))


class Crowd:
    """Many programs, at most ``size`` of them under way. A row's value is its program, run, or the failure."""

    def __init__(self, lms: Sequence[LM], visit: Visit, size: int) -> None:
        self.mailbox = Mailbox()
        self._lms, self._visit, self._size = lms, visit, size
        self._rows = iter(range(len(lms)))
        self._walks: dict[int, Walk] = {}
        self._calling = False

    def call(self) -> None:
        """Let some begin for which there is room, and soon the next: what the first ask for is under way by then."""
        if self._calling:
            return
        self._calling = True
        begun = list(islice(self._rows, min(PORTION, self._size - len(self._walks))))
        for row in begun:
            self._walks[row] = walk = Walk(self._lms[row], self._visit, partial(self._ended, row))
            walk.go()
        self._calling = False
        if begun:
            asyncio.get_running_loop().call_soon(self.call)
        elif not self._walks:
            self.mailbox.close()

    def _ended(self, row: int, error: Exception | None) -> None:
        del self._walks[row]
        self.mailbox.post([Event(row, self._lms[row] if error is None else Failure(error))])
        self.call()

    def leave(self) -> None:
        """Give all of it up."""
        self._rows = iter(())
        for walk in list(self._walks.values()):
            walk.leave()


async def each_shown(lms: Sequence[LM], visit: Visit, concurrency: int) -> Bursts:
    """Run many programs where they are watched. A row's values are states."""

    async def one(row: int) -> Bursts:
        last: State | None = None
        try:
            async with aclosing(follow(lm := lms[row], visit)) as states:
                async for _, state in states:
                    if state is not last and state is not lm.state:
                        yield [Event(row, last := state, False)]
        except Exception as error:
            yield [Event(row, Failure(error))]
        else:
            yield [Event(row, lm.final)]

    async with aclosing(interleave(one, range(len(lms)), concurrency)) as bursts:
        async for burst in bursts:
            yield burst


async def each_settled(lms: Sequence[LM], visit: Visit, concurrency: int) -> Bursts:
    """Run many programs, at most ``concurrency`` at a time."""
    crowd = Crowd(lms, visit, concurrency)
    try:
        crowd.call()
        while (burst := await crowd.mailbox.take()) is not None:
            yield burst
    finally:
        crowd.leave()
