"""Find where a computation went bad: `first_bad_layer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, tensors_in
from multitudes.core.members import Members
from multitudes.core.settings import holding
from multitudes.core.trace import hooked

__all__ = ["first_bad_layer"]


@torch.no_grad()
def first_bad_layer(net: nn.Module, x: Input, compute: Callable[[], Any]) -> str:
    """Name the input, weight or layer's output that first holds NaN or infinity when `compute` runs `net` on `x`."""
    if any(_bad(tensor) for tensor in tensors_in(x)):
        return "the input holds NaN or infinite values"
    for name, parameter in net.named_parameters():
        if _bad(parameter):
            return f"the weights {name!r} hold NaN or infinite values"
    found: list[str] = []

    def look(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        if not found and isinstance(output, Tensor) and _bad(output):
            found.append(f"the output of layer {name!r} ({type(layer).__name__}) is the first to hold such values")

    layers = [name for name, layer in net.named_modules() if name and not any(True for _ in layer.children())]
    members = [net] if isinstance(net, Members) else []
    with holding(members, "_runner", "loop"), hooked(net, layers, look):  # hooks see layers that run one by one
        compute()
    return found[0] if found else "every layer's output is finite when it runs again, so the loss itself overflows"


def _bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())
