"""What can be lifted: something that makes rows of calls, and runs them."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from .arrays import Call
from .checks import count
from .events import Bursts, Elementwise, Event, Failure, Layer, stack, subset
from .occasions import Occasion
from .requests import Terms
from .signatures import Signature

Fn = Callable[..., Any]


class Given(NamedTuple):
    """A row whose answer is known before anything runs."""

    value: Any


class Plan(NamedTuple):
    """What a call would do: rows in all, answers in the store, different requests, and calls of the backend."""

    rows: int
    cached: int
    unique: int
    calls: int


@runtime_checkable
class Target(Protocol):
    """Something that can be lifted. ``signature`` says which axes it takes whole, None for single cells."""

    @property
    def signature(self) -> Signature | None:
        """Which axes it takes whole."""

    @property
    def concurrency(self) -> int | None:
        """How many rows of a call may be under way; None where all calls share a limit."""

    def prepare(self, calls: Sequence[Call], samples: int | None, terms: Terms) -> list[Any]:
        """The rows to run, the samples of a call side by side."""

    def run(self, rows: Sequence[Any], /) -> Bursts:
        """Run them."""

    def preview(self, rows: Sequence[Any]) -> Plan:
        """What running them would do."""

    def layered(self, *layers: Layer) -> Target:
        """The same, with layers round it."""

    def bounded(self, concurrency: int) -> Target:
        """The same, with at most ``concurrency`` rows under way."""

    def bound(self, owner: object) -> Target:
        """The same as a method of ``owner``."""


@runtime_checkable
class Ways(Protocol):
    """A target that can be asked in more ways than one."""

    def via(self, way: str) -> Target:
        """The same, asked in that way."""


@dataclass(frozen=True)
class FunctionTarget:
    """A Python function, and how it is run: ``make(fn, concurrency)`` with ``layers`` round it."""

    fn: Fn
    make: Callable[[Fn, int], Elementwise]
    concurrency: int = 64
    layers: tuple[Layer, ...] = ()
    signature: Signature | None = None

    def prepare(self, calls: Sequence[Call], samples: int | None, terms: Terms) -> list[Any]:
        """One row for each call and sample; a call without a first argument is answered with None."""
        rows = Occasion(self.fn, calls, samples, terms).rows()
        return [Given(None) if arguments_missing(row.args, row.kwargs) else row for row in rows]

    def run(self, rows: Sequence[Any], /) -> Bursts:
        """Call the function."""
        return stack(self.make(self.fn, self.concurrency), *self.layers)(rows)

    def preview(self, rows: Sequence[Any]) -> Plan:
        """One call a row."""
        return Plan(len(rows), 0, len(rows), len(rows))

    def layered(self, *layers: Layer) -> FunctionTarget:
        """The same function with layers round it."""
        return replace(self, layers=(*self.layers, *layers))

    def bounded(self, concurrency: int) -> FunctionTarget:
        """The same function, ``concurrency`` rows at a time."""
        return replace(self, concurrency=count("concurrency", concurrency))

    def bound(self, owner: object) -> FunctionTarget:
        """The same function as a method."""
        return replace(self, fn=types.MethodType(self.fn, owner))


def arguments_missing(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first argument is missing."""
    return missing(args[0]) if args else bool(kwargs) and missing(next(iter(kwargs.values())))


def missing(value: Any) -> bool:
    """Whether a cell holds nothing: None, NaN, NaT or pandas' NA."""
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")


def answered(run: Elementwise) -> Elementwise:
    """Tell the answers that are given at once, and run the other rows."""

    async def answered_run(rows: Sequence[Any]) -> Bursts:
        given = [Event(i, row.value) for i, row in enumerate(rows) if isinstance(row, Given)]
        if given:
            yield given
        todo = [i for i, row in enumerate(rows) if not isinstance(row, Given)]
        if todo:
            async with aclosing(subset(run, rows, todo)) as bursts:
                async for burst in bursts:
                    yield burst

    return answered_run


def hasty(run: Elementwise) -> Elementwise:
    """Stop at the first failure."""

    async def hasty_run(rows: Sequence[Any]) -> Bursts:
        async with aclosing(run(rows)) as bursts:
            async for burst in bursts:
                yield burst
                if any(isinstance(event.value, Failure) for event in burst):
                    return

    return hasty_run
