"""Group rows into the batches that a backend likes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any

from ..checks import count
from ..events import Burst, Bursts, Elementwise, Event, Layer
from ..streams import OPEN, interleave
from .limiting import Limit

By = Callable[[Any], Hashable]


def together(row: Any) -> Hashable:
    """All rows may share a batch."""
    return None


def plan(rows: Sequence[Any], size: int | None, by: By = together) -> list[list[int]]:
    """Cut row numbers into batches that share ``by(row)``, of at most ``size`` (None: any number).

    >>> plan("abcab", 2, by=str)
    [[0, 3], [1, 4], [2]]
    """
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(by(row), []).append(i)
    if size is None:
        return list(groups.values())
    return [group[k : k + size] for group in groups.values() for k in range(0, len(group), size)]


def batched(
    size: int | None = None, *, by: By = together, concurrency: int = 64, within: Callable[[], Limit] | None = None
) -> Layer:
    """Run rows in batches, at most ``concurrency`` at a time.

    ``within`` gives a :class:`Limit` in which each of them holds a place, over all calls that share it.
    """

    count("concurrency", concurrency)
    count("size", 1 if size is None else size)

    def layer(run: Elementwise) -> Elementwise:
        async def batched_run(rows: Sequence[Any]) -> Bursts:
            gate = OPEN if within is None else within()
            bursts = interleave(
                lambda batch: run([rows[i] for i in batch]), plan(rows, size, by), concurrency, gate=gate, told=numbered
            )
            async with aclosing(bursts):
                async for burst in bursts:
                    yield burst

        return batched_run

    return layer


def numbered(batch: Sequence[int], burst: Burst) -> Burst:
    """A burst of a batch, with the numbers that its rows have in the whole call."""
    return [Event(batch[row], value, done) for row, value, done in burst]
