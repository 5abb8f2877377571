"""Layers that draw weights, and networks that compute with their tensors instead of calling them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import InputError
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.trace import Trace, recording

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
    owners: dict[Tensor, str] = {
        parameter: f"{own.rpartition('.')[2]} of layer {name!r} ({type(layer).__name__})"
        for name, layer in layers.items()
        for own, parameter in layer.named_parameters()
    }
    trace = Trace()
    try:
        with torch.no_grad(), recording(network, layers, trace, tensors=False, functions=owners.keys()):
            run()
    finally:  # a weight with components has another rank, at which the run may fail
        for use in trace.functions:
            if not use.inside:
                raise InputError(
                    f"the network computes with the {owners[use.tensors[0]]} instead of calling the layer, so that "
                    "its noise would be left out: leave the layer out by layers="
                )
