"""The thread that owns a database: no other thread, and no event loop, ever waits for a lock of SQLite."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from .handles import Handle, Note
from .remedies import TIMEOUT

T = TypeVar("T")
GROUP = 256  # rows that are committed together, at most: others wait that long
DELAY = 0.005  # seconds that the first row of a group waits for company


class Writer:
    """Reads at once and writes in groups. Its thread begins with the first call and ends with `close`."""

    def __init__(self, folder: Path, note: Note, durable: bool = False) -> None:
        self.handle = Handle(folder, note, durable)
        self._folder, self._note = folder, note
        self._news = threading.Condition(threading.Lock())
        self._waiting: dict[str, bytes | None] = {}  # None: to be deleted
        self._since = 0.0  # when the first of them came
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._rests: dict[int, threading.Event] = {}
        self.thread: threading.Thread | None = None

    def put(self, rows: Mapping[str, bytes | None]) -> None:
        """Have ``rows`` written soon, or deleted where they are None. Does not block."""
        with self._news:
            before = len(self._waiting)
            self._waiting.update(rows)
            if before == 0:
                self._since = time.monotonic()
            if before == 0 or before < GROUP <= len(self._waiting):
                self._wake()

    def read(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The rows of those ``keys`` that are there, or wait to be written."""
        return self._ask(partial(self._read, keys), {})

    def harden(self) -> None:
        """From now on, have what is committed survive a loss of power. Does not block."""
        self._submit(self.handle.harden)

    def flush(self) -> bool:
        """Block until nothing waits. False: some rows since the last flush could not be stored."""
        return self._ask(self._flush, False)

    def clear(self) -> None:
        """Delete all rows."""
        self._ask(self._clear, None)

    def count(self) -> int:
        """How many rows there are."""
        return self._ask(self._count, 0)

    def close(self) -> None:
        """Write what waits, let go of the database and end the thread. A later call begins it again."""
        if self.thread is not None:
            self._ask(self._leave, None)

    async def aclose(self) -> None:
        """Close without blocking the loop; a TimeoutError if that takes too long."""
        if self.thread is not None:  # not to_thread: at exit the pools are closed already
            await asyncio.wait_for(asyncio.wrap_future(self._submit(self._leave)), TIMEOUT)

    def rest(self) -> None:
        """Let go of the database until this thread calls `resume`."""
        if self.thread is None or self.thread is threading.current_thread():
            return
        resting, go = threading.Event(), threading.Event()
        self._rests[threading.get_ident()] = go

        def pause() -> None:
            self.handle.close()
            resting.set()
            go.wait()

        self._submit(pause)
        resting.wait(TIMEOUT)

    def resume(self) -> None:
        """Go on after `rest`."""
        if go := self._rests.pop(threading.get_ident(), None):
            go.set()

    def _ask(self, job: Callable[[], T], otherwise: T) -> T:
        try:
            return self._submit(job).result(2 * TIMEOUT)
        except (TimeoutError, CancelledError):
            self._note("silent", f"did not answer within {2 * TIMEOUT:.0f} s; the run goes on without it.")
            return otherwise

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._news:
            self._jobs.append((job, future))
            self._wake()
        return future

    def _wake(self) -> None:
        if self.thread is None:
            self._start()
        self._news.notify()

    def _start(self) -> None:
        self.thread = threading.Thread(target=self._work, name=f"store {self._folder}", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self.thread = None
            while self._jobs:
                self._jobs.popleft()[1].cancel()

    def _work(self) -> None:
        while threading.current_thread() is self.thread:
            job, future = self._next()
            if not future.set_running_or_notify_cancel():
                continue
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
        """In how many seconds a group is to be written. Jobs go first, but not for long."""
        if not self._waiting:
            return 1.0
        return self._since + (0.0 if len(self._waiting) >= GROUP else DELAY) - time.monotonic()

    def _write(self) -> None:
        """Commit the next group."""
        with self._news:
            group = list(islice(self._waiting.items(), GROUP))
            self._since = time.monotonic()
        self.handle.write(group)
        with self._news:
            for key, data in group:
                if self._waiting.get(key) is data:
                    self._waiting.pop(key, None)

    def _read(self, keys: Sequence[str]) -> dict[str, bytes]:
        with self._news:
            waiting = {key: self._waiting[key] for key in keys if key in self._waiting}
        nothing: dict[str, bytes] = {}
        found = {**self.handle.use(lambda database: database.read(keys), nothing), **waiting}
        return {key: data for key, data in found.items() if data is not None}

    def _write_all(self) -> None:
        while self._waiting:
            self._write()

    def _flush(self) -> bool:
        self._write_all()
        return self.handle.whole()

    def _clear(self) -> None:
        with self._news:
            self._waiting.clear()
        self.handle.use(lambda database: database.clear(), None)

    def _count(self) -> int:
        self._write_all()
        return self.handle.use(lambda database: database.count(), 0)

    def _leave(self) -> None:
        self._write_all()
        self.handle.close()
        with self._news:
            if not self._jobs and not self._waiting:
                self.thread = None
