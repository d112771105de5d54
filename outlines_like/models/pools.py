"""Worker processes of one model, and which of them answers which row."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from ..errors import ModelError, WorkerError
from ..events import Burst, Bursts, Event
from ..requests import Completion, Request
from ..streams import Mailbox
from ..worker.wire import News, Setup
from .hubs import fetched
from .notices import Notice
from .nurseries import Nursery
from .queues import WINDOW, Job, Queue
from .workers import Worker

FOLLOWERS = 8  # rows that follow a beginning they share to the worker that has read it, even if others have less to do
DOUBTS = 3  # times that a row may have been killed by somebody outside while it ran alone
RECENT = 20  # deaths that are remembered
NUMBERS = count()


@dataclass(slots=True)
class Counts:
    """What the workers of a model have done.

    ``prompted`` is how many tokens the prompts had that were answered, ``prefilled`` how many were read for that: what
    prompts share counts once. ``written`` is how many tokens the answers have, ``started`` how many workers there were,
    ``died`` how many of them ended unasked.
    """

    prefilled: int = 0
    prompted: int = 0
    written: int = 0
    started: int = 0
    died: int = 0

    def add(self, completion: Completion) -> None:
        """Count an answer."""
        self.prompted += completion.usage.prompt_tokens
        self.written += completion.usage.completion_tokens


class Pool:
    """Worker processes of one model, started when there are rows for them, and the rows that wait."""

    def __init__(self, setup: Setup, nursery: Callable[[], Nursery], counts: Counts | None = None) -> None:
        self._setup, self._origin, self.counts = setup, nursery, counts or Counts()
        self._nursery: Nursery | None = None
        self._found: Setup | None = None
        self._deaths: deque[set[int]] = deque(maxlen=RECENT)
        self._notice = Notice(f"loading {Path(setup.path).name}")
        self._queue = Queue()
        self._workers: list[Worker] = []
        self._seats: set[asyncio.Task[None] | None] = set()

    async def run(self, rows: Sequence[Request]) -> Bursts:
        """Answer rows. Whoever leaves early takes his rows out of the workers."""
        mailbox, left, call = Mailbox(), len(rows), next(NUMBERS)
        self._admit([Job(next(NUMBERS), call, row, request, mailbox) for row, request in enumerate(rows)])
        try:
            while left and (burst := await mailbox.take()) is not None:
                left -= sum(event.done for event in burst)
                yield burst
        finally:
            if left:
                self._forget(mailbox)

    def _admit(self, jobs: Sequence[Job]) -> None:
        """Queue rows, and see that there are workers for them."""
        self._queue.add(jobs)
        self._staff()
        self._feed()

    def _staff(self) -> None:
        """See that there are workers for the rows that wait; a single one until the model is loaded."""
        most = self._setup.workers if self._nursery and self._nursery.awake else 1
        while len(self._seats) < min(most, len(self._queue)):
            self._seats.add(asyncio.ensure_future(self._seat()))

    async def _locate(self) -> Setup:
        """What to load: a name on the hub becomes a folder. Meanwhile the imports begin."""
        if self._found is None:
            self._origin()
            self._notice.show("fetching its files")
            self._found = replace(self._setup, path=await fetched(self._setup.path, pickled=self._setup.pickled))
        return self._found

    def _home(self, setup: Setup) -> Nursery:
        """Where workers come from."""
        if self._nursery is None or self._nursery.over:
            self._nursery = self._origin().forked(setup)
        return self._nursery

    def _feed(self) -> None:
        """Hand waiting rows out."""
        ready = [worker for worker in self._workers if worker.ready]
        total = len(self._queue) + sum(len(worker.jobs) for worker in ready)
        share = min(WINDOW, max(FOLLOWERS, -(-total // max(1, len(self._seats)))))
        while self._queue and (worker := placed(self._queue.first, ready, share)):
            worker.take(self._queue.pop())
        for worker in ready:
            worker.flush()

    def _forget(self, mailbox: Mailbox) -> None:
        """Let go of the rows of a call."""
        self._queue.drop(mailbox)
        for worker in self._workers:
            worker.drop(mailbox)
        self._feed()

    async def _seat(self) -> None:
        """Keep a worker while there is work. Whatever goes wrong here, nobody is left waiting."""
        try:
            await self._keep()
        except ModelError as error:
            self._refuse(error)
        except Exception as error:
            self._refuse(WorkerError(f"a worker for {self._setup.path} could not be kept: {error}"))
        finally:
            self._notice.wipe()
            self._seats.discard(asyncio.current_task())

    async def _keep(self) -> None:
        """Have a worker; when it dies and rows wait, have another one. One that can't start is tried again if it was killed."""
        tries, setup = 2, await self._locate()
        while tries and self._queue:
            worker = Worker(setup)
            code = await self._lifetime(worker, self._home(setup))
            tries = 2 if worker.ready else tries - 1 if code < 0 and not worker.refused else 0
        if not tries and not any(other.ready for other in self._workers):
            why = f"the worker for {self._setup.path} did not start ({worker.story}"
            self._refuse(worker.refused or WorkerError(why))

    async def _lifetime(self, worker: Worker, nursery: Nursery) -> int:
        """Have a worker until it dies; how it ended."""
        self._workers.append(worker)
        self.counts.started += 1
        code = 0
        try:
            worker.start(nursery)
            await self._attend(worker)
            self.counts.died += 1
        finally:
            self._workers.remove(worker)
            code = await worker.end()
            self._rescue(worker, code)
        return code

    async def _attend(self, worker: Worker) -> None:
        """Listen to a worker until it dies."""
        async with aclosing(worker.reports()) as reports:
            async for report in reports:
                if isinstance(report, News):
                    self._hear(worker, report)
                elif worker.ready:
                    self._notice.wipe()
                    self._staff()
                else:
                    self._notice.show(worker.stage)
                self._feed()

    def _hear(self, worker: Worker, news: News) -> None:
        self.counts.prefilled += news.prefilled - worker.prefilled
        worker.prefilled = news.prefilled
        told = worker.hear(news)
        for _, event in told:
            if event.done and isinstance(event.value, Completion):
                self.counts.add(event.value)
        deliver(told)

    def _rescue(self, worker: Worker, code: int) -> None:
        """Queue the rows of a dead worker again; one that was alone with it, not for the first time, is to blame.

        What was killed may have been killed by somebody outside, again and again, so that is believed late; the later, the
        more workers have died of no row.
        """
        jobs = list(worker.jobs.values())
        death = set(worker.jobs)
        self._deaths.append(death)
        for job in jobs:
            job.deaths.append(death)
            job.lonely += len(jobs) == 1
        outside = code == -signal.SIGKILL and not worker.hung
        doubts = DOUBTS * outside + sum(not death for death in self._deaths)
        if len(jobs) == 1 and len(jobs[0].deaths) > 1 and jobs[0].lonely > doubts:
            jobs[0].fail(WorkerError(f"this row killed every worker that held it (the last one: {worker.story}"))
        else:
            self._queue.again(jobs)

    def _refuse(self, error: ModelError) -> None:
        """Fail all that waits."""
        for job in self._queue.drain():
            job.fail(copy(error))

    async def aclose(self) -> None:
        """End the workers, and fail what is under way."""
        seats = [seat for seat in self._seats if seat]
        for seat in seats:
            seat.cancel()
        await asyncio.gather(*seats, return_exceptions=True)
        if self._nursery:
            await self._nursery.aclose()
        self._refuse(WorkerError(f"{self._setup.path} was closed before this row was answered"))


def placed(job: Job, workers: Sequence[Worker], share: int) -> Worker | None:
    """The worker for a row: the one that has read most of its beginning, among equals the one with least to do."""
    free = [worker for worker in workers if worker.room(job, share)]
    if len(workers) < 2 or not free:
        return free[0] if free else None
    best = max(free, key=lambda worker: (worker.knows(job), -len(worker.jobs)))
    best.learn(job)
    return best


def deliver(told: Iterable[tuple[Mailbox, Event]]) -> None:
    """Post events, one burst for each mailbox."""
    bursts: dict[Mailbox, Burst] = {}
    for mailbox, event in told:
        bursts.setdefault(mailbox, []).append(event)
    for mailbox, burst in bursts.items():
        mailbox.post(burst)
