"""Streams that users hold: run once, read by anybody, left at any time."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, closing
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload, runtime_checkable
from weakref import WeakSet

from . import bridge
from .bridge import Home, across, insist
from .calling import Ends, Index, Tally, Work
from .errors import BlockingError, OutlinesError
from .events import Snapshot
from .streams import Crew, Mailbox, Pump, arriving, carrying, row_of

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V", covariant=True)
P = ParamSpec("P")
Lists = AsyncGenerator[list[T], None]
Open = Callable[[Ends | None], Lists[T]]
BLOCKED: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("BLOCKED", default=None)  # by the plain `for` that reads


class Run:
    """One run that any number of readers follow, owned by one task on one loop.

    It remembers the latest snapshot of each row, so who comes late sees the present, then what follows. All but
    ``readers`` is touched on its loop alone.
    """

    def __init__(self, make: Callable[[], Lists[Any]], loop: asyncio.AbstractEventLoop, home: Home | None = None) -> None:
        self.loop, self.home, self.readers = loop, home, 0
        self.present: dict[Any, Any] = {}
        self.over = self.gone = False
        self.error: BaseException | None = None
        self._make = make
        self._mailboxes: dict[Mailbox, Index | None] = {}
        self._crew: Crew | None = None

    async def follow(self, mailbox: Mailbox, index: Index | None) -> None:
        """Post what has been and will be told, of all rows or of one."""
        mailbox.post(self.told(index))
        if self.over:
            mailbox.close(self.error)
        self._mailboxes[mailbox] = index
        self._crew = self._crew or Crew(Mailbox(), [self._read()])

    def told(self, index: Index | None = None) -> list[Any]:
        """What has been told, of all rows or of one."""
        return list(self.present.values()) if index is None else [self.present[index]] if index in self.present else []

    async def _read(self) -> None:
        try:
            with carrying():
                async with aclosing(self._make()) as bursts:
                    async for burst in bursts:
                        self._tell(burst)
        except asyncio.CancelledError:
            self.gone, self.error = True, OutlinesError(bridge.ENDED)
            raise
        except BaseException as error:
            self.error = error
        finally:
            self.over = not self.gone
            for mailbox in self._mailboxes:
                mailbox.close(self.error)

    def _tell(self, burst: list[Any]) -> None:
        for item in burst:
            row = row_of(item)
            self.present[-1 - len(self.present) if row is None else row] = item
        for mailbox, index in self._mailboxes.items():
            if index is None:
                mailbox.post(burst)
            elif mine := [item for item in burst if row_of(item) == index]:
                mailbox.post(mine)

    async def leave(self, mailbox: Mailbox) -> None:
        """Post no more; when nobody is left, end, and wait until all is cleaned up."""
        self._mailboxes.pop(mailbox, None)
        if self.gone and self._crew is not None:
            await self._crew.stop()

    def retire(self) -> None:
        """Let its own home go, if it had one."""
        if self.home is not None:
            self.home.retire()


async def there(run: Run, work: Callable[[], Coroutine[Any, Any, U]]) -> U:
    """Do ``work`` on the loop of ``run``; here, where that has ended after all was told, as then nobody else touches it."""
    try:
        return await across(run.loop, work())
    except OutlinesError:
        if not run.over:
            raise
        return await work()


class Source:
    """Something that runs once for all who read it. When the last reader leaves early it is cancelled, to run afresh."""

    def __init__(self, make: Callable[[], Lists[Any]], *, ours: bool = False) -> None:
        self._make, self.ours = make, ours
        self._lock = threading.Lock()
        self._run: Run | None = None

    def _new(self) -> Run:
        """A run on the loop of its first reader. Where that ends with him it is on the library's, or has one of its own."""
        if self.ours:
            return Run(self._make, bridge.home().loop if bridge.in_guest() else asyncio.get_running_loop())
        if bridge.in_guest() or bridge.on_loop():
            home = bridge.guest()
            return Run(self._make, home.loop, home)
        return Run(self._make, asyncio.get_running_loop())

    def _enter(self) -> Run:
        with self._lock:
            run = self._run
            if run is None or run.gone or (run.loop.is_closed() and not run.over):
                run = self._run = self._new()
            run.readers += 1
        if run.loop is BLOCKED.get() and not run.over:
            self._leave(run)
            raise BlockingError("this `for` blocks the event loop that runs the stream; in async code write `async for`")
        return run

    def _leave(self, run: Run) -> bool:
        """Whether the reader was the last."""
        with self._lock:
            run.readers -= 1
            if not run.readers and not run.over:
                run.gone = True
            return not run.readers

    @property
    def state(self) -> str:
        """How far it is."""
        run = self._run
        return "not begun" if run is None or run.gone else "over" if run.over else "under way"

    async def read(self, index: Index | None = None) -> Lists[Any]:
        """Follow all rows, or one."""
        run, mailbox = self._enter(), Mailbox()
        try:
            if run.over:
                yield run.told(index)
                if run.error is not None:
                    raise run.error
                return
            await there(run, partial(run.follow, mailbox, index))
            while (burst := await there(run, mailbox.take)) is not None:
                yield burst
                if index is not None and burst[-1].done:
                    return
        finally:
            last = self._leave(run)
            if not run.over and not run.loop.is_closed():
                await insist(run.loop, run.leave(mailbox))
            if last:
                run.retire()


