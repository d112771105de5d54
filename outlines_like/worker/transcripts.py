"""From token ids to text as it grows: whole characters, stop strings, nothing that might be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..stops import cut, ended, safe

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


class Transcript:
    """A row's text so far, cut at its first stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer, self._stops = detokenizer, stops
        self._text = ""

    def push(self, token: int) -> None:
        """Add a token."""
        self._text += self._detokenizer.push(token)

    @property
    def length(self) -> int:
        """Characters so far."""
        return len(self._text)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return ended(self._text, self._stops)

    @property
    def shown(self) -> str:
        """The text that nothing can change any more."""
        return safe(self._text, self._stops)

    def close(self) -> bool:
        """Add what was held back; whether there is a stop string after all."""
        whole = self._text + self._detokenizer.rest()
        self._text, self._stops = cut(whole, self._stops), ()
        return self._text != whole
