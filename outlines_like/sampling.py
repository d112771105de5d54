"""Many answers to one question, and what they say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from math import prod
from typing import Any, NamedTuple

from .arrays import cells, unflatten
from .targets import missing


class Vote(NamedTuple):
    """What most samples say: the answer, the share of the samples that gave it, and all counts.

    ``share`` is of the samples that gave an answer at all. Without any, ``answer`` is None and ``share`` 0.
    """

    answer: Any
    share: float
    counts: dict[Any, int]


def tally(samples: Iterable[Any]) -> Vote:
    """The vote of one row of samples. What is missing does not vote; among equals the answer seen first wins."""
    given = [sample for sample in samples if not missing(sample) and not isinstance(sample, Exception)]
    counts = Counter(map(ballot, given))
    if not counts:
        return Vote(None, 0.0, {})
    winner, votes = counts.most_common(1)[0]
    answer = next(sample for sample in given if ballot(sample) == winner)
    return Vote(answer, votes / counts.total(), dict(counts.most_common()))


def ballot(answer: Any) -> Any:
    """What an answer is counted under: itself, or its text where it is a list or dict."""
    return answer if isinstance(answer, Hashable) and not isinstance(answer, tuple) else repr(answer)


def vote(samples: Any) -> Any:
    """Majority votes over the last axis: a :class:`Vote` for each row, in the shape of the other axes.

    Source: X. Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", ICLR 2023,
    arXiv:2203.11171.

    >>> import outlines_like as ol
    >>> ol.vote(["18", "26", "18", None])
    Vote(answer='18', share=0.6666666666666666, counts={'18': 2, '26': 1})
    """
    array = cells(samples)
    if not array.ndim:
        raise ValueError(f"vote takes samples along the last axis, not the single value {samples!r:.60}")
    votes = [tally(row) for row in array.reshape(-1, array.shape[-1])] if array.size else []
    return unflatten(votes or [tally([])] * prod(array.shape[:-1]), array.shape[:-1])
