"""Python functions, sync, async or over lists, as elementwise backends."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing, closing, suppress
from contextvars import copy_context
from typing import Any

from .bridge import Errand, Job
from .events import Burst, Bursts, Elementwise, Event, Failure
from .occasions import CURRENT, Row
from .streams import Abort, Mailbox, carrying, interleave

Fn = Callable[..., Any]
SILENT = Failure(ValueError("the generator yielded nothing; the last thing that it yields is its answer"))


def is_async(fn: Fn) -> bool:
    """Whether calling ``fn`` gives a coroutine or an async generator."""
    return says(fn, inspect.iscoroutinefunction) or says(fn, inspect.isasyncgenfunction)


def is_generator(fn: Fn) -> bool:
    """Whether calling ``fn`` gives a generator, sync or async."""
    return says(fn, inspect.isgeneratorfunction) or says(fn, inspect.isasyncgenfunction)


def says(fn: Fn, kind: Callable[[Any], bool]) -> bool:
    """Whether ``fn`` is of a ``kind`` of function: also a partial, a method, an object with ``__call__``."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return kind(fn) or kind(type(fn).__call__)


def each(fn: Fn, concurrency: int) -> Elementwise:
    """One call of ``fn`` a row, at most ``concurrency`` at a time."""
    return awaited(fn, concurrency) if is_async(fn) else threaded(fn, concurrency)


def awaited(fn: Fn, concurrency: int) -> Elementwise:
    """An async function, in the loop that iterates."""

    async def one(numbered: tuple[int, Row]) -> AsyncGenerator[Burst, None]:
        i, row = numbered
        CURRENT.set(row)
        try:
            value = await fn(*row.args, **row.kwargs)
        except Exception as error:
            value = Failure(error)
        yield [Event(i, value)]

    async def growing(numbered: tuple[int, Row]) -> AsyncGenerator[Burst, None]:
        i, row = numbered
        CURRENT.set(row)
        value: Any = SILENT
        try:
            async with aclosing(fn(*row.args, **row.kwargs)) as values:
                async for value in values:
                    if row.terms.live:
                        yield [Event(i, value, False)]
        except Exception as error:
            value = Failure(error)
        yield [Event(i, value)]

    async def awaited_run(rows: Sequence[Row]) -> Bursts:
        async with aclosing(interleave(growing if is_generator(fn) else one, enumerate(rows), concurrency)) as bursts:
            async for burst in bursts:
                yield burst

    return awaited_run


class Gang:
    """Threads that call a function for the rows of one shared iterator, and the mailbox they report to.

    They are made for this call alone: threads of a bounded pool would deadlock where lifted functions are nested.
    """

    def __init__(self, fn: Fn, rows: Sequence[Row], size: int) -> None:
        self.fn, self.rows = fn, iter(enumerate(rows))
        self.value = self.grown if is_generator(fn) else self.returned
        self.loop, self.mailbox, self.errand = asyncio.get_running_loop(), Mailbox(), Errand()
        self.done: deque[Event] = deque()
        self.told = False
        self.left = min(size, len(rows))
        for _ in range(self.left):
            threading.Thread(target=copy_context().run, args=(self.errand.run, self.work), daemon=True).start()
        if not self.left:
            self.mailbox.close()

    def work(self) -> None:
        """Take rows until there are none; runs in a thread."""
        error: BaseException | None = None
        try:
            with carrying():
                for i, row in self.rows:
                    if self.errand.over:
                        break
                    self.report(Event(i, self.value(i, row)))
        except BaseException as broken:
            error = broken
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.ended, error)

    def grown(self, i: int, row: Row) -> Any:
        """The last that a generator yields, or what it raises. What comes before is shown."""
        CURRENT.set(row)
        value: Any = SILENT
        try:
            with closing(self.fn(*row.args, **row.kwargs)) as values:
                for value in values:
                    if self.errand.over:
                        break
                    if row.terms.live:
                        self.report(Event(i, value, False))
            return value
        except Abort:
            raise
        except Exception as error:
            return Failure(error)

    def returned(self, i: int, row: Row) -> Any:
        """What the function returns or raises. A coroutine from a plain function is awaited on the loop."""
        CURRENT.set(row)
        try:
            value = self.fn(*row.args, **row.kwargs)
            if inspect.isawaitable(value):
                value = self.errand.done(Job(functools.partial(finish, value), self.loop))
            return value
        except Abort:
            raise
        except Exception as error:
            return Failure(error)

    def report(self, event: Event) -> None:
        """Hand over a value; the loop is woken once for all that it has not yet fetched."""
        self.done.append(event)
        if not self.told:
            self.told = True
            self.loop.call_soon_threadsafe(self.fetch)

    def fetch(self) -> None:
        """Move what the threads have done to the mailbox; runs on the loop."""
        self.told = False
        self.mailbox.post([self.done.popleft() for _ in range(len(self.done))])

    def ended(self, error: BaseException | None) -> None:
        """One thread has ended; runs on the loop."""
        self.left -= 1
        self.fetch()
        if error is not None or not self.left:
            self.mailbox.close(error)


async def finish(value: Any) -> Any:
    """Any awaitable as a coroutine."""
    with carrying():
        return await value


def threaded(fn: Fn, concurrency: int) -> Elementwise:
    """A plain function, in threads of its own."""

    async def threaded_run(rows: Sequence[Row]) -> Bursts:
        gang = Gang(fn, rows, concurrency)
        try:
            while (burst := await gang.mailbox.take()) is not None:
                yield burst
        finally:
            gang.errand.end()

    return threaded_run


def in_lists(size: int, fn: Fn, concurrency: int) -> Elementwise:
    """A function from lists to a list: each argument comes as the list of its values in up to ``size`` rows."""
    run_lists = each(fn, concurrency)

    def lists(rows: Sequence[Row]) -> Iterator[Row]:
        for k in range(0, len(rows), size):
            part = rows[k : k + size]
            args = tuple(list(column) for column in zip(*(row.args for row in part), strict=True))
            yield part[0]._replace(args=args, kwargs={name: [row.kwargs[name] for row in part] for name in part[0].kwargs})

    async def listed_run(rows: Sequence[Row]) -> Bursts:
        async with aclosing(run_lists(list(lists(rows)))) as bursts:
            async for burst in bursts:
                yield [event for at, value, _ in burst for event in apart(value, at * size, min(size, len(rows) - at * size))]

    return listed_run


def apart(value: Any, start: int, n: int) -> Burst:
    """The events of ``n`` rows from the list or array that a batch function returned for them."""
    if isinstance(value, Failure):
        return [Event(start + k, value) for k in range(n)]
    listed = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Set, Iterator))
    values = (value.tolist() if getattr(value, "ndim", 0) == 1 else list(value)) if listed else []
    if listed and len(values) == n:
        return [Event(start + k, item) for k, item in enumerate(values)]
    size = f"{len(values)} values" if listed else type(value).__name__
    wrong = Failure(ValueError(f"a batch function returned {size} for {n} rows; it must return a list of {n}"))
    return [Event(start + k, wrong) for k in range(n)]
