"""Answers kept on disk: many keys in, many values out, and nothing in the folder is ever believed without a check.

One thread of its own owns the database and everything about it (opening, reading, writing, mending), so that no
other thread and no event loop ever waits for a lock of SQLite.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import sqlite3
import stat
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec

from .errors import StoreWarning
from .requests import Completion

T = TypeVar("T")
GROUP = 64  # rows that are committed together
DELAY = 0.005  # seconds that the first row of a group waits for company
READ = 256  # keys that are looked up in one go: writes wait no longer than that takes
PATIENCE = 10.0  # seconds for another process to let go of the database
PAUSE = 1.0  # seconds before a store that could not be opened is tried again
LARGEST = 2**28  # bytes of one value
SEAL = 16  # bytes of a checksum
DATABASE = "cache.db"
BUSY, SICK, FULL = (5, 6, 15), (1, 11, 26), (10, 13)  # SQLite's: held by others; another schema, corrupt, no database; no room


def default_folder() -> Path:
    """Where answers are kept if nobody says otherwise: OUTLINES_LIKE_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("OUTLINES_LIKE_CACHE"):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("outlines_like")) / "answers"


# Values as bytes. msgpack has no tuples and no large integers: they and completions are tagged.

BIG, TUPLE, COMPLETION = 1, 2, 3
pack = msgspec.msgpack.Encoder().encode
read_completion = msgspec.msgpack.Decoder(Completion).decode


class UnfitError(TypeError):
    """A value that would not come back from the store as it was."""


def plain(value: Any) -> Any:
    """``value`` in msgpack's types, exactly: a subclass, which would come back as something else, is an error."""
    kind = type(value)
    if value is None or kind in (str, float, bool, bytes):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(BIG, big_bytes(value))
    if kind is Completion:
        return msgspec.msgpack.Ext(COMPLETION, pack(value))
    if kind is list:
        return [plain(cell) for cell in value]
    if kind is tuple:
        return msgspec.msgpack.Ext(TUPLE, pack([plain(cell) for cell in value]))
    if kind is dict and all(type(name) is str for name in value):
        return {name: plain(cell) for name, cell in value.items()}
    raise UnfitError(f"{kind.__module__}.{kind.__qualname__}" if kind is not dict else "dict with keys that are not str")


def big_bytes(value: int) -> bytes:
    """An integer of any size as bytes."""
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


def tagged(code: int, data: memoryview) -> Any:
    """The value of a tag."""
    if code == BIG:
        return int.from_bytes(data, "big", signed=True)
    if code == TUPLE:
        return tuple(unpack(data))
    if code == COMPLETION:
        return read_completion(data)
    raise ValueError(f"unknown tag {code}")


unpack = msgspec.msgpack.Decoder(ext_hook=tagged).decode


def seal(key: str, packed: bytes) -> bytes:
    """A checksum over key and value: what is damaged, or stands under another key, does not match it."""
    name = key.encode()
    return blake2b(b"%d %b%b" % (len(name), name, packed), digest_size=SEAL).digest()


def sealed(key: str, value: Any) -> bytes:
    """What is written for ``value`` under ``key``."""
    packed = pack(plain(value))
    return seal(key, packed) + packed


def unsealed(key: str, data: bytes) -> Any:
    """The value that was written under ``key``; a ValueError if these bytes are not it."""
    if seal(key, data[SEAL:]) != data[:SEAL]:
        raise ValueError("the checksum does not match")
    return unpack(data[SEAL:])


def sound(key: str) -> bool:
    """Whether a database can hold ``key`` (lone surrogates it can't)."""
    return key.isascii() or key.encode("utf-8", "ignore").decode() == key


# The folder: ours alone, and the database in it is what diskcache itself would have made.


class PlantedError(Exception):
    """The database holds tables or triggers that are not diskcache's."""


