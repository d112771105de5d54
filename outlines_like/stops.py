"""Stop strings, by one rule for every backend: an answer is the text before the earliest stop, without it."""

from __future__ import annotations

from collections.abc import Sequence


def met(text: str, stops: Sequence[str]) -> int | None:
    """Where the earliest stop begins in ``text``; None if there is none."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the earliest stop.

    >>> cut("one, two. three", [".", ","])
    'one'
    """
    return text[: met(text, stops)]


def held(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters may yet turn out to begin a stop.

    >>> held("Q: why?\\nQ", ["\\nQ:", "END"])
    2
    """
    return max((_begun(text, stop) for stop in stops), default=0)


def safe(text: str, stops: Sequence[str]) -> str:
    """As much of ``text`` as may be shown now, since nothing that follows can take it back.

    >>> safe("Q: why?\\nQ", ["\\nQ:"])
    'Q: why?'
    """
    return cut(text, stops)[: len(text) - held(text, stops)]


def ended(text: str, stops: Sequence[str]) -> bool:
    """Whether a stop was met, and none that begins before it may yet come.

    What follows can then change nothing: ``cut(text + more, stops) == cut(text, stops)``.

    >>> ended("abcd", ["bcd"]), ended("abcd", ["bcd", "abcde"])
    (True, False)
    """
    start = met(text, stops)
    return start is not None and start <= len(text) - held(text, stops)


def _begun(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that begins ``stop`` without finishing it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def sendable(stops: Sequence[str], most: int) -> list[str]:
    """At most ``most`` stops that a server may apply by itself without changing the answer.

    The others are cut by us. A server that stops at "b" has thrown away the end of "ab", so with more stops than it
    takes, only those are given that no other one can reach into.

    >>> sendable(["b", "ab", "x", "y", "z"], 4)
    ['ab', 'x', 'y', 'z']
    >>> sendable(["b", "ab"], 4)
    ['b', 'ab']
    """
    if len(stops) <= most:
        return list(stops)
    needed = [stop for stop in dict.fromkeys(stops) if not any(stop != other and stop.startswith(other) for other in stops)]
    return [stop for stop in needed if not any(_reaches(other, stop) for other in needed)][:most]


def _reaches(other: str, stop: str) -> bool:
    """Whether an occurrence of ``other`` can begin before one of ``stop`` and end inside or after it."""
    ends = [other[k:] for k in range(1, len(other))]
    return other != stop and any(stop.startswith(end) or end.startswith(stop) for end in ends)
