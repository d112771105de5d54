"""Group rows into the batches that a backend likes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any

from ..checks import count
from ..events import Bursts, Elementwise, Layer, subset
from ..streams import interleave

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


def batched(size: int | None = None, *, by: By = together, concurrency: int = 64) -> Layer:
    """Run rows in batches, at most ``concurrency`` at a time."""

    count("concurrency", concurrency)
    count("size", 1 if size is None else size)

    def layer(run: Elementwise) -> Elementwise:
        async def batched_run(rows: Sequence[Any]) -> Bursts:
            batches = plan(rows, size, by)
            async with aclosing(interleave(lambda batch: subset(run, rows, batch), batches, concurrency)) as bursts:
                async for burst in bursts:
                    yield burst

        return batched_run

    return layer
