"""What went wrong on a server, read into an error of ours. Pure: status, headers and body in, an error out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from ..errors import (
    AccessError,
    AuthenticationError,
    BadRequestError,
    ContentFilterError,
    ContextLengthError,
    MalformedError,
    ModelError,
    NotFoundError,
    QuotaError,
    RateLimitError,
    ServerError,
    TimedOutError,
)

Headers = Mapping[str, str]
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
PATIENCE = 120.0  # seconds: who asks for a longer wait is not waited for
NONSENSE = 366 * 86400.0  # seconds: a wait beyond this was never meant
DEPTH = 5  # how deep servers bury their errors

BY_STATUS: dict[int, type[ModelError]] = {
    401: AuthenticationError,
    402: QuotaError,
    403: AccessError,
    404: NotFoundError,
    408: TimedOutError,
    409: ServerError,
    425: ServerError,
    429: RateLimitError,
}
LEADS: dict[type[ModelError], str] = {
    BadRequestError: "the server refused the request",
    ContextLengthError: "the request is longer than the model can read",
    ContentFilterError: "the server's content_filter withheld the answer",
    AuthenticationError: "the server refused the key",
    AccessError: "the server denied access",
    NotFoundError: "there is no such model or address",
    QuotaError: "the account's quota is used up",
    RateLimitError: "the server's rate limit was reached",
    ServerError: "the server failed",
    TimedOutError: "the server gave up waiting",
    MalformedError: "the server's answer can't be read",
}
BY_WORD: list[tuple[str, int]] = [
    ("insufficient_quota", 429),
    ("rate_limit", 429),
    ("overloaded", 503),
    ("invalid_request", 400),
    ("authentication", 401),
    ("permission", 403),
    ("not_found", 404),
    ("timeout", 504),
]
QUOTA = (
    "insufficient_quota",
    "billing_hard_limit",
    "insufficient_credits",
    "insufficient_balance",
    "credit balance is too low",
)
TOO_LONG = re.compile(
    r"context[ _](length|window|size)|maximum (sequence|model) length|max_model_len|prompt is too long|too many (input )?tokens"
    r"|(input|prompt)[^.]{0,40}(exceeds?|longer than)[^.]{0,40}(tokens|limit|maximum)|string_above_max_length"
)
FILTERED = ("content_filter", "content_policy", "responsibleaipolicy")
DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")


def unmasked(text: str) -> str:
    """The text as it is: for servers that were told no secret."""
    return text


Mask = Callable[[str], str]


def excerpt(text: str, mask: Mask = unmasked) -> str:
    """At most 200 characters on one line, without secrets or control characters.

    >>> excerpt("<html>\\r\\n<b>Bad\\x1b[31m Gateway</b>")
    '<html> <b>Bad [31m Gateway</b>'
    """
    # A page of HTML or a whole prompt may come back: its beginning tells who said it.
    words = "".join(c if c.isprintable() else " " for c in mask(text)).split()
    return " ".join(words)[:200]


class Said(NamedTuple):
    """A server's words on what is wrong."""

    text: str = ""
    code: str = ""
    kind: str = ""
    param: str = ""

    @property
    def words(self) -> str:
        """All of them, for recognizing."""
        return " ".join((self.text[:2000], *self[1:])).lower()


def said(body: bytes) -> Said:
    """What the body of a refusal says, in whichever of the common shapes."""
    try:
        return said_in(msgspec.json.decode(body))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Said(body.decode("utf-8", "replace"))


def said_in(value: Any, depth: int = DEPTH) -> Said:
    """What a decoded error says.

    >>> said_in({"error": {"message": "no", "code": 429}})
    Said(text='no', code='429', kind='', param='')
    """
    match value if depth else str(value):
        case str(text):
            return Said(text)
        case [inner, *_] | {"error": (dict() | str()) as inner} | {"errors": [inner, *_]} | {"detail": inner}:
            return _named(said_in(inner, depth - 1), value)
        case {"loc": [*_, field], "msg": str(text)}:
            return _named(Said(f"{field}: {text}", param=str(field)), value)
        case {"message": str(text)}:
            return _named(Said(text), value)
        case {"message": inner} if inner:
            return _named(said_in(inner, depth - 1), value)
    return _named(Said(msgspec.json.encode(value).decode() if value else ""), value)


def _named(said: Said, value: Any) -> Said:
    """``said`` with the names that stand beside it, where it has none of its own."""
    if not isinstance(value, dict):
        return said
    names = {"code": value.get("code"), "kind": value.get("type"), "param": value.get("param")}
    known = {name: str(word) for name, word in names.items() if isinstance(word, str | int) and not getattr(said, name)}
    return said._replace(**known)


def kind_of(status: int, said: Said) -> type[ModelError]:
    """Which error this is."""
    words = said.words
    if status in (400, 402, 403, 429) and any(sign in words for sign in QUOTA):
        return QuotaError
    if status in (400, 413, 422) and TOO_LONG.search(words):
        return ContextLengthError
    if status in (400, 403) and any(sign in words for sign in FILTERED):
        return ContentFilterError
    return BY_STATUS.get(status) or (ServerError if status >= 500 else BadRequestError if status >= 400 else MalformedError)


