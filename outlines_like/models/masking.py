"""Keeping secrets out of sight."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any, NoReturn
from urllib.parse import quote, quote_plus

from ..events import Failure

SHORTEST = 6  # a shorter word is no secret, and masking it would garble honest text


class Secret:
    """A text that is never shown, not even by a debugger that prints local variables."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself. Pass it on at once; keep it in no variable."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not written to disk or sent to other processes")


class Mask:
    """Replaces every spelling of some secrets by ``***``."""

    __slots__ = ("_spellings",)

    def __init__(self, secrets: Iterable[Secret]) -> None:
        words = {spelling for secret in secrets for spelling in _spellings(secret.reveal())}
        self._spellings = [Secret(word) for word in sorted(words, key=len, reverse=True)]

    def __call__(self, text: str) -> str:
        for spelling in self._spellings:
            text = text.replace(spelling.reveal(), "***")
        return text


def _spellings(word: str) -> set[str]:
    """The word as it may be echoed: plain, in an address, in JSON, in base64."""
    if len(word) < SHORTEST:
        return set()
    coded = {base64.b64encode(word.encode("utf-8")).decode().rstrip("=")}
    return coded | {word, quote(word), quote(word, safe=""), quote_plus(word), json.dumps(word)[1:-1]}


def bare(value: Any) -> Any:
    """The same value; an error without the frames it came through, as they hold what was sent and received."""
    if isinstance(value, Failure):
        value.error.__traceback__ = value.error.__context__ = value.error.__cause__ = None
    return value
