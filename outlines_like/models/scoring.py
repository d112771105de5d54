"""How likely given answers are: a target that scores options instead of writing text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import Any

from ..arrays import Call
from ..events import Bursts, Elementwise, Layer, stack
from ..requests import Completion, Request, Terms
from ..signatures import parse
from ..targets import Given, Plan
from .parameters import texts

Draws = Callable[[Any, dict[str, Any], int, Terms, Counter[str]], list[Any]]
FORM = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("prompt", "options")])


@dataclass(frozen=True)
class Scoring:
    """Gives the log-probabilities of options after a prompt."""

    ask: Elementwise
    draws: Draws
    look: Callable[[Sequence[Request]], Plan]
    concurrency: int | None = None
    signature = parse("prompt:(), options:(m) -> (m)")
    __signature__ = FORM

    def prepare(self, calls: Sequence[Call], samples: int | None, terms: Terms) -> list[Any]:
        """One row for each prompt. Scores are no draws, so there are no samples of them."""
        if samples is not None:
            raise TypeError("scores are computed, not drawn: samples= makes no sense here")
        return [self._row(terms, *call.args, **call.kwargs) for call in calls]

    def _row(self, terms: Terms, prompt: Any, options: Iterable[Any]) -> Any:
        params = {"options": texts("options", list(options)), "temperature": 0}
        (row,) = self.draws(prompt, params, 1, terms, Counter())
        return row if params["options"] or isinstance(row, Given) else Given([])

    def run(self, rows: Sequence[Request], /) -> Bursts:
        """Score all rows."""
        return self.ask(rows)

    def preview(self, rows: Sequence[Request]) -> Plan:
        """What that would do."""
        return self.look(rows)

    def layered(self, *layers: Layer) -> Scoring:
        """The same with layers round it."""
        return replace(self, ask=stack(self.ask, *layers))

    def bounded(self, concurrency: int) -> Scoring:
        """The same: the model knows best how many it reads together."""
        return self

    def bound(self, owner: object) -> Scoring:
        """The same: this is no method."""
        return self


def numbers(completion: Completion) -> list[float]:
    """The scores of a completion."""
    return list(completion.scores)
