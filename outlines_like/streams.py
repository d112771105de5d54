"""Machinery for streams of bursts. Nothing here knows about models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

from .events import Bursts, Event, Snapshot

SLACK = 4096  # events that a slow reader may fall behind before partial values are dropped

OPEN: AbstractAsyncContextManager[Any] = nullcontext()


class Abort(Exception):
    """Carries a SystemExit or KeyboardInterrupt of the user's code through the event loop, which would end with it."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


@contextmanager
def carrying() -> Iterator[None]:
    """Pack what would end an event loop."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise Abort(error) from None


@contextmanager
def arriving() -> Iterator[None]:
    """Unpack it where the user's own code goes on."""
    try:
        yield
    except Abort as abort:
        raise abort.cause from None


def row_of(item: Any) -> Any:
    """The row that an event or a snapshot tells of; None for anything else."""
    return item[0] if type(item) in (Event, Snapshot) else None


def newest(items: Iterable[Any]) -> list[Any]:
    """The last event or snapshot of each row, and all that is neither.

    >>> newest(["a", Event(0, "b", False), Event(0, "c"), "a"])
    ['a', Event(row=0, value='c', done=True), 'a']
    """
    return list({-1 - k if (row := row_of(item)) is None else row: item for k, item in enumerate(items)}.values())


class Mailbox:
    """Bursts on their way to one reader, who may be slow.

    All that has come is taken at once. When too much has, only the latest event of each row is kept: partial
    values may be skipped, an answer never is. One loop owns a mailbox; posting and taking happen there.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._bound = SLACK
        self._news, self._space = asyncio.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._closed = False

    async def room(self) -> None:
        """Wait until the reader is not far behind."""
        while len(self._events) > SLACK and not self._closed:
            self._space.clear()
            await self._space.wait()

    @property
    def unread(self) -> int:
        """How many events wait to be taken."""
        return len(self._events)

    def post(self, burst: Sequence[Any]) -> None:
        """Add ``burst``; never blocks."""
        self._events += burst
        if len(self._events) > self._bound:
            self._events = newest(self._events)
            self._bound = 2 * len(self._events) + SLACK
        self._news.set()

    def close(self, error: BaseException | None = None) -> None:
        """Let the reader end, or fail with ``error``, once all is taken."""
        self._error, self._closed = self._error or error, True
        self._news.set()
        self._space.set()

    async def take(self) -> list[Any] | None:
        """All that has come, at least one event; None at the end."""
        while not self._events and not self._closed:
            self._news.clear()
            await self._news.wait()
        if self._events:
            burst, self._events = self._events, []
            self._space.set()
            return burst
        if self._error is not None:
            raise self._error
        return None


async def carried(work: Coroutine[Any, Any, None]) -> None:
    """Do ``work`` in a task that can't end its loop."""
    try:
        await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise Abort(error) from None


async def outlast(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all are done. A cancellation takes effect only then: what is cleaning up must not be left half done."""
    cancelled: asyncio.CancelledError | None = None
    while left := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def dismiss(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and wait until each has cleaned up."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
    await outlast(tasks)


class Crew:
    """Tasks with one owner. They post to a mailbox, which closes when the last has ended or the first has failed."""

    def __init__(self, mailbox: Mailbox, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        self.mailbox = mailbox
        self._tasks: set[asyncio.Task[None]] = set()
        for work in works:
            self.add(work)
        if not self._tasks:
            mailbox.close()

    def add(self, work: Coroutine[Any, Any, None]) -> None:
        """Let one more task join."""
        self._tasks.add(task := asyncio.get_running_loop().create_task(carried(work)))
        task.add_done_callback(partial(self._ended, work))

    def _ended(self, work: Coroutine[Any, Any, None], task: asyncio.Task[None]) -> None:
        work.close()  # it was never begun if the task was cancelled before its first step
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None or not self._tasks:
            self.mailbox.close(error)

    def cancel(self) -> None:
        """End every task, without waiting for it."""
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """End every task and wait until it has cleaned up."""
        await dismiss(list(self._tasks))


def as_it_is(item: Any, burst: list[Any]) -> list[Any]:
    """A burst unchanged."""
    return burst


async def interleave(
    make: Callable[[Any], Bursts],
    items: Iterable[Any],
    limit: int,
    *,
    gate: AbstractAsyncContextManager[Any] = OPEN,
    told: Callable[[Any, list[Any]], list[Any]] = as_it_is,
) -> Bursts:
    """The bursts of ``make(item)`` for every item as they come, at most ``limit`` of them under way, each inside ``gate``.

    A crew works through one shared iterator: thousands of items cost ``limit`` tasks. ``told(item, burst)`` is what is
    passed on of a burst.
    """
    mailbox, shared = Mailbox(), iter(items)
    first = list(islice(shared, limit))

    async def work(item: Any) -> None:
        while True:
            async with gate, aclosing(make(item)) as bursts:
                async for burst in bursts:
                    mailbox.post(told(item, burst))
                    if mailbox.unread > limit:
                        await asyncio.sleep(0)  # let the reader have his say, also where nothing else waits
            try:
                item = next(shared)
            except StopIteration:
                return

    crew = Crew(mailbox, [work(item) for item in first])
    try:
        while (burst := await mailbox.take()) is not None:
            yield burst
    finally:
        await crew.stop()


class Pump:
    """A stream that a task of its own reads ahead, so that any thread or loop may take from it in turn.

    It starts with the first ``take``, on the loop where that runs, as does ``stop``. A ``patient`` one does not read far
    ahead.
    """

    def __init__(self, bursts: AsyncGenerator[list[Any], None], *, patient: bool = False) -> None:
        self._bursts, self._mailbox, self._patient = bursts, Mailbox(), patient
        self._crew: Crew | None = None

    async def _read(self) -> None:
        async with aclosing(self._bursts) as bursts:
            async for burst in bursts:
                self._mailbox.post(burst)
                if self._patient:
                    await self._mailbox.room()

    async def take(self) -> list[Any] | None:
        """All that has come; None at the end."""
        self._crew = self._crew or Crew(self._mailbox, [self._read()])
        return await self._mailbox.take()

    def close(self) -> None:
        """Let its reader end once he has taken what has come."""
        self._mailbox.close()

    def drop(self) -> None:
        """Let it end by itself: nobody reads any more."""
        if self._crew is not None:
            self._crew.cancel()

    async def stop(self) -> None:
        """Close the stream."""
        await (self._crew.stop() if self._crew else self._bursts.aclose())
        self.close()
