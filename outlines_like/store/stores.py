"""Values by key in a folder, for many threads and processes at once."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ..errors import StoreWarning
from .folders import default_folder
from .packing import sealed, sound, unsealed
from .writing import Writer

READ = 256  # keys that are looked up in one go: writes wait no longer than that takes


class Store:
    """Values by key in a folder. Faults of the store are warnings, one of a kind: a call is answered all the same.

    Values are `Completion`s and plain data: None, bool, int, float, str, bytes, and tuples, lists and dicts of such.
    They come back equal and of equal types. Many threads and processes may use one folder. What was flushed survives the
    death of the process; if ``durable``, a loss of power too.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, durable: bool = False) -> None:
        self.folder = Path(folder).expanduser().absolute() if folder is not None else default_folder()
        self._said: dict[str, str] = {}
        self._untold: deque[str] = deque()
        self.durable = durable
        self._ears: dict[int, dict[str, Any]] = {}
        self._writer = Writer(self.folder, self._note, durable)
        STORES.add(self)

    def harden(self) -> None:
        """Be durable from now on."""
        if not self.durable:
            self.durable = True
            self._writer.harden()

    def get_many(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of those ``keys`` that are known. Blocks."""
        found: dict[str, Any] = {}
        for first in range(0, len(keys), READ):
            chunk = [key for key in keys[first : first + READ] if sound(key)]
            found.update(self._unsealed(self._writer.read(chunk)))
        self.tell()
        return found

    @contextmanager
    def overheard(self) -> Iterator[dict[str, Any]]:
        """What is put meanwhile: a look-up that is under way may miss it."""
        heard: dict[str, Any] = {}
        self._ears[id(heard)] = heard
        try:
            yield heard
        finally:
            del self._ears[id(heard)]

    def put_many(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Have values written soon (within 50 ms). Never blocks and never raises."""
        pairs = list(pairs)
        for heard in list(self._ears.values()):
            heard.update(pairs)
        if rows := dict(self._sealed(pairs)):
            self._writer.put(rows)

    def put(self, key: str, value: Any) -> None:
        """Have one value written soon."""
        self.put_many([(key, value)])

    def drop_many(self, keys: Iterable[str]) -> None:
        """Have values deleted soon. Never blocks and never raises."""
        if rows := dict.fromkeys(key for key in keys if sound(key)):
            self._writer.put(rows)

    def flush(self) -> bool:
        """Block until all that was put is on disk. False: some of it, since the last flush, could not be stored."""
        whole = self._writer.flush()
        self.tell()
        return whole

    def clear(self) -> None:
        """Forget everything."""
        self._writer.clear()
        self.tell()

    def __len__(self) -> int:
        count = self._writer.count()
        self.tell()
        return count

    def close(self) -> None:
        """Write what is waiting and let go of the database. A later call opens it again."""
        self._writer.close()
        self.tell()

    async def aclose(self) -> None:
        """Close, without blocking the loop. Never raises: it runs at exit."""
        with suppress(TimeoutError):
            await self._writer.aclose()
        self._tell_or_print()

    def tell(self) -> None:
        """Give the warnings that have come up, in this thread: raised in the store's own, nobody would hear them."""
        with suppress(IndexError):
            while True:
                warnings.warn(self._untold.popleft(), StoreWarning, stacklevel=3)

    def _tell_or_print(self) -> None:
        try:
            self.tell()
        except StoreWarning as warning:
            print(f"StoreWarning: {warning}", file=sys.stderr)

    def _note(self, kind: str, text: str) -> None:
        notice = f"The store at {self.folder} {text}"
        if self._said.setdefault(kind, notice) is notice:
            self._untold.append(notice)

    def _sealed(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, bytes]]:
        for key, value in pairs:
            try:
                yield key, sealed(key, value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                kind = type(value).__qualname__
                what = f"can't keep this {kind} ({str(error)[:200]}). It is answered, but not stored."
                self._note(f"unfit {kind} {type(error).__name__}", what)

    def _unsealed(self, rows: dict[str, bytes]) -> Iterator[tuple[str, Any]]:
        for key, data in rows.items():
            try:
                yield key, unsealed(key, data)
            except (ValueError, TypeError, RecursionError) as error:
                self._note("value", f"holds a value that is damaged or not ours ({error}); it counts as missing.")

    def _finish(self) -> None:
        """At exit: nothing that was put is lost."""
        if self._writer.thread is not None:
            self._writer.flush()
        self._tell_or_print()

    def _rest(self) -> None:
        """Before a fork, which SQLite's locks do not survive, not even for what is opened afterwards."""
        self._writer.rest()

    def _resume(self) -> None:
        self._writer.resume()

    def _begin_anew(self) -> None:
        """In a forked child."""
        INHERITED.append(self._writer.handle.database)
        self._writer = Writer(self.folder, self._note, self.durable)


STORES: WeakSet[Store] = WeakSet()
INHERITED: list[Any] = []  # open databases of a parent that did not rest in time: closing them here would break them there


def each_store(act: Callable[[Store], None]) -> None:
    """``act`` on every store of this process."""
    for store in list(STORES):
        act(store)


atexit.register(each_store, Store._finish)
os.register_at_fork(
    before=lambda: each_store(Store._rest),
    after_in_parent=lambda: each_store(Store._resume),
    after_in_child=lambda: each_store(Store._begin_anew),
)
