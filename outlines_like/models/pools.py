"""The parent's side of local models: worker processes, and the rows that they hold."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from .. import errors
from ..errors import BadRequestError, ModelError, WorkerError
from ..events import Burst, Bursts, Event, Failure
from ..requests import Completion, Request
from ..streams import Mailbox
from ..worker.wire import LENGTH, Ask, Cancel, News, Order, Ready, Report, Rows, Setup, frame, pack, report_of
from .processes import command, ending, environment, last_words

WINDOW = 128  # rows that a worker holds at most, so that there is always a next batch, and little to do again
TAIL = 16_384  # bytes of a log that are looked at
NUMBERS = count()


@dataclass(slots=True, eq=False)
class Job:
    """One row of one call: where its events go, and how many workers died while they held it."""

    id: int
    row: int
    request: Request
    mailbox: Mailbox
    deaths: int = 0
    shown: str = ""

    @property
    def alone(self) -> bool:
        """Whether it may have killed two workers, so that nothing else must run beside it."""
        return self.deaths > 1

    def encoded(self) -> msgspec.Raw:
        """The row as the worker reads it."""
        request = self.request
        return msgspec.Raw(
            pack(Ask(self.id, request.prompt, request.params, request.key, request.terms.live, request.terms.ongoing))
        )

    def fail(self, error: ModelError) -> None:
        """End with an error."""
        self.mailbox.post([Event(self.row, Failure(error))])

    def event(self, completion: Completion) -> Event | None:
        """The event that tells of ``completion``. After a death, text already shown is not shown again."""
        done = completion.finish_reason is not None
        if not done and not completion.text.startswith(self.shown):
            return None
        self.shown = completion.text
        return Event(self.row, completion, done)


class Worker:
    """A child process, the rows that it holds, and its log."""

    def __init__(self, setup: Setup) -> None:
        self.jobs: dict[int, Job] = {}
        self.prefilled = 0
        self.ready = False
        self.story = ""
        self._setup = setup
        self._outbox: list[Job] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (``end`` closes it)
        self._socket, self._theirs = socket.socketpair()

    def start(self) -> None:
        """Make the process."""
        with self._theirs:
            self._process = subprocess.Popen(
                command(str(self._theirs.fileno())),
                pass_fds=[self._theirs.fileno()],
                env=environment(offline=Path(self._setup.path).is_absolute()),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # a Ctrl-C in the terminal is the parent's affair
            )

    async def reports(self) -> AsyncGenerator[Report, None]:
        """What it says, until it dies."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._send(self._setup)
        while True:
            try:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                yield report_of(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    def _send(self, order: Order) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(order))

    def takes(self, job: Job, share: int) -> bool:
        """Whether it has room for ``job`` beside what it holds."""
        if job.alone or any(held.alone for held in list(self.jobs.values())[:1]):
            return not self.jobs
        return len(self.jobs) < share

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

    def drop(self, ids: set[int]) -> None:
        """Let go of rows that nobody waits for."""
        gone = [id for id in self.jobs if id in ids]
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

    def end(self) -> int:
        """Make sure that it is gone; how it ended."""
        if self._writer is not None:
            self._writer.close()
        self._socket.close()
        code = 0
        if self._process is not None:
            self._process.kill()
            code = self._process.wait()
        with self._log:
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - TAIL))
            self.story = f"{ending(code)}). It said:{last_words(self._log.read())}"
        return code


@dataclass(slots=True)
class Counts:
    """What the workers of a model have done: ``prefilled`` is how many tokens of prompts they read."""

    prefilled: int = 0


