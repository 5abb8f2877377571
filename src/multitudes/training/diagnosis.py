"""Where a computation went bad: `first_bad_layer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, tensors_in
from multitudes.core.members import Members

__all__ = ["first_bad_layer"]


@torch.no_grad()
def first_bad_layer(net: nn.Module, x: Input, compute: Callable[[], Any]) -> str:
    """Which input, weight or layer's output first holds NaN or infinity when `compute` runs `net` on `x`; in words."""
    if any(_bad(tensor) for tensor in tensors_in(x)):
        return "the input holds NaN or infinite values"
    for name, parameter in net.named_parameters():
        if _bad(parameter):
            return f"the weights {name!r} hold NaN or infinite values"
    found: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_looped(net))  # left last, once no hook is there that keeps a runner from running
        for name, layer in net.named_modules():
            if name and not any(True for _ in layer.children()):
                stack.callback(layer.register_forward_hook(_watch(name, layer, found)).remove)
        compute()
    return found[0] if found else "every layer's output is finite when it runs again, so the loss itself overflows"


def _watch(name: str, layer: nn.Module, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not found and isinstance(output, Tensor) and _bad(output):
            found.append(f"the output of layer {name!r} ({type(layer).__name__}) is the first to hold such values")

    return hook


@contextmanager
def _looped(net: nn.Module) -> Iterator[None]:
    """Members run one after the other inside, through their layers, where hooks are heard."""
    if not isinstance(net, Members):
        yield
        return
    runner, net.runner = net.runner, "loop"
    try:
        yield
    finally:
        net.runner = runner


def _bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())
