"""Known rows are answered from a store."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext
from typing import Any, Protocol

import msgspec

from .. import bridge
from ..events import Burst, Bursts, Elementwise, Event, Failure, Layer, subset
from ..requests import Completion, Request, digest
from ..store import Store, default_folder

Name = Callable[[Any], str]


class Shelf(Protocol):
    """Values by key: all that is asked of a store."""

    def get_many(self, keys: Sequence[str], /) -> dict[str, Any]:
        """The values of those keys that are known. May block."""

    def overheard(self) -> AbstractContextManager[dict[str, Any]]:
        """What is put meanwhile."""

    def put_many(self, pairs: Iterable[tuple[str, Any]], /) -> None:
        """Have values kept. Does not block."""

    def tell(self) -> None:
        """Give the warnings that have come up."""


class Held:
    """Any mapping as a shelf."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self.values = values

    def get_many(self, keys: Sequence[str], /) -> dict[str, Any]:
        """The values of those keys that are known."""
        return {key: self.values[key] for key in keys if key in self.values}

    def overheard(self) -> AbstractContextManager[dict[str, Any]]:
        """Nothing: looking up takes no time."""
        return nullcontext({})

    def put_many(self, pairs: Iterable[tuple[str, Any]], /) -> None:
        """Set them."""
        self.values.update(pairs)

    def tell(self) -> None:
        """Nothing."""


Places = dict[int, Shelf]  # where each row is looked up and kept; no place for rows that want none


async def opened(folder: str | None, durable: bool = False) -> Store:
    """The store in ``folder``, one for each folder and process. The loop owns it. Once durable, it stays so."""
    path = os.fspath(folder or default_folder())
    store = bridge.owned(("store", path), lambda: Store(path, durable=durable))
    if durable:
        store.harden()
    return store


async def cleared(folder: str | None) -> None:
    """Forget everything in the store in ``folder``."""
    await asyncio.to_thread((await opened(folder)).clear)


async def places_of(rows: Sequence[Any], given: Shelf | None) -> Places:
    """The store that each of the ``rows`` wants used: the ``given`` one, or that in the folder of its terms."""
    folders = {(row.terms.store, row.terms.durable) for row in rows if row.terms.mode != "disabled"}
    shelves = {
        place[0]: given if given is not None else await bridge.ask(opened(*place)) for place in sorted(folders, key=repr)
    }
    return {i: shelves[row.terms.store] for i, row in enumerate(rows) if row.terms.mode != "disabled"}


def by_shelf(numbers: Iterable[int], places: Places) -> Iterable[tuple[Shelf, list[int]]]:
    """Each shelf with those of the rows that have their place there."""
    groups: defaultdict[Shelf, list[int]] = defaultdict(list)
    for i in numbers:
        groups[places[i]].append(i)
    return groups.items()


def look_up(rows: Sequence[Any], places: Places, name: Name) -> Burst:
    """The answers that are known. Blocks."""
    names = {i: name(rows[i]) for i in places}  # a row without a name fails now, not when paid for
    hits: Burst = []
    for shelf, numbers in by_shelf([i for i in places if rows[i].terms.mode == "use"], places):
        found = shelf.get_many([names[i] for i in numbers])
        hits += [Event(i, replayed(found[names[i]])) for i in numbers if names[i] in found]
    return hits


async def known_events(rows: Sequence[Any], places: Places, name: Name) -> Burst:
    """The answers that are known, looked up in one hop off the loop."""
    if all(isinstance(shelf, Held) for shelf in places.values()):
        return look_up(rows, places, name)
    return await asyncio.to_thread(look_up, rows, places, name)


def overheard(rows: Sequence[Any], places: Places, name: Name, news: Mapping[Shelf, dict[str, Any]], but: set[int]) -> Burst:
    """The answers that others have put while we looked up: they were not there yet, and are no longer under way."""
    if not any(news.values()):
        return []
    wanted = [(i, name(rows[i]), news[places[i]]) for i in places if i not in but and rows[i].terms.mode == "use"]
    return [Event(i, replayed(heard[key])) for i, key, heard in wanted if key in heard]


def keep(rows: Sequence[Any], places: Places, name: Name, burst: Burst) -> None:
    """Have the answers of a burst kept."""
    answers = {i: value for i, value, done in burst if done and i in places and lasting(rows[i], value)}
    for shelf, numbers in by_shelf(answers, places):
        shelf.put_many([(name(rows[i]), answers[i]) for i in numbers])


async def settled(rows: Sequence[Any], places: Places) -> None:
    """Give the warnings that have come up, and wait for the disk where that was asked for."""
    for shelf in set(places.values()):
        if isinstance(shelf, Store) and any(row.terms.durable for row in rows):
            await asyncio.to_thread(shelf.flush)
        shelf.tell()


def replayed(value: Any) -> Any:
    """A stored value as it is given out: completions say where they come from."""
    return msgspec.structs.replace(value, cached=True) if type(value) is Completion else value


def lasting(row: Any, value: Any) -> bool:
    """Whether an answer may stand for the next time: complete, or cut by a limit that the user set.

    >>> lasting(None, Completion("Hello", "stop")), lasting(None, Completion("Hel", "length"))
    (True, False)
    """
    if isinstance(value, Failure):
        return False
    if not isinstance(value, Completion) or value.finish_reason == "stop":
        return True
    if isinstance(row, Request):
        return value.finish_reason == "length" and row.params.get("max_tokens") is not None
    return value.finish_reason is None


def known(rows: Sequence[Any]) -> set[str]:
    """The keys of those ``rows`` whose answers are stored where their terms say. Blocks."""

    async def ask() -> set[str]:
        hits = await known_events(rows, await places_of(rows, None), lambda row: row.key)
        return {rows[event.row].key for event in hits}

    return bridge.wait(ask)


def cached(store: Store | MutableMapping[str, Any] | None = None, *, version: str = "") -> Layer:
    """Answer known rows at once and pay only for the rest; keep each row's answer as it comes.

    ``store`` is a `Store`, any mapping, or None: where each call's terms say (see `outlines_like.cache`). Failures are
    not kept, nor answers cut short other than by a ``max_tokens`` of the user's. Another ``version`` does not meet the
    values of the ones before: raise it when the function behind has changed.
    """
    given = Held(store) if isinstance(store, MutableMapping) else store

    def name(row: Any) -> str:
        return digest([version, row.key]) if version else str(row.key)

    def layer(run: Elementwise) -> Elementwise:
        async def cached_run(rows: Sequence[Any]) -> Bursts:
            places = await places_of(rows, given)
            answered: set[int] = set()
            with ExitStack() as ears:
                news = {shelf: ears.enter_context(shelf.overheard()) for shelf in set(places.values())}
                hits = await known_events(rows, places, name)
                while hits or (hits := overheard(rows, places, name, news, answered)):
                    yield hits
                    answered |= {event.row for event in hits}
                    hits = []
            misses = [i for i in range(len(rows)) if i not in answered]
            if misses:
                async with aclosing(subset(run, rows, misses)) as bursts:
                    async for burst in bursts:
                        keep(rows, places, name, burst)
                        yield burst
            await settled(rows, places)

        return cached_run

    return layer
