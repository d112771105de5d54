"""Threads for the bodies of plain programs: as many as there are bodies under way, each used again while there are more."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

from ..bridge import Errand
from ..streams import carrying

LINGER = 0.1  # seconds that a thread waits for another body
Body = Callable[[], None]


class Thread:
    """A thread that does one body after the other, and ends when none comes for a while."""

    __slots__ = ("_body", "_news")

    def __init__(self, body: Body) -> None:
        self._body: Body | None = body
        self._news = threading.Semaphore(0)
        threading.Thread(target=self._live, name="outlines_like program", daemon=True).start()

    def _live(self) -> None:
        while self._body is not None:
            self._body()
            self._body = None
            IDLE.append(self)
            if not self._news.acquire(timeout=LINGER):
                self._leave()

    def _leave(self) -> None:
        """End, unless a body is just being handed over."""
        try:
            IDLE.remove(self)
        except ValueError:
            self._news.acquire()

    def hand(self, body: Body) -> None:
        """Give it a body. It was idle."""
        self._body = body
        self._news.release()


IDLE: list[Thread] = []  # the last to come is used first, so those that are not needed end
os.register_at_fork(after_in_child=IDLE.clear)


def do(body: Body) -> None:
    """Do ``body`` at once in some thread; it never waits for others to end, so nested ones can't deadlock."""
    try:
        thread = IDLE.pop()
    except IndexError:
        Thread(body)
    else:
        thread.hand(body)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Do ``work`` in a thread of its own, in this context. When nobody waits any more, its blocking calls are cancelled."""
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

    do(ready(copy_context(), errand, body))
    try:
        value, error = await outcome
    finally:
        errand.end()
    if error is not None:
        raise error
    return value


def ready(context: Context, errand: Errand, body: Body) -> Body:
    """``body`` in a context, on an errand."""
    return lambda: context.run(errand.run, body)
