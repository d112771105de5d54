"""The only door between sync and async: one event loop in one daemon thread.

That loop owns every connection, limit, store handle and in-flight table, so none of them needs a lock.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from .errors import BlockingError, OutlinesError
from .events import Bursts, Elementwise
from .streams import Pump, arriving, carrying, outlast

T = TypeVar("T")
HERE = threading.local()  # its ``home`` is the one whose loop this thread runs
ENDED = "the event loop that ran this ended before it was done"
PULSE = 0.2  # seconds between two looks at what nobody tells of: whether a user's loop still lives, or a Ctrl-C came
PATIENCE = 5.0  # seconds for cleaning up, at exit and after Ctrl-C


class Closable(Protocol):
    """Something the loop owns until exit."""

    async def aclose(self) -> None:
        """Let go of everything held."""


C = TypeVar("C", bound=Closable)


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop's where that is installed (the extra ``fast``), else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Home:
    """An event loop in a daemon thread, and what it owns: the library's own, or one for a single reader's operators."""

    def __init__(self, name: str = "outlines_like") -> None:
        self.loop = new_loop()
        self.loop.slow_callback_duration = PATIENCE  # a big array's burst is no fault, and debug mode would report it
        self.owned: dict[Hashable, Closable] = {}
        self.errands: set[Future[None]] = set()
        self.closing = False
        self.loop.call_soon(sys.set_asyncgen_hooks, None)  # every stream here has an owner who closes it: none is listed twice
        self.thread = threading.Thread(target=self._live, name=name, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        HERE.home = self
        self.loop.run_forever()
        self.loop.close()

    async def empty(self) -> None:
        """End all tasks, then close what is owned."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(thing.aclose() for thing in self.owned.values()), return_exceptions=True)
        await self.loop.shutdown_default_executor()

    async def leave(self) -> None:
        """Do that, as far as patience goes, and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await self.empty()
        self.loop.stop()

    def retire(self) -> None:
        """Close soon, without waiting for it."""
        if not self.closing:
            self.closing = True
            asyncio.run_coroutine_threadsafe(self.leave(), self.loop)

    def close(self) -> None:
        """Leave no task, connection or process behind."""
        self.retire()
        if threading.current_thread() is not self.thread:
            self.thread.join(2 * PATIENCE)


class Door:
    """Where the homes of this process are kept. A forked child has to open its own: its parent's loops do not run there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.home: Home | None = None
        self.guests: WeakSet[Home] = WeakSet()

    def forget(self) -> None:
        """Drop what was the parent's."""
        atexit.unregister(self.close)
        self.__init__()  # type: ignore[misc]

    def close(self) -> None:
        """Close all homes, the library's own last."""
        with self.lock:
            homes = [*self.guests, self.home]
        for home in homes:
            if home is not None:
                home.close()


DOOR = Door()
os.register_at_fork(after_in_child=DOOR.forget)


def home() -> Home:
    """The one home of this process, opened on first use."""
    if DOOR.home is not None:
        return DOOR.home
    with DOOR.lock:
        if DOOR.home is None:
            DOOR.home = Home()
            atexit.register(DOOR.close)
        return DOOR.home


def on_loop() -> bool:
    """Whether this code runs on the library's loop."""
    return DOOR.home is not None and threading.current_thread() is DOOR.home.thread


def guest() -> Home:
    """A home for one reader, whose operators may run code of the user's that blocks. Its owner closes it."""
    home()
    made = Home("outlines_like reader")
    with DOOR.lock:
        DOOR.guests.add(made)
    return made


def running() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def in_guest() -> bool:
    """Whether this code runs in a reader's home."""
    here = getattr(HERE, "home", None)
    return here is not None and here is not DOOR.home


class Errand:
    """Blocking calls made in threads for somebody who may leave; then they are cancelled."""

    def __init__(self) -> None:
        self.over = False
        self._calls: set[Job[Any]] = set()

    def run(self, work: Callable[[], None]) -> None:
        """Do ``work`` so that its blocking calls belong to this errand."""
        ERRAND.set(self)
        work()

    def done(self, call: Job[T]) -> T:
        """Run a call and wait for its result."""
        self._calls.add(call)
        if self.over:
            call.cancel()
        try:
            return call.result()
        finally:
            self._calls.discard(call)

    def end(self) -> None:
        """Nobody waits any more."""
        self.over = True
        for call in list(self._calls):
            call.cancel()


ERRAND: ContextVar[Errand | None] = ContextVar("ERRAND", default=None)


