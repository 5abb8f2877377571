"""Recompute batch-norm statistics for weights that were never trained, such as averages or draws.

Averaged statistics are not the statistics of averaged weights, so a pass over the data measures them (Izmailov et al.,
2018).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from multitudes.networks.calls import Input, call_with, evaluating, input_errors
from multitudes.networks.devices import device_in
from multitudes.networks.settings import override_attribute
from multitudes.networks.stochastic import expecting
from multitudes.training.batches import Batches

State = dict[str, Tensor]

_KINDS = ("running_mean", "running_var", "num_batches_tracked")


def norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers with running statistics, by name."""
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
    return {name: layer for name, layer in layers.items() if isinstance(layer.running_mean, Tensor)}


@torch.no_grad()
def statistics(network: nn.Module, state: State, batches: Batches) -> State:
    """Return batch-norm buffers by name, averaged over batches, of a network with the weights of `state`.

    Only batch norms run in training mode; stochastic layers return expectations. The network's buffers do not change.

    >>> network = nn.BatchNorm1d(1)
    >>> statistics(network, {}, Batches(torch.tensor([[1.0], [3.0]])))["running_mean"], network.running_mean
    (tensor([2.]), tensor([0.]))
    """
    layers = norms(network)
    fresh = {
        name: {f"{name}.{kind}".lstrip("."): torch.zeros_like(layer.get_buffer(kind)) for kind in _KINDS}
        for name, layer in layers.items()
    }
    buffers = {name: buffer for own in fresh.values() for name, buffer in own.items()}
    with (
        evaluating(network),
        expecting(network),
        override_attribute(layers.values(), "training", True),
        override_attribute(layers.values(), "momentum", None),
    ):
        for x, _ in batches.on(device_in(network)):
            _predict(network, state | buffers, x)
    # Skip layers that did not run.
    used = [own for name, own in fresh.items() if own[f"{name}.num_batches_tracked".lstrip(".")].item()]
    return {name: buffer for own in used for name, buffer in own.items()}


@torch.no_grad()
def accuracy(network: nn.Module, state: State, batches: Batches) -> float:
    """Return the accuracy on `batches` of a network with the tensors of `state`."""
    right = total = 0
    with evaluating(network), expecting(network):
        for x, y in batches.on(device_in(network)):
            if y is None or y.is_floating_point():
                raise ValueError(
                    "accuracy needs classes as targets: pass data=(x, y), or batches of inputs and classes"
                )
            labels = _predict(network, state, x).argmax(1)
            if labels.shape != y.shape:
                raise ValueError(f"data has classes of shape {list(y.shape)}, predictions have {list(labels.shape)}")
            right += int((labels == y).sum())
            total += y.numel()
    return right / total


def _predict(network: nn.Module, state: State, x: Input) -> Tensor:
    with input_errors(x):
        return call_with(network, state, x)
