"""What rows' settings make of their logits before a token is chosen, and how likely that token was without them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .constraints import forbidding
from .rows import Row
from .sampling import wide


def shaped(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits after biases, then penalties, then constraints; the same tensor where no row has any."""
    if not any(row.shaped for row in rows):
        return logits
    changed = logits.to("cpu", wide(logits.dtype), copy=True)
    for line, row in zip(changed, rows, strict=True):
        if row.bias:
            line[list(row.bias)] += torch.tensor(list(row.bias.values()), dtype=line.dtype)
        if row.taste.penalty != 1:
            penalize(line, torch.tensor(row.text), row.taste.penalty)
    return constrained(changed, rows)


def penalize(line: Tensor, tokens: Tensor, penalty: float) -> None:
    """Make tokens that were read or written before less likely, as Keskar et al. 2019 (arXiv 1909.05858) do."""
    scores = line[tokens]
    line[tokens] = torch.where(scores < 0, scores * penalty, scores / penalty)


def constrained(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits that leave only what constraints allow."""
    held = [place for place, row in enumerate(rows) if row.constraint is not None and not row.due]
    if held:
        logits[held] += forbidding([rows[place].mask for place in held], logits.shape[-1], logits.dtype)
    return logits


def chances(logits: Tensor, rows: Sequence[Row], tokens: Sequence[int]) -> list[float | None]:
    """The log-probability of each row's token as the model itself has it, where the row wants to know."""
    found: list[float | None] = [None] * len(rows)
    asked = [place for place, row in enumerate(rows) if row.chances is not None]
    if asked:
        logs = logits[asked].to("cpu", wide(logits.dtype)).log_softmax(-1)
        for line, place in zip(logs, asked, strict=True):
            found[place] = float(line[tokens[place]])
    return found
