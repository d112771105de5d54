"""Weights reordered once, the way oneDNN wants them, instead of in every pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear, pad

WIDTH = 128  # rows of a product that the order is chosen for
FEW, STEP, MANY = 8, 32, 64  # a product has a multiple of so many rows, a multiple of more where it has many


class Reordered(Module):
    """A linear layer of a model on the CPU. Its own copy of the weights takes the place of those on disk."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), WIDTH)
        self._bias = linear.bias

    def forward(self, given: Tensor) -> Tensor:
        """Weights times ``given``."""
        count = given.shape[-2]
        more = filled(count) - count
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            pad(given, (0, 0, 0, more)) if more else given, self._packed, self._bias, "none", [], ""
        )
        return product[..., :count, :]


def filled(count: int) -> int:
    """How many rows to multiply for ``count``. oneDNN compiles and keeps a kernel for every number it meets, which costs
    milliseconds and half a megabyte each: so it meets few.

    >>> [filled(count) for count in (1, 8, 60, 70)]
    [8, 8, 64, 96]
    """
    step = FEW if count <= MANY else STEP
    return -(-count // step) * step


class Head(Module):
    """A model's last layer: as the model has it, or in float32 while it is ``exact``."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.exact = False
        self._linear = linear
        self._usual: Module = linear
        self._weight: Tensor | None = None

    def reorder(self) -> None:
        """Usually take reordered weights."""
        if type(self._linear) is Linear:
            self._usual = Reordered(self._linear)

    def forward(self, given: Tensor) -> Tensor:
        """Logits."""
        if not self.exact:
            logits: Tensor = self._usual(given)
            return logits
        bias = None if self._linear.bias is None else self._linear.bias.float()
        if self._weight is None:
            self._weight = self._linear.weight.detach().float()  # kept: it takes as long to make as to use
        return linear(given.float(), self._weight, bias)


def precise(model: Any) -> Head | None:
    """Give a model a last layer that can be exact, where that makes a difference."""
    if model.dtype not in (torch.bfloat16, torch.float16) or type(model.get_output_embeddings()) is not Linear:
        return None
    model.set_output_embeddings(head := Head(model.get_output_embeddings()))
    return head


def reorder(model: Any) -> None:
    """Reorder the weights of all linear layers, where that pays: on the CPU, in bfloat16 or float32."""
    library: Any = torch.backends.mkldnn
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float32) or not library.is_available():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Linear and not isinstance(parent, Head):
                setattr(parent, name, Reordered(child))
        if isinstance(parent, Head):
            parent.reorder()
