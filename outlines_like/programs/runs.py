"""Runs of nodes, once each, for every reader; and requests that are made together. All of it lives on the library's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from ..events import Elementwise, Failure
from ..requests import Request
from .states import State

Loop = asyncio.AbstractEventLoop
Hear = Callable[[Any, bool], None]
Stop = Callable[[], object]
End = Callable[[Exception | None], None]


class Visit(NamedTuple):
    """Who reads: whether partial states are wanted, the loop for async programs, and the loop that is blocked meanwhile."""

    live: bool = False
    host: Loop | None = None
    blocked: Loop | None = None


class Owner(Protocol):
    """What runs: it knows its run while there is one."""

    running: Run | None


class Run:
    """One node's states: run once, told to every reader, the latest first. When the last reader leaves, it stops."""

    __slots__ = ("_ends", "_error", "_news", "_owner", "_readers", "_trace", "built", "host", "latest", "over", "stop")

    def __init__(self, owner: Owner, host: Loop | None) -> None:
        self.host, self._owner = host, owner
        self.latest: State | None = None
        self.over = False
        self.built: Any = None  # what a program returned, run or not
        self.stop: Stop = int
        self._error: Exception | None = None
        self._trace: TracebackType | None = None
        self._readers = 0
        self._ends: list[End] = []
        self._news: list[asyncio.Future[None]] = []

    @property
    def error(self) -> Exception | None:
        """What it failed with, as it was raised there."""
        return self._error.with_traceback(self._trace) if self._error is not None else None

    def tell(self, state: State) -> None:
        """Show a state to all readers."""
        self.latest = state
        self._wake()

    def finish(self, state: State) -> None:
        """Show the last state."""
        self.latest = state
        self._end()

    def fail(self, error: Exception) -> None:
        """End with an error, for good."""
        self._error, self._trace = error, error.__traceback__
        self._end()

    def _end(self) -> None:
        self.over = True
        self._wake()
        self.stop = int
        ends, self._ends = self._ends, []
        for end in ends:
            end(self.error)

    def _wake(self) -> None:
        for reader in self._news:
            if not reader.done():
                reader.set_result(None)
        self._news.clear()

    async def _wait(self) -> None:
        self._news.append(news := asyncio.get_running_loop().create_future())
        await news

    def enter(self, end: End) -> None:
        """Have ``end(error)`` called when it is over, with the error that it failed with, if it did."""
        self._readers += 1
        self._ends.append(end)

    def leave(self, end: End) -> None:
        """Take that back."""
        if end in self._ends:
            self._ends.remove(end)
            self._left()

    def _left(self) -> None:
        self._readers -= 1
        if not self._readers and not self.over:
            self._owner.running = None
            self.stop()

    async def states(self) -> AsyncGenerator[State, None]:
        """The state that there is, then each that comes."""
        self._readers += 1
        seen = None
        try:
            while True:
                if self.latest is not None and self.latest is not seen:
                    yield (seen := self.latest)
                elif self.over:
                    break
                else:
                    await self._wait()
        finally:
            self._left()
        if self.error is not None:
            raise self.error


class Seat:
    """One request among those that go out together."""

    __slots__ = ("_batch", "gone", "hear", "request")

    def __init__(self, request: Request, hear: Hear) -> None:
        self.request, self.hear = request, hear
        self._batch: Batch | None = None
        self.gone = False

    def board(self, batch: Batch) -> None:
        """Go out with a batch."""
        self._batch = batch

    def leave(self) -> None:
        """Take the request back; a batch that nobody waits for any more is stopped."""
        self.gone, self.hear = True, deaf
        if self._batch is not None:
            self._batch.check()

    def told(self, value: Any, done: bool) -> None:
        """Hear of the answer."""
        if not self.gone:
            hear = self.hear
            if done:
                self.gone, self.hear = True, deaf
            hear(value, done)


def deaf(value: Any, done: bool) -> None:
    """Hear nothing more."""


class Batch:
    """Requests that went out together."""

    def __init__(self, run: Elementwise, seats: Sequence[Seat]) -> None:
        self._run, self._seats = run, seats
        for seat in seats:
            seat.board(self)
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        fault = Failure(RuntimeError("this row ended without an answer"))
        try:
            async with aclosing(self._run([seat.request for seat in self._seats])) as bursts:
                async for burst in bursts:
                    for row, value, done in burst:
                        self._seats[row].told(value, done)
        except Exception as error:
            fault = Failure(error)
        for seat in self._seats:
            seat.told(fault, True)

    def check(self) -> None:
        """Stop if all have left."""
        if all(seat.gone for seat in self._seats):
            self.task.cancel()


class Pool:
    """The requests of all programs of one model. Those of one turn of the loop go out as the rows of one call.

    A watched request goes out alone, so that leaving it ends it.
    """

    def __init__(self, run: Elementwise) -> None:
        self._run = run
        self._waiting: list[Seat] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, request: Request, hear: Hear) -> Stop:
        """Have a request made, and ``hear(value, done)`` called with what comes. Calling the result takes it back."""
        seat = Seat(request, hear)
        if request.terms.live:
            self._send([seat])
            return seat.leave
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._soon)
        self._waiting.append(seat)
        return seat.leave

    def _soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._flush)  # those who are woken in this turn come along

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if seats := [seat for seat in waiting if not seat.gone]:
            self._send(seats)

    def _send(self, seats: Sequence[Seat]) -> None:
        batch = Batch(self._run, seats)
        self._tasks.add(batch.task)
        batch.task.add_done_callback(self._tasks.discard)
