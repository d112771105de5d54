"""Rows of local models that wait for a worker: a line for each call, served in turn, so that no call starves another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ..errors import ModelError
from ..events import Event, Failure
from ..requests import Completion, Request
from ..streams import Mailbox
from ..worker.wire import Ask, pack

WINDOW = 128  # rows that a worker holds at most, so that there is always a next batch, and little to do again
COMPANY = (WINDOW, 8)  # how many rows may stand beside one that no, one worker died with; else none
MARKS = (64, 256, 1024, 4096, 16384)  # letters at the beginning of a prompt that are compared with other prompts'


@dataclass(eq=False)
class Job:
    """One row of one call: where its events go, and which workers died while they held it, or held it alone.

    A death is the set of the rows that may have been its cause: once they are all answered, none of them was.
    """

    id: int
    call: int
    row: int
    request: Request
    mailbox: Mailbox
    deaths: list[set[int]] = field(default_factory=list)
    lonely: int = 0
    shown: str = ""

    @property
    def company(self) -> int:
        """How many rows its worker may hold. Whoever may have killed two workers has to run alone."""
        return COMPANY[len(self.deaths)] if len(self.deaths) < len(COMPANY) else 1

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """What tells beginnings of prompts apart, the shortest first."""
        text = opening(self.request.prompt)
        return tuple(hash(text[:length]) for length in MARKS if len(text) >= length)

    def encoded(self) -> msgspec.Raw:
        """The row as the worker reads it."""
        request = self.request
        ask = Ask(self.id, request.prompt, request.params, request.key, request.terms.live, self.call, request.terms.ongoing)
        return msgspec.Raw(pack(ask))

    def fail(self, error: ModelError) -> None:
        """End with an error."""
        self.mailbox.post([Event(self.row, Failure(error))])

    def event(self, completion: Completion) -> Event | None:
        """The event that tells of ``completion``. After a death, text already shown is not shown again."""
        done = completion.finish_reason is not None
        if not done and not completion.text.startswith(self.shown):
            return None
        self.shown = completion.text
        if done:
            for death in self.deaths:
                death.discard(self.id)
        return Event(self.row, completion, done)


def opening(prompt: object) -> str:
    """The beginning of a prompt, as one text."""
    if isinstance(prompt, str):
        return prompt
    assert isinstance(prompt, tuple)
    return "\n".join(f"{turn.role} {turn.content}" for turn in prompt)


class Queue:
    """Jobs that wait: those of dead workers first, then one of each call in turn."""

    def __init__(self) -> None:
        self._again: deque[Job] = deque()
        self._lines: dict[Mailbox, deque[Job]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, jobs: Sequence[Job]) -> None:
        """Take in the rows of a call."""
        for job in jobs:
            self._lines.setdefault(job.mailbox, deque()).append(job)
        self._count += len(jobs)

    def again(self, jobs: Sequence[Job]) -> None:
        """Take back rows that have had their turn."""
        self._again.extendleft(reversed(jobs))
        self._count += len(jobs)

    @property
    def first(self) -> Job:
        """Whose turn it is."""
        return self._again[0] if self._again else next(iter(self._lines.values()))[0]

    def pop(self) -> Job:
        """Let the first one go; its call goes to the end."""
        self._count -= 1
        if self._again:
            return self._again.popleft()
        call, line = next(iter(self._lines.items()))
        del self._lines[call]
        job = line.popleft()
        if line:
            self._lines[call] = line
        return job

    def drop(self, mailbox: Mailbox) -> None:
        """Forget the rows of a call."""
        self._again = deque(job for job in self._again if job.mailbox is not mailbox)
        self._lines.pop(mailbox, None)
        self._count = len(self._again) + sum(map(len, self._lines.values()))

    def drain(self) -> Iterable[Job]:
        """Let all go."""
        while self._count:
            yield self.pop()
