"""Known rows are answered from a store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import aclosing
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

    def put_many(self, pairs: Iterable[tuple[str, Any]], /) -> None:
        """Set them."""
        self.values.update(pairs)

    def tell(self) -> None:
        """Nothing."""


Shelves = dict[str | None, Shelf]  # by the folder that rows name; under None, the only one there is


async def opened(folder: str | None) -> Store:
    """The store in ``folder``, one for each folder and process. The loop owns it."""
    path = os.fspath(folder or default_folder())
    return bridge.owned(("store", path), lambda: Store(path))


async def cleared(folder: str | None) -> None:
    """Forget everything in the store in ``folder``."""
    await asyncio.to_thread((await opened(folder)).clear)


async def shelves(rows: Sequence[Any], given: Shelf | None) -> Shelves:
    """The stores that ``rows`` want used."""
    wanted = {row.terms.store for row in rows if row.terms.mode != "disabled"}
    if given is not None:
        return {None: given} if wanted else {}
    return {folder: await bridge.ask(opened(folder)) for folder in wanted}


def placed(rows: Sequence[Any], shelves: Shelves, folder: str | None) -> list[int]:
    """The numbers of the rows that use the store in ``folder``."""
    alone = len(shelves) == 1
    return [i for i, row in enumerate(rows) if row.terms.mode != "disabled" and (alone or row.terms.store == folder)]


def look_up(rows: Sequence[Any], shelves: Shelves, name: Name) -> Burst:
    """The answers that are known. Blocks."""
    hits: Burst = []
    for folder, shelf in shelves.items():
        keys = {i: name(rows[i]) for i in placed(rows, shelves, folder)}  # a row without a name fails now, not when paid for
        found = shelf.get_many([key for i, key in keys.items() if rows[i].terms.mode == "use"])
        hits += [Event(i, replayed(found[key])) for i, key in keys.items() if key in found and rows[i].terms.mode == "use"]
    return hits


def keep(rows: Sequence[Any], shelves: Shelves, name: Name, burst: Burst) -> None:
    """Have the answers of a burst kept."""
    answers = [(rows[i], value) for i, value, done in burst if done and lasting(rows[i], value)]
    for folder, shelf in shelves.items() if answers else ():
        chosen = placed([row for row, _ in answers], shelves, folder)
        shelf.put_many([(name(answers[k][0]), answers[k][1]) for k in chosen])


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
        hits = await asyncio.to_thread(look_up, rows, await shelves(rows, None), lambda row: row.key)
        return {rows[event.row].key for event in hits}

    return bridge.wait(ask())


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
            stores = await shelves(rows, given)
            if not stores:
                async with aclosing(run(rows)) as bursts:
                    async for burst in bursts:
                        yield burst
                return
            hits = await found(rows, stores, name)
            if hits:
                yield hits
            answered = {event.row for event in hits}
            misses = [i for i in range(len(rows)) if i not in answered]
            if misses:
                async with aclosing(subset(run, rows, misses)) as bursts:
                    async for burst in bursts:
                        keep(rows, stores, name, burst)
                        yield burst
            for shelf in stores.values():
                shelf.tell()

        return cached_run

    return layer


async def found(rows: Sequence[Any], stores: Shelves, name: Name) -> Burst:
    """The answers that are known, looked up in one hop off the loop."""
    if all(isinstance(shelf, Held) for shelf in stores.values()):
        return look_up(rows, stores, name)
    return await asyncio.to_thread(look_up, rows, stores, name)