def secure(folder: Path) -> None:
    """Make ``folder`` and the database in it for this user alone; an OSError if someone else has a hand in them."""
    path = folder / DATABASE
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)
    if path.exists() or not os.listdir(folder):  # a folder with other things in it keeps its mode
        narrow(folder, 0o700)
    if folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        raise PermissionError(f"everybody may write to {folder}")
    for name in (path, folder / f"{DATABASE}-wal", folder / f"{DATABASE}-shm"):
        if name.is_symlink():
            raise PermissionError(f"{name} is a link")
    if not path.exists():
        create(path)
    check_owner(path)
    narrow(path, 0o600)


def check_owner(path: Path) -> None:
    """An OSError if ``path`` belongs to someone else."""
    if os.name == "posix" and path.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (uid {path.stat().st_uid})")


def narrow(path: Path, mode: int) -> None:
    """Set the mode of ``path`` where it is another one."""
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def create(path: Path) -> None:
    """An empty file for this user alone, whatever the umask; SQLite gives its other files the same mode.

    It gets its name once it is closed: closing a database by hand would drop the locks SQLite holds on it
    (sqlite.org/howtocorrupt.html, section 2.2).
    """
    fresh = path.with_name(f"{path.name}.new-{os.getpid()}-{threading.get_ident()}")
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600))
    narrow(fresh, 0o600)
    try:
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()


def identity(path: Path) -> tuple[int, int] | None:
    """Which file ``path`` names just now."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def set_aside(path: Path) -> None:
    """Rename a database, its log first: a fresh database must not meet an old log."""
    label = f"damaged-{time.time_ns()}"
    for name in (f"{path.name}-wal", f"{path.name}-shm", path.name):
        with suppress(FileNotFoundError):
            os.replace(path.with_name(name), path.with_name(f"{name}.{label}"))


def settings() -> dict[str, Any]:
    """diskcache's settings, all of them: what a database says about itself is overruled."""
    import diskcache

    own = {"eviction_policy": "none", "cull_limit": 0, "disk_min_file_size": 2**31, "sqlite_mmap_size": 0}
    return {**diskcache.DEFAULT_SETTINGS, **own}


def known_names() -> set[str]:
    """The tables, indexes and triggers that diskcache makes."""
    triggers = {f"Settings_{what}" for what in ("count_insert", "count_delete", "size_insert", "size_update", "size_delete")}
    indexes = {f"Cache_{what}" for what in ("key_raw", "expire_time", "store_time", "access_time", "access_count", "tag_rowid")}
    return {"Cache", "Settings", "sqlite_autoindex_Settings_1"} | triggers | indexes


def cleanse(path: Path, known: Iterable[str]) -> None:
    """Take unknown settings out of the database: diskcache sets each as an attribute or runs it as a pragma."""
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if names - known_names():
            raise PlantedError(f"it holds {', '.join(sorted(map(str, names - known_names())))}")
        if "Settings" in names:
            keys = [key for (key,) in connection.execute("SELECT key FROM Settings")]
            connection.executemany("DELETE FROM Settings WHERE key IS ?", [(key,) for key in keys if key not in known])
    finally:
        connection.close()


def honest(mode: Any, filename: Any, value: Any) -> bytes:
    """A row's bytes; ``b""``, which has no valid checksum, for every other kind of row.

    >>> honest(1, None, b"ours"), honest(4, None, b"a pickle"), honest(2, "../a/file", None)
    (b'ours', b'', b'')
    """
    return value if mode == 1 and filename is None and type(value) is bytes else b""


@lru_cache
def disk_type() -> Any:
    """The only kind of row that is written and read: a str key with bytes in the database itself."""
    import diskcache

    class PlainDisk(diskcache.Disk):  # type: ignore[misc]
        """Never a file, never anything that would have to be unpickled (CVE-2025-69872)."""

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

    return PlainDisk


