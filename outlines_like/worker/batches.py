"""Rows decoded together: keys and values of unequal length in one left-padded batch.

Only public methods of transformers' caches are used, so any decoder model works. Rows of a batch do not see each
other: padding is masked, and positions are counted without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .rows import Row

Text = tuple[tuple[int, ...], tuple[int, ...]]  # a prompt, and the prompt with what was written after it
CACHE_NAMES = ("cache", "past_key_values")  # renamed in transformers 5


def takes(model: Any) -> frozenset[str]:
    """The names of what a model is given."""
    return frozenset(inspect.signature(model.forward).parameters)


def named_cache(model: Any) -> str:
    """Under what name a model takes its memory."""
    name = next((name for name in CACHE_NAMES if name in takes(model)), "")
    if not name:
        raise ValueError(f"{type(model).__name__} keeps its memory in a way of its own, which is not known here")
    return name


class Net:
    """A decoder model: tokens in, logits of what follows out."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = model.device
        self._takes = takes(model)
        self._cache_name = named_cache(model)
        # Only where every layer keeps all keys and values can batches be padded and joined.
        self.plain = all(type(layer) is DynamicLayer for layer in self.memory().layers)

    def alike(self, row: Row) -> int:
        """What rows that are read together have in common: their length, where it can't be padded."""
        return 0 if self.plain else len(row.text)

    def batch(self, texts: Sequence[Text]) -> Batch:
        """Read texts."""
        return Batch.read(self, [text for _, text in texts])

    def memory(self) -> Any:
        """An empty cache of the kinds of layers that the model has."""
        return DynamicCache(config=self.model.config)

    def read(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits after the last column of ``ids``; ``cache`` grows by it."""
        given = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": True,
            "logits_to_keep": 1,
            self._cache_name: cache,
        }
        out = self.model(**{name: value for name, value in given.items() if name in self._takes})
        logits: torch.Tensor = out.logits[:, -1]
        return logits


class Batch:
    """What the model remembers of some rows, and the logits of the token that each needs next."""

    def __init__(self, net: Net, cache: Any, mask: torch.Tensor, logits: torch.Tensor) -> None:
        self._net, self._cache, self._mask, self.logits = net, cache, mask, logits

    @classmethod
    def read(cls, net: Net, prompts: Sequence[Sequence[int]]) -> Self:
        """Run the model over prompts."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=net.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=net.device)
        cache = net.memory()
        return cls(net, cache, mask, net.read(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), cache))

    @property
    def layers(self) -> list[Any]:
        """The layers of the cache that hold keys and values."""
        return [layer for layer in self._cache.layers if getattr(layer, "keys", None) is not None]

    @property
    def weight(self) -> int:
        """Bytes that the keys and values of one token take."""
        return int(sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)) // self._mask.numel()

    def extend(self, tokens: Sequence[int]) -> None:
        """Give each row its next token and get the logits after it."""
        positions = self._mask.sum(1, keepdim=True)
        self._mask = pad(self._mask, (0, 1), value=1)
        ids = torch.tensor(tokens, device=self._net.device)[:, None]
        self.logits = self._net.read(ids, self._mask, positions, self._cache)

    def select(self, rows: Sequence[int]) -> None:
        """Keep ``rows``, in that order; a row may be taken several times."""
        chosen = torch.tensor(rows, device=self._net.device)
        self._cache.reorder_cache(chosen)
        self._mask, self.logits = self._mask[chosen], self.logits[chosen]
        if self._net.plain:
            self._fit(int(self._mask.sum(1).max()))

    def join(self, other: Batch) -> None:
        """Take the rows of ``other`` in, after these."""
        longest = max(self._mask.shape[1], other._mask.shape[1])
        self._fit(longest)
        other._fit(longest)
        pairs = zip(self._cache.layers, other._cache.layers, strict=True)
        joined = [(torch.cat([a.keys, b.keys]), torch.cat([a.values, b.values])) for a, b in pairs]
        self._cache = self._filled(joined)
        self._mask = torch.cat([self._mask, other._mask])
        self.logits = torch.cat([self.logits, other.logits])

    def _fit(self, length: int) -> None:
        """Add or take padding on the left."""
        more = length - self._mask.shape[1]
        if more:
            self._mask = pad(self._mask, (more, 0))
            sides = (0, 0, more, 0)
            self._cache = self._filled([(pad(layer.keys, sides), pad(layer.values, sides)) for layer in self._cache.layers])

    def _filled(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        cache = self._net.memory()
        for number, (keys, values) in enumerate(layers):
            cache.update(keys, values, number)
        return cache
