"""BatchEnsemble: one shared weight, and rank-one factors for each member.

Wen, Tran and Ba, *BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning*, 2020.
Member i's weight is `W_i = W * (s_i r_i^T)`, so that its layer is

    y = W (x * r_i) * s_i + b_i,

and all members run as one batch. On a CPU, where a weight is smaller than a member's input, as in most convolutions, it
is the weight that is scaled, and no scaled copy of the input has to be remembered for the gradient.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.core.checks import check_choice, check_number
from multitudes.core.shared import MemberLayer, SharedMembers
from multitudes.methods.registry import Method, by
from multitudes.surgery.layers import PRODUCTS, TRANSPOSED, Factory, Selector, replace, select
from multitudes.surgery.start import starting


class RankOne(MemberLayer):
    """A layer shared by all members, with factors on its inputs (`r [M, I]`) and outputs (`s [M, O]`).

    Maps the tiled batch `[M*B, I, ...]` to `[M*B, O, ...]`.
    """

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__(copy.deepcopy(layer), members)
        inputs, outputs = _widths(layer)
        weight, bias = layer.get_parameter("weight").detach(), layer.bias
        self.r = nn.Parameter(weight.new_ones(members, inputs))
        self.s = nn.Parameter(weight.new_ones(members, outputs))
        self.biases = nn.Parameter(bias.detach().repeat(members, 1)) if isinstance(bias, Tensor) else None
        self.layer.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        if self._changes_weight(x):
            y = self._each(x)
        else:
            y = self._by_member(torch.mul, self.layer(self._by_member(torch.mul, x, self.r)), self.s)
        return y if self.biases is None else self._by_member(torch.add, y, self.biases)

    def _own(self, index: int, rows: Tensor) -> Tensor:
        return functional_call(self.layer, {"weight": self._weight_of(index)}, (rows,))

    def _weight_of(self, index: int) -> Tensor:
        weight: Any = self.layer.weight
        return weight * _outer(self.r[index], self.s[index], self.layer, weight)

    def fold(self, index: int) -> nn.Module:
        plain = copy.deepcopy(self.layer)
        plain.get_parameter("weight").data = self._weight_of(index).detach()
        if self.biases is not None:
            plain.register_parameter("bias", nn.Parameter(self.biases[index].detach().clone()))
        return plain


def _widths(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def _outer(r: Tensor, s: Tensor, layer: nn.Module, weight: Tensor) -> Tensor:
    """`s r^T` in the shape of the layer's weight, group by group."""
    groups = getattr(layer, "groups", 1)
    r, s = r.view(groups, 1, -1), s.view(groups, -1, 1)
    outer = (s * r).mT if isinstance(layer, TRANSPOSED) else s * r  # [G, O/G, I/G]
    return outer.flatten(0, 1).reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))


def batch_ensemble(
    model: nn.Module | Factory,
    members: int = 4,
    *,
    factors: str = "normal",
    spread: float | None = None,
    layers: Selector = None,
    init: str | None = None,
    heads: Selector = None,
    task: str | None = None,
    seed: int | None = None,
) -> SharedMembers:
    """A BatchEnsemble: convolutions and linear layers get rank-one factors and a bias for each member.

    The factors are drawn from N(1, `spread`) (`factors="normal"`) or are random signs (`"sign"`). From a
    pretrained network, member 0 starts as that network, exactly, and the others close to it: `spread` is 0.5
    for fresh networks and 0.1 for pretrained ones unless it is given. `layers` selects the layers.

    >>> net = batch_ensemble(nn.Linear(3, 2), members=4)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """
    start = starting(model, members, init, heads, seed=seed)
    model = start.network
    check_choice("factors", factors, ("normal", "sign"))
    if spread is None:
        spread = 0.5 if start.fresh else 0.1
    check_number("spread", spread, 0)
    chosen = select(model, layers, PRODUCTS)
    with start.seeded():
        model = start.begin(copy.deepcopy(model))
        chosen = {name: model.get_submodule(name) for name in chosen}
        converted = {name: RankOne(layer, members) for name, layer in chosen.items()}
        for layer in converted.values():
            for factor in (layer.r.data, layer.s.data):
                own = factor if start.fresh else factor[1:]
                if factors == "normal":
                    own.normal_(1.0, spread)
                else:
                    own.bernoulli_(0.5).mul_(2).sub_(1)
    net = SharedMembers(replace(model, converted), members).like(start.given, task)
    net.notes = {name: "a rank-one factor for each member" for name in converted}
    return net


ROWS = (
    Method(
        "batch_ensemble", by(batch_ensemble), {"members": 4, "factors": "normal", "spread": None},
        "The parameters of one network and two vectors a layer for each member; the time of all members.",
        "Pick it when parameters are scarce and time is not.",
        place=30,
    ),
)  # fmt: skip
