"""Bound how many calls of a backend are under way."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from ..bridge import running
from ..checks import count
from ..events import Bursts, Elementwise, Layer

Turns = deque[asyncio.Future[None]]


class Limit:
    """At most ``size`` holders at once; those who wait get in by order of arrival."""

    def __init__(self, size: int) -> None:
        self.size, self.held = count("limit", size), 0
        self._lock = threading.Lock()  # an async function may be limited over several loops
        self._queue: Turns = deque()

    async def __aenter__(self) -> None:
        with self._lock:
            if self.held < self.size:
                self.held += 1
                return
            self._queue.append(turn := asyncio.get_running_loop().create_future())
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def resize(self, size: int) -> None:
        """Let ``size`` in from now on. Nobody is sent out: a smaller limit holds once enough have left."""
        with self._lock:
            self.size = size
            free = min(size - self.held, len(self._queue))
            turns = [self._queue.popleft() for _ in range(free)]
            self.held += len(turns)
        for turn in turns:
            self._call(turn)

    def leave(self) -> None:
        """Hand the place to whoever waits longest, if anybody does."""
        with self._lock:
            if not self._queue or self.held > self.size:
                self.held -= 1
                return
            turn = self._queue.popleft()
        self._call(turn)

    def _call(self, turn: asyncio.Future[None]) -> None:
        loop = turn.get_loop()
        self._enter(turn) if loop is running() else loop.call_soon_threadsafe(self._enter, turn)

    def _enter(self, turn: asyncio.Future[None]) -> None:
        self.leave() if turn.done() else turn.set_result(None)

    async def aclose(self) -> None:
        """Nothing is held beyond the process."""


def limited(limit: int | Limit) -> Layer:
    """Let at most ``limit`` calls of the backend be under way, over all callers that share the limit."""
    count("limit", limit.size if isinstance(limit, Limit) else limit)

    def layer(run: Elementwise) -> Elementwise:
        gate = limit if isinstance(limit, Limit) else Limit(limit)

        async def limited_run(rows: Sequence[Any]) -> Bursts:
            async with gate, aclosing(run(rows)) as bursts:
                async for burst in bursts:
                    yield burst

        return limited_run

    return layer
