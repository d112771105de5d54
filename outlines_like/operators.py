"""Operators: small generators from streams to streams. Each closes what it opened, whichever end leaves first."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial, singledispatch
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from .arrays import unflatten
from .calling import Ends, Index, Work
from .checks import count, seconds
from .errors import MalformedError, TimedOutError
from .events import Failure, Snapshot
from .requests import Completion
from .streaming import Lists, Stream, Streamable, as_stream, caller, curried, operator
from .streams import dismiss, newest

T = TypeVar("T")
LINE = re.compile(r"([^\n]*)\n")
SENTENCE = re.compile(r"\s*(\S.*?[.!?…][\"'”’)\]]*)\s", re.DOTALL)
STOPPED = "stopped"  # the finish_reason of a completion that its reader ended


@singledispatch
def text_of(value: object) -> str:
    """The text of an answer so far; that of a failure is empty."""
    raise TypeError(f"this operator takes a stream of texts, not of {type(value).__name__} {value!r:.60}")


text_of.register(str, str)
text_of.register(Completion, attrgetter("text"))
for silent in (type(None), Failure, Exception):
    text_of.register(silent, lambda value: "")


@operator
async def deltas(stream: Stream[Any]) -> Lists[tuple[Index, str]]:
    """``(index, new text)`` as it comes: joined, the text of each row.

    >>> import outlines_like as ol
    >>> list(ol.models.fake().stream("so it goes") | ol.deltas)
    [((), 'SO'), ((), ' IT'), ((), ' GOES')]
    """
    shown: dict[Index, int] = {}
    async with stream.bursts() as bursts:
        async for burst in bursts:
            news = []
            for index, value, _ in burst:
                text = value if type(value) is str else text_of(value)
                if len(text) > (start := shown.get(index, 0)):
                    news.append((index, text[start:]))
                    shown[index] = len(text)
            yield news


@operator
async def latest(stream: Stream[Any]) -> Lists[Any]:
    """After each burst, an array of all values so far, in the shape of the call; None where nothing has come.

    >>> import outlines_like as ol
    >>> *_, last = ol.models.fake().stream(["a", "b"]) | ol.latest
    >>> last.tolist()
    ['A', 'B']
    """
    cells = Cells(stream.work)
    async with stream.bursts() as bursts:
        async for burst in bursts:
            for index, value, _ in burst:
                cells.values[cells.rows[index]] = value
            yield [unflatten(cells.values, cells.work.shape)]


@operator
async def finished(stream: Stream[Any]) -> Lists[tuple[Index, Any]]:
    """``(index, answer)`` of each row, in the order in which they finish.

    >>> import outlines_like as ol
    >>> sorted(ol.models.fake().stream(["a b", "c"]) | ol.finished)
    [((0,), 'A B'), ((1,), 'C')]
    """
    async with stream.bursts() as bursts:
        async for burst in bursts:
            yield [(index, value) for index, value, done in burst if done]


@curried
def by_row(stream: Stream[Any]) -> Stream[tuple[Index, Stream[Any]]]:
    """``(index, stream of that row)`` for each row as it begins.

    >>> import outlines_like as ol
    >>> for index, row in ol.models.fake(concurrency=1).stream(["a b", "c"]) | ol.by_row:
    ...     print(index, [text for _, text, done in row if done])
    (0,) ['A B']
    (1,) ['C']
    """
    source = stream.shared()

    async def rows(part: Stream[Any]) -> Lists[tuple[Index, Stream[Any]]]:
        seen: set[Index] = set()
        async with part.bursts() as bursts:
            async for burst in bursts:
                new = dict.fromkeys(index for index, *_ in burst if index not in seen)
                seen.update(new)
                yield [(index, stream.over(source, index)) for index in new]

    return stream.over(source).derived(rows)


def merge(*streams: Streamable, **named: Streamable) -> Stream[tuple[Any, Any]]:
    """``(name, what came)`` from several streams, as it comes; those without a name are numbered.

    >>> import outlines_like as ol
    >>> ask = ol.models.fake().stream
    >>> sorted(ol.merge(ask("a"), b=ask("b")), key=str)
    [('b', Snapshot(index=(), value='B', done=True)), (0, Snapshot(index=(), value='A', done=True))]
    """

    async def merged(_: Ends | None) -> Lists[tuple[Any, Any]]:
        async with aclosing(raced(together)) as parts:
            async for name, burst in parts:
                yield [(name, item) for item in burst]

    together = {name: as_stream(stream) for name, stream in (*enumerate(streams), *named.items())}
    return Stream(merged, ours=all(stream.ours for stream in together.values()))


def zip_latest(*streams: Streamable) -> Stream[tuple[Any, ...]]:
    """The latest of each stream as a tuple, whenever one has news, once all have begun.

    >>> import outlines_like as ol
    >>> one, two = ol.models.fake().stream("a b"), ol.models.fake().stream("c d")
    >>> *_, last = ol.zip_latest(one | ol.deltas, two | ol.deltas)
    >>> last
    (((), ' B'), ((), ' D'))
    """

    async def zipped(_: Ends | None) -> Lists[tuple[Any, ...]]:
        last: dict[int, Any] = {}
        async with aclosing(raced(together)) as parts:
            async for number, burst in parts:
                last.update({number: burst[-1]} if burst else {})
                yield [tuple(last[k] for k in range(len(streams)))] if len(last) == len(streams) else []

    together = dict(enumerate(map(as_stream, streams)))
    return Stream(zipped, ours=all(stream.ours for stream in together.values()))


async def raced(streams: Mapping[Any, Stream[Any]]) -> AsyncGenerator[tuple[Any, list[Any]], None]:
    """The bursts of several streams by name, as they come. The first error ends them all."""
    async with AsyncExitStack() as stack:
        open = {name: await stack.enter_async_context(stream.bursts()) for name, stream in streams.items()}
        steps = {name: step(bursts) for name, bursts in open.items()}
        stack.push_async_callback(lambda: dismiss(list(steps.values())))
        while steps:
            await asyncio.wait(steps.values(), return_when=asyncio.FIRST_COMPLETED)
            for name in [name for name, task in steps.items() if task.done()]:
                if (burst := steps.pop(name).result()) is not None:
                    steps[name] = step(open[name])
                    yield name, burst


def step(bursts: Lists[T]) -> asyncio.Task[list[T] | None]:
    """The next burst, or None at the end, waited for by a task."""

    async def next_burst() -> list[T] | None:
        return await anext(bursts, None)

    return asyncio.ensure_future(next_burst())


@caller
async def map_values(stream: Stream[Any], fn: Callable[[Any], Any]) -> Lists[Snapshot[Any]]:
    """The same rows with ``fn(value)`` for each value so far. Failures stay what they are.

    >>> import outlines_like as ol
    >>> ol.models.fake().stream(["so it goes", "no"]) | ol.map_values(len) | ol.collect
    array([10, 2], dtype=object)
    """
    async with stream.bursts() as bursts:
        async for burst in bursts:
            yield [Snapshot(i, v if isinstance(v, Failure) else fn(v), done) for i, v, done in burst]


@caller
async def filter_rows(stream: Stream[Any], keep: Callable[[Index], Any]) -> Lists[Snapshot[Any]]:
    """Only the rows whose index pleases ``keep``. Once they have their answers the others are left, which cancels them.

    >>> import outlines_like as ol
    >>> list(ol.models.fake().stream(["a", "b"]) | ol.filter_rows(lambda index: index[0] > 0))
    [Snapshot(index=(1,), value='B', done=True)]
    """
    left = {index for index in stream.work.indices if keep(index)}
    async with stream.bursts() as bursts:
        while left and (burst := await anext(bursts, None)) is not None:
            kept = [snapshot for snapshot in burst if keep(snapshot.index)]
            left -= {index for index, value, done in kept if done and not isinstance(value, Failure)}
            yield kept


@caller
async def scan(stream: Stream[Any], fn: Callable[[Any, Any], Any], start: Any) -> Lists[Any]:
    """What ``fn(state so far, what came)`` gives, beginning with ``start``, for all that comes.

    >>> import outlines_like as ol
    >>> list(ol.models.fake().stream("so it goes") | ol.deltas | ol.scan(lambda n, delta: n + len(delta[1]), 0))
    [2, 5, 10]
    """
    async with stream.bursts() as bursts:
        async for burst in bursts:
            yield [start := fn(start, item) for item in burst]


@caller
async def peek(stream: Stream[Any], fn: Callable[[Any], object]) -> Lists[Any]:
    """The same stream, all of it shown to ``fn`` as it passes.

    >>> import outlines_like as ol
    >>> ol.models.fake().stream("hi there") | ol.peek(lambda snapshot: print(snapshot.value)) | ol.collect
    HI
    HI THERE
    'HI THERE'
    """
    async with stream.bursts() as bursts:
        async for burst in bursts:
            for item in burst:
                fn(item)
            yield burst


@curried
def take(stream: Stream[T], n: int) -> Stream[T]:
    """The first ``n`` things that come; then what is behind is left.

    >>> import outlines_like as ol
    >>> list(ol.models.fake().stream("so it goes") | ol.deltas | ol.take(2))
    [((), 'SO'), ((), ' IT')]
    """
    count("n", n, 0)
    return stream.derived(lambda part: taken(part, n))


async def taken(stream: Stream[T], n: int) -> Lists[T]:
    """The first ``n`` things."""
    async with stream.bursts() as bursts:
        while n > 0 and (burst := await anext(bursts, None)) is not None:
            n -= len(burst)
            yield burst[:n] if n < 0 else burst


@curried
def first(stream: Stream[Any], n: int = 1) -> Stream[Snapshot[Any]]:
    """The answers of the first ``n`` rows to finish; the other rows are cancelled.

    >>> import outlines_like as ol
    >>> list(ol.models.fake(concurrency=1).stream(["a", "b"]) | ol.first(1))
    [Snapshot(index=(0,), value='A', done=True)]
    """
    count("n", n)
    return stream.once(lambda part: firsts(part, n))


async def firsts(stream: Stream[Any], n: int) -> Lists[Snapshot[Any]]:
    """The first ``n`` answers."""
    async with stream.bursts() as bursts:
        while n and (burst := await anext(bursts, None)) is not None:
            done = [snapshot for snapshot in burst if snapshot.done][:n]
            n -= len(done)
            yield done


@curried
def stop_when(stream: Stream[Any], predicate: Callable[[Any], Any]) -> Stream[Snapshot[Any]]:
    """End a row once its value so far pleases ``predicate``: its request is cancelled, that value is its answer.

    A completion that ends so has the finish_reason "stopped"; an answer that comes whole stays whole. The rows run by
    themselves, not together with those of other readers, and samples of one prompt are asked for one by one.

    >>> import outlines_like as ol
    >>> ol.models.fake().stream(["so it goes", "no"]) | ol.stop_when(lambda text: " " in text) | ol.collect
    array(['SO IT', 'NO'], dtype=object)
    """

    async def stopped(part: Stream[Any], ends: Ends) -> Lists[Snapshot[Any]]:
        over: set[Index] = set()
        async with part.bursts() as bursts:
            async for burst in bursts:
                yield list(judged(burst, predicate, over, ends))

    return stream.cut(stopped)


def judged(
    burst: list[Snapshot[Any]], predicate: Callable[[Any], Any], over: set[Index], ends: Ends
) -> Iterator[Snapshot[Any]]:
    """The snapshots of rows that go on, and the last ones of those that end."""
    for index, value, done in burst:
        if index in over:
            continue
        if not done and predicate(value):
            over.add(index)
            ends.end(index)
            value = msgspec.structs.replace(value, finish_reason=STOPPED) if isinstance(value, Completion) else value
        yield Snapshot(index, value, done or index in over)


@operator
async def lines(stream: Stream[Any]) -> Lists[tuple[Index, str]]:
    """``(index, line)`` for each whole line, when it is whole.

    >>> import outlines_like as ol
    >>> list(ol.models.fake().stream("one two\\nthree") | ol.lines)
    [((), 'ONE TWO'), ((), 'THREE')]
    """
    async with aclosing(units(stream, LINE)) as parts:
        async for part in parts:
            yield part


@operator
async def sentences(stream: Stream[Any]) -> Lists[tuple[Index, str]]:
    """``(index, sentence)`` for each whole sentence, once white space follows it.

    >>> import outlines_like as ol
    >>> list(ol.models.fake().stream("So it goes. On and on") | ol.sentences)
    [((), 'SO IT GOES.'), ((), 'ON AND ON')]
    """
    async with aclosing(units(stream, SENTENCE)) as parts:
        async for part in parts:
            yield part


async def units(stream: Stream[Any], pattern: re.Pattern[str]) -> Lists[tuple[Index, str]]:
    """Pieces of each text: what the first group of ``pattern`` matches, and at the end the rest."""
    read: dict[Index, int] = {}
    async with stream.bursts() as bursts:
        async for burst in bursts:
            news: list[tuple[Index, str]] = []
            for index, value, done in burst:
                text = text_of(value)
                for whole in pattern.finditer(text, read.get(index, 0)):
                    news.append((index, whole[1]))
                    read[index] = whole.end()
                if done and (rest := text[read.get(index, 0) :]):
                    news.append((index, rest))
            yield news


@operator
async def partial_json(stream: Stream[Any]) -> Lists[Snapshot[Any]]:
    """The value that each text stands for, as far as it has come. Text that is not JSON in the end is a failure.

    >>> import outlines_like as ol
    >>> [value for _, value, _ in ol.models.fake().stream('{"A": 1, "B": ["SO IT GOES"]}') | ol.partial_json]
    [{}, {'A': 1}, {'A': 1}, {'A': 1, 'B': ['SO']}, {'A': 1, 'B': ['SO IT']}, {'A': 1, 'B': ['SO IT GOES']}]
    """
    parse = parser()
    async with stream.bursts() as bursts:
        async for burst in bursts:
            yield [Snapshot(i, v if isinstance(v, Failure) else parse(text_of(v), done), done) for i, v, done in burst]


def parser() -> Callable[[str, bool], Any]:
    """A parser of text that may not be whole yet: None before it says anything."""
    try:
        import jiter
    except ImportError:
        raise ImportError("partial_json needs jiter: run `pip install 'outlines_like[streams]'`") from None

    def parse(text: str, whole: bool) -> Any:
        try:
            return jiter.from_json(text.encode(), partial_mode="off" if whole else "trailing-strings")
        except ValueError as error:
            return Failure(MalformedError(f"this is no JSON ({error}): {text:.80}")) if whole else None

    return parse


@curried
def tee(stream: Stream[T], n: int = 2) -> tuple[Stream[T], ...]:
    """``n`` streams of the same, which may be read at different times. What is behind them runs once.

    >>> import outlines_like as ol
    >>> one, two = ol.models.fake().stream(["a", "b"]) | ol.tee
    >>> (one | ol.collect).tolist(), len(list(two))
    (['A', 'B'], 2)
    """
    source = stream.shared()
    return tuple(
        Stream(lambda ends: source.read(), stream._work, source=source, ours=stream.ours) for _ in range(count("n", n))
    )


@curried
def timeout(stream: Stream[T], *, idle: float) -> Stream[T]:
    """The same stream; a :class:`TimedOutError` where nothing comes for ``idle`` seconds.

    >>> import outlines_like as ol
    >>> ol.models.fake().stream("in time") | ol.timeout(idle=60) | ol.collect
    'IN TIME'
    """
    seconds("idle", idle)
    return stream.derived(lambda part: prompt(part, idle))


async def prompt(stream: Stream[T], idle: float) -> Lists[T]:
    """What comes, if it never keeps one waiting for ``idle`` seconds."""
    async with stream.bursts() as bursts:
        while True:
            try:
                async with asyncio.timeout(idle) as limit:
                    burst = await anext(bursts, None)
            except TimeoutError as error:
                if limit.expired():
                    raise TimedOutError(f"nothing came for {idle:g} s") from None
                raise error
            if burst is None:
                return
            yield burst


@curried
def chunks(stream: Stream[T], n: int | None = None, *, every: float | None = None) -> Stream[list[T]]:
    """Lists of ``n`` things, or of what came in the ``every`` seconds after the first; at the end what is left.

    >>> import outlines_like as ol
    >>> list(ol.models.fake().stream("so it goes") | ol.deltas | ol.chunks(2))
    [[((), 'SO'), ((), ' IT')], [((), ' GOES')]]
    """
    if (n is None) == (every is None):
        raise TypeError(f"chunks(n={n!r}, every={every!r}): give one of them")
    cut = partial(groups, n=count("n", n)) if every is None else partial(windows, length=seconds("every", every))
    return stream.derived(lambda part: listed(part, cut))


async def listed(stream: Stream[T], cut: Callable[[Lists[T]], Lists[T]]) -> Lists[list[T]]:
    """What ``cut`` puts together, as lists."""
    async with stream.bursts() as bursts, aclosing(cut(bursts)) as parts:
        async for part in parts:
            yield [part]


@curried
def throttle(stream: Stream[T], every: float) -> Stream[T]:
    """At most one burst in ``every`` seconds, with the latest snapshot of each row: no answer is left out.

    >>> import outlines_like as ol
    >>> [text for _, text, _ in ol.models.fake().stream("so it goes") | ol.throttle(0.2)]
    ['SO IT GOES']
    """
    seconds("every", every)
    return stream.derived(lambda part: slowed(part, every))


async def slowed(stream: Stream[T], every: float) -> Lists[T]:
    """What is newest after each ``every`` seconds."""
    async with stream.bursts() as bursts, aclosing(windows(bursts, every)) as parts:
        async for part in parts:
            yield newest(part)


async def groups(bursts: Lists[T], n: int) -> Lists[T]:
    """``n`` at a time. An error comes after what came before it."""
    held: list[T] = []
    try:
        async for burst in bursts:
            held += burst
            while len(held) >= n:
                yield held[:n]
                del held[:n]
    except Exception:
        if held:
            yield held
        raise
    if held:
        yield held


async def windows(bursts: Lists[T], length: float) -> Lists[T]:
    """What came in the ``length`` seconds after the first of it, at a time. An error comes after what came before it."""
    loop = asyncio.get_running_loop()
    steps = {"next": step(bursts)}
    try:
        while (burst := await steps["next"]) is not None:
            held, until = list(burst), loop.time() + length
            steps["next"] = step(bursts)
            while held and not await ended(steps["next"], until - loop.time()):
                held += steps["next"].result() or []
                steps["next"] = step(bursts)
            yield held
    finally:
        await dismiss(list(steps.values()))


async def ended(task: asyncio.Task[Any], left: float) -> bool:
    """Whether ``task`` brings nothing more in the seconds that are left."""
    await asyncio.wait([task], timeout=max(0.0, left))
    return not task.done() or task.cancelled() or task.exception() is not None or task.result() is None


class Cells:
    """The values of a call's rows so far."""

    def __init__(self, work: Work) -> None:
        self.work, self.rows = work, {index: row for row, index in enumerate(work.indices)}
        self.values: list[Any] = [None] * len(self.rows)

    def note(self, snapshot: Snapshot[Any]) -> None:
        """Keep an answer."""
        if snapshot.done:
            self.values[self.rows[snapshot.index]] = snapshot.value


@curried
def collect(stream: Stream[Any]) -> Any:
    """Read a stream to its end: the answers in the shape of the call, None in the cells of rows that have none.

    >>> import outlines_like as ol
    >>> ol.models.fake().stream([["a"], ["b"]]) | ol.collect
    array([['A'],
           ['B']], dtype=object)
    """
    cells = Cells(stream.work)
    for snapshot in stream:
        cells.note(snapshot)
    return cells.work.result(cells.values)


async def acollect(given: Streamable) -> Any:
    """:func:`collect`, awaited.

    >>> import asyncio
    >>> import outlines_like as ol
    >>> asyncio.run(ol.acollect(ol.models.fake().stream("hi")))
    'HI'
    """
    cells = Cells((stream := as_stream(given)).work)
    async with stream.bursts() as bursts:
        async for burst in bursts:
            for snapshot in burst:
                cells.note(snapshot)
    return cells.work.result(cells.values)
