"""Encoder-decoder models (T5, BART): one half reads the prompt, the other writes the answer.

Rows that have written equally much run in one batch. Prompts are padded on the right, which their encoders expect;
answers never are, as they grow together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from .batches import Text, named_cache
from .rows import Row


class Pair:
    """An encoder-decoder model. Answers begin after the tokens ``starts``."""

    plain = False

    def __init__(self, model: Any, starts: tuple[int, ...]) -> None:
        self.model, self.starts, self.device = model, starts, model.device
        self._cache_name = named_cache(model)

    def alike(self, row: Row) -> int:
        """What rows that are read together have in common: how much they have written."""
        return len(row.tokens)

    def batch(self, texts: Sequence[Text]) -> Answers:
        """Read prompts, and what has been written after them."""
        longest = max(len(prompt) for prompt, _ in texts)
        ids = self._tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt, _ in texts])
        mask = self._tensor([[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt, _ in texts])
        hidden = self.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        answers = Answers(self, hidden, mask)
        answers.read(self._tensor([[*self.starts, *text[len(prompt) :]] for prompt, text in texts]))
        return answers

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)

    def write(self, ids: Tensor, hidden: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits after the last column of ``ids``; ``cache`` grows by it."""
        given = {self._cache_name: cache, "encoder_outputs": BaseModelOutput(last_hidden_state=hidden)}
        logits: Tensor = self.model(decoder_input_ids=ids, attention_mask=mask, use_cache=True, **given).logits
        return logits[:, -1]


class Answers:
    """Answers that are written together, and the logits of the token that each needs next."""

    def __init__(self, pair: Pair, hidden: Tensor, mask: Tensor) -> None:
        self._pair, self._hidden, self._mask = pair, hidden, mask
        self._cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.logits = torch.empty(0)

    @property
    def weight(self) -> int:
        """Bytes that a token takes."""
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.cross_attention_cache.layers)
        return int(held) // self._mask.numel()

    def read(self, ids: Tensor) -> None:
        """Go on with ``ids``, a line for each answer."""
        self.logits = self._pair.write(ids, self._hidden, self._mask, self._cache)

    def extend(self, tokens: Sequence[int]) -> None:
        """Give each answer its next token and get the logits after it."""
        self.read(torch.tensor(tokens, device=self._pair.device)[:, None])

    def select(self, rows: Sequence[int]) -> None:
        """Keep ``rows``, in that order; a row may be taken several times."""
        chosen = torch.tensor(rows, device=self._pair.device)
        self._cache.reorder_cache(chosen)
        self._hidden, self._mask, self.logits = self._hidden[chosen], self._mask[chosen], self.logits[chosen]
