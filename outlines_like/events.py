"""The one shape everything has: many rows in, a stream of row events out."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Failure:
    """A row's error, carried as a value so that one bad row never costs the others."""

    error: Exception


class Event(NamedTuple):
    """One row's value so far. The last event of a row has ``done=True``: its value is the answer."""

    row: int
    value: Any
    done: bool = True


Burst = list[Event]
Bursts = AsyncGenerator[Burst, None]
Elementwise = Callable[[Sequence[Any]], Bursts]
Layer = Callable[[Elementwise], Elementwise]


def stack(run: Elementwise, *layers: Layer) -> Elementwise:
    """Wrap ``run`` in ``layers``, innermost first: ``stack(f, g, h)`` is ``h(g(f))``."""
    for layer in layers:
        run = layer(run)
        if inspect.isfunction(run) and not inspect.isasyncgenfunction(run):
            raise TypeError(
                f"{getattr(layer, '__name__', layer)} makes layers and is none; call it: retried(5), deduped(), cached()"
            )
    return run


async def subset(run: Elementwise, rows: Sequence[Any], chosen: Sequence[int]) -> Bursts:
    """Run only the ``chosen`` rows, in ascending order; events keep the caller's row numbers."""
    everything = len(chosen) == len(rows)
    async with aclosing(run(rows if everything else [rows[i] for i in chosen])) as bursts:
        async for burst in bursts:
            yield burst if everything else [Event(chosen[row], value, done) for row, value, done in burst]


async def last_values(bursts: Bursts, n: int) -> list[Any]:
    """Keep the answer of each of ``n`` rows; a row without one is a failure."""
    last: list[Any] = [Failure(RuntimeError("this row ended without an answer"))] * n
    async with aclosing(bursts):
        async for burst in bursts:
            for row, value, done in burst:
                if done:
                    last[row] = value
    return last