class Job(Generic[T]):
    """Work on a loop for a thread that waits for it, and that a Ctrl-C may strike between any two steps.

    So the coroutine is made on the loop, and the wait is for a bare lock: Python's own conditions can break in between.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._loop = work, loop
        self._task: asyncio.Task[T] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._left = self.ended = False
        self._running = threading.Lock()
        self._running.acquire()

    def result(self) -> T:
        """Run it, and wait for its result. As a Ctrl-C just before a thread falls asleep wakes nobody, look up now and then."""
        self._loop.call_soon_threadsafe(self._step)
        while not self._running.acquire(timeout=PULSE):
            pass
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._left = True
        with suppress(RuntimeError):  # the loop is closed, and the work has ended with it
            self._loop.call_soon_threadsafe(self._step)

    def leave(self) -> None:
        """The same, and wait a while for it to clean up."""
        if not self.ended:
            self.cancel()
            self._running.acquire(timeout=PATIENCE)

    def _step(self) -> None:
        """On the loop: begin, or end."""
        if self._task is not None and self._left:
            self._task.cancel()
        elif not self.ended and self._left:
            self._end(CancelledError())
        elif not self.ended and self._task is None:
            self._task = self._loop.create_task(self._run())
            self._task.add_done_callback(self._settle)

    async def _run(self) -> T:
        with carrying():
            return await self._work()

    def _settle(self, task: asyncio.Task[T]) -> None:
        self._task = None
        error = CancelledError() if task.cancelled() else task.exception()
        self._value = task.result() if error is None else None
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._error, self.ended = error, True
        self._running.release()


def wait(work: Callable[..., Coroutine[Any, Any, T]], *args: Any, loop: asyncio.AbstractEventLoop | None = None) -> T:
    """Run ``work(*args)`` on ``loop``, by default the library's, and block this thread until it is done.

    Ctrl-C cancels it and comes through.
    """
    if on_loop():
        raise BlockingError("this call blocks the event loop that has to answer it; in async code write `await f.acall(...)`")
    here = home()
    job = Job(partial(work, *args), loop or here.loop)
    try:
        with arriving():
            return (ERRAND.get() or Errand()).done(job)
    except BaseException as error:
        if here.closing and threading.current_thread().daemon:
            threading.Event().wait()  # the process ends, and this thread with it: there is nobody to tell
        if isinstance(error, KeyboardInterrupt) and not job.ended:
            error.with_traceback(None)  # it struck here, and where in the waiting tells the user nothing
        job.leave()
        raise


def submitted(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """``work``, begun on another loop."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:  # it is closed
        work.close()
        raise OutlinesError(ENDED) from None
    if loop is not home().loop:
        heed(future, loop, work)
    return asyncio.wrap_future(future)


def heed(future: Future[T], loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
    """Let ``future`` fail when a user's ``loop`` ends that has taken ``work`` and will never begin it."""
    if loop.is_closed() and not future.done():
        work.close()
        future.set_exception(OutlinesError(ENDED))
    elif not future.done():
        asyncio.get_running_loop().call_later(PULSE, heed, future, loop, work)


async def across(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on ``loop``, from whichever loop this is."""
    if loop is asyncio.get_running_loop():
        return await work
    answer = submitted(loop, work)
    try:
        return await answer
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and not task.cancelling():
            raise OutlinesError(ENDED) from None
        raise


async def insist(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """The same for a clean-up, which is waited for even by those who are cancelled."""
    if loop is asyncio.get_running_loop():
        return await work
    answer = submitted(loop, work)
    await outlast([answer])
    return answer.result()


async def ask(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the library's loop, from whichever loop this is."""
    return await across(home().loop, work)


def release(work: Callable[[], Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop) -> None:
    """Run a clean-up on ``loop``: at once where this thread may block, else soon."""
    if loop is running() or on_loop():
        home().errands.add(errand := asyncio.run_coroutine_threadsafe(work(), loop))
        errand.add_done_callback(home().errands.discard)
    elif not loop.is_closed():
        wait(work, loop=loop)


def iterate(pump: Pump, loop: asyncio.AbstractEventLoop) -> Generator[list[Any], None, None]:
    """A plain iterator over what ``pump`` reads on ``loop``. Leaving it early stops it."""
    try:
        while (burst := wait(pump.take, loop=loop)) is not None:
            yield burst
    finally:
        release(pump.stop, loop)


def hosted(run: Elementwise) -> Elementwise:
    """Run on the library's loop, whichever loop iterates."""

    async def hosted_run(rows: Sequence[Any]) -> Bursts:
        if on_loop():
            async with aclosing(run(rows)) as bursts:
                async for burst in bursts:
                    yield burst
            return
        pump = Pump(run(rows))
        try:
            while (taken := await ask(pump.take())) is not None:
                yield taken
        finally:
            await insist(home().loop, pump.stop())

    return hosted_run


def owned(key: Hashable, make: Callable[[], C]) -> C:
    """The loop's own thing of that name, made on first use and closed at exit. Call it on the loop."""
    if key not in home().owned:
        home().owned[key] = make()
    return home().owned[key]  # type: ignore[return-value]


def disown(key: Hashable) -> Closable | None:
    """Give the thing of that name back to the caller, who closes it."""
    return home().owned.pop(key, None)
