"""Equal rows run once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from ..bridge import on_loop, owned
from ..events import Bursts, Elementwise, Event, Layer, subset
from ..streams import Mailbox, interleave

GONE = object()  # told to followers whose leader left before the answer was there
Tell = Callable[[Any], None]


class Flights:
    """Keys under way, each with those who want to be told its answer."""

    def __init__(self) -> None:
        self.table: dict[str, list[Tell]] = {}

    def claim(self, keys: Iterable[str]) -> dict[str, list[Tell]]:
        """Take the lead for ``keys``."""
        ours: dict[str, list[Tell]] = {key: [] for key in keys}
        self.table.update(ours)
        return ours

    def land(self, ours: dict[str, list[Tell]], key: str, value: Any) -> None:
        """Tell the answer to all who followed, once."""
        followers = ours.pop(key, [])
        if self.table.get(key) is followers:
            del self.table[key]
        for tell in followers:
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
            self.table[rows[i].key].append(partial(told, i))
        return mailbox

    async def aclose(self) -> None:
        """Forget."""
        self.table.clear()


def flights() -> Flights:
    """The table of all calls on the library's loop; on another loop, one for this call alone."""
    return owned("flights", Flights) if on_loop() else Flights()


async def leading(bursts: Bursts, rows: Sequence[Any], sky: Flights, ours: dict[str, list[Tell]]) -> Bursts:
    """Pass ``bursts`` on and tell whoever follows."""
    async with aclosing(bursts):
        async for burst in bursts:
            for row, value, done in burst:
                if done:
                    sky.land(ours, rows[row].key, value)
            yield burst


async def following(mailbox: Mailbox, run: Elementwise, rows: Sequence[Any]) -> Bursts:
    """The answers of rows that others lead. Rows whose leader leaves are run after all."""
    orphans: list[int] = []
    while (burst := await mailbox.take()) is not None:
        orphans += [event.row for event in burst if event.value is GONE]
        if answers := [event for event in burst if event.value is not GONE]:
            yield answers
    if orphans:
        async with aclosing(subset(run, rows, orphans)) as bursts:
            async for burst in bursts:
                yield burst


def deduped() -> Layer:
    """Run rows with equal keys once, within a call and among calls that are under way together.

    Every asker is told. One who leaves takes nothing from the others.
    """

    def layer(run: Elementwise) -> Elementwise:
        async def deduped_run(rows: Sequence[Any]) -> Bursts:
            sky, askers = flights(), dict[str, list[int]]()
            for i, row in enumerate(rows):
                askers.setdefault(row.key, []).append(i)
            theirs = [same[0] for key, same in askers.items() if key in sky.table]
            mine = [same[0] for key, same in askers.items() if key not in sky.table]
            ours = sky.claim(rows[i].key for i in mine)
            parts = [leading(subset(run, rows, mine), rows, sky, ours)] if mine else []
            if theirs:
                parts.append(following(sky.follow(rows, theirs), deduped_run, rows))
            try:
                async with aclosing(parts[0] if len(parts) == 1 else interleave(lambda part: part, parts, 2)) as bursts:
                    async for burst in bursts:
                        yield [Event(i, value, done) for row, value, done in burst for i in askers[rows[row].key]]
            finally:
                for key in list(ours):
                    sky.land(ours, key, GONE)

        return deduped_run

    return layer
