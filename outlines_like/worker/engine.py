"""The queue and the rows that run: schedule, run, report."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from traceback import format_exception_only
from typing import Any, Protocol

import torch

from ..errors import BadRequestError, ModelError, WorkerError
from ..requests import Completion
from .constraints import Grammars
from .prompting import Reader
from .rows import Habits, Row, open_row
from .sampling import choose
from .scoring import Quiz, open_quiz
from .shaping import chances, shaped
from .turns import in_turn
from .wire import Answer, Ask, Fault, News

ROWS = 64  # decoded together
MOST = 2000  # letters of a foreign error's message


class Runner(Protocol):
    """Runs rows of one model side by side: ``logits`` has a line for each of ``rows``, to choose its next token from."""

    @property
    def rows(self) -> list[Row]:
        """The rows that run."""

    @property
    def logits(self) -> torch.Tensor:
        """What each row's next token is chosen from."""

    @property
    def prefilled(self) -> int:
        """Tokens of prompts that were read so far."""

    def pick(self, waiting: Sequence[Row], free: int, room: int) -> list[Row]:
        """Which waiting rows to let in now: at most ``free``, holding at most ``room`` tokens with those that run."""

    def advance(self, group: Sequence[Row]) -> None:
        """Read what each running row wrote last, and the texts of new rows."""

    def score(self, quizzes: Sequence[Quiz]) -> list[Completion]:
        """Score the answers of the first quizzes, at least of one."""

    def keep(self, rows: Iterable[Row]) -> None:
        """Let all other rows go."""


class Engine:
    """Answers rows. ``take`` and ``drop`` them, and ``step`` as long as it is not ``idle``."""

    def __init__(self, runner: Runner, reader: Reader, tokenizer: Any, habits: Habits, room: int) -> None:
        self.runner, self._reader, self._tokenizer, self._habits = runner, reader, tokenizer, habits
        self._grammars = Grammars(tokenizer, habits.ends)
        self._most, self._room = ROWS, room
        self._waiting: deque[Row] = deque()
        self._quizzes: list[Quiz] = []
        self._faults: list[Fault] = []
        self._ended: list[Row] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do or to tell."""
        return not (self._waiting or self._quizzes or self.runner.rows or self._faults or self._ended)

    def take(self, asks: Iterable[Ask]) -> None:
        """Queue rows."""
        for ask in asks:
            try:
                self._open(ask)
            except Exception as error:  # whatever a row provokes is its own affair
                self._faults.append(fault(ask.id, error))

    def _open(self, ask: Ask) -> None:
        if "options" in ask.params:
            return self._quizzes.append(open_quiz(ask, self._reader, self._habits.context))
        row = open_row(ask, self._reader, self._tokenizer, self._habits, self._grammars)
        (self._ended if row.over else self._waiting).append(row)

    def drop(self, ids: Iterable[int]) -> None:
        """Forget rows that nobody waits for."""
        gone = set(ids)
        self._waiting = deque(row for row in self._waiting if row.id not in gone)
        self._quizzes = [quiz for quiz in self._quizzes if quiz.id not in gone]
        self.runner.keep([row for row in self.runner.rows if row.id not in gone])

    def step(self) -> News:
        """One token for every running row, after letting some waiting ones in; what there is to tell."""
        self._advance(self._admit())
        self._choose()
        return self._report(self._score())

    def _choose(self) -> None:
        """Give each row that was read to its end its next token."""
        rows = self.runner.rows
        ready = [place for place, row in enumerate(rows) if not row.unread]
        if not ready:
            return
        logits = self.runner.logits
        if len(ready) < len(rows):
            rows, logits = [rows[place] for place in ready], logits[ready]
        found = choose(shaped(logits, rows), [row.draw for row in rows])
        tokens = [row.due.pop(0) if row.due else token for row, token in zip(rows, found, strict=True)]
        for row, token, chance in zip(rows, tokens, chances(logits, rows, tokens), strict=True):
            row.push(token, chance)

    def _score(self) -> list[Answer]:
        self._quizzes = in_turn(self._quizzes)
        scored = self._attempted() if self._quizzes else []
        done, self._quizzes = self._quizzes[: len(scored)], self._quizzes[len(scored) :]
        return [Answer(quiz.id, completion) for quiz, completion in zip(done, scored, strict=True)]

    def _admit(self) -> list[Row]:
        free = self._most - len(self.runner.rows)
        self._waiting = deque(in_turn(self._waiting, self.runner.rows))
        group = self.runner.pick(self._waiting, free, self._room) if self._waiting and free > 0 else []
        chosen = set(map(id, group))
        self._waiting = deque(row for row in self._waiting if id(row) not in chosen)
        return group

    def _advance(self, group: list[Row]) -> None:
        """Run. Where memory runs out, all rows go back to the queue, to run in smaller company."""
        rows = [*self.runner.rows, *group]
        try:
            return self.runner.advance(group) if rows else None
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        self.runner.keep([])
        self._most = max(1, len(rows) // 2)
        if len(rows) > 1:
            self._waiting.extendleft(reversed(rows))
        else:
            self._faults.append(Fault(rows[0].id, WorkerError.__name__, "the worker's memory does not suffice for this row"))

    def _attempted(self) -> list[Completion]:
        """Score some quizzes; where memory runs out, one alone."""
        try:
            return self.runner.score(self._quizzes)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        return self.runner.score(self._quizzes[:1])

    def _report(self, scores: list[Answer]) -> News:
        rows = self.runner.rows
        told = [*self._ended, *rows]
        answers = scores + [Answer(row.id, completion) for row in told if (completion := row.news())]
        self._faults += [Fault(row.id, BadRequestError.__name__, row.fault) for row in told if row.fault]
        self.runner.keep([row for row in rows if not row.over])
        faults, self._faults, self._ended = self._faults, [], []
        if self.idle:
            self._most = ROWS
        return News(answers, faults, self.runner.prefilled)


def fault(id: int, error: Exception) -> Fault:
    """An error as plain data."""
    if isinstance(error, ModelError):
        return Fault(id, type(error).__name__, str(error.args[0]))
    return Fault(id, WorkerError.__name__, format_exception_only(error)[-1].strip()[:MOST])


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, as far as PyTorch's errors tell."""
    known = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in known)
