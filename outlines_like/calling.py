"""One call of a lifted function: its rows, and the putting together of their answers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from . import arrays, frames
from .arrays import Grid
from .errors import RowErrors, SignatureError
from .events import Burst, Bursts, Elementwise, Failure, Snapshot, subset
from .garbage import seldom
from .signatures import OPTIONS, Signature, parse
from .streams import Pump, arriving, interleave
from .targets import hasty

Index = tuple[int, ...]
ON_ERROR = ("raise", "return", "missing")
SINGLY = 256  # rows run by themselves at a time, where the model has a limit of its own
UNRUN = Failure(RuntimeError("this row ended without an answer"))


class Options(NamedTuple):
    """How a lifted function treats its arguments and its failures."""

    signature: Signature | None = None
    excluded: tuple[int | str, ...] = ()
    on_error: str = "raise"
    fail_fast: bool = False
    progress: Callable[[int, int], object] | None = None
    partial: bool = False


@dataclass(frozen=True)
class Work:
    """One call of a lifted function, taken apart: its rows, and how to put their answers together."""

    run: Elementwise
    rows: Sequence[Any]
    grid: Grid
    samples: int | None
    options: Options
    columns: Sequence[Any]
    concurrency: int | None = None

    @property
    def shape(self) -> Index:
        """The loop's shape, samples last."""
        return self.grid.shape if self.samples is None else (*self.grid.shape, self.samples)

    @cached_property
    def indices(self) -> list[Index]:
        """Where the answer of each row stands."""
        return list(product(*map(range, self.shape)))

    def start(self, ends: Ends | None = None) -> Bursts:
        """Run the rows: together, or so that ``ends`` can end each of them."""
        run = self.run if ends is None else self.singly(ends)
        return (hasty(run) if self.options.fail_fast else run)(self.rows)

    def singly(self, ends: Ends) -> Elementwise:
        """Run each row by itself, until it ends or is ended."""

        async def singly_run(rows: Sequence[Any]) -> Bursts:
            def one(i: int) -> Bursts:
                return ends.until(self.indices[i], subset(self.run, rows, [i]))

            async with aclosing(interleave(one, range(len(rows)), self.concurrency or SINGLY)) as bursts:
                async for burst in bursts:
                    yield burst

        return singly_run

    async def values(self) -> list[Any]:
        """The answer of every row."""
        tally = Tally(self)
        with arriving(), seldom(len(self.rows)):
            async with aclosing(self.start()) as bursts:
                async for burst in bursts:
                    tally.note(burst)
        return tally.answers

    def result(self, values: Sequence[Any]) -> Any:
        """The answers in the shape of the call, or the errors of those that failed."""
        errors = {i: value.error for i, value in enumerate(values) if isinstance(value, Failure)}
        if not errors or self.options.on_error == "missing":
            return self.shaped([None if isinstance(value, Failure) else value for value in values])
        if self.options.on_error == "raise" and not self.shape:
            raise errors[0]
        whole = self.shaped([errors.get(i) if isinstance(value, Failure) else value for i, value in enumerate(values)])
        if self.options.on_error == "raise":
            raise self.failed(errors, whole)
        return whole

    def failed(self, errors: Mapping[int, Exception], partial: Any) -> RowErrors:
        """The errors of all failed rows as one, those first that others came of."""
        causes = set(map(id, errors.values()))
        rows = sorted(errors, key=lambda i: id(errors[i].__cause__) in causes)
        named = {arrays.index_of(i, self.shape): errors[i] for i in rows}
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
        outputs = self.options.signature.outputs if self.options.signature else None
        if outputs and len(outputs) == 1 and outputs[0].dims:
            return None  # a tuple is the array that was promised
        seen = {len(value) if type(value) is tuple else None for value in values if not blank(value)}
        wanted = seen or {None} if outputs is None else {None if len(outputs) == 1 else len(outputs)}
        if len(seen | wanted) > 1:
            found, promised = (" or ".join(sorted(str(width or 1) for width in widths)) for widths in (seen, wanted))
            raise ValueError(
                f"wrong number of outputs: rows returned {found}, expected {promised if outputs else 'one number'}"
            )
        return wanted.pop()

    def array(self, values: list[Any], output: int) -> Any:
        """The values of one output in the shape of the call; a column where a column came in."""
        dims = self.options.signature.outputs[output].dims if self.options.signature else ()
        if dims:
            return arrays.expand(values, dims, self.shape, self.grid.core, self.samples)
        whole = arrays.unflatten(values, self.shape)
        return frames.like(self.columns, whole) if self.is_column else whole

    @property
    def is_column(self) -> bool:
        """Whether the answers are one column, like one that came in."""
        return bool(self.columns) and self.samples is None and self.shape == (len(self.columns[0]),)


def blank(value: Any) -> bool:
    """Whether a value says nothing of how many outputs a function has."""
    return value is None or isinstance(value, Exception)


