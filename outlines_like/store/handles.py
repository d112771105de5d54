"""A database that is opened when it is needed, and mended when it is not what it should be."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .folders import DATABASE, inode, secure, set_aside
from .remedies import BUSY, TIMEOUT, remedy, root, sqlite_code

if TYPE_CHECKING:
    from .databases import Database

T = TypeVar("T")
Note = Callable[[str, str], None]  # takes the kind of a fault, and words for it
PAUSE = 1.0  # seconds before a database that could not be opened is tried again


class Handle:
    """The database in a folder, for one thread. Faults are noted, never raised."""

    def __init__(self, folder: Path, note: Note, durable: bool = False) -> None:
        self.folder, self.path, self._note, self.durable = folder, folder / DATABASE, note, durable
        self.database: Database | None = None
        self._file: tuple[int, int] | None = None
        self._not_before = 0.0
        self._stored = self._lost = False  # some rows, since `whole` was asked

    def write(self, rows: Sequence[tuple[str, bytes | None]]) -> None:
        """Commit ``rows`` together, if that can be done."""
        stored = self.use(partial(self._commit, rows), False)
        self._stored, self._lost = self._stored or stored, self._lost or not stored

    def _commit(self, rows: Sequence[tuple[str, bytes | None]], database: Database) -> bool:
        database.write(rows)
        if inode(self.path) != self._file:
            raise FileNotFoundError("the database was removed while it was written")
        return True

    def whole(self) -> bool:
        """Whether all that was written since this was last asked is there."""
        lost, self._lost, self._stored = self._lost, False, False
        return not lost

    def use(self, work: Callable[[Database], T], otherwise: T) -> T:
        """``work(database)``: waits while others hold the database, tries each other remedy once."""
        deadline, tried = time.monotonic() + TIMEOUT, {"give up"}
        while time.monotonic() >= self._not_before:
            try:
                return work(self._opened())
            except Exception as error:
                first = root(error)
            step = remedy(first)
            if step == "wait" and time.monotonic() < deadline:
                time.sleep(random.uniform(0.0005, 0.005))
            elif step == "wait" or step in tried:
                self._give_up(first)
                break
            else:
                tried.add(step)
                self._mend(step, first)
        return otherwise

    def _opened(self) -> Database:
        """The database, opened anew where the file is no longer the one that was opened."""
        if self.database is not None and self._file == inode(self.path):
            return self.database
        if self.database is not None:
            self._note("replaced", "was removed or replaced while in use; a fresh one is begun.")
            self._lost = self._lost or self._stored
            self.close()
        from .databases import Database

        secure(self.folder)
        self._file = inode(self.path)
        self.database = Database(self.folder, self.durable)
        return self.database

    def _mend(self, step: str, error: BaseException) -> None:
        self.close()
        if step == "set aside" and self._file == inode(self.path):
            self._note("damaged", f"is damaged ({error}); it was set aside in that folder and a fresh one begun.")
            set_aside(self.path)
            self._lost = self._lost or self._stored

    def _give_up(self, error: BaseException) -> None:
        code = sqlite_code(error)
        self._note(f"{type(error).__name__} {code}", f"can't be used ({error}); the run goes on without it.")
        if self.database is None or code in BUSY:
            self._not_before = time.monotonic() + PAUSE

    def harden(self) -> None:
        """Have the database opened anew so that what is committed survives a loss of power."""
        self.durable = True
        self.close()

    def close(self) -> None:
        """Let go of the database until it is used again."""
        database, self.database = self.database, None
        if database is not None:
            database.close()
