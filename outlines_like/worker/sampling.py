"""Choosing the next token of every row: each by its own settings and its own random stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, shake_128

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256  # values of which the highest is looked for at once
PART = 16  # rows that are drawn for at once: what that takes stays in the processor's cache
TABLE = 2**20  # random integers of a table, several times a vocabulary
HEAD = 1024  # tokens looked at first when a nucleus is cut: sorting a whole vocabulary takes far longer


@dataclass(frozen=True, slots=True)
class Taste:
    """How a row's tokens are drawn. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``penalty`` 1 mean off; ``temperature`` 0 takes
    the likeliest."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides a row's next token beside its logits: a taste, the name of a random stream, a place in it."""

    taste: Taste
    stream: bytes
    step: int

    def places(self, span: int) -> tuple[int, int]:
        """Two numbers below ``span``. They depend on nothing but stream and step, so company never matters."""
        digest = blake2b(self.step.to_bytes(8, "big"), key=self.stream, digest_size=16).digest()
        return int.from_bytes(digest[:8], "big") % span, int.from_bytes(digest[8:], "big") % span


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The next token of each row."""
    logits = logits.to("cpu", wide(logits.dtype))
    tokens = [0] * len(draws)
    for pick, rows in ((likeliest, _rows(draws, warm=False)), (sample, _rows(draws, warm=True))):
        if rows:
            some = logits if len(rows) == len(draws) else logits[rows]
            for row, token in zip(rows, pick(some, [draws[row] for row in rows]), strict=True):
                tokens[row] = token
    return tokens


def _rows(draws: Sequence[Draw], *, warm: bool) -> list[int]:
    return [row for row, draw in enumerate(draws) if (draw.taste.temperature > 0) == warm]


def likeliest(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The best token for each row."""
    return highest(logits)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw a token for each row."""
    chances = probabilities(logits, [draw.taste for draw in draws])
    parts = range(0, len(draws), PART)
    return [token for k in parts for token in first(chances[k : k + PART], draws[k : k + PART])]


def first(chances: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Which token arrives first, where each comes after an exponential time with its chance as rate.

    As every token has a number of its own, a chance that is rounded otherwise tips a draw only where two arrive together.
    (Chances summed up and inverted are tipped a thousand times as often: all tokens that follow the rounded one move.)
    """
    lateness = numbers(draws, chances.shape[-1]).to(chances.dtype).mul_(-(2.0**-31)).log1p_().div_(chances)
    return highest(lateness)  # logarithms are negative here, so the highest one is the first to arrive


def highest(values: Tensor) -> list[int]:
    """Where each row is highest: first the block, then the place in it, which is twice as fast as looking for both at once."""
    blocks = pad(values, (0, -values.shape[-1] % BLOCK), value=float("-inf")).reshape(len(values), -1, BLOCK)
    block = blocks.amax(-1).argmax(-1)
    within = blocks[torch.arange(len(blocks)), block].argmax(-1)
    places: list[int] = (block * BLOCK + within).tolist()
    return places


def numbers(draws: Sequence[Draw], count: int) -> Tensor:
    """For each draw ``count`` random integers from 1 to 2 ** 31 - 1: pieces of the tables at the draw's places, combined."""
    left, right = tables()
    found = torch.empty(len(draws), count, dtype=torch.int32)
    for row, draw in zip(found, draws, strict=True):
        a, b = draw.places(TABLE - count)
        torch.bitwise_xor(left[a : a + count], right[b : b + count], out=row)
    return found


@cache
def tables() -> tuple[Tensor, Tensor]:
    """Random integers that are not negative, even ones and odd ones: the same everywhere and always."""
    digest = bytearray(shake_128(b"outlines_like").digest(8 * TABLE))
    left, right = torch.frombuffer(digest, dtype=torch.int32).bitwise_and_(2**31 - 2).chunk(2)
    return left, right + 1


def probabilities(logits: Tensor, tastes: Sequence[Taste]) -> Tensor:
    """What each row draws from: temperature first, then the best k, then the nucleus, then what is not far below the best."""
    scores = (logits - logits.amax(-1, keepdim=True)).div_(_column(logits, [taste.temperature for taste in tastes]))
    few = [row for row, taste in enumerate(tastes) if 0 < taste.top_k < scores.shape[-1]]
    if few:
        scores[few] = best(scores[few], [tastes[row].top_k for row in few])
    chances = scores.softmax(-1)
    cut = [row for row, taste in enumerate(tastes) if taste.top_p < 1]
    if cut:
        chances[cut] = nucleus(chances[cut], [tastes[row].top_p for row in cut])
    high = [row for row, taste in enumerate(tastes) if taste.min_p > 0]
    if high:
        chances[high] = likely(chances[high], [tastes[row].min_p for row in high])
    return chances


def best(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """Keep each row's ``counts`` highest scores (and what ties with the last of them)."""
    ordered = scores.topk(max(counts)).values
    floor = ordered.gather(-1, torch.tensor(counts)[:, None] - 1)
    return scores.masked_fill(scores < floor, float("-inf"))


def nucleus(chances: Tensor, masses: Sequence[float]) -> Tensor:
    """Keep each row's likeliest tokens that together reach its mass; the first always stays."""
    wanted = _column(chances, masses)
    ordered = chances.topk(min(HEAD, chances.shape[-1])).values
    if bool((ordered.sum(-1, keepdim=True) < wanted).any()):
        ordered = chances.sort(descending=True).values
    last = (ordered.cumsum(-1) < wanted).sum(-1, keepdim=True).clamp_(max=ordered.shape[-1] - 1)
    return chances.where(chances >= ordered.gather(-1, last), 0.0)


def likely(chances: Tensor, shares: Sequence[float]) -> Tensor:
    """Keep each row's tokens that have at least its share of the chance of the likeliest."""
    return chances.where(chances >= chances.amax(-1, keepdim=True) * _column(chances, shares), 0.0)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype)[:, None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
