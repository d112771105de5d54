"""Choosing the next token of every row: each by its own settings and its own random stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256  # tokens whose chances are summed up before a draw looks at single ones
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

    @property
    def uniform(self) -> float:
        """The stream's number at this place, in [0, 1). It depends on nothing else, so company never matters."""
        digest = blake2b(self.step.to_bytes(8, "big"), key=self.stream, digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53


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
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw a token for each row."""
    return invert(probabilities(logits, [draw.taste for draw in draws]), [draw.uniform for draw in draws])


def invert(chances: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Where each row's cumulated chances pass its uniform number: first the block, then the place in it.

    Exact, and several times faster than cumulating a whole vocabulary or ``torch.multinomial``.
    """
    blocks = pad(chances, (0, -chances.shape[-1] % BLOCK)).reshape(len(chances), -1, BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    point = _column(ends, uniforms) * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[-1] - 1)
    before = pad(ends, (1, 0)).gather(-1, block)
    inner = blocks[torch.arange(len(blocks)), block[:, 0]].double().cumsum(-1)
    # Sums by blocks and by single tokens round apart: the place is never past the block's last token with a chance.
    within = torch.minimum(point - before, inner[:, -1:] * (1 - 2**-52))
    places: list[int] = (block * BLOCK + torch.searchsorted(inner, within, right=True))[:, 0].tolist()
    return [min(place, chances.shape[-1] - 1) for place in places]


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