class Ends:
    """Which rows their reader has seen enough of."""

    def __init__(self) -> None:
        self._over: set[Index] = set()
        self._bells: dict[Index, Pump] = {}

    def end(self, index: Index) -> None:
        """Cancel a row, or never begin it. Call it on the loop that runs the rows."""
        self._over.add(index)
        if index in self._bells:
            self._bells[index].close()

    async def until(self, index: Index, bursts: Bursts) -> Bursts:
        """The bursts of one row until it is ended."""
        self._bells[index] = pump = Pump(bursts)
        try:
            while index not in self._over and (burst := await pump.take()) is not None:
                yield burst
        finally:
            del self._bells[index]
            await pump.stop()


class Tally:
    """What has come of one call so far. ``partial``: rows may be ended before they have an answer."""

    def __init__(self, work: Work, partial: bool = False) -> None:
        self.work, self.values, self.done, self.partial = work, [UNRUN] * len(work.rows), 0, partial

    @property
    def answers(self) -> list[Any]:
        """The answer of every row; None for those that were cancelled, by a first failure or by the reader."""
        partial = self.partial or (self.work.options.fail_fast and self.done < len(self.values))
        return [None if value is UNRUN else value for value in self.values] if partial else self.values

    def note(self, burst: Burst) -> None:
        """Keep the answers of a burst, and tell whoever asked for progress."""
        finished = 0
        for row, value, done in burst:
            if done:
                self.values[row] = value
                finished += 1
        self.done += finished
        if self.work.options.progress is not None and finished:
            self.work.options.progress(self.done, len(self.work.rows))

    def snapshots(self, burst: Burst) -> list[Snapshot[Any]]:
        """A burst as a reader sees it. A single answer's error is raised, not shown."""
        self.note(burst)
        indices, options = self.work.indices, self.work.options
        if options.on_error == "raise" and not self.work.shape:
            burst = [event for event in burst if not isinstance(event.value, Failure)]
        return [Snapshot(indices[i], self.shown(v) if isinstance(v, Failure) else v, done) for i, v, done in burst]

    def shown(self, failure: Failure) -> Any:
        """What a reader sees of a failure."""
        options = self.work.options
        return failure if options.on_error == "raise" else failure.error if options.on_error == "return" else None


def choose(options: Options, given: Mapping[str, Any], form: inspect.Signature) -> Options:
    """``options`` with those that are ``given``, checked against the function's ``form``."""
    for name in given:
        if name not in Options._fields:
            raise TypeError(f"vectorize has no option {name!r}; it takes {', '.join(OPTIONS)}")
    chosen = options._replace(**given)
    check_choices(chosen)
    signature = chosen.signature if isinstance(chosen.signature, Signature | None) else parse(chosen.signature)
    if signature is not None and signature is not options.signature:
        check_inputs(signature, form)
    excluded = tuple(chosen.excluded) if isinstance(chosen.excluded, (tuple, list, set, frozenset)) else (chosen.excluded,)
    check_excluded(excluded, form)
    return chosen._replace(signature=signature, excluded=excluded, progress=shower(chosen.progress))


def check_choices(options: Options) -> None:
    """Of some options there are few."""
    if options.on_error not in ON_ERROR:
        raise ValueError(f"on_error={options.on_error!r}; it is one of {', '.join(map(repr, ON_ERROR))}")
    for name, value in (("fail_fast", options.fail_fast), ("partial", options.partial)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}; it is True or False")


def shower(progress: Any) -> Callable[[int, int], object] | None:
    """What shows progress; ``True`` stands for a line on stderr."""
    if progress is True:
        return meter
    if progress and not callable(progress):
        raise TypeError(f"progress={progress!r}; it is True, or a function of rows done and rows in all")
    return progress or None


def check_inputs(signature: Signature, form: inspect.Signature) -> None:
    """A signature tells of arguments that the function takes."""
    kinds, takes = {p.kind for p in form.parameters.values()}, ", ".join(form.parameters) or "none"
    if len(signature.inputs) > len(form.parameters) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise SignatureError(f"the signature has {len(signature.inputs)} inputs, but the function's arguments are {takes}")
    for name, _ in signature.inputs:
        if name is not None and name not in form.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise SignatureError(f"the signature names {name!r}, but the function's arguments are {takes}")


def check_excluded(excluded: Sequence[int | str], form: inspect.Signature) -> None:
    """Only what the function takes can be excluded."""
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in form.parameters.values()):
        return
    for name in excluded:
        if name not in form.parameters and name not in range(len(form.parameters)):
            raise ValueError(
                f"excluded={name!r} is no argument of the function, which takes {', '.join(form.parameters) or 'none'}"
            )


def meter(done: int, total: int) -> None:
    """Show on one line of stderr how far a call is."""
    print(f"\r{done:,} of {total:,} rows", end="\n" if done == total else "", file=sys.stderr, flush=True)
