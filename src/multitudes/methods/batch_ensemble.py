"""BatchEnsemble: one shared weight, and rank-one factors for each member.

Wen, Tran and Ba, *BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning*, 2020.
Member i's weight is `W_i = W * (s_i r_i^T)`, so that its layer is

    y = W (x * r_i) * s_i + b_i,

and all members run as one batch. On a CPU, where a weight is smaller than a member's input, as in most convolutions, it
is the weight that is scaled, and no scaled copy of the input has to be remembered for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.checks import check_choice, check_number
from multitudes.core.copying import copied
from multitudes.core.multitude import evaluating
from multitudes.core.shared import MemberLayer, SharedMembers
from multitudes.methods.registry import Method, by
from multitudes.surgery.affine import (
    SEVERAL,
    AffineMap,
    axis_of,
    kind_of,
    maps_of,
    plain_copy,
    run_with,
    select_affine,
    weight_of,
)
from multitudes.surgery.coverage import tell_reach
from multitudes.surgery.layers import Factory, Selector, replace
from multitudes.surgery.start import starting
from multitudes.surgery.whole import WholeMemberLayer


class RankOne(MemberLayer):
    """A layer shared by all members, with factors on its inputs (`r [M, I]`) and outputs (`s [M, O]`).

    Maps the tiled batch `[M*B, I, ...]` to `[M*B, O, ...]`.
    """

    def __init__(self, layer: Any, members: int) -> None:
        (affine,) = maps_of(layer)
        super().__init__(copied(layer), members, axis_of(layer))
        self.transposed, self.groups = affine.inputs == 0, affine.groups
        weight, bias = weight_of(self.layer).detach(), getattr(layer, "bias", None)
        inputs, outputs = affine.widths(weight.shape)
        self.r = nn.Parameter(weight.new_ones(members, inputs))
        self.s = nn.Parameter(weight.new_ones(members, outputs))
        self.biases = _repeated(bias, members)
        self.layer.register_parameter("bias", None)

    def factors(self) -> list[nn.Parameter]:
        return [self.r, self.s]

    def _bias(self) -> Tensor | None:
        return None if self.biases is None else self.biases[0]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = weight_of(self.layer)
        if self._changes_weight(x, weight):
            return self._each(x, lambda index, rows: self._own(index, rows, weight, *args, **kwargs))
        y = run_with(
            self.layer, self._affine(), self._by_member(torch.mul, x, self.r), weight, None, *args, **kwargs
        )  # fmt: skip
        y = self._by_member(torch.mul, y, self.s)
        return y if self.biases is None else self._by_member(torch.add, y, self.biases)

    def _own(self, index: int, rows: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias = None if self.biases is None else self.biases[index]
        return run_with(self.layer, self._affine(), rows, self._weight_of(index, weight), bias, *args, **kwargs)

    def _affine(self) -> AffineMap:
        inputs = 0 if self.transposed else 1
        return AffineMap(inputs=inputs, outputs=1 - inputs, groups=self.groups)

    def _weight_of(self, index: int, weight: Tensor) -> Tensor:
        return weight * self._affine().outer(self.r[index], self.s[index], weight.dim())

    def fold(self, index: int) -> nn.Module:
        with evaluating(self.layer):
            weight = self._weight_of(index, weight_of(self.layer))
        return plain_copy(self.layer, weight, _folded(self.biases, index))


class RankOneWhole(WholeMemberLayer):
    """A layer of several maps, shared by all members: each map has factors of its own, and each member its biases."""

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__(copied(layer), members)
        for affine in self.affine_maps():
            weight = self.layer.get_parameter(affine.weight).detach()
            for name, width in zip("rs", affine.widths(weight.shape), strict=True):
                self.register_parameter(_own_name(affine.weight, name), nn.Parameter(weight.new_ones(members, width)))
            owner, _, own = (affine.bias or "").rpartition(".")
            bias = self.layer.get_submodule(owner)._parameters.get(own)
            if bias is not None:
                self.register_parameter(_own_name(str(affine.bias), "own"), _repeated(bias, members))
                self.layer.get_submodule(owner).register_parameter(own, None)

    def factors(self) -> list[nn.Parameter]:
        return [self.get_parameter(_own_name(affine.weight, name)) for affine in self.affine_maps() for name in "rs"]

    def trained(self, name: str) -> bool:
        biases = self._parameters.get(_own_name(name, "own"))
        return super().trained(name) if biases is None else biases.requires_grad

    def tensors(self, index: int) -> dict[str, Tensor]:
        tensors = {}
        for affine in self.affine_maps():
            weight = self.layer.get_parameter(affine.weight)
            r, s = (getattr(self, _own_name(affine.weight, name))[index] for name in "rs")
            tensors[affine.weight] = weight * affine.outer(r, s, weight.dim())
            biases = self._parameters.get(_own_name(affine.bias or "", "own"))
            if affine.bias is not None and biases is not None:
                tensors[affine.bias] = biases[index]
        return tensors


def _own_name(name: str, kind: str) -> str:
    """What belongs to a tensor of the layer: `out_proj_weight_r` to `out_proj.weight`."""
    return f"{name.replace('.', '_')}_{kind}"


def _repeated(bias: Any, members: int) -> nn.Parameter | None:
    if not isinstance(bias, Tensor):
        return None
    return nn.Parameter(bias.detach().repeat(members, 1), bias.requires_grad)


def _folded(biases: nn.Parameter | None, index: int) -> nn.Parameter | None:
    return None if biases is None else nn.Parameter(biases[index].detach().clone(), biases.requires_grad)


def rank_one(layer: nn.Module, members: int) -> RankOne | RankOneWhole:
    """A layer with factors of one for each member."""
    return RankOneWhole(layer, members) if kind_of(layer) in SEVERAL else RankOne(layer, members)


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
    for fresh networks and 0.1 for pretrained ones unless it is given. `layers` selects the layers. `model`, `init` and
    `heads` are as in `deep_ensemble`, for the weights that all members share: frozen ones stay, with factors around
    them.

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
    if factors == "normal" and spread == 0 and members > 1:
        raise ValueError(
            f"spread={spread!r} gives all members the same factors, so they would be one network for ever: a larger "
            "one tells them apart"
        )
    chosen = select_affine(model, layers)
    with start.seeded():
        model = start.begin(copied(model))
        chosen = {name: model.get_submodule(name) for name in chosen}
        converted = {name: rank_one(layer, members) for name, layer in chosen.items()}
        for name, layer in converted.items():
            layer.place = name
            for factor in layer.factors():
                own = factor.data if start.fresh else factor.data[1:]
                if factors == "normal":
                    own.normal_(1.0, spread)
                else:
                    own.bernoulli_(0.5).mul_(2).sub_(1)
    net = SharedMembers(replace(model, converted), members).like(start.given, task)
    net.notes = start.noted({name: "a rank-one factor for each member" for name in converted})
    tell_reach(net, model, converted, warn=layers is None)
    return net


ROWS = (
    Method(
        "batch_ensemble", by(batch_ensemble), {"members": 4, "factors": "normal", "spread": None},
        "The parameters of one network and two vectors a layer for each member; the time of all members.",
        "Pick it when parameters are scarce and time is not.",
        place=30,
    ),
)  # fmt: skip