def refusal(status: int, headers: Headers, said: Said, *, mask: Mask = unmasked, now: float) -> ModelError:
    """The error for an answer that is none. ``now`` is the time by the clock, for dates in headers."""
    kind, wait = kind_of(status, said), wait_asked(headers, now)
    late = wait is not None and wait > PATIENCE
    again = status in AGAIN and kind is not QuotaError
    advised = {"true": True, "false": False}.get(headers.get("x-should-retry", "").strip().lower(), again)
    return kind(
        f"{LEADS[kind]}{_details(said, headers, mask)}",
        status=status,
        request_id=request_id(headers, mask),
        retry_after=wait,
        retryable=advised and not late,
        hint=_return_at(wait, now) if wait is not None and late else None,
    )


def _details(said: Said, headers: Headers, mask: Mask) -> str:
    words, content = excerpt(said.text, mask), headers.get("content-type", "")
    source = f" [{excerpt(content, mask)}]" if content.startswith("text/") and "event-stream" not in content else ""
    return f": {words}{source}" if words else f" and gave no reason{source}"


def _return_at(wait: float, now: float) -> str:
    moment = datetime.fromtimestamp(now + wait, UTC)
    return f"The server asks to come back in {wait:.0f} s, at {moment:%Y-%m-%d %H:%M:%S} UTC."


def inner_refusal(answer: Any, headers: Headers, *, mask: Mask = unmasked, now: float) -> ModelError:
    """The error for an error object that came with status 200, or in mid-stream."""
    words = said_in(answer)
    return refusal(inner_status(words), headers, words, mask=mask, now=now)


def inner_status(said: Said) -> int:
    """The status that an error object stands for.

    >>> inner_status(Said(code="429")), inner_status(Said(kind="overloaded_error")), inner_status(Said("oops"))
    (429, 503, 500)
    """
    if re.fullmatch(r"[45]\d\d", said.code):
        return int(said.code)
    names = f"{said.code} {said.kind}".lower()
    return next((status for word, status in BY_WORD if word in names), 500)


def request_id(headers: Headers, mask: Mask = unmasked) -> str | None:
    """The name under which the server's people can find the request."""
    names = ("x-request-id", "request-id", "apim-request-id", "cf-ray")
    return next((excerpt(headers[name], mask)[:100] for name in names if headers.get(name)), None)


def wait_asked(headers: Headers, now: float) -> float | None:
    """How many seconds the server asks us to wait; None if it does not say, or says nonsense."""
    waits = _waits(headers, now)
    return next((wait for wait in waits if wait is not None and 0 <= wait < NONSENSE), None)


def _waits(headers: Headers, now: float) -> Iterator[float | None]:
    milliseconds = _number(headers.get("retry-after-ms", ""))
    yield None if milliseconds is None else milliseconds / 1000
    yield _number(headers.get("retry-after", ""))
    yield _until(headers.get("retry-after", ""), now)
    yield max((wait for wait in _resets(headers, now) if wait is not None), default=None)


def _resets(headers: Headers, now: float) -> Iterator[float | None]:
    """When limits that are used up now are lifted."""
    for name in headers:
        low = name.lower()
        if "ratelimit" in low and "reset" in low and headers.get(low.replace("reset", "remaining"), "").strip() == "0":
            yield _duration(headers[name]) if _until(headers[name], now) is None else _until(headers[name], now)


class Allowance(NamedTuple):
    """What a server says of one of its limits: how many in all, how many left, and the seconds until all are back.

    Those seconds are read only when most of the limit is used up: they stand in the headers of every answer.
    """

    limit: float
    left: float
    reset: float

    @property
    def ample(self) -> bool:
        """Whether at least half is left."""
        return 2 * self.left >= self.limit


def allowances(headers: Headers, now: float) -> dict[str, Allowance]:
    """What headers say of the limits on "requests" and "tokens"."""
    told = {name: _allowance(headers, name, now) for name in ("requests", "tokens") if f"x-ratelimit-limit-{name}" in headers}
    return {name: allowance for name, allowance in told.items() if allowance is not None}


def _allowance(headers: Headers, name: str, now: float) -> Allowance | None:
    limit, left = _number(headers[f"x-ratelimit-limit-{name}"]), _number(headers.get(f"x-ratelimit-remaining-{name}", ""))
    if limit is None or left is None or not 0 <= left <= limit or limit < 1:
        return None
    told = Allowance(limit, left, 0.0)
    if told.ample:
        return told
    text = headers.get(f"x-ratelimit-reset-{name}", "")
    reset = _duration(text) if (until := _until(text, now)) is None else until
    return told._replace(reset=reset) if reset is not None and 0 < reset < NONSENSE else None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


def _until(text: str, now: float) -> float | None:
    """The seconds up to a date, by HTTP or by ISO; 0 if it has passed."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return max(0.0, read(text).timestamp() - now)
        except (ValueError, TypeError, OverflowError, IndexError, OSError):
            continue
    return None


def _duration(text: str) -> float | None:
    """Seconds in a Go-like duration.

    >>> _duration("6m0.5s"), _duration("20ms"), _duration("soon")
    (360.5, 0.02, None)
    """
    found = DURATION.fullmatch(text.strip())
    if not found or not text.strip():
        return _number(text)
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000
