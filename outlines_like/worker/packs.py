"""New tokens of many rows in one pass, laid end to end without padding.

What a row reads has up to two parts: a prefix that it shares with other rows and whose keys and values are held once,
and its own part. Attention over the two is computed apart and merged by the logarithms of the sums of exponentials, as
in Hydragen (Juravsky et al. 2024, "Hydragen: High-Throughput LLM Inference with Shared Prefixes", arXiv 2402.05099) and
cascade attention (Ye et al. 2024, "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding";
FlashInfer, arXiv 2501.01005). So all rows' queries read a prefix's keys in one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sampling import wide

Store = Callable[[int, Tensor, Tensor], None]  # takes a layer's number, keys and values of a pack's tokens


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens that were read, and what the model remembers of them: (layers, 2, heads, tokens, width)."""

    ids: tuple[int, ...]
    memory: Tensor


class Share(NamedTuple):
    """The first ``length`` tokens of a prefix."""

    prefix: Prefix | None = None
    length: int = 0

    def layer(self, number: int) -> Tensor:
        """Keys and values of one layer."""
        assert self.prefix is not None
        return self.prefix.memory[number, :, None, :, : self.length]


class Piece(NamedTuple):
    """New tokens of one row: its slot, how many tokens of its own stand there, and the prefix before them."""

    ids: tuple[int, ...]
    slot: int = 0
    start: int = 0
    share: Share = Share()


class Pack:
    """Pieces in one pass. The first ``going`` go on in the first slots, with one token each; others may go on with several.

    Logits are wanted after the last token of each piece, or after every token.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        store: Store,
        slots: Tensor | None = None,
        *,
        going: int = 0,
        device: Any = None,
        every: bool = False,
    ) -> None:
        self._store, self._slots, self._device = store, slots, device
        lengths = [len(piece.ids) for piece in pieces]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.ids = self._tensor([token for piece in pieces for token in piece.ids])
        self.cols = self._tensor([piece.start + k for piece in pieces for k in range(len(piece.ids))])
        self.rows = self._tensor([piece.slot for piece in pieces for _ in piece.ids])
        offsets = [piece.share.length for piece in pieces for _ in piece.ids]
        self.positions = self.cols + self._tensor(offsets)
        self.lasts = self._tensor(range(ends[-1]) if every else [end - 1 for end in ends])
        self._going = going
        self._spans = [(slice(end - n, end), piece) for n, end, piece in zip(lengths, ends, pieces, strict=True)][going:]
        self._starts = [piece.start for piece in pieces[: self._going]]
        self._shares = self._grouped(pieces, ends)
        self._mask: Tensor | None = None

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _grouped(self, pieces: Sequence[Piece], ends: Sequence[int]) -> list[tuple[Share, Tensor | slice]]:
        """Which tokens read which prefix."""
        groups: dict[tuple[int, int], tuple[Share, list[int]]] = {}
        for piece, end in zip(pieces, ends, strict=True):
            if piece.share.length:
                key = (id(piece.share.prefix), piece.share.length)
                groups.setdefault(key, (piece.share, []))[1].extend(range(end - len(piece.ids), end))
        whole = slice(None)
        return [(share, whole if len(at) == ends[-1] else self._tensor(at)) for share, at in groups.values()]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """What each token gathers: (tokens, heads, width). Keys and values are stored on the way."""
        self._store(layer, key, value)
        count = query.shape[1]
        found = query.new_empty(count, query.shape[0], value.shape[-1])
        weight = torch.empty(count, query.shape[0], dtype=wide(query.dtype), device=query.device)
        if self._going:
            self._decode(layer, query, scale, found, weight)
        for part, piece in self._spans:
            found[part], weight[part] = causal(query[:, part], key[:, part], value[:, part], scale)
            if piece.start:
                more, its = shared(query[:, part], self._own(layer, piece), scale)
                merge(found, weight, part, more, its)
                weight[part] = torch.logaddexp(weight[part], its)
        for share, those in self._shares:
            merge(found, weight, those, *shared(query[:, those], share.layer(layer), scale))
        return found

    def _own(self, layer: int, piece: Piece) -> Tensor:
        """Keys and values of a piece's own tokens before it."""
        assert self._slots is not None
        return self._slots[layer, :, piece.slot, None, :, : piece.start]

    def _decode(self, layer: int, query: Tensor, scale: float | None, found: Tensor, weight: Tensor) -> None:
        """One query a row, over the row's own slot."""
        assert self._slots is not None
        count, length = self._going, max(self._starts) + 1
        keys, values = self._slots[layer, :, :count, :, :length]
        heads = keys.shape[1]
        packed = query[:, :count].reshape(heads, -1, count, query.shape[-1]).permute(2, 0, 1, 3)
        if self._mask is None:
            self._mask = lower(self.cols[:count], length, query.dtype)
        out, its = attention(packed, keys, values, scale, mask=self._mask)
        found[:count], weight[:count] = out.flatten(1, 2), its.flatten(1, 2)


def merge(found: Tensor, weight: Tensor, those: Tensor | slice, more: Tensor, its: Tensor) -> None:
    """Add to what ``those`` tokens gathered what they gather elsewhere, each with the logarithm of its sum."""
    ratio = torch.sigmoid(weight[those] - its)[..., None]
    found[those] = torch.lerp(more, found[those], ratio.to(found.dtype))


def lower(lasts: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """A mask that lets each row see its first columns, up to ``lasts``."""
    seen = torch.arange(length, device=lasts.device) <= lasts[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=lasts.device).masked_fill_(~seen, float("-inf"))[:, None, None]


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of a row's new tokens among themselves."""
    out, weight = attention(query[None], key[None], value[None], scale, ordered=True)
    return out[0].transpose(0, 1), weight[0].transpose(0, 1)


def shared(query: Tensor, memory: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of many tokens over one prefix."""
    keys, values = memory
    heads, count = keys.shape[1], query.shape[1]
    packed = query.reshape(1, heads, -1, query.shape[-1])  # the queries that share a head's keys, as if of one row
    out, weight = attention(packed, keys, values, scale)
    return out.reshape(-1, count, out.shape[-1]).transpose(0, 1), weight.reshape(-1, count).transpose(0, 1)


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, mask: Tensor | None = None, ordered: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of exponentials that it was divided by. Queries may share keys."""
    if query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, weight = flash(query, key, value, 0.0, ordered, attn_mask=mask, scale=scale)
        return out, weight
    return spelled_out(query, key, value, scale, mask=mask, ordered=ordered)


def spelled_out(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, mask: Tensor | None, ordered: bool
) -> tuple[Tensor, Tensor]:
    """The same where there is no fused kernel that gives the logarithm too."""
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2)).to(wide(query.dtype)) * (scale or query.shape[-1] ** -0.5)
    if ordered:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores + mask
    weight = scores.logsumexp(-1)
    return (scores - weight[..., None]).exp().to(value.dtype) @ value, weight
