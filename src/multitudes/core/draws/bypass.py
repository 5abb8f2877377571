"""Layers that draw weights, and networks that compute with their tensors instead of calling them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.core.calling import InputError
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.unreadable import ASKING

__all__ = ["check_called", "drawing_weights"]


def drawing_weights(network: nn.Module) -> dict[str, Stochastic]:
    """The layers that draw and have weights of their own, by name; of a network that is one itself, none."""
    if isinstance(network, Stochastic):
        return {}
    layers = {name: m for name, m in network.named_modules() if name and isinstance(m, Stochastic)}
    return {name: layer for name, layer in layers.items() if any(True for _ in layer.parameters())}


def check_called(network: nn.Module, run: Callable[[], Any]) -> None:
    """Run a network once; an error where it computes with the weight of a layer that draws past the layer's forward.

    The noise of that layer would be left out in silence.
    """
    layers = drawing_weights(network)
    watch = _Watch(layers)
    handles = []
    for layer in layers.values():
        handles.append(layer.register_forward_pre_hook(lambda *_: watch.enter()))
        handles.append(layer.register_forward_hook(lambda *_: watch.leave(), always_call=True))
    try:
        with torch.no_grad(), watch:
            run()
    finally:
        for handle in handles:
            handle.remove()


class _Watch(TorchFunctionMode):
    def __init__(self, layers: dict[str, Stochastic]) -> None:
        super().__init__()
        self.inside = 0
        self.owners = {
            id(parameter): f"{own.rpartition('.')[2]} of layer {name!r} ({type(layer).__name__})"
            for name, layer in layers.items()
            for own, parameter in layer.named_parameters()
        }

    def enter(self) -> None:
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and getattr(func, "__name__", "") not in ASKING:
            for value in (*args, *(kwargs or {}).values()):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, Tensor) and id(tensor) in self.owners:
                        raise InputError(
                            f"the network computes with the {self.owners[id(tensor)]} instead of calling the layer, so "
                            "that its noise would be left out: leave the layer out by layers="
                        )
        return func(*args, **(kwargs or {}))
