"""Running programs, on the library's loop: only what is read, each node once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from contextvars import Context, ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..bridge import ERRAND, Errand, home
from ..errors import BlockingError, ProgramError
from ..events import Bursts, Event, Failure
from ..requests import Completion
from ..running import is_async
from ..streams import carrying, interleave
from .blocks import BLOCK, LEDGER
from .generation import answer, partial_piece, prompt
from .nodes import Apply, Assign, Gen, Picture, Text
from .runs import Run, Visit
from .states import Captured, Piece, State

if TYPE_CHECKING:
    from .lm import LM

BACK = (
    "{} read what it had built with `lm += ...`, where its reader saw it, and then returned something else. For a try that "
    "may be given up, write `attempt = lm + ...`"
)
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


async def settle(lm: LM, visit: Visit) -> None:
    """Run what ``lm`` needs and has not run yet."""
    for node in pending(lm):
        if node.state is None and not advanced(node, node.before):
            await joined(node, visit).wait()


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
        lm.running = run = Run(host, lambda: forget(lm))
        try:
            begin(lm, run, visit)
        except Exception as error:
            run.fail(error)
    if visit.blocked is not None and lm.running.host is visit.blocked and not lm.running.over:
        raise BlockingError("this blocks the event loop in which the program runs that is read; write `await lm` first")
    return lm.running


def forget(lm: LM) -> None:
    """Let a node run afresh when it is read again."""
    lm.running = None


def begin(lm: LM, run: Run, visit: Visit) -> None:
    """Have a node run."""
    if isinstance(lm.node, Gen):
        request = lm.source.model.request(prompt(lm), lm.params, replace(lm.terms, live=visit.live))
        run.stop = lm.source.pool.ask(request, partial(heard, lm, run))
    else:
        run.stop = asyncio.ensure_future(applied(lm, run, visit)).cancel


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
        built = await (staged(lm, run, visit) if visit.live else unwatched(lm, visit))
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


async def unwatched(lm: LM, visit: Visit) -> LM:
    """What a program built, run."""
    start = lm.inner(None)
    built = continued(await called(lm, start, visit), start, lm.node)
    await settle(built, visit)
    return built


async def staged(lm: LM, run: Run, visit: Visit) -> LM:
    """What a program built, run, and told while it runs: also what it reads on its way, if it can't go back from there."""
    stage = Stage(run, visit)
    try:
        start = lm.inner(stage)
        built = continued(await called(lm, start, visit), start, lm.node)
        await stage.ended()
        if stage.told is not None and stage.told not in way(built):
            raise ProgramError(BACK.format(lm.title))
        await stage.show(built, last=True)
    finally:
        await stage.close()
    return built


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


async def called(lm: LM, start: LM, visit: Visit) -> Any:
    """What a program's function returns: a plain one in a thread of its own, an async one in the loop of who reads."""
    node = lm.node
    assert isinstance(node, Apply)
    context = lm.context.copy()
    context.run(BLOCK.set, lm.stamp)
    context.run(LEDGER.set, None)
    if not is_async(node.fn):
        return await in_thread(lambda: node.fn(start, *node.args, **node.kwargs), context)
    host = visit.host or home().loop
    context.run(ERRAND.set, None)
    context.run(INSIDE.set, host)
    return await hosted_by(host, lambda: node.fn(start, *node.args, **node.kwargs), context)


async def hosted_by(host: asyncio.AbstractEventLoop, make: Callable[[], Any], context: Context) -> Any:
    """Await ``make()`` on the loop ``host``, in ``context``."""

    async def work() -> Any:
        with carrying():
            return await make()

    async def entered() -> Any:
        return await asyncio.get_running_loop().create_task(work(), context=context)

    if host is asyncio.get_running_loop():
        return await entered()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(entered(), host))


async def in_thread(work: Callable[[], Any], context: Context) -> Any:
    """Do ``work`` in a thread of its own. When nobody waits any more, its blocking calls are cancelled."""
    loop, errand = asyncio.get_running_loop(), Errand()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def body() -> None:
        value, error = None, None
        try:
            with carrying():
                value = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(told, (value, error))

    def told(end: tuple[Any, BaseException | None]) -> None:
        if not outcome.done():
            outcome.set_result(end)

    threading.Thread(target=context.run, args=(errand.run, body), daemon=True).start()
    try:
        value, error = await outcome
    finally:
        errand.end()
    if error is not None:
        raise error
    return value


async def each_settled(lms: Sequence[LM], visit: Visit, concurrency: int) -> Bursts:
    """Run many programs, at most ``concurrency`` at a time. A row's value is its program, run, or the failure."""

    async def one(row: int) -> Bursts:
        try:
            await settle(lms[row], visit)
        except Exception as error:
            yield [Event(row, Failure(error))]
        else:
            yield [Event(row, lms[row])]

    async with aclosing(interleave(one, range(len(lms)), concurrency)) as bursts:
        async for burst in bursts:
            yield burst
