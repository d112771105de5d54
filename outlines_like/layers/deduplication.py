"""Equal rows run once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from ..bridge import on_loop, owned
from ..events import Burst, Bursts, Elementwise, Event, Layer, subset
from ..streams import Mailbox, interleave

GONE = object()  # told to followers whose leader left before the answer was there
Tell = Callable[[Any], None]


class Flights:
    """Keys under way, each with those who want to be told its answer."""

    def __init__(self) -> None:
        self.table: dict[str, tuple[Tell, ...]] = {}

    def claim(self, keys: Iterable[str]) -> set[str]:
        """Take the lead for ``keys``, which nobody has."""
        ours = set(keys)
        self.table.update(dict.fromkeys(ours, ()))
        return ours

    def land(self, key: str, value: Any) -> None:
        """Tell the answer to all who follow."""
        for tell in self.table.pop(key):
            tell(value)

    def follow(self, rows: Sequence[Any], chosen: Sequence[int]) -> Mailbox:
        """Where the answers of rows that others lead will come in."""
        mailbox, left = Mailbox(), set(chosen)

        def told(i: int, value: Any) -> None:
            left.discard(i)
            mailbox.post([Event(i, value)])
            if not left:
                mailbox.close()

        for i in chosen:
            self.table[rows[i].key] += (partial(told, i),)
        return mailbox

    async def aclose(self) -> None:
        """Forget."""
        self.table.clear()


def flights(name: Hashable) -> Flights:
    """The table of that name on the library's loop; on another loop, one for this call alone."""
    return owned(("flights", name), Flights) if on_loop() else Flights()


async def leading(bursts: Bursts, rows: Sequence[Any], sky: Flights, ours: set[str]) -> Bursts:
    """Pass ``bursts`` on and tell whoever follows."""
    async with aclosing(bursts):
        async for burst in bursts:
            for row, value, done in burst:
                if done and (key := rows[row].key) in ours:
                    ours.remove(key)
                    sky.land(key, value)
            yield burst


async def following(mailbox: Mailbox, run: Elementwise, rows: Sequence[Any]) -> Bursts:
    """The answers of rows that others lead. Rows whose leader leaves are run after all."""
    orphans: list[int] = []
    while (burst := await mailbox.take()) is not None:
        orphans += [event.row for event in burst if event.value is GONE]
        if answers := [event for event in burst if event.value is not GONE]:
            yield answers
    if orphans:
        async with aclosing(subset(run, rows, sorted(orphans))) as bursts:
            async for burst in bursts:
                yield burst


def first_of_each(rows: Sequence[Any]) -> tuple[dict[str, int], dict[int, list[int]]]:
    """The first row of each key, and for those that have more, all of them."""
    first: dict[str, int] = {}
    same: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if (j := first.setdefault(row.key, i)) != i:
            same.setdefault(j, [j]).append(i)
    return first, same


def shared(burst: Burst, same: dict[int, list[int]]) -> Burst:
    """A burst about first rows as one about all rows."""
    return [Event(i, value, done) for row, value, done in burst for i in same.get(row, (row,))]


def deduped(name: Hashable = None) -> Layer:
    """Run rows with equal keys once, within a call and among calls that are under way together.

    Every asker is told. One who leaves takes nothing from the others. Layers of the same ``name`` share what is under
    way; without one, a layer is alone.
    """

    def layer(run: Elementwise) -> Elementwise:
        table = object() if name is None else name

        async def deduped_run(rows: Sequence[Any]) -> Bursts:
            sky, (first, same) = flights(table), first_of_each(rows)
            mine = [i for key, i in first.items() if key not in sky.table]
            theirs = [i for key, i in first.items() if key in sky.table]
            ours = sky.claim(rows[i].key for i in mine)
            parts = [leading(subset(run, rows, mine), rows, sky, ours)] if mine else []
            if theirs:
                parts.append(following(sky.follow(rows, theirs), deduped_run, rows))
            try:
                async with aclosing(parts[0] if len(parts) == 1 else interleave(lambda part: part, parts, 2)) as bursts:
                    async for burst in bursts:
                        yield shared(burst, same) if same else burst
            finally:
                for key in ours:
                    sky.land(key, GONE)

        return deduped_run

    return layer
