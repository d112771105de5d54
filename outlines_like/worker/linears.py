"""Weights reordered once, the way oneDNN wants them, instead of in every pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

WIDTH = 128  # rows of a product that the order is chosen for


class Reordered(Module):
    """A linear layer of a model on the CPU. Its own copy of the weights takes the place of those on disk."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), WIDTH)
        self._bias = linear.bias

    def forward(self, given: Tensor) -> Tensor:
        """Weights times ``given``."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(given, self._packed, self._bias, "none", [], "")
        return product


def reorder(model: Any) -> None:
    """Reorder the weights of all linear layers, where that pays: on the CPU, in bfloat16 or float32."""
    library: Any = torch.backends.mkldnn
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float32) or not library.is_available():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Linear:
                setattr(parent, name, Reordered(child))
