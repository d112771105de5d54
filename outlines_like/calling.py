"""One call of a lifted function: its rows, and the putting together of their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar
from weakref import WeakSet

from . import arrays, bridge, frames
from .arrays import Grid
from .errors import RowErrors
from .events import Elementwise, Event, Failure
from .signatures import Signature, parse

T = TypeVar("T")
Index = tuple[int, ...]
ON_ERROR = ("raise", "return", "missing")
UNRUN = Failure(RuntimeError("this row ended without an answer"))


class Options(NamedTuple):
    """How a lifted function treats its arguments and its failures."""

    signature: Signature | None = None
    excluded: tuple[int | str, ...] = ()
    on_error: str = "raise"
    fail_fast: bool = False
    progress: Callable[[int, int], object] | None = None


@dataclass(frozen=True)
class Work:
    """One call of a lifted function, taken apart: its rows, and how to put their answers together."""

    run: Elementwise
    rows: Sequence[Any]
    grid: Grid
    samples: int | None
    options: Options
    columns: Sequence[Any]

    @property
    def shape(self) -> Index:
        """The loop's shape, samples last."""
        return self.grid.shape if self.samples is None else (*self.grid.shape, self.samples)

    async def values(self) -> list[Any]:
        """The answer of every row; with ``fail_fast``, None for those that the first failure cancelled."""
        values: list[Any] = [UNRUN] * len(self.rows)
        done = 0
        async with aclosing(self.run(self.rows)) as bursts:
            async for burst in bursts:
                finished = [event for event in burst if event.done]
                for row, value, _ in finished:
                    values[row] = value
                done += len(finished)
                self.tell(done)
                if self.options.fail_fast and any(isinstance(event.value, Failure) for event in finished):
                    return [None if value is UNRUN else value for value in values]
        return values

    def tell(self, done: int) -> None:
        """Show progress to whoever asked for it."""
        if self.options.progress is not None:
            self.options.progress(done, len(self.rows))

    def result(self, values: list[Any]) -> Any:
        """The answers in the shape of the call, or the errors of those that failed."""
        errors = {i: value.error for i, value in enumerate(values) if isinstance(value, Failure)}
        if not errors or self.options.on_error == "missing":
            return self.shaped([None if isinstance(value, Failure) else value for value in values])
        if self.options.on_error == "raise" and not self.shape:
            raise errors[0]
        whole = self.shaped([errors.get(i, value) for i, value in enumerate(values)])
        if self.options.on_error == "raise":
            raise self.failed(errors, whole)
        return whole

    def failed(self, errors: Mapping[int, Exception], partial: Any) -> RowErrors:
        """The errors of all failed rows as one."""
        named = {arrays.index_of(i, self.shape): error for i, error in errors.items()}
        index, error = next(iter(named.items()))
        text = f"{len(errors)} of {len(self.rows)} rows failed; the first, at {index}: {type(error).__name__}: {error}"
        return RowErrors(text, named, partial)

    def shaped(self, values: list[Any]) -> Any:
        """Values as an array, or as one for each output of the function."""
        width = self.width(values)
        if width is None:
            return self.array(values, 0)
        return tuple(self.array([value[k] if isinstance(value, tuple) else value for value in values], k) for k in range(width))

    def width(self, values: list[Any]) -> int | None:
        """How many outputs the function has; None where it has one that is no tuple."""
        widths = {len(value) if type(value) is tuple else None for value in values if not blank(value)}
        promised = len(self.options.signature.outputs) if self.options.signature else None
        if promised == 1 and (widths <= {None} or self.options.signature.outputs[0].dims):  # type: ignore[union-attr]
            return None
        if not widths:
            return promised if promised != 1 else None
        if len(widths) > 1 or promised not in (None, *widths):
            seen = " or ".join(sorted(str(width or 1) for width in widths))
            raise ValueError(f"wrong number of outputs: rows returned {seen}, expected {promised or 'the same in every row'}")
        return widths.pop()

    def array(self, values: list[Any], output: int) -> Any:
        """The values of one output in the shape of the call; a column where a column came in."""
        dims = self.options.signature.outputs[output].dims if self.options.signature else ()
        if dims:
            return arrays.expand(values, dims, self.shape, self.grid.core, self.samples)
        whole = arrays.unflatten(values, self.shape)
        return frames.like(self.columns, whole) if self.columns and len(self.shape) == 1 and self.samples is None else whole


def blank(value: Any) -> bool:
    """Whether a value says nothing of how many outputs a function has."""
    return value is None or isinstance(value, Exception)


class Stream(Generic[T]):
    """Snapshots ``(index, value so far, done)`` as they come, for ``for`` and for ``async for``.

    Nothing runs until it is iterated. Leaving early, by ``break``, ``close()`` or the end of a ``with`` block, cancels what is
    under way. A failed row's last value is a ``Failure``; with ``on_error="raise"`` its error is raised at the end.
    """

    def __init__(self, work: Callable[[], Work]) -> None:
        self._make = work
        self._open: WeakSet[Any] = WeakSet()  # weak, so that a reader who just drops his iterator closes it

    def _snapshot(self, work: Work, event: Event) -> tuple[Index, T, bool]:
        value = event.value
        if isinstance(value, Failure) and work.options.on_error != "raise":
            value = value.error if work.options.on_error == "return" else None
        return arrays.index_of(event.row, work.shape), value, event.done

    def __iter__(self) -> Iterator[tuple[Index, T, bool]]:
        snapshots = self._sync()
        self._open.add(snapshots)
        return snapshots

    def _sync(self) -> Iterator[tuple[Index, T, bool]]:
        work, errors = self._make(), dict[int, Exception]()
        with closing(bridge.iterate(work.run(work.rows))) as bursts:
            for burst in bursts:
                for event in burst:
                    if self._fails(work, event, errors):
                        raise event.value.error
                    yield self._snapshot(work, event)
        self._finish(work, errors)

    async def __aiter__(self) -> AsyncIterator[tuple[Index, T, bool]]:
        work, errors = self._make(), dict[int, Exception]()
        async with aclosing(work.run(work.rows)) as bursts:
            async for burst in bursts:
                for event in burst:
                    if self._fails(work, event, errors):
                        raise event.value.error
                    yield self._snapshot(work, event)
        self._finish(work, errors)

    def _fails(self, work: Work, event: Event, errors: dict[int, Exception]) -> bool:
        """Note a failure; true where it ends the stream."""
        if not isinstance(event.value, Failure) or work.options.on_error != "raise":
            return False
        errors[event.row] = event.value.error
        return work.options.fail_fast or not work.shape

    def _finish(self, work: Work, errors: Mapping[int, Exception]) -> None:
        if errors:
            partial = [errors.get(i) for i in range(len(work.rows))]
            raise work.failed(errors, arrays.unflatten(partial, work.shape))

    def close(self) -> None:
        """End every plain iteration of this stream."""
        for snapshots in list(self._open):
            snapshots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def choose(
    signature: str | None = None,
    excluded: Iterable[int | str] = (),
    on_error: str = "raise",
    fail_fast: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Options:
    """Options, checked."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r}; it is one of {', '.join(map(repr, ON_ERROR))}")
    return Options(parse(signature) if signature else None, tuple(excluded), on_error, fail_fast, progress)
