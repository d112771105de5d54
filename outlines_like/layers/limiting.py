"""Bound how many calls of a backend are under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from ..events import Bursts, Elementwise, Layer


class Limit:
    """At most ``size`` holders at once; those who wait get in by order of arrival."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, 0
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self.held < self.size and not self._queue:
            self.held += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn  # whoever leaves hands its place over, so that held stays as it is
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.held -= 1

    async def aclose(self) -> None:
        """Nothing is held beyond the process."""


def limited(limit: int | Limit) -> Layer:
    """Let at most ``limit`` calls of the backend be under way, over all callers that share the limit."""
    gate = Limit(limit) if isinstance(limit, int) else limit

    def layer(run: Elementwise) -> Elementwise:
        async def limited_run(rows: Sequence[Any]) -> Bursts:
            async with gate, aclosing(run(rows)) as bursts:
                async for burst in bursts:
                    yield burst

        return limited_run

    return layer