class Database:
    """An open database: diskcache writes, and one SELECT reads many rows. Belongs to the thread that opened it."""

    def __init__(self, folder: Path) -> None:
        import diskcache

        wanted = settings()
        cleanse(folder / DATABASE, {*wanted, *diskcache.core.METADATA})
        # timeout=0: SQLite's own waiting is not fair among processes and would hold up the reads queued behind it.
        self.cache = diskcache.Cache(str(folder), timeout=0, disk=disk_type(), **wanted)
        link = f"{(folder / DATABASE).as_uri()}?mode=ro"
        self.reader = sqlite3.connect(link, uri=True, timeout=0, isolation_level=None)
        self.reader.text_factory = bytes  # a damaged text is no error then

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The rows of those ``keys`` that are there; what is no bytes of ours, a pickle above all, as ``b""``."""
        names = {key.encode(): key for key in keys}
        select = f"SELECT key, mode, filename, value FROM Cache WHERE raw = 1 AND key IN ({', '.join('?' * len(keys))})"
        rows = self.reader.execute(select, keys)
        return {names[key]: honest(mode, filename, value) for key, mode, filename, value in rows if key in names}

    def write(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Commit ``rows`` together."""
        with self.cache.transact():
            for key, data in rows:
                self.cache.set(key, data)

    def clear(self) -> None:
        """Delete all rows."""
        self.cache.clear()

    def count(self) -> int:
        """How many rows there are."""
        return int(self.reader.execute("SELECT count(*) FROM Cache").fetchone()[0])

    def close(self) -> None:
        """Close both handles."""
        self.reader.close()
        self.cache.close()


# What went wrong, and what to do about it.


def cause(error: BaseException) -> BaseException:
    """The first error of a chain: diskcache's Timeout, and its failing rollback, hide what SQLite said."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def code(error: BaseException) -> int:
    """SQLite's primary result code, or 0."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def remedy(error: BaseException) -> str:
    """What to do before the next try: "wait", "set aside", "reopen" or "give up".

    >>> remedy(OSError("no such folder"))
    'reopen'
    """
    if code(error) in BUSY:
        return "wait"
    if code(error) in FULL:
        return "give up"  # what is open can still be read, but perhaps not opened again
    return "set aside" if code(error) in SICK or isinstance(error, (PlantedError, UnicodeError)) else "reopen"


