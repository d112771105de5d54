"""Many answers to one question, and what they say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from math import prod
from typing import Any, NamedTuple

from .arrays import cells, unflatten
from .calling import Ends, Index
from .events import Failure, Snapshot
from .streaming import Lists, Stream, curried
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


@curried
def until_decided(stream: Stream[Any], parse: Callable[[Any], Any] | None = None) -> Stream[Snapshot[Any]]:
    """End the samples of a row once no more of them can change its vote: the calls behind the others are cancelled.

    ``parse`` makes of an answer what is voted for; None does not vote. What was cancelled is None in a collected array.

    >>> import outlines_like as ol
    >>> votes = ol.models.fake(concurrency=1).stream("18?", samples=5) | ol.until_decided | ol.collect
    >>> ol.vote(votes).answer
    '18?'
    """
    if not stream.work.shape:
        raise ValueError("until_decided takes a stream of samples, which are the last axis of its call; pass samples=")

    async def decided(part: Stream[Any], ends: Ends) -> Lists[Snapshot[Any]]:
        polls: dict[Index, Poll] = {}
        async with part.bursts() as bursts:
            async for burst in bursts:
                open = [snapshot for snapshot in burst if not poll_of(polls, snapshot, part).over]
                yield open
                for index, value, done in open:
                    poll = polls[index[:-1]]
                    if done and poll.count(parse(value) if parse and not isinstance(value, Failure) else value):
                        for k in range(poll.size):
                            ends.end((*index[:-1], k))

    return stream.cut(decided, ours=parse is None)


def poll_of(polls: dict[Index, Poll], snapshot: Snapshot[Any], stream: Stream[Any]) -> Poll:
    """The poll that a sample belongs to."""
    return polls.setdefault(snapshot.index[:-1], Poll(stream.work.shape[-1]))


class Poll:
    """A vote under way."""

    def __init__(self, size: int) -> None:
        self.size, self.left, self.over = size, size, False
        self.counts: Counter[Any] = Counter()

    def count(self, answer: Any) -> bool:
        """Count an answer; whether the vote is decided now and was not before."""
        self.left -= 1
        if not missing(answer) and not isinstance(answer, Failure | Exception):
            self.counts[ballot(answer)] += 1
        first, second = ([votes for _, votes in self.counts.most_common(2)] + [0, 0])[:2]
        decided = first - second > self.left and not self.over
        self.over |= decided
        return decided
