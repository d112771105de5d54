"""The parent's side of a nursery: a process that others are forked from, which find there what they have in common."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import IO

from ..worker.wire import HATCH, ORDER, REAP, REAPED, Setup, frame
from .processes import NOTHING, command, environment, last_words

FAREWELL = 1.0  # seconds in which a nursery ends its workers and itself
TAIL = 16_384  # bytes of a log that are looked at

End = Callable[[], Awaitable[int]]  # makes sure that a process is gone, and says how it ended
Start = Callable[[socket.socket, IO[bytes]], End]  # makes one with that end of a socket, and that log


class Nursery:
    """Makes children and says how they ended. When it dies, they die with it.

    The first one is a fresh process; ``nursery.forked(setup)`` is one of its children, and makes workers of one model.
    """

    def __init__(self, start: Start, setup: Setup | None = None, origin: Nursery | None = None) -> None:
        self.over, self.awake, self.words = False, False, ""  # its last words
        self._loop, self._silent = asyncio.get_running_loop(), asyncio.Event()
        self._tickets = count(1)
        self._origin = origin
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (``_bury`` closes it)
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._end = start(theirs, self._log)
        except BaseException:
            self._control.close()
            self._log.close()
            raise
        if setup:
            self._control.sendall(frame(setup))
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._hear)

    def forked(self, setup: Setup) -> Nursery:
        """One that is forked from this one and loads a model."""
        return Nursery(lambda control, log: partial(self.reap, self.hatch(control, log)), setup, self)

    def hatch(self, wire: socket.socket, log: IO[bytes]) -> int:
        """Make a child that talks through ``wire`` and writes to ``log``; a ticket to reap it by."""
        ticket = next(self._tickets)
        self._say(HATCH, ticket, [wire.fileno(), log.fileno()])
        return ticket

    async def reap(self, ticket: int) -> int:
        """Make sure that a child is gone; how it ended."""
        if self.over:
            return await asyncio.shield(self._gone)
        end = self._ends[ticket] = self._loop.create_future()
        self._say(REAP, ticket)
        if not self.awake:
            self._close()  # it has no children yet
        await end
        return self._ends.pop(ticket).result()

    def _say(self, order: bytes, ticket: int, descriptors: Sequence[int] = ()) -> None:
        with suppress(ConnectionError):  # it is dead, which ``_hear`` will notice
            socket.send_fds(self._control, [ORDER.pack(order, ticket)], descriptors)

    def _hear(self) -> None:
        """Take in how children ended."""
        try:
            heard = self._control.recv(64 * REAPED.size)
        except ConnectionError:
            heard = b""
        if not heard:
            return self._close()
        for ticket, code in REAPED.iter_unpack(heard):
            self.awake = True
            settle(self._ends.get(ticket), code)

    def _close(self) -> None:
        """Note that it is gone, with all its children, and see to it."""
        self.over, self.awake = True, False
        self._loop.remove_reader(self._control)
        self._control.close()
        self._gone = asyncio.ensure_future(self._bury())
        self._silent.set()

    async def _bury(self) -> int:
        """Make sure that it is gone; how it ended."""
        code = await self._end()
        with self._log:
            self.words = tail(self._log)
        if self._origin and self._origin.over and self.words == NOTHING:
            self.words = self._origin.words
        for end in self._ends.values():
            settle(end, code)
        return code

    async def aclose(self) -> None:
        """End it and its children."""
        if self.awake:
            self._control.shutdown(socket.SHUT_WR)
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL):
                    await self._silent.wait()
        if not self.over:
            self._close()
        await asyncio.shield(self._gone)


def process(control: socket.socket, log: IO[bytes]) -> End:
    """A fresh nursery; how to make sure that it is gone."""
    started = subprocess.Popen(
        command("nursery", str(control.fileno())),
        pass_fds=[control.fileno()],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # a Ctrl-C in the terminal is the parent's affair
    )

    async def end() -> int:
        started.kill()
        return started.wait()

    return end


def settle(end: asyncio.Future[int] | None, code: int) -> None:
    """Tell whoever waits how a worker ended."""
    if end is not None and not end.done():
        end.set_result(code)


def tail(log: IO[bytes]) -> str:
    """The last lines of a log, to stand at the end of an error message."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
    return last_words(log.read())
