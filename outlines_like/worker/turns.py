"""Whose turn it is among calls whose rows share one running batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Called(Protocol):
    """Something that a call asked for."""

    @property
    def call(self) -> int:
        """Which one."""


C = TypeVar("C", bound=Called)


def in_turn(waiting: Iterable[C], running: Iterable[Called] = ()) -> list[C]:
    """Those who wait, so that each call comes to have as many rows running as any other; else as they came."""
    held = Counter(row.call for row in running)
    turns = []
    for row in waiting:
        held[row.call] += 1
        turns.append((held[row.call], row))
    return [row for _, row in sorted(turns, key=lambda turn: turn[0])]
