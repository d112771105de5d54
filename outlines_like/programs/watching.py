"""Programs watched while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .. import bridge
from ..arrays import Grid
from ..calling import Ends, Options, Work
from ..events import Bursts, Failure, Snapshot
from ..operators import text_of
from ..streaming import BLOCKED, Lists, Reader, Scoped, Stream
from .evaluation import each_shown
from .runs import Visit
from .states import Part, part_of

if TYPE_CHECKING:
    from .lm import LM

T = TypeVar("T")


class Watch(Scoped):
    """A program that is watched instead of waited for: ``lm.stream() + f()``, for ``for`` and for ``async for``.

    Each item is a :class:`Part`. Nothing runs until it is iterated; iterating again tells again what is known. Leaving
    early, by ``break``, ``close()`` or the end of a ``with`` block, cancels what is under way. Operators take it as a stream
    of one row, of snapshots ``((), part, done)``: ``(lm.stream() + f()) | deltas``.
    """

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        work = Work(lambda rows: shown(lm), [lm], Grid([], (), {}), None, Options(), [])
        self._snapshots: Stream[Snapshot[Part]] = Stream(partial(snapshots, lm), work, ours=True)
        self._parts = self._snapshots.derived(parts)

    def as_stream(self) -> Stream[Snapshot[Part]]:
        """The same as operators take it."""
        return self._snapshots

    def __add__(self, other: Any) -> Watch:
        return Watch(self.lm + other)

    def __or__(self, operator: Callable[[Stream[Snapshot[Part]]], T]) -> T:
        return self._snapshots | operator

    def __iter__(self) -> Iterator[Part]:
        self.lm.unblocked("lm.stream()")
        return iter(self._parts)

    def __aiter__(self) -> Reader[Part]:
        return aiter(self._parts)

    def only(self, name: str) -> Stream[str]:
        """Watch one capture: its text so far, each time that there is more of it; of a list, the text of the item under way."""
        return self._snapshots.derived(lambda stream: only(stream, name))

    def close(self) -> None:
        """End every plain iteration."""
        self._parts.close()

    async def aclose(self) -> None:
        """End every ``async for``."""
        await self._parts.aclose()

    def __repr__(self) -> str:
        return f"<stream of {self.lm!r}>"


async def parts(stream: Stream[Snapshot[Part]]) -> Lists[Part]:
    """The parts alone."""
    async with stream.bursts() as bursts:
        async for burst in bursts:
            yield [part for _, part, _ in burst]


async def only(stream: Stream[Snapshot[Part]], name: str) -> Lists[str]:
    """The texts of one capture."""
    known = Known(name)
    async with stream.bursts() as bursts:
        async for burst in bursts:
            yield [text for _, part, _ in burst for text in known.news(part)]


class Known:
    """What was told of a capture."""

    def __init__(self, name: str) -> None:
        self._name, self._told = name, (0, "")

    def news(self, seen: Part) -> list[str]:
        """What a snapshot adds: the text so far, if it is another one."""
        value = seen.captures.get(self._name)
        finished = value if isinstance(value, list) else [value] if self._name in seen.captures else []
        count = len(finished)
        if seen.open is not None and seen.open.name == self._name:
            now = (count, seen.open.text)
        elif finished:
            now = (count - 1, str(finished[-1]))
        else:
            return []
        if now == self._told or now == (0, ""):
            return []
        self._told = now
        return [now[1]]


def shown(lm: LM) -> Bursts:
    """The states of a program, for whoever reads them in this loop. Its async parts run here too, if it is the user's."""
    ours = bridge.on_loop() or bridge.in_guest()
    visit = Visit(live=True, host=None if ours else asyncio.get_running_loop(), blocked=BLOCKED.get())
    return bridge.hosted(lambda rows: each_shown([lm], visit, 1))([lm])


async def snapshots(lm: LM, ends: Ends | None) -> Lists[Snapshot[Part]]:
    """The same as snapshots of parts; ``ends`` may end it."""
    text = ""
    async with aclosing(shown(lm) if ends is None else ends.until((), shown(lm))) as bursts:
        async for burst in bursts:
            for _, state, done in burst:
                if isinstance(state, Failure):
                    raise state.error
                yield [Snapshot((), part := part_of(state, text, done), done)]
                text = part.text


@text_of.register
def text_of_part(value: Part) -> str:
    """All text so far."""
    return value.text
