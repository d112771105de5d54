"""One row under way: what it asked, what it has written, and why it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ..errors import BadRequestError, ContextLengthError
from ..requests import Completion, Usage
from .constraints import FORMS, Constraint, Grammars
from .prompting import Reader
from .sampling import Draw, Taste
from .transcripts import Detokenizer, Transcript
from .wire import Ask

MAX_TOKENS = 256  # new tokens where the user set no limit
SETTINGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "seed",
    "logprobs",
)
KNOWN = frozenset({*SETTINGS, *FORMS})


@dataclass(frozen=True, slots=True)
class Habits:
    """What a checkpoint says of itself: how far it can read, which tokens end its turn, how it likes to be sampled.

    ``starts`` are the tokens that an answer goes on from where it does not go on from the prompt (encoder-decoder models).
    """

    context: int
    ends: frozenset[int]
    taste: Taste
    starts: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Row:
    """A row of a running batch."""

    id: int
    ids: tuple[int, ...]
    limit: int
    ends: frozenset[int]
    taste: Taste
    stream: bytes
    transcript: Transcript
    live: bool
    call: int = 0
    constraint: Constraint | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    chances: list[tuple[int, float]] | None = None
    due: list[int] = field(default_factory=list)
    ongoing: bool = False
    tokens: list[int] = field(default_factory=list)
    seen: int = 0
    mask: bytes = b""
    finish: str | None = None
    fault: str = ""
    told: str = ""

    @property
    def text(self) -> tuple[int, ...]:
        """All that the model has to have read before the next token."""
        return self.ids + tuple(self.tokens)

    @property
    def unread(self) -> tuple[int, ...]:
        """The end of that, as far as the model has not ``seen`` it."""
        after = self.seen - len(self.ids)
        return tuple(self.tokens[after:]) if after >= 0 else self.text[self.seen :]

    @property
    def size(self) -> int:
        """Tokens it may come to hold."""
        return len(self.ids) + self.limit

    @property
    def draw(self) -> Draw:
        """What decides its next token."""
        return Draw(self.taste, self.stream, len(self.tokens))

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self.finish or self.fault)

    @property
    def shaped(self) -> bool:
        """Whether its logits are changed before a token is chosen."""
        return self.constraint is not None or bool(self.bias) or self.taste.penalty != 1

    def push(self, token: int, chance: float | None = None) -> None:
        """Add a token that was chosen, with its log-probability if that is wanted, and end where it ends.

        What a constraint forces is added too. Where log-probabilities are wanted it is ``due`` token by token.
        """
        if self.chances is not None and chance is not None and token not in self.ends:
            self.chances.append((self.transcript.length, chance))
        self._add(token)
        self.force()

    def force(self) -> None:
        """Add what can't but follow."""
        if self.constraint is None or self.due or self.finish:
            return
        self.due = self.constraint.forced()
        while self.due and self.chances is None and not self.finish:
            self._add(self.due.pop(0))
        if not self.due and not self.finish:
            self.mask = self.constraint.mask()
            self.fault = self.constraint.fault()

    def _add(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.ends:
            return self.close("stop")
        self.transcript.push(token)
        if self.constraint is not None:
            self.constraint.push(token)
        if self.transcript.stopped or (self.constraint is not None and self.constraint.complete):
            self.close("stop")
        elif len(self.tokens) >= self.limit:
            self.close("length")

    def close(self, reason: str) -> None:
        """End here."""
        self.finish = "stop" if self.transcript.close() else reason

    def news(self) -> Completion | None:
        """What its reader should hear now, if anything."""
        shown = self.transcript.shown
        if self.fault or (not self.finish and (not self.live or shown == self.told)):
            return None
        self.told = shown
        return Completion(shown, self.finish, Usage(len(self.ids), len(self.tokens)), logprobs=self._logprobs(len(shown)))

    def _logprobs(self, length: int) -> tuple[float, ...] | None:
        """The log-probabilities of the tokens that begin in the answer."""
        return None if self.chances is None else tuple(chance for begin, chance in self.chances if begin < length)


def open_row(ask: Ask, reader: Reader, tokenizer: Any, habits: Habits, grammars: Grammars) -> Row:
    """The row that answers ``ask``; one of our errors where it can't be answered."""
    ids, params = tuple(reader.ids(ask.prompt)), ask.params
    row = Row(
        id=ask.id,
        ids=ids,
        limit=limit(len(ids), params.get("max_tokens"), habits),
        ends=habits.ends,
        taste=taste(params, habits.taste),
        stream=blake2b(ask.key.encode(), digest_size=32).digest(),
        transcript=Transcript(Detokenizer(tokenizer, habits.starts or ids), params.get("stop", ())),
        live=ask.live,
        call=ask.call,
        constraint=grammars.open(params),
        bias=bias(params.get("logit_bias", {}), len(tokenizer)),
        chances=[] if params.get("logprobs") else None,
        ongoing=ask.ongoing,
    )
    if row.limit <= 0:
        row.close("length")
    row.force()
    return row


def limit(length: int, asked: int | None, habits: Habits) -> int:
    """How many new tokens a prompt of that length may get.

    >>> limit(1000, None, Habits(1024, frozenset(), Taste()))
    24
    """
    context = habits.context
    if length > context or (length == context and not habits.starts):
        raise ContextLengthError(f"the prompt has {length} tokens and the model reads at most {context}, with its answer")
    return min(MAX_TOKENS if asked is None else asked, context - (len(habits.starts) or length))


def taste(params: Mapping[str, Any], habit: Taste) -> Taste:
    """What the user set, and the checkpoint's habit for the rest."""
    unknown = sorted(params.keys() - KNOWN)
    if unknown:
        raise BadRequestError(f"a local model does not know {', '.join(unknown)}; it knows {', '.join(sorted(KNOWN))}")
    asked = Taste(
        params.get("temperature", habit.temperature),
        params.get("top_k", habit.top_k),
        params.get("top_p", habit.top_p),
        params.get("min_p", habit.min_p),
        params.get("repetition_penalty", habit.penalty),
    )
    if asked.temperature < 0 or not 0 <= asked.top_p <= 1 or not 0 <= asked.min_p <= 1 or asked.penalty <= 0:
        raise BadRequestError(f"a setting is out of range: {asked}")
    return asked


def bias(given: Mapping[str, float], size: int) -> dict[int, float]:
    """What is added to single tokens' logits, by token.

    >>> bias({"7": -100}, 10)
    {7: -100}
    """
    found = {int(token): value for token, value in given.items()}
    if strange := [token for token in found if not 0 <= token < size]:
        raise BadRequestError(f"logit_bias names token {strange[0]}, but this model's tokens are 0 to {size - 1}")
    return found
