"""Batch norm for weights that were never trained: its running statistics, measured anew on data.

The average of two networks' statistics is not the statistics of their average. Where weights are averaged or
drawn, a pass over some data in training mode says what they are (Izmailov et al., 2018).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset, IterableDataset

from multitudes.calling import Input, call_with, moved, split_batch, told_in_terms_of
from multitudes.multitude import evaluating
from multitudes.stochastic import expecting

State = dict[str, Tensor]

ROWS = 256
"""The most rows of a tensor that run at a time."""

_KINDS = ("running_mean", "running_var", "num_batches_tracked")


class Batches:
    """Data to measure networks on, which can be gone through any number of times.

    That is a tensor of inputs `[N, ...]`; one batch, `(x, y)` or a mapping of keyword arguments; or an iterable of
    batches, such as a `DataLoader`. A tuple starts with the inputs, and targets follow. Tensors are cut into
    parts of equal size. Copies of a network share its data.
    """

    def __init__(self, data: Any) -> None:
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            raise ValueError(f"data must come in batches, got a {type(data).__name__}: wrap it in a DataLoader")
        if isinstance(data, Tensor | tuple | Mapping):
            data = list(_cut(*split_batch(data)))
        elif not isinstance(data, Iterable):
            raise ValueError(f"data must be a tensor, a batch or an iterable of batches, got {type(data).__name__}")
        self.batches = list(data) if isinstance(data, Iterator) else data

    @classmethod
    def of(cls, data: Any) -> Batches | None:
        """`data`, where there is any, ready to be gone through."""
        return data if data is None or isinstance(data, Batches) else cls(data)

    def on(self, device: torch.device) -> Iterator[tuple[Input, Tensor | None]]:
        """Inputs and targets, batch by batch; an error where there is none."""
        empty = True
        for batch in self.batches:
            empty = False
            x, y = split_batch(batch)
            yield moved(x, device), None if y is None else y.to(device)
        if empty:
            raise ValueError("data must hold at least one batch, got none")

    def __deepcopy__(self, memo: Any) -> Batches:
        return self


def _cut(x: Input, y: Tensor | None) -> Iterator[tuple[Input, Tensor | None]]:
    if not isinstance(x, Tensor):
        yield x, y
        return
    if y is not None and len(y) != len(x):
        raise ValueError(f"data must have one target for each of the {len(x)} inputs, got {len(y)}")
    parts = -(-len(x) // ROWS)
    if not parts:
        raise ValueError(f"data must hold at least one input, got shape {list(x.shape)}")
    targets = [None] * parts if y is None else y.tensor_split(parts)
    yield from zip(x.tensor_split(parts), targets, strict=True)


def norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers that keep running statistics, by name."""
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
    return {name: layer for name, layer in layers.items() if isinstance(layer.running_mean, Tensor)}


@torch.no_grad()
def statistics(network: nn.Module, state: State, batches: Batches) -> State:
    """The batch-norm buffers, by name, of a network with the weights of `state`: the mean over the batches.

    Only batch norm is in training mode meanwhile: dropout is off, and layers that draw give expectations. The
    network's own buffers stay as they are.

    >>> network = nn.BatchNorm1d(1)
    >>> statistics(network, {}, Batches(torch.tensor([[1.0], [3.0]])))["running_mean"], network.running_mean
    (tensor([2.]), tensor([0.]))
    """
    layers = norms(network)
    fresh = {
        name: {kind: torch.zeros_like(layer.get_buffer(kind)) for kind in _KINDS} for name, layer in layers.items()
    }
    with _measuring(network, layers):
        for x, _ in batches.on(_device(network)):
            _answer(network, state | _flat(fresh), x)
    # A layer that the network does not use has seen nothing.
    return _flat({name: kinds for name, kinds in fresh.items() if kinds["num_batches_tracked"].item()})


def _flat(buffers: Mapping[str, State]) -> State:
    return {
        f"{name}.{kind}" if name else kind: tensor for name, kinds in buffers.items() for kind, tensor in kinds.items()
    }


@contextmanager
def _measuring(network: nn.Module, layers: Mapping[str, _BatchNorm]) -> Iterator[None]:
    momenta = {name: layer.momentum for name, layer in layers.items()}
    with evaluating(network), expecting(network):
        for layer in layers.values():
            layer.training, layer.momentum = True, None
        try:
            yield
        finally:
            for name, layer in layers.items():
                layer.momentum = momenta[name]


@torch.no_grad()
def accuracy(network: nn.Module, state: State, batches: Batches) -> float:
    """The share of `batches` that a network with the tensors of `state` puts into the right class."""
    right = total = 0
    with evaluating(network), expecting(network):
        for x, y in batches.on(_device(network)):
            if y is None or y.is_floating_point():
                raise ValueError(
                    "accuracy needs classes as targets: pass data=(x, y), or batches of inputs and classes"
                )
            labels = _answer(network, state, x).argmax(1)
            if labels.shape != y.shape:
                raise ValueError(f"data has classes of shape {list(y.shape)} for answers of shape {list(labels.shape)}")
            right += int((labels == y).sum())
            total += y.numel()
    return right / total


def _answer(network: nn.Module, state: State, x: Input) -> Tensor:
    with told_in_terms_of(x):
        return call_with(network, state, x)


def _device(network: nn.Module) -> torch.device:
    return next(iter([*network.parameters(), *network.buffers()]), torch.zeros(0)).device
