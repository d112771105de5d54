"""The parent's side of one worker: the rows that it holds, and what it says."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncGenerator

from .. import errors
from ..errors import BadRequestError, ModelError
from ..events import Event, Failure
from ..streams import Mailbox
from ..worker.wire import LENGTH, Cancel, Loading, News, Order, Ready, Refused, Report, Rows, Setup, frame, report_of
from .nurseries import Nursery, tail
from .processes import NOTHING, ending
from .queues import Job

BIRTH = 60.0  # seconds that imports may take at least
KNOWN = 4096  # beginnings of prompts that are remembered of a worker


class Worker:
    """A child process, the rows that it holds, and its log."""

    def __init__(self, setup: Setup) -> None:
        self.jobs: dict[int, Job] = {}
        self.prefilled = self.pid = 0
        self.refused: ModelError | None = None
        self.stage, self.story = "", ""
        self._setup = setup
        self._outbox: list[Job] = []
        self._known: dict[int, None] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.hung = False
        self._born: tuple[Nursery, int] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (``end`` closes it)
        self._socket, self._theirs = socket.socketpair()

    @property
    def ready(self) -> bool:
        """Whether it takes rows."""
        return self.pid > 0

    def start(self, nursery: Nursery) -> None:
        """Make the process."""
        self._born = nursery, nursery.hatch(self._theirs, self._log)
        self._theirs.close()

    async def reports(self) -> AsyncGenerator[Report, None]:
        """What it says, until it dies."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._send(self._setup)
        self._watch()
        while True:
            try:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                report = report_of(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            self._note(report)
            yield report
            self._watch()

    def _note(self, report: Report) -> None:
        match report:
            case Ready():
                self.pid, self.stage = report.pid, "ready"
            case Loading():
                self.stage = report.stage
            case Refused():
                self.refused = report.error()

    def _watch(self) -> None:
        """Start anew the time in which it has to give a sign of life, if there is something for it to do."""
        if self._alarm:
            self._alarm.cancel()
        patience = self._setup.timeout if self.stage else max(self._setup.timeout, BIRTH)
        busy = self.jobs or not self.ready
        self._alarm = asyncio.get_running_loop().call_later(patience, self._give_up) if busy else None

    def _give_up(self) -> None:
        """Hear no more of it, which is as good as its death."""
        self.hung = True
        if self._writer is not None:
            self._writer.transport.abort()

    def _send(self, order: Order) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(order))

    def room(self, job: Job, share: int) -> bool:
        """Whether it has room for ``job`` beside what it holds."""
        return len(self.jobs) < min(share, job.company, *(held.company for held in self.jobs.values()))

    def knows(self, job: Job) -> int:
        """How much of a prompt's beginning it has read before."""
        return sum(mark in self._known for mark in job.marks)

    def learn(self, job: Job) -> None:
        """Remember what it reads."""
        for mark in job.marks:
            self._known.pop(mark, None)
            self._known[mark] = None
        while len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def take(self, job: Job) -> None:
        """Hold ``job``; ``flush`` sends it."""
        self.jobs[job.id] = job
        self._outbox.append(job)

    def flush(self) -> None:
        """Send what was taken."""
        rows = []
        for job in self._outbox:
            try:
                rows.append(job.encoded())
            except (TypeError, ValueError, OverflowError) as error:
                del self.jobs[job.id]
                job.fail(BadRequestError(f"this request can't be sent to a worker: {error}"))
        self._outbox.clear()
        if rows:
            self._send(Rows(rows))
            if self._alarm is None:
                self._watch()

    def drop(self, mailbox: Mailbox) -> None:
        """Let go of the rows of a call."""
        gone = [id for id, job in self.jobs.items() if job.mailbox is mailbox]
        for id in gone:
            del self.jobs[id]
        if gone:
            self._send(Cancel(gone))

    def hear(self, news: News) -> list[tuple[Mailbox, Event]]:
        """What ``news`` tells whom."""
        told: list[tuple[Mailbox, Event]] = []
        for answer in news.answers:
            job = self.jobs.get(answer.id)
            if job is not None and (event := job.event(answer.completion)):
                told.append((job.mailbox, event))
                if event.done:
                    del self.jobs[job.id]
        for fault in news.faults:
            if job := self.jobs.pop(fault.id, None):
                told.append((job.mailbox, Event(job.row, Failure(getattr(errors, fault.kind)(fault.message)))))
        return told

    async def end(self) -> int:
        """Make sure that it is gone; how it ended."""
        if self._alarm:
            self._alarm.cancel()
        if self._writer is not None:
            self._writer.close()
        self._socket.close()
        self._theirs.close()
        nursery, ticket = self._born or (None, 0)
        code = await nursery.reap(ticket) if nursery else 0
        with self._log:
            words = tail(self._log)
        how = f"it gave no sign of life for {self._setup.timeout:g} s" if self.hung else ending(code)
        said = nursery.words if nursery and nursery.words and words == NOTHING else words
        self.story = f"{how}). It said:{said}"
        return code
