"""The queue and the running batches: schedule, run, report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch

from ..errors import ModelError, WorkerError
from .batches import Batch, Net
from .prompting import Reader
from .rows import Habits, Row, open_row
from .sampling import choose
from .wire import Answer, Ask, Fault, News

T = TypeVar("T")
ROWS = 64  # decoded together
PREFILL = 1024  # tokens, with padding, that are read in one go: it bounds how long running rows wait for new ones


def together(waiting: Iterable[Row], *, rows: int, room: int, even: bool) -> list[Row]:
    """Which rows to read next: the oldest, and of those behind it the ones closest in length.

    At most ``rows`` of them, holding at most ``room`` tokens together; only equally long ones if ``even``. Rows with
    equal prompts count once, as the prompt is read once.
    """
    window = list(islice(waiting, rows))
    oldest = len(window[0].text) if window else 0
    group: list[Row] = []
    texts: set[tuple[int, ...]] = set()
    for row in sorted(window, key=lambda row: abs(len(row.text) - oldest)):
        both = texts | {row.text}
        wide = len(both) * max(map(len, both)) > PREFILL or (len(group) + 1) * max(r.size for r in [*group, row]) > room
        if group and (wide or (even and len(row.text) != oldest)):
            break
        group, texts = [*group, row], both
    return group


class Cohort:
    """Rows and the batch they are decoded in."""

    def __init__(self, rows: Sequence[Row], batch: Batch) -> None:
        self.rows, self.batch = list(rows), batch

    @classmethod
    def read(cls, net: Net, rows: Sequence[Row]) -> Cohort:
        """Read the rows' prompts, each different one once."""
        places = {text: place for place, text in enumerate(dict.fromkeys(row.text for row in rows))}
        batch = Batch.read(net, list(places))
        batch.select([places[row.text] for row in rows])
        return cls(rows, batch)

    def choose(self) -> None:
        """Give each row its next token."""
        for row, token in zip(self.rows, choose(self.batch.logits, [row.draw for row in self.rows]), strict=True):
            row.push(token)

    def extend(self) -> None:
        """Read the tokens chosen last."""
        self.batch.extend([row.tokens[-1] for row in self.rows])

    def keep(self, places: Sequence[int]) -> None:
        """Let the other rows go."""
        if len(places) < len(self.rows):
            self.rows = [self.rows[place] for place in places]
            if places:
                self.batch.select(places)

    def join(self, other: Cohort) -> None:
        """Take the rows of ``other`` in."""
        self.batch.join(other.batch)
        self.rows += other.rows


class Engine:
    """Answers rows. ``take`` and ``drop`` them, and ``step`` as long as it is not ``idle``."""

    def __init__(self, net: Net, reader: Reader, tokenizer: Any, habits: Habits, room: int) -> None:
        self._net, self._reader, self._tokenizer, self._habits = net, reader, tokenizer, habits
        self._rows, self._room, self._filling = ROWS, room, False
        self._waiting: deque[Row] = deque()
        self._cohorts: list[Cohort] = []
        self._faults: list[Fault] = []
        self._ended: list[Row] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do or to tell."""
        return not (self._waiting or self._cohorts or self._faults or self._ended)

    def take(self, asks: Iterable[Ask]) -> None:
        """Queue rows."""
        for ask in asks:
            try:
                row = open_row(ask, self._reader, self._tokenizer, self._habits)
            except ModelError as error:
                self._faults.append(Fault(ask.id, type(error).__name__, str(error.args[0])))
                continue
            if row.limit <= 0:
                row.close("length")
            (self._ended if row.finish else self._waiting).append(row)

    def drop(self, ids: Iterable[int]) -> None:
        """Forget rows that nobody waits for."""
        gone = set(ids)
        self._waiting = deque(row for row in self._waiting if row.id not in gone)
        for cohort in self._cohorts:
            cohort.keep([place for place, row in enumerate(cohort.rows) if row.id not in gone])
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def step(self) -> News:
        """One token for every running row, after letting some waiting ones in; what there is to tell."""
        for cohort in list(self._cohorts):
            self._attempt(cohort.extend, cohort.rows)
        self._admit()
        for cohort in self._cohorts:
            cohort.choose()
        return self._report()

    def _admit(self) -> None:
        running = [row for cohort in self._cohorts for row in cohort.rows]
        free = self._rows - len(running)
        # New rows come in crowds: reading one prompt at a time would hold up all that run for each of them.
        enough = free >= min(len(self._waiting), self._rows // 4)
        self._filling = bool(self._waiting) and free > 0 and (enough or self._filling)
        room = self._room - len(running) * max((row.size for row in running), default=0)
        if not self._filling or (running and room < self._waiting[0].size):
            return
        group = together(self._waiting, rows=free, room=room, even=not self._net.plain)
        self._filling = len(group) < free
        chosen = set(map(id, group))
        self._waiting = deque(row for row in self._waiting if id(row) not in chosen)
        self._enter(group)

    def _enter(self, group: list[Row]) -> None:
        """Let ``group`` join what is running."""
        cohort = self._attempt(lambda: Cohort.read(self._net, group), group)
        if cohort is None:
            return
        if self._net.plain and self._cohorts:
            first = self._cohorts[0]
            self._attempt(lambda: first.join(cohort), [*first.rows, *group])
        else:
            self._cohorts.append(cohort)

    def _attempt(self, work: Callable[[], T], rows: list[Row]) -> T | None:
        """Do ``work`` for ``rows``; where memory runs out they go back to the queue, to run in smaller company."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        self._cohorts = [cohort for cohort in self._cohorts if not set(map(id, cohort.rows)) & set(map(id, rows))]
        self._rows = max(1, len(rows) // 2)
        if len(rows) > 1:
            self._waiting.extendleft(reversed(rows))
        else:
            self._faults.append(Fault(rows[0].id, WorkerError.__name__, "the worker's memory does not suffice for this row"))
        return None

    def _report(self) -> News:
        rows = [*self._ended, *(row for cohort in self._cohorts for row in cohort.rows)]
        answers = [Answer(row.id, completion) for row in rows if (completion := row.news())]
        for cohort in self._cohorts:
            cohort.keep([place for place, row in enumerate(cohort.rows) if not row.finish])
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        faults, self._faults, self._ended = self._faults, [], []
        if self.idle:
            self._rows = ROWS
        return News(answers, faults)


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, as far as PyTorch's errors tell."""
    known = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in known)
