"""Choosing the next token of every row: each by its own settings and its own random stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

HEAD = 1024  # tokens looked at first when a nucleus is cut: sorting a whole vocabulary takes far longer


@dataclass(frozen=True, slots=True)
class Taste:
    """How a row's tokens are drawn. ``top_k`` 0 and ``top_p`` 1 mean off; ``temperature`` 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


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


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """The next token of each row."""
    tokens = logits.argmax(-1).tolist()
    warm = [row for row, draw in enumerate(draws) if draw.taste.temperature > 0]
    if warm:
        for row, token in zip(warm, sample(logits[warm], [draws[row] for row in warm]), strict=True):
            tokens[row] = token
    return [int(token) for token in tokens]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw a token for each row by inverting its cumulated probabilities at the row's uniform number."""
    # In float64 a row alone and a row in company differ by 1e-16, too little to move a draw.
    cumulated = probabilities(logits, [draw.taste for draw in draws]).cumsum(-1)
    point = _column(cumulated, [draw.uniform for draw in draws]) * cumulated[:, -1:]
    places: list[int] = torch.searchsorted(cumulated, point, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1).tolist()
    return places


def probabilities(logits: torch.Tensor, tastes: Sequence[Taste]) -> torch.Tensor:
    """What each row draws from, in float64: temperature first, then the best k, then the nucleus."""
    scores = logits.to("cpu", torch.float64)
    scores = (scores - scores.amax(-1, keepdim=True)) / _column(scores, [taste.temperature for taste in tastes])
    few = [row for row, taste in enumerate(tastes) if 0 < taste.top_k < scores.shape[-1]]
    if few:
        scores[few] = best(scores[few], [tastes[row].top_k for row in few])
    chances = scores.softmax(-1)
    cut = [row for row, taste in enumerate(tastes) if taste.top_p < 1]
    if cut:
        chances[cut] = nucleus(chances[cut], [tastes[row].top_p for row in cut])
    return chances


def best(scores: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Keep each row's ``counts`` highest scores (and what ties with the last of them)."""
    ordered = scores.topk(max(counts)).values
    floor = ordered.gather(-1, torch.tensor(counts)[:, None] - 1)
    return scores.masked_fill(scores < floor, float("-inf"))


def nucleus(chances: torch.Tensor, masses: Sequence[float]) -> torch.Tensor:
    """Keep each row's likeliest tokens that together reach its mass; the first always stays."""
    wanted = _column(chances, masses)
    ordered = chances.topk(min(HEAD, chances.shape[-1])).values
    if bool((ordered.sum(-1, keepdim=True) < wanted).any()):
        ordered = chances.sort(descending=True).values
    last = (ordered.cumsum(-1) < wanted).sum(-1, keepdim=True).clamp_(max=ordered.shape[-1] - 1)
    return chances.where(chances >= ordered.gather(-1, last), 0.0)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype)[:, None]
