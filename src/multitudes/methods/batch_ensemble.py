"""BatchEnsemble: one shared weight, and rank-one factors for each member.

Wen, Tran and Ba, *BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning*, 2020.
Member i's weight is `W_i = W * (s_i r_i^T)`, so that its layer is

    y = W (x * r_i) * s_i + b_i,

and all members run as one batch. On a CPU, where a weight is smaller than a member's input, as in most convolutions, it
is the weight that is scaled, and no scaled copy of the input has to be remembered for the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.checks import check_choice, check_number
from multitudes.core.copying import copied
from multitudes.core.locking import evaluating
from multitudes.core.member_layer import MemberLayer
from multitudes.core.shared import SharedMembers
from multitudes.methods.own_layers import own_layer
from multitudes.methods.registry import Method, by
from multitudes.surgery.affine import (
    SEVERAL,
    AffineMap,
    WholeMemberLayer,
    affine_layers,
    axis_of,
    kind_of,
    maps_of,
    plain_copy,
    run_with,
    select_affine,
    weight_of,
)
from multitudes.surgery.initialise import redraw
from multitudes.surgery.layers import Factory, Selector, replace, select
from multitudes.surgery.observe import tell_reach
from multitudes.surgery.start import starting


class RankOne(MemberLayer):
    """A layer shared by all members, with factors on its inputs (`r [M, I]`) and outputs (`s [M, O]`).

    Maps the tiled batch `[M*B, I, ...]` to `[M*B, O, ...]`. With inputs' factors alone, members share the bias too.
    """

    def __init__(self, layer: Any, members: int, sides: str = "both") -> None:
        (affine,) = maps_of(layer)
        super().__init__(copied(layer), members, axis_of(layer))
        self.transposed, self.groups = affine.inputs == 0, affine.groups
        weight, bias = weight_of(self.layer).detach(), getattr(layer, "bias", None)
        inputs, outputs = affine.widths(weight.shape)
        self.r = nn.Parameter(weight.new_ones(members, inputs))
        self.s = nn.Parameter(weight.new_ones(members, outputs)) if sides == "both" else None
        self.biases = _repeated(bias, members) if sides == "both" else None
        if sides == "both":
            self.layer.register_parameter("bias", None)

    def factors(self) -> list[nn.Parameter]:
        return [self.r] if self.s is None else [self.r, self.s]

    def _bias(self) -> Tensor | None:
        return super()._bias() if self.biases is None else self.biases[0]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = weight_of(self.layer)
        if self._changes_weight(x, weight):
            return self._each(x, lambda index, rows: self._own(index, rows, weight, *args, **kwargs))
        shared = getattr(self.layer, "bias", None)
        y = run_with(
            self.layer, self._affine(), self._by_member(torch.mul, x, self.r), weight, shared, *args, **kwargs
        )  # fmt: skip
        if self.s is None:
            return y
        if self.biases is None:
            return self._by_member(torch.mul, y, self.s, untiled=False)
        return self._by_member(_scaled_and_moved, y, self.s, self.biases, untiled=False)

    def _own(self, index: int, rows: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias = getattr(self.layer, "bias", None) if self.biases is None else self.biases[index]
        own = self._weight_of(index, weight)
        return run_with(self.layer, self._affine(), rows, own, bias, *args, **kwargs)

    def _affine(self) -> AffineMap:
        inputs = 0 if self.transposed else 1
        return AffineMap(inputs=inputs, outputs=1 - inputs, groups=self.groups)

    def _weight_of(self, index: int, weight: Tensor) -> Tensor:
        affine, r = self._affine(), self.r[index]
        s = r.new_ones(*r.shape[:-1], affine.widths(weight.shape)[1]) if self.s is None else self.s[index]
        return weight * affine.outer(r, s, weight.dim())

    def fold(self, index: int) -> nn.Module:
        with evaluating(self.layer):
            weight = self._weight_of(index, weight_of(self.layer))
        return plain_copy(self.layer, weight, _folded(self.biases, index))


def _scaled_and_moved(y: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return torch.addcmul(b, y, s)


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


def rank_one(layer: nn.Module, members: int, sides: str = "both") -> RankOne | RankOneWhole:
    """A layer with factors of one for each member."""
    if kind_of(layer) not in SEVERAL:
        return RankOne(layer, members, sides)
    if sides != "both":
        raise ValueError(f"sides={sides!r} is for linear layers and convolutions, got a {type(layer).__name__}")
    return RankOneWhole(layer, members)


@dataclass(frozen=True)
class Factors:
    """The distribution of factors: N(`center`, `spread`), or random signs, of all layers or of the first one's inputs.

    `chunks` are the widths of parts of the first layer's inputs, each with one number for all of it.
    """

    kind: str
    spread: float
    center: float = 1.0
    random: str = "all"
    chunks: Sequence[int] | None = None

    def check(self, members: int) -> None:
        check_choice("factors", self.kind, ("normal", "sign"))
        check_choice("random", self.random, ("all", "first"))
        check_number("spread", self.spread, 0)
        check_number("center", self.center, -math.inf)
        if self.kind == "normal" and self.spread == 0 and members > 1:
            raise ValueError(
                f"spread={self.spread!r} gives all members the same factors, so they would be one network for ever: a "
                "larger one tells them apart"
            )

    def draw(self, layers: Sequence[RankOne | RankOneWhole], first_kept: bool) -> None:
        """Draw the factors of layers in their order; where the first member is kept, its factors stay one."""
        for number, layer in enumerate(layers):
            for place, factor in enumerate(layer.factors()):
                if self.random == "first" and (number or place):
                    continue
                own = factor.data[1:] if first_kept else factor.data
                chunks = self.chunks if number == place == 0 else None
                own.copy_(self._drawn(own) if chunks is None else self._by_chunks(own, chunks))

    def _by_chunks(self, like: Tensor, chunks: Sequence[int]) -> Tensor:
        if sum(chunks) != like.shape[1]:
            raise ValueError(f"chunks must add up to {like.shape[1]}, the first layer's inputs, got {sum(chunks)}")
        drawn = self._drawn(like.new_empty(len(like), len(chunks)))
        return drawn.repeat_interleave(torch.tensor(list(chunks), device=like.device), 1)

    def _drawn(self, like: Tensor) -> Tensor:
        if self.kind == "normal":
            return torch.empty_like(like).normal_(self.center, self.spread)
        return torch.empty_like(like).bernoulli_(0.5).mul_(2).sub_(1)


def batch_ensemble(
    model: nn.Module | Factory,
    members: int = 4,
    *,
    factors: str = "normal",
    spread: float | None = None,
    center: float = 1.0,
    random: str = "all",
    chunks: Sequence[int] | None = None,
    sides: str = "both",
    own: Selector = None,
    rows: str = "shared",
    layers: Selector = None,
    init: str | None = None,
    heads: Selector = None,
    task: str | None = None,
    seed: int | None = None,
) -> SharedMembers:
    """A BatchEnsemble: convolutions and linear layers get rank-one factors and a bias for each member.

    The factors are drawn from N(`center`, `spread`) (`factors="normal"`) or are random signs (`"sign"`). From a
    pretrained network, member 0 starts as that network, exactly, and the others close to it: `spread` is 0.5
    for fresh networks and 0.1 for pretrained ones unless it is given. `layers` selects the layers. `model`, `init` and
    `heads` are as in `deep_ensemble`, for the weights that all members share: frozen ones stay, with factors around
    them.

    With `random="first"` only the factors of the first layer's inputs are drawn, and all others are one in the
    beginning, as Gorishniy et al. do it in *TabM* (2025); `chunks` are the widths of parts of these inputs, such as
    embeddings, each of which has one number for all of it. `sides="inputs"` leaves out the factors of outputs and the
    members' biases. The layers that `own` selects are each member's own, with all their weights: `own=["fc"]` gives
    each member an output layer. With `rows="own"` each member trains on its own part of the batch: `net.loss` is the
    mean over members of each one's loss on its part, for little more than the time of one network. Parts are equally
    large; where the batch cannot be divided evenly, some rows belong to two members.

    >>> net = batch_ensemble(nn.Linear(3, 2), members=4)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """
    start = starting(model, members, init, heads, seed=seed)
    model = start.network
    check_choice("sides", sides, ("both", "inputs"))
    check_choice("rows", rows, ("shared", "own"))
    drawn = Factors(factors, (0.5 if start.fresh else 0.1) if spread is None else spread, center, random, chunks)
    drawn.check(members)
    apart = {} if own is None else select(model, own, affine_layers(model), "own")
    chosen = {name: layer for name, layer in select_affine(model, layers).items() if name not in apart}
    with start.seeded():
        model = start.begin(copied(model))
        converted: dict[str, MemberLayer] = {}
        for name in chosen:
            converted[name] = rank_one(model.get_submodule(name), members, sides)
        for name in apart:
            anew = start.fresh or (start.mode == "heads" and name in start.heads)
            converted[name] = own_layer(name, model.get_submodule(name), members, redraw if anew else lambda one: one)
        for name, layer in converted.items():
            layer.place = name
        drawn.draw(
            [layer for layer in converted.values() if isinstance(layer, RankOne | RankOneWhole)], not start.fresh
        )
    net = SharedMembers(replace(model, converted), members).like(start.given, task)
    net.rows = rows
    notes = {name: "each member's own" if name in apart else "a rank-one factor for each member" for name in converted}
    net.notes = start.noted(notes)
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