class Store:
    """Values by key in a folder. Faults of the store are warnings, one of a kind: a call is answered all the same.

    Values are `Completion`s and plain data: None, bool, int, float, str, bytes, and tuples, lists and dicts of such.
    They come back equal and of equal types. Many threads and processes may use one folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder).expanduser().absolute() if folder is not None else default_folder()
        self.path = self.folder / DATABASE
        self._said: set[str] = set()
        self._untold: deque[str] = deque()
        self._begin()
        STORES.add(self)

    def _begin(self) -> None:
        """Nothing open, nothing waiting: the state at first, and that of a forked child."""
        self._talk, self._news = threading.Lock(), threading.Condition(threading.Lock())
        self._waiting: dict[str, bytes] = {}
        self._since = 0.0
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._rests: dict[int, threading.Event] = {}
        self._database: Database | None = None
        self._file: tuple[int, int] | None = None
        self._not_before = 0.0
        self._lost = self._loose = 0  # rows, since the last flush: not stored, stored

    # For callers, from any thread.

    def get_many(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of those ``keys`` that are known. Blocks."""
        found: dict[str, Any] = {}
        for first in range(0, len(keys), READ):
            chunk = [key for key in keys[first : first + READ] if sound(key)]
            found.update(self._checked(self._ask(partial(self._read, chunk), {})))
        self.tell()
        return found

    def put_many(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Have values written soon (within 50 ms). Never blocks and never raises."""
        rows = {key: data for key, value in pairs if (data := self._sealed(key, value)) is not None}
        with self._news:
            if not rows:
                return
            idle, few = not self._waiting, len(self._waiting) < GROUP
            self._since = time.monotonic() if idle else self._since
            self._waiting.update(rows)
            if idle or (few and len(self._waiting) >= GROUP):
                self._wake()

    def put(self, key: str, value: Any) -> None:
        """Have one value written soon."""
        self.put_many([(key, value)])

    def flush(self) -> bool:
        """Block until all that was put is on disk. False: some of it, since the last flush, could not be stored."""
        whole = self._ask(self._write_all, False)
        self.tell()
        return whole

    def clear(self) -> None:
        """Forget everything."""
        self._ask(self._empty, None)
        self.tell()

    def __len__(self) -> int:
        count = self._ask(self._count, 0)
        self.tell()
        return count

    def close(self) -> None:
        """Write what is waiting and let go of the database. A later call opens it again."""
        if self._thread is not None:
            self._ask(self._leave, None)
        self.tell()

    async def aclose(self) -> None:
        """Close, without blocking the loop. Never raises: it runs at exit."""
        if self._thread is not None:
            with suppress(TimeoutError):  # not to_thread: at exit the pools are closed already
                await asyncio.wait_for(asyncio.wrap_future(self._submit(self._leave)), PATIENCE)
        try:
            self.tell()
        except StoreWarning as warning:
            print(f"StoreWarning: {warning}", file=sys.stderr)

    def tell(self) -> None:
        """Give the warnings that have come up, in this thread: raised in the store's own, nobody would hear them."""
        with suppress(IndexError):
            while True:
                warnings.warn(self._untold.popleft(), StoreWarning, stacklevel=3)

    # Values in and out.

    def _sealed(self, key: str, value: Any) -> bytes | None:
        try:
            data = sealed(key, value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            what = str(error) if isinstance(error, UnfitError) else f"{type(value).__qualname__}: {error}"
            self._note(f"unfit {what[:80]}", f"can't keep a value of this type: {what[:200]}. It is answered, but not stored.")
            return None
        if len(data) <= LARGEST:
            return data
        self._note("large", f"can't keep a value of {len(data)} bytes (at most {LARGEST}). It is answered, but not stored.")
        return None

    def _checked(self, rows: dict[str, bytes]) -> Iterator[tuple[str, Any]]:
        for key, data in rows.items():
            try:
                yield key, unsealed(key, data)
            except (ValueError, TypeError, RecursionError) as error:
                self._note("value", f"holds a value that is damaged or not ours ({error}); it counts as missing.")

    def _note(self, kind: str, text: str) -> None:
        with self._talk:
            if kind not in self._said:
                self._said.add(kind)
                self._untold.append(f"The store at {self.folder} {text}")

    # The thread that owns the database.

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._news:
            self._jobs.append((job, future))
            self._wake()
        return future

    def _ask(self, job: Callable[[], T], otherwise: T) -> T:
        try:
            return self._submit(job).result(2 * PATIENCE)
        except (TimeoutError, CancelledError):
            self._note("silent", f"did not answer within {2 * PATIENCE:.0f} s; the run goes on without it.")
            return otherwise

    def _wake(self) -> None:
        if self._thread is None:
            self._start()
        self._news.notify()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=f"store {self.folder}", daemon=True)
        try:
            self._thread.start()
            atexit.register(self.flush)
        except RuntimeError:  # the interpreter is shutting down
            self._thread = None
            while self._jobs:
                self._jobs.popleft()[1].cancel()

    def _work(self) -> None:
        while threading.current_thread() is self._thread:
            job, future = self._next()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

    def _next(self) -> tuple[Callable[[], Any], Future[Any]]:
        with self._news:
            while True:
                due = self._due()
                if self._jobs and due > -3 * DELAY:
                    return self._jobs.popleft()
                if due <= 0:
                    return self._write, Future()
                self._news.wait(due if self._waiting else None)

    def _due(self) -> float:
        """In how many seconds a group is to be written. Reads go first, but not for long."""
        if not self._waiting:
            return 1.0
        return self._since + (0.0 if len(self._waiting) >= GROUP else DELAY) - time.monotonic()

    def _read(self, keys: Sequence[str]) -> dict[str, bytes]:
        with self._news:
            waiting = {key: self._waiting[key] for key in keys if key in self._waiting}

        return {**self._try(lambda database: database.read(keys), {}), **waiting}

    def _write(self) -> None:
        """Commit the next group."""
        with self._news:
            group = list(islice(self._waiting.items(), GROUP))
            self._since = time.monotonic()

        def commit(database: Database) -> bool:
            database.write(group)
            if identity(self.path) != self._file:
                raise FileNotFoundError("the database was removed while it was written")
            return True

        stored = self._try(commit, False)
        self._loose, self._lost = self._loose + stored * len(group), self._lost + (not stored) * len(group)
        with self._news:
            for key, data in group:
                if self._waiting.get(key) is data:
                    del self._waiting[key]

    def _write_all(self) -> bool:
        while self._waiting:
            self._write()
        lost, self._lost, self._loose = self._lost, 0, 0
        return not lost

    def _empty(self) -> None:
        with self._news:
            self._waiting.clear()
        self._try(Database.clear, None)

    def _count(self) -> int:
        self._write_all()
        return self._try(Database.count, 0)

    def _leave(self) -> None:
        while self._waiting:
            self._write()
        self._shut()
        with self._news:
            if not self._jobs and not self._waiting:
                self._thread = None
                atexit.unregister(self.flush)

    # The database: opened, checked, mended.

    def _try(self, work: Callable[[Database], T], otherwise: T) -> T:
        """``work(database)``: waits while others hold the database, tries each other remedy once. Never raises."""
        deadline, tried = time.monotonic() + PATIENCE, {"give up"}
        while time.monotonic() >= self._not_before:
            try:
                return work(self._opened())
            except Exception as error:
                first = cause(error)
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

    def _give_up(self, error: BaseException) -> None:
        self._note(f"{type(error).__name__} {code(error)}", f"can't be used ({error}); the run goes on without it.")
        if self._database is None or code(error) in BUSY:
            self._not_before = time.monotonic() + PAUSE

    def _mend(self, step: str, error: BaseException) -> None:
        self._shut()
        if step == "set aside" and self._file == identity(self.path):
            self._note("damaged", f"is damaged ({error}); it was set aside in that folder and a fresh one begun.")
            set_aside(self.path)
            self._bereave()

    def _bereave(self) -> None:
        """What was committed since the last flush is gone."""
        self._lost, self._loose = self._lost + self._loose, 0

    def _opened(self) -> Database:
        """The handle, opened anew where the file is no longer the one that was opened."""
        if self._database is not None and self._file == identity(self.path):
            return self._database
        if self._database is not None:
            self._note("replaced", "was removed or replaced while in use; a fresh one is begun.")
            self._bereave()
            self._shut()
        secure(self.folder)
        self._file = identity(self.path)
        self._database = Database(self.folder)
        return self._database

    def _shut(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()

    # Forks. SQLite's locks do not survive one, not even for handles opened afterwards: let go of the database before.

    def _pause(self) -> None:
        if self._thread is None or self._thread is threading.current_thread():
            return
        resting, go = threading.Event(), threading.Event()
        self._rests[threading.get_ident()] = go

        def rest() -> None:
            self._shut()
            resting.set()
            go.wait()

        self._submit(rest)
        resting.wait(PATIENCE)

    def _resume(self) -> None:
        if go := self._rests.pop(threading.get_ident(), None):
            go.set()

    def _forget(self) -> None:
        if self._database is not None:  # the thread did not rest in time: closing its handle here would break it there
            INHERITED.append(self._database)
        atexit.unregister(self.flush)
        self._begin()


STORES: WeakSet[Store] = WeakSet()
INHERITED: list[Any] = []


def each_store(act: Callable[[Store], None]) -> None:
    """``act`` on every store of this process."""
    for store in list(STORES):
        act(store)


os.register_at_fork(
    before=lambda: each_store(Store._pause),
    after_in_parent=lambda: each_store(Store._resume),
    after_in_child=lambda: each_store(Store._forget),
)
