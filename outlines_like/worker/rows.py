"""One row under way: what it asked, what it has written, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ..errors import BadRequestError, ContextLengthError
from ..requests import Completion, Usage
from .prompting import Reader
from .sampling import Draw, Taste
from .transcripts import Detokenizer, Transcript
from .wire import Ask

MAX_TOKENS = 256  # new tokens where the user set no limit
KNOWN = frozenset({"max_tokens", "temperature", "top_p", "top_k", "stop", "seed"})


@dataclass(frozen=True, slots=True)
class Habits:
    """What a checkpoint says of itself: how far it can read, which tokens end its turn, how it likes to be sampled."""

    context: int
    ends: frozenset[int]
    taste: Taste


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
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    told: str = ""

    @property
    def text(self) -> tuple[int, ...]:
        """All that the model has to have read before the next token."""
        return self.ids + tuple(self.tokens)

    @property
    def last(self) -> int:
        """The end of that."""
        return self.tokens[-1] if self.tokens else self.ids[-1]

    @property
    def size(self) -> int:
        """Tokens it may come to hold."""
        return len(self.ids) + self.limit

    @property
    def draw(self) -> Draw:
        """What decides its next token."""
        return Draw(self.taste, self.stream, len(self.tokens))

    def push(self, token: int) -> None:
        """Add a token, and end where it ends."""
        self.tokens.append(token)
        if token in self.ends:
            return self.close("stop")
        self.transcript.push(token)
        if self.transcript.stopped:
            self.close("stop")
        elif len(self.tokens) >= self.limit:
            self.close("length")

    def close(self, reason: str) -> None:
        """End here."""
        self.finish = "stop" if self.transcript.close() else reason

    def news(self) -> Completion | None:
        """What its reader should hear now, if anything."""
        shown = self.transcript.shown
        if not self.finish and (not self.live or shown == self.told):
            return None
        self.told = shown
        return Completion(shown, self.finish, Usage(len(self.ids), len(self.tokens)))


def open_row(ask: Ask, reader: Reader, tokenizer: Any, habits: Habits) -> Row:
    """The row that answers ``ask``; one of our errors where it can't be answered."""
    ids = tuple(reader.ids(ask.prompt))
    return Row(
        id=ask.id,
        ids=ids,
        limit=limit(len(ids), ask.params.get("max_tokens"), habits.context),
        ends=habits.ends,
        taste=taste(ask.params, habits.taste),
        stream=blake2b(ask.key.encode(), digest_size=32).digest(),
        transcript=Transcript(Detokenizer(tokenizer, ids), ask.params.get("stop", ())),
        live=ask.live,
        call=ask.call,
    )


def limit(length: int, asked: int | None, context: int) -> int:
    """How many new tokens a prompt of that length may get.

    >>> limit(1000, None, 1024)
    24
    """
    if length >= context:
        raise ContextLengthError(f"the prompt has {length} tokens and the model reads at most {context}, with its answer")
    return min(MAX_TOKENS if asked is None else asked, context - length)


def taste(params: dict[str, Any], habit: Taste) -> Taste:
    """What the user set, and the checkpoint's habit for the rest."""
    unknown = sorted(params.keys() - KNOWN)
    if unknown:
        raise BadRequestError(f"a local model does not know {', '.join(unknown)}; it knows {', '.join(sorted(KNOWN))}")
    asked = Taste(
        params.get("temperature", habit.temperature), params.get("top_k", habit.top_k), params.get("top_p", habit.top_p)
    )
    if asked.temperature < 0 or not 0 <= asked.top_p <= 1:
        raise BadRequestError(f"temperature {asked.temperature} or top_p {asked.top_p} is out of range")
    return asked
