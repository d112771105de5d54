"""The database in a store's folder: made by diskcache, on stricter terms than its own."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import diskcache

from .folders import DATABASE
from .remedies import PlantedError

TRIGGERS = {f"Settings_{what}" for what in ("count_insert", "count_delete", "size_insert", "size_update", "size_delete")}
INDEXES = {f"Cache_{what}" for what in ("key_raw", "expire_time", "store_time", "access_time", "access_count", "tag_rowid")}
NAMES = {"Cache", "Settings", "sqlite_autoindex_Settings_1"} | TRIGGERS | INDEXES
OWN = {"eviction_policy": "none", "cull_limit": 0, "disk_min_file_size": 2**31, "sqlite_mmap_size": 0}
SETTINGS = {**diskcache.DEFAULT_SETTINGS, **OWN}  # all of them: what a database says about itself is overruled
SET = """
    INSERT INTO Cache (key, raw, store_time, access_time, size, mode, value) VALUES (?, 1, ?, ?, ?, 1, ?)
    ON CONFLICT (key, raw) DO UPDATE SET store_time = excluded.store_time, access_time = excluded.access_time,
    size = excluded.size, mode = 1, filename = NULL, value = excluded.value, expire_time = NULL
"""
READ = """
    SELECT key, CASE WHEN mode = 1 AND filename IS NULL AND typeof(value) = 'blob' THEN value ELSE x'' END FROM Cache
    WHERE raw = 1 AND key IN ({})
"""
DELETE = "DELETE FROM Cache WHERE key = ? AND raw = 1"
PICKLING = "disk_pickle_protocol"  # nothing is ever pickled, so it is not written down how


def cleanse(connection: sqlite3.Connection) -> None:
    """Take unknown settings out of the database: diskcache sets each as an attribute or runs it as a pragma."""
    connection.executescript("PRAGMA trusted_schema = OFF; PRAGMA secure_delete = ON")
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if names - NAMES:
        raise PlantedError(f"it holds {', '.join(sorted(map(str, names - NAMES)))}")
    if "Settings" in names:
        known = {*SETTINGS, *diskcache.core.METADATA} - {PICKLING}
        if planted := [(key,) for (key,) in connection.execute("SELECT key FROM Settings") if key not in known]:
            connection.executemany("DELETE FROM Settings WHERE key IS ?", planted)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # else it is only the log that knows
    connection.execute("PRAGMA secure_delete = OFF")


def honest(mode: Any, filename: Any, value: Any) -> bytes:
    """A row's bytes; ``b""``, which has no valid checksum, for every other kind of row.

    >>> honest(1, None, b"ours"), honest(4, None, b"a pickle"), honest(2, "../a/file", None)
    (b'ours', b'', b'')
    """
    return value if mode == 1 and filename is None and type(value) is bytes else b""


class Disk(diskcache.Disk):  # type: ignore[misc]
    """The only kind of row that is written and read: a str key with bytes in the database itself.

    Never a file, never anything that would have to be unpickled (CVE-2025-69872).
    """

    def put(self, key: str) -> tuple[str, bool]:
        return key, True

    def get(self, key: Any, raw: Any) -> Any:
        return key

    def store(self, value: bytes, read: bool, key: Any = None) -> tuple[int, int, None, bytes]:
        return len(value), 1, None, value

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> bytes:
        return honest(mode, filename, value)

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        raise ValueError("values are never files")

    def remove(self, file_path: str) -> None:
        """Nothing: a file named by a row is not ours."""


class Cache(diskcache.Cache):  # type: ignore[misc]
    """Without the one setting that is about pickles: whoever looks for the word in the folder finds nothing."""

    @property
    def _sql_retry(self) -> Callable[..., Any]:
        run = diskcache.Cache._sql_retry.fget(self)
        return lambda statement, *values: None if any(PICKLING in row for row in values) else run(statement, *values)


def connected(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to a database that is there."""
    return sqlite3.connect(f"{path.as_uri()}?mode={mode}", uri=True, timeout=0, isolation_level=None)


@contextmanager
def committed(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All that is done inside, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


class Database:
    """An open database: diskcache makes it, one statement reads or writes many rows. Belongs to the thread that opened it.

    ``durable``: what is committed survives a loss of power, at the price of waiting for the disk.
    """

    def __init__(self, folder: Path, durable: bool = False) -> None:
        self.writer = connected(folder / DATABASE, "rw")
        try:
            cleanse(self.writer)
            self._open(folder, durable)
        except BaseException:
            self.writer.close()
            raise

    def _open(self, folder: Path, durable: bool) -> None:
        # The writer stays open meanwhile: whoever closes a database last has to write its log back, and wait for the disk.
        # timeout=0: SQLite's own waiting is not fair among processes and would hold up the reads queued behind it.
        self.cache = Cache(str(folder), timeout=0, disk=Disk, **SETTINGS)
        self.reader = connected(folder / DATABASE, "ro")
        self.reader.text_factory = bytes  # a damaged text is no error then
        self.writer.execute("PRAGMA cache_size = -16000")  # KiB: keys are random, so every page of the index is met
        self.writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The rows of those ``keys`` that are there; what is no bytes of ours, a pickle above all, as ``b""``."""
        names = {key.encode(): key for key in keys}
        rows = self.reader.execute(READ.format(", ".join("?" * len(keys))), keys)
        return {names[key]: data for key, data in rows if key in names}

    def write(self, rows: Iterable[tuple[str, bytes | None]]) -> None:
        """Commit ``rows`` together; None deletes a row."""
        now, rows = time.time(), list(rows)
        with committed(self.writer) as writer:
            writer.executemany(SET, [(key, now, now, len(data), data) for key, data in rows if data is not None])
            writer.executemany(DELETE, [(key,) for key, data in rows if data is None])

    def clear(self) -> None:
        """Delete all rows."""
        self.cache.clear()

    def count(self) -> int:
        """How many rows there are."""
        return int(self.reader.execute("SELECT count(*) FROM Cache").fetchone()[0])

    def close(self) -> None:
        """Close both connections, sick ones too."""
        for connection in (self.reader, self.writer, self.cache):  # the last of them clears the log away
            with suppress(sqlite3.Error):
                connection.close()
