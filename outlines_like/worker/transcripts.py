"""From token ids to text as it grows: whole characters, stop strings, nothing that might be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 8  # tokens of the prompt that the first new token is decoded after: some decoders drop a leading space
BROKEN = "\ufffd"


class Detokenizer:
    """Text of new tokens, piece by piece; half a character waits for its other half."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._told = len(self._ids)
        self._before = self._decode(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def push(self, token: int) -> str:
        """What ``token`` adds."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(BROKEN) or len(text) <= len(self._before):
            return ""
        piece = text[len(self._before) :]
        self._ids = self._ids[self._told :]
        self._told, self._before = len(self._ids), self._decode(self._ids)
        return piece

    def rest(self) -> str:
        """What was held back and will not become whole."""
        return self._decode(self._ids)[len(self._before) :]


def found(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Where the earliest stop string begins.

    >>> found("one two", ["two", "e"])
    2
    """
    return min((at for stop in stops if (at := text.find(stop, start)) >= 0), default=None)


def firm(text: str, stops: Sequence[str]) -> int:
    """How much of ``text`` can't become part of a stop string any more.

    >>> firm("one tw", ["two"])
    4
    """
    starts = (
        len(text) - size
        for stop in stops
        for size in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:size])
    )
    return min(starts, default=len(text))


class Transcript:
    """A row's text so far.

    The rule for stop strings: of the text that would be written without any, the answer is what stands before the
    earliest one. So a stop that is whole waits while an earlier beginning may still become another.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer, self._stops = detokenizer, stops
        self._reach = max((len(stop) for stop in stops), default=1) - 1
        self._text = ""
        self._cut: int | None = None

    def push(self, token: int) -> None:
        """Add a token."""
        self._add(self._detokenizer.push(token))

    def _add(self, piece: str) -> None:
        start = max(0, len(self._text) - self._reach)
        self._text += piece
        cuts = (self._cut, found(self._text, self._stops, start))
        self._cut = min((cut for cut in cuts if cut is not None), default=None)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._cut is not None and firm(self._text, self._stops) >= self._cut

    @property
    def shown(self) -> str:
        """The text that can't change any more."""
        return self._text[: self._cut][: firm(self._text, self._stops)]

    def close(self) -> bool:
        """Add what was held back; whether there was a stop string after all."""
        self._add(self._detokenizer.rest())
        self._stops = ()
        return self._cut is not None
