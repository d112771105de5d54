"""Programs watched while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from .. import bridge
from ..events import Bursts, Event
from ..streams import Pump, arriving
from .evaluation import follow
from .runs import Visit
from .states import Part, State, part_of

if TYPE_CHECKING:
    from .lm import LM


class Watch:
    """A program that is watched instead of waited for: ``lm.stream() + f()``, for ``for`` and for ``async for``.

    Each item is a :class:`Part`. Nothing runs until it is iterated; iterating again tells again what is known. Leaving
    early, by ``break``, ``close()`` or the end of a ``with`` block, cancels what is under way.
    """

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self._open: WeakSet[Any] = WeakSet()

    def __add__(self, other: Any) -> Watch:
        return Watch(self.lm + other)

    def _bursts(self, visit: Visit) -> Bursts:
        return bridge.hosted(lambda rows: states(self.lm, visit))([self.lm])

    def _snapshots(self) -> Iterator[Part]:
        visit, text = Visit(live=True, blocked=self.lm.unblocked("lm.stream()")), ""
        with closing(bridge.iterate(Pump(self._bursts(visit)), bridge.home().loop)) as bursts:
            for burst in bursts:
                for event in burst:
                    seen = part_of(event.value, text, event.done)
                    text = seen.text
                    yield seen

    def __iter__(self) -> Iterator[Part]:
        snapshots = self._snapshots()
        self._open.add(snapshots)
        return snapshots

    async def __aiter__(self) -> AsyncIterator[Part]:
        visit, text = Visit(live=True, host=asyncio.get_running_loop()), ""
        with arriving():
            async with aclosing(self._bursts(visit)) as bursts:
                async for burst in bursts:
                    for event in burst:
                        seen = part_of(event.value, text, event.done)
                        text = seen.text
                        yield seen

    def only(self, name: str) -> Only:
        """Watch one capture: its text so far, each time that there is more of it."""
        return Only(self, name)

    def close(self) -> None:
        """End every plain iteration."""
        for snapshots in list(self._open):
            snapshots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Only:
    """One capture of a program that is watched. Each item is its text so far; of a list, the text of the item under way."""

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch, self._name = watch, name

    def __iter__(self) -> Iterator[str]:
        known = Known(self._name)
        with closing(iter(self._watch)) as snapshots:  # type: ignore[type-var]
            for seen in snapshots:
                yield from known.news(seen)

    async def __aiter__(self) -> AsyncIterator[str]:
        known = Known(self._name)
        async with aclosing(aiter(self._watch)) as snapshots:  # type: ignore[type-var]
            async for seen in snapshots:
                for text in known.news(seen):
                    yield text


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


async def states(lm: LM, visit: Visit) -> Bursts:
    """The states of a program as events; the last is done."""
    last: State | None = None
    async with aclosing(follow(lm, visit)) as found:
        async for _, state in found:
            if state is not last and state is not lm.state:
                yield [Event(0, last := state, False)]
    yield [Event(0, lm.final, True)]
