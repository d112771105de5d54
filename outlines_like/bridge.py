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
from concurrent.futures import Future
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from .errors import BlockingError
from .events import Burst, Bursts, Elementwise
from .streams import Pump, arriving, carrying

T = TypeVar("T")
PATIENCE = 5.0  # seconds for cleaning up, at exit and after Ctrl-C


class Closable(Protocol):
    """Something the loop owns until exit."""

    async def aclose(self) -> None:
        """Let go of everything held."""


C = TypeVar("C", bound=Closable)


class Home:
    """The library's own event loop, its thread, and what it owns."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.slow_callback_duration = PATIENCE  # a big array's burst is no fault, and debug mode would report it
        self.owned: dict[Hashable, Closable] = {}
        self.errands: set[asyncio.Task[None]] = set()
        self.closing = False
        self.loop.call_soon(sys.set_asyncgen_hooks, None)  # every stream here has an owner who closes it: none is listed twice
        self.thread = threading.Thread(target=self.loop.run_forever, name="outlines_like", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    async def empty(self) -> None:
        """End all tasks, then close what is owned."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(thing.aclose() for thing in self.owned.values()), return_exceptions=True)
        await self.loop.shutdown_default_executor()

    async def leave(self) -> None:
        """Do that, as far as patience goes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await self.empty()

    def close(self) -> None:
        """Leave no task, connection or process behind."""
        self.closing = True
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.leave(), self.loop).result(2 * PATIENCE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE)
        if not self.loop.is_running():
            self.loop.close()


class Door:
    """Where the home of this process is kept. A forked child has to open its own: its parent's loop does not run there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.home: Home | None = None

    def forget(self) -> None:
        """Drop what was the parent's."""
        if self.home is not None:
            atexit.unregister(self.home.close)
        self.__init__()  # type: ignore[misc]


DOOR = Door()
os.register_at_fork(after_in_child=DOOR.forget)


def home() -> Home:
    """The one home of this process, opened on first use."""
    with DOOR.lock:
        DOOR.home = DOOR.home or Home()
        return DOOR.home


def on_loop() -> bool:
    """Whether this code runs on the library's loop."""
    return DOOR.home is not None and threading.current_thread() is DOOR.home.thread


class Errand:
    """Blocking calls made in threads for somebody who may leave; then they are cancelled."""

    def __init__(self) -> None:
        self.over = False
        self._calls: set[Future[Any]] = set()

    def run(self, work: Callable[[], None]) -> None:
        """Do ``work`` so that its blocking calls belong to this errand."""
        ERRAND.set(self)
        work()

    def begin(self, call: Future[Any]) -> None:
        """Note a call under way."""
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        if self.over:
            call.cancel()

    def end(self) -> None:
        """Nobody waits any more."""
        self.over = True
        for call in list(self._calls):
            call.cancel()


ERRAND: ContextVar[Errand | None] = ContextVar("ERRAND", default=None)


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the loop and block this thread until it is done. Ctrl-C cancels it and comes through."""
    if on_loop():
        work.close()
        raise BlockingError("this call blocks the event loop that has to answer it; in async code write `await f.acall(...)`")
    done = threading.Event()

    async def tracked() -> T:
        try:
            with carrying():
                return await work
        finally:
            done.set()

    here = home()
    future = asyncio.run_coroutine_threadsafe(tracked(), here.loop)
    if (errand := ERRAND.get()) is not None:
        errand.begin(future)
    try:
        with arriving():
            return future.result()
    except BaseException:
        if here.closing and threading.current_thread().daemon:
            threading.Event().wait()  # the process ends, and this thread with it: there is nobody to tell
        if future.cancel():
            done.wait(PATIENCE)
        raise


async def ask(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the library's loop, from whichever loop this is."""
    if on_loop():
        return await work
    answer: asyncio.Future[T] = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home().loop))
    return await answer


def release(work: Coroutine[Any, Any, None]) -> None:
    """Run a clean-up: at once where this thread may block, else soon."""
    if home().loop.is_closed():
        work.close()
    elif on_loop():
        home().errands.add(task := asyncio.ensure_future(work))
        task.add_done_callback(home().errands.discard)
    else:
        wait(work)


def iterate(bursts: Bursts) -> Generator[Burst, None, None]:
    """A plain iterator over ``bursts``, which run on the loop. Leaving it early closes them."""
    pump = Pump(bursts)
    try:
        while (burst := wait(pump.take())) is not None:
            yield burst
    finally:
        release(pump.stop())


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
            await ask(pump.stop())

    return hosted_run


def owned(key: Hashable, make: Callable[[], C]) -> C:
    """The loop's own thing of that name, made on first use and closed at exit. Call it on the loop."""
    if key not in home().owned:
        home().owned[key] = make()
    return home().owned[key]  # type: ignore[return-value]


def disown(key: Hashable) -> Closable | None:
    """Give the thing of that name back to the caller, who closes it."""
    return home().owned.pop(key, None)