class Pool:
    """Worker processes of one model, started when there are rows for them, and the rows that wait."""

    def __init__(self, setup: Setup, counts: Counts | None = None) -> None:
        self._setup, self.counts = setup, counts or Counts()
        self._waiting: deque[Job] = deque()
        self._workers: list[Worker] = []
        self._seats: set[asyncio.Task[None] | None] = set()

    async def run(self, rows: Sequence[Request]) -> Bursts:
        """Answer rows. Whoever leaves early takes his rows out of the workers."""
        mailbox = Mailbox()
        jobs = [Job(next(NUMBERS), row, request, mailbox) for row, request in enumerate(rows)]
        left = {job.row: job.id for job in jobs}
        self._admit(jobs)
        try:
            while left and (burst := await mailbox.take()) is not None:
                for event in burst:
                    if event.done:
                        del left[event.row]
                yield burst
        finally:
            self._forget(set(left.values()))

    def _admit(self, jobs: Iterable[Job]) -> None:
        """Queue rows, and see that there are workers for them."""
        self._waiting.extend(jobs)
        while len(self._seats) < min(self._setup.workers, len(self._waiting)):
            self._seats.add(asyncio.ensure_future(self._seat()))
        self._feed()

    def _feed(self) -> None:
        """Hand waiting rows out, to the least busy worker first."""
        ready = [worker for worker in self._workers if worker.ready]
        held = sum(len(worker.jobs) for worker in ready)
        share = min(WINDOW, -(-(held + len(self._waiting)) // max(1, len(self._seats))))
        while self._waiting and ready:
            worker = min(ready, key=lambda worker: len(worker.jobs))
            if not worker.takes(self._waiting[0], share):
                break
            worker.take(self._waiting.popleft())
        for worker in ready:
            worker.flush()

    def _forget(self, ids: set[int]) -> None:
        if not ids:
            return
        self._waiting = deque(job for job in self._waiting if job.id not in ids)
        for worker in self._workers:
            worker.drop(ids)
        self._feed()

    async def _seat(self) -> None:
        """Keep a worker while there is work. Whatever goes wrong here, nobody is left waiting."""
        try:
            await self._keep()
        except Exception as error:
            self._refuse(f"a worker for {self._setup.path} could not be kept: {error}")
        finally:
            self._seats.discard(asyncio.current_task())

    async def _keep(self) -> None:
        """Have a worker; when it dies and rows wait, have another one. One that can't start is tried again if it was killed."""
        tries = 2
        while tries and self._waiting:
            worker = Worker(self._setup)
            self._workers.append(worker)
            try:
                worker.start()
                await self._attend(worker)
            finally:
                self._workers.remove(worker)
                code = worker.end()
                self._rescue(worker)
            tries = 2 if worker.ready else tries - 1 if code < 0 else 0
        if not tries and not any(other.ready for other in self._workers):
            self._refuse(f"the worker for {self._setup.path} did not start ({worker.story}")

    async def _attend(self, worker: Worker) -> None:
        """Listen to a worker until it dies."""
        async with aclosing(worker.reports()) as reports:
            async for report in reports:
                if isinstance(report, Ready):
                    worker.ready = True
                else:
                    self.counts.prefilled += report.prefilled - worker.prefilled
                    worker.prefilled = max(worker.prefilled, report.prefilled)
                    deliver(worker.hear(report))
                self._feed()

    def _rescue(self, worker: Worker) -> None:
        """Queue the rows of a dead worker again; one that was alone with it, not for the first time, is to blame."""
        jobs = list(worker.jobs.values())
        for job in jobs:
            job.deaths += 1
        if len(jobs) == 1 and jobs[0].alone:
            jobs[0].fail(WorkerError(f"this row killed every worker that held it (the last one: {worker.story}"))
        else:
            self._waiting.extendleft(reversed(jobs))

    def _refuse(self, why: str) -> None:
        """Fail all that waits."""
        while self._waiting:
            self._waiting.popleft().fail(WorkerError(why))

    async def aclose(self) -> None:
        """End the workers."""
        seats = [seat for seat in self._seats if seat]
        for seat in seats:
            seat.cancel()
        await asyncio.gather(*seats, return_exceptions=True)


def deliver(told: Iterable[tuple[Mailbox, Event]]) -> None:
    """Post events, one burst for each mailbox."""
    bursts: dict[Mailbox, Burst] = {}
    for mailbox, event in told:
        bursts.setdefault(mailbox, []).append(event)
    for mailbox, burst in bursts.items():
        mailbox.post(burst)
