"""The parent's side of a nursery: the process that workers are forked from."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import IO

from ..worker.wire import HATCH, ORDER, REAP, REAPED
from .processes import command, environment, last_words

FAREWELL = 1.0  # seconds in which a nursery ends its workers and itself
TAIL = 16_384  # bytes of a log that are looked at


class Nursery:
    """Makes workers and says how they ended. When it dies, its workers die with it."""

    def __init__(self) -> None:
        self.over, self.words = False, ""  # its last words
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._awake = False
        self._tickets = count(1)
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (``_close`` closes it)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = self._started(theirs.fileno())
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._hear)

    def _started(self, descriptor: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command("nursery", str(descriptor)),
                pass_fds=[descriptor],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # a Ctrl-C in the terminal is the parent's affair
            )
        except BaseException:
            self._control.close()
            self._log.close()
            raise

    def hatch(self, wire: socket.socket, log: IO[bytes]) -> int:
        """Make a worker that talks through ``wire`` and writes to ``log``; a ticket to reap it by."""
        ticket = next(self._tickets)
        self._say(HATCH, ticket, [wire.fileno(), log.fileno()])
        return ticket

    async def reap(self, ticket: int) -> int:
        """Make sure that a worker is gone; how it ended."""
        if not self.over:
            end = self._ends[ticket] = self._loop.create_future()
            self._say(REAP, ticket)
            if not self._awake:
                self._process.kill()  # there are no workers yet
            await end
            return self._ends.pop(ticket).result()
        return self._process.wait()

    def _say(self, order: bytes, ticket: int, descriptors: Sequence[int] = ()) -> None:
        with suppress(ConnectionError):  # it is dead, which ``_hear`` will notice
            socket.send_fds(self._control, [ORDER.pack(order, ticket)], descriptors)

    def _hear(self) -> None:
        """Take in how workers ended."""
        try:
            heard = self._control.recv(64 * REAPED.size)
        except ConnectionError:
            heard = b""
        if not heard:
            return self._close()
        for ticket, code in REAPED.iter_unpack(heard):
            self._awake = True
            settle(self._ends.get(ticket), code)

    def _close(self) -> None:
        """Note that it is gone, with all its workers."""
        self.over = True
        self._loop.remove_reader(self._control)
        self._control.close()
        self._process.kill()
        code = self._process.wait()
        with self._log:
            self.words = tail(self._log)
        for end in self._ends.values():
            settle(end, code)
        self._gone.set_result(None)

    async def aclose(self) -> None:
        """End it and its workers."""
        if not self.over:
            self._control.shutdown(socket.SHUT_WR) if self._awake else self._process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL):
                    return await asyncio.shield(self._gone)
            self._close()


def settle(end: asyncio.Future[int] | None, code: int) -> None:
    """Tell whoever waits how a worker ended."""
    if end is not None and not end.done():
        end.set_result(code)


def tail(log: IO[bytes]) -> str:
    """The last lines of a log, to stand at the end of an error message."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
    return last_words(log.read())