class Reader(Generic[T]):
    """One ``async for`` over a stream. A task reads ahead; it ends when the reader leaves, in whatever way.

    It is no async generator: CPython 3.11 does not close one properly that is dropped just before its
    loop ends.
    """

    def __init__(self, bursts: Lists[T]) -> None:
        self._pump, self._items = Pump(bursts, patient=True), iter(list[T]())
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> Reader[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            for item in self._items:
                return item
            self._items = iter(await self._next())

    async def _next(self) -> list[T]:
        self._loop = asyncio.get_running_loop()
        try:
            with arriving():
                burst = await self._pump.take()
        except BaseException:
            await self.aclose()
            raise
        if burst is None:
            raise StopAsyncIteration
        return burst

    async def aclose(self) -> None:
        """Leave."""
        await insist(self._loop or asyncio.get_running_loop(), self._pump.stop())

    def __del__(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            here = self._loop is bridge.running()
            self._pump.drop() if here else self._loop.call_soon_threadsafe(self._pump.drop)


class Scoped:
    """What ends with a ``with`` or ``async with`` block."""

    def close(self) -> None:
        """End it."""

    async def aclose(self) -> None:
        """The same, awaited."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Stream(Scoped, Generic[T]):
    """Things as they come, for ``for`` and for ``async for``: as a rule snapshots ``(index, value so far, done)``.

    Nothing runs until it is read. Reading again replays: it runs once, and who comes late sees the present, then
    what follows. Leaving early, by ``break``, an error, ``close()`` or the end of a ``with`` block, cancels what is under
    way when nobody else reads it; read after that, it runs afresh. A failed row's last value is a ``Failure``; with
    ``on_error="raise"`` its error is raised at the end.

    ``stream | operator`` is ``operator(stream)``, for the operators of this library and any function of a stream.
    """

    def __init__(self, start: Open[T], work: Work | None = None, *, source: Source | None = None, ours: bool = False) -> None:
        self._start, self._work, self._source = start, work, source
        self.ours = ours  # whether no code of the user's runs in it
        self._ends: Ends | None = None
        self._plain: WeakSet[Any] = WeakSet()  # weak, so that a reader who just drops his iterator closes it
        self._awaited: WeakSet[Reader[T]] = WeakSet()
        self._pumps: list[tuple[Pump, asyncio.AbstractEventLoop]] = []

    @property
    def work(self) -> Work:
        """The call whose rows these are."""
        if self._work is None:
            raise TypeError("this stream is not about the rows of one call, so it has no shape")
        return self._work

    def as_stream(self) -> Stream[T]:
        """Itself."""
        return self

    def bursts(self) -> AbstractAsyncContextManager[Lists[T]]:
        """What comes, in lists; closed at the end of the block."""
        return aclosing(self._start(self._ends))

    def shared(self) -> Source:
        """All that is behind this stream, run once for several readers."""
        return self._source or Source(lambda: self._start(self._ends), ours=self.ours)

    def over(self, source: Source, index: Index | None = None) -> Stream[T]:
        """What ``source`` reads, of all rows or of one, about the same call."""
        return Stream(lambda ends: source.read(index), self._work, source=source if index is None else None, ours=self.ours)

    def ending(self, ends: Ends | None) -> Stream[T]:
        """The same, read by one who may end rows: it runs for him alone, each row by itself."""
        other: Stream[T] = Stream(self._start, self._work, ours=self.ours)
        other._ends = ends
        return other

    def derived(self, operator: Callable[[Stream[T]], Lists[U]], *, ours: bool = True) -> Stream[U]:
        """A stream of what ``operator`` makes of this one."""
        return Stream(lambda ends: operator(self.ending(ends)), self._work, ours=ours and self.ours)

    def once(self, operator: Callable[[Stream[T]], Lists[U]]) -> Stream[U]:
        """The same of an operator that leaves early. It runs once for all who read it."""
        made = self.derived(operator)
        source = made.shared()
        return Stream(lambda ends: made._start(ends) if ends else source.read(), self._work, source=source, ours=made.ours)

    def cut(self, operator: Callable[[Stream[T], Ends], Lists[U]], *, ours: bool = False) -> Stream[U]:
        """The same of an operator that ends rows."""

        def start(ends: Ends) -> Lists[U]:
            return operator(self.ending(ends), ends)

        source = Source(lambda: start(Ends()), ours=ours and self.ours)
        return Stream(lambda ends: start(ends) if ends else source.read(), self._work, source=source, ours=source.ours)

    def __iter__(self) -> Iterator[T]:
        items = self._items()
        self._plain.add(items)
        return items

    def _items(self) -> Iterator[T]:
        home = bridge.home() if self.ours else bridge.guest()
        context = copy_context()
        context.run(BLOCKED.set, bridge.running())
        self._pumps.append((pump := Pump(self._start(self._ends), patient=True), home.loop))
        try:
            with closing(bridge.iterate(pump, home.loop)) as bursts:
                for burst in iter(partial(context.run, next, bursts, None), None):
                    yield from burst
        finally:
            self._pumps.remove((pump, home.loop))
            if not self.ours:
                home.close()

    def __aiter__(self) -> Reader[T]:
        reader = Reader(self._start(self._ends))
        self._awaited.add(reader)
        return reader

    def __or__(self, operator: Callable[[Stream[T]], U]) -> U:
        if not callable(operator):
            raise TypeError(
                f"stream | {operator!r:.60}; behind the bar stands an operator, like deltas, or a function of a stream"
            )
        return operator(self)

    def close(self) -> None:
        """End every plain iteration of this stream; one that waits in another thread sees it end."""
        for items in list(self._plain):
            if not items.gi_running:
                items.close()
        for pump, loop in list(self._pumps):
            bridge.release(pump.stop, loop)

    async def aclose(self) -> None:
        """End every ``async for`` over this stream; one that waits in another task sees it end."""
        for reader in list(self._awaited):
            await reader.aclose()

    def __repr__(self) -> str:
        rows = f" of {len(self._work.rows)} row{'s' * (len(self._work.rows) != 1)}" if self._work else ""
        return f"<stream{rows}, {self._source.state}>" if self._source else f"<stream{rows}>"


def reading(work: Work) -> Stream[Snapshot[Any]]:
    """The snapshots of a call."""
    source = Source(lambda: snapshots(work), ours=True)
    return Stream(lambda ends: source.read() if ends is None else snapshots(work, ends), work, source=source, ours=True)


async def snapshots(work: Work, ends: Ends | None = None) -> Lists[Snapshot[Any]]:
    """A call as its reader sees it, its failures raised at the end."""
    tally = Tally(work, partial=ends is not None)
    async with aclosing(work.start(ends)) as bursts:
        async for burst in bursts:
            yield tally.snapshots(burst)
    work.result(tally.answers)


@runtime_checkable
class Streamable(Protocol):
    """A stream, or what can be read as one."""

    def as_stream(self) -> Stream[Any]:
        """The stream."""


def as_stream(value: Streamable) -> Stream[Any]:
    """What an operator was given, as a stream."""
    if not isinstance(value, Streamable):
        raise TypeError(f"an operator takes a stream, not {type(value).__name__} {value!r:.60}")
    return value.as_stream()


class Curried(Protocol[P, V]):
    """A function of a stream, which waits for its stream where it is called without one."""

    @overload
    def __call__(self, stream: Streamable, /, *args: P.args, **kwargs: P.kwargs) -> V: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Callable[[Stream[Any]], V]: ...


def curried(fn: Callable[Concatenate[Stream[Any], P], U]) -> Curried[P, U]:
    """Let ``fn(stream, ...)`` also be written ``stream | fn(...)``."""

    form = inspect.signature(fn)

    @functools.wraps(fn)
    def applied(*args: Any, **kwargs: Any) -> Any:
        streams, more = (args[:1], args[1:]) if args and isinstance(args[0], Streamable) else ((), args)
        check_call(fn.__name__, form, more, kwargs)
        return fn(as_stream(streams[0]), *more, **kwargs) if streams else lambda stream: fn(as_stream(stream), *more, **kwargs)

    return applied


def check_call(name: str, form: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what an operator does not take beside its stream."""
    try:
        form.bind(None, *args, **kwargs)
    except TypeError as error:
        given = ", ".join(f"{value!r:.40}" for value in (*args, *kwargs.values()))
        takes = ", ".join(list(form.parameters)[1:])
        raise TypeError(f"{name}({given}): {error}; write stream | {name}({takes})") from None


def operator(fn: Callable[Concatenate[Stream[Any], P], Lists[U]]) -> Curried[P, Stream[U]]:
    """Make an operator of an async generator over bursts: ``op(stream, ...)`` and ``stream | op(...)``."""

    def derived(stream: Stream[Any], /, *args: P.args, **kwargs: P.kwargs) -> Stream[U]:
        return stream.derived(lambda part: fn(part, *args, **kwargs))

    functools.update_wrapper(derived, fn)
    return curried(derived)


def caller(fn: Callable[Concatenate[Stream[Any], P], Lists[U]]) -> Curried[P, Stream[U]]:
    """The same for an operator that calls a function of the user's."""

    def derived(stream: Stream[Any], /, *args: P.args, **kwargs: P.kwargs) -> Stream[U]:
        return stream.derived(lambda part: fn(part, *args, **kwargs), ours=False)

    functools.update_wrapper(derived, fn)
    return curried(derived)
