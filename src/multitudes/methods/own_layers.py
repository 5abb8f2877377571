"""Layers that each member has of its own, in a network whose other weights the members share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.copying import copied
from multitudes.core.multitude import evaluating
from multitudes.core.shared import MemberLayer
from multitudes.surgery.affine import SEVERAL, AffineMap, axis_of, kind_of, maps_of, plain_copy, run_with, weight_of

__all__ = ["Own", "own_layer"]

Drawn = Callable[[nn.Module], nn.Module]
"""Gives a copy of a layer the weights that it starts from."""


class Own(MemberLayer):
    """A layer of one map whose weights `[M, ...]` and biases `[M, O]` are each member's own.

    Maps the tiled batch `[M*B, I, ...]` to `[M*B, O, ...]`.
    """

    def __init__(self, layers: list[Any]) -> None:
        (affine,) = maps_of(layers[0])
        shell = plain_copy(layers[0], weight_of(layers[0]))
        super().__init__(shell, len(layers), axis_of(layers[0]))
        self.transposed, self.groups = affine.inputs == 0, affine.groups
        first = next(iter(layers[0].parameters()))
        self.weights = nn.Parameter(_stacked([weight_of(layer) for layer in layers]), first.requires_grad)
        biases = [getattr(layer, "bias", None) for layer in layers]
        self.biases = nn.Parameter(_stacked(biases), biases[0].requires_grad) if biases[0] is not None else None
        for name in ("weight", "bias"):
            self.layer.register_parameter(name, None)

    @property
    def weight(self) -> Tensor:
        return self._asked("weight", self.weights[0])

    def _bias(self) -> Tensor | None:
        return None if self.biases is None else self.biases[0]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kind_of(self.layer) is nn.Linear and self.member is None and not self._hooked:
            return self._product(x)
        return self._each(x, lambda index, rows: self._own(index, rows, *args, **kwargs))

    def _product(self, x: Tensor) -> Tensor:
        """One batched product for all members."""
        rows = self._rows(x)
        y = torch.bmm(rows.flatten(1, -2), self.weights.mT)
        y = y if self.biases is None else y + self.biases.unsqueeze(1)
        return y.view(*rows.shape[:-1], -1).flatten(0, 1)

    def _own(self, index: int, rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inputs = 0 if self.transposed else 1
        affine = AffineMap(inputs=inputs, outputs=1 - inputs, groups=self.groups)
        bias = None if self.biases is None else self.biases[index]
        return run_with(self.layer, affine, rows, self.weights[index], bias, *args, **kwargs)

    def fold(self, index: int) -> nn.Module:
        bias = None
        if self.biases is not None:
            bias = nn.Parameter(self.biases[index].detach().clone(), self.biases.requires_grad)
        plain = plain_copy(self.layer, self.weights[index], bias)
        plain.get_parameter("weight").requires_grad_(self.weights.requires_grad)
        return plain


def own_layer(place: str, layer: nn.Module, members: int, drawn: Drawn) -> Own:
    """A layer for each member, each a copy that starts as `drawn` says."""
    if kind_of(layer) in SEVERAL:
        kind = type(layer).__name__
        raise ValueError(f"own: layer {place!r} ({kind}) has several maps; own= is for linear layers and convolutions")
    with evaluating(layer):
        return Own([drawn(copied(layer)) for _ in range(members)])


def _stacked(tensors: list[Any]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors])
