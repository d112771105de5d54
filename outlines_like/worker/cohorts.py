"""The general way to run rows: padded batches, through public methods of transformers' caches alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from ..requests import Completion
from .batches import Net
from .pairs import Pair
from .rows import Row
from .scoring import Quiz, logarithms

PREFILL = 1024  # tokens, with padding, that are read in one go: it bounds how long running rows wait for new ones


def together(waiting: Iterable[Row], *, rows: int, room: int, alike: Callable[[Row], Any]) -> list[Row]:
    """Which rows to read next: the oldest, and of those behind it that are ``alike`` the ones closest in length.

    At most ``rows`` of them, holding at most ``room`` tokens together. Rows with equal prompts count once, as the prompt
    is read once.
    """
    first = list(islice(waiting, rows))
    window = [row for row in first if alike(row) == alike(first[0])]
    oldest = len(window[0].text) if window else 0
    group: list[Row] = []
    texts: set[tuple[int, ...]] = set()
    for row in sorted(window, key=lambda row: abs(len(row.text) - oldest)):
        both = texts | {row.text}
        wide = len(both) * max(map(len, both)) > PREFILL or (len(group) + 1) * max(r.size for r in [*group, row]) > room
        if group and wide:
            break
        group, texts = [*group, row], both
    return group


class Cohort:
    """Rows and the batch they are decoded in."""

    def __init__(self, rows: Sequence[Row], batch: Any) -> None:
        self.rows, self.batch = list(rows), batch

    @classmethod
    def read(cls, net: Net | Pair, rows: Sequence[Row]) -> Cohort:
        """Read the rows' prompts, each different one once."""
        texts = [(row.ids, row.text) for row in rows]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        batch = net.batch(list(places))
        batch.select([places[text] for text in texts])
        for row in rows:
            row.seen = len(row.text)
        return cls(rows, batch)

    def extend(self) -> None:
        """Read each row's next token."""
        self.batch.extend([row.unread[0] for row in self.rows])
        for row in self.rows:
            row.seen += 1

    def keep(self, ids: set[int]) -> None:
        """Keep the rows named by ``ids``."""
        places = [place for place, row in enumerate(self.rows) if row.id in ids]
        if len(places) < len(self.rows):
            self.rows = [self.rows[place] for place in places]
            if places:
                self.batch.select(places)

    def join(self, other: Cohort) -> None:
        """Take the rows of ``other`` in."""
        self.batch.join(other.batch)
        self.rows += other.rows


class Cohorts:
    """Runs rows of any model: one batch where keys and values can be padded, else one for each group of rows alike."""

    def __init__(self, net: Net | Pair) -> None:
        self._net, self._filling = net, False
        self._cohorts: list[Cohort] = []
        self.prefilled = 0

    @property
    def rows(self) -> list[Row]:
        """The rows that run."""
        return [row for cohort in self._cohorts for row in cohort.rows]

    @property
    def logits(self) -> torch.Tensor:
        """What each row's next token is chosen from."""
        return torch.cat([cohort.batch.logits for cohort in self._cohorts])

    def pick(self, waiting: Sequence[Row], free: int, room: int) -> list[Row]:
        """Which waiting rows to let in now."""
        running = self.rows
        # New rows come in crowds: reading one prompt at a time would hold up all that run for each of them.
        enough = free >= min(len(waiting), (free + len(running)) // 4)
        self._filling = bool(waiting) and free > 0 and (enough or self._filling)
        left = room - len(running) * max((row.size for row in running), default=0)
        if not self._filling or (running and left < waiting[0].size):
            return []
        group = together(waiting, rows=free, room=left, alike=self._net.alike)
        self._filling = len(group) < free
        return group

    def advance(self, group: Sequence[Row]) -> None:
        """Read the next token of each running row, and the texts of new rows."""
        for cohort in self._cohorts:
            cohort.extend()
        if group:
            self._enter(Cohort.read(self._net, group))
            self.prefilled += sum(map(len, {row.text for row in group}))

    def _enter(self, cohort: Cohort) -> None:
        if self._net.plain and self._cohorts:
            self._cohorts[0].join(cohort)
        else:
            self._cohorts.append(cohort)

    def score(self, quizzes: Sequence[Quiz]) -> list[Completion]:
        """Score the first quiz's answers: each of their beginnings is read as a text of its own."""
        quiz = quizzes[0]
        texts = [quiz.text, *(quiz.text + tail[: k + 1] for tail in quiz.tails for k in range(len(tail)))]
        pairs = [(quiz.text, text) for text in texts]
        groups = [pairs] if self._net.plain else [[pair] for pair in pairs]
        found = torch.cat([logarithms(self._net.batch(group).logits) for group in groups])
        self.prefilled += sum(map(len, texts))
        parts = torch.split(found[1:], [len(tail) for tail in quiz.tails]) if quiz.tails else ()
        return [quiz.completion(found[0], dict(zip(quiz.tails, parts, strict=True)))]

    def keep(self, rows: Iterable[Row]) -> None:
        """Let all other rows go."""
        ids = {row.id for row in rows}
        for cohort in self._cohorts:
            cohort.keep(ids)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
