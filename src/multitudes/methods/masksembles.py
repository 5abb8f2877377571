"""Masksembles: each member sees its own fixed subset of the channels.

Durasov, Bagautdinov, Baque and Fua, *Masksembles for uncertainty estimation*, 2021. N masks of K ones each are
drawn over `K * scale` positions and positions that no mask uses are dropped, which leaves

    C = K * scale * (1 - (1 - 1/scale)^N)

channels in expectation. Here C is the layer's width, so K follows from it, and the last few channels are
settled by moving single ones instead of by drawing again until the count happens to fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, tile
from multitudes.core.checks import check_choice, check_number
from multitudes.core.copying import copied
from multitudes.core.locking import evaluating
from multitudes.core.member_layer import MemberLayer
from multitudes.core.runners.one_by_one import member_view
from multitudes.core.runners.side_by_side import SideBySide
from multitudes.core.shared import SharedMembers
from multitudes.methods.registry import Method, by
from multitudes.surgery.activation_size import keep_scale
from multitudes.surgery.affine import (
    SEVERAL,
    AffineMap,
    WholeMemberLayer,
    axis_of,
    kind_of,
    maps_of,
    plain_copy,
    run_with,
    select_affine,
    weight_of,
)
from multitudes.surgery.layers import Factory, Selector, replace
from multitudes.surgery.observe import example_for, executed, kinds_left, tell_reach
from multitudes.surgery.start import starting


def masks(channels: int, members: int, scale: float, generator: torch.Generator | None = None) -> Tensor:
    """`[M, C]` masks of zeros and ones: as many ones in each, and every channel used by some member.

    With `scale=1` all members see all channels; the larger the scale, the less they share.

    >>> torch.manual_seed(0).seed() and None
    >>> drawn = masks(64, members=4, scale=2.0)
    >>> drawn.shape, drawn.sum(1).unique().numel(), bool(drawn.any(0).all())
    (torch.Size([4, 64]), 1, True)
    """
    expected = scale * (1 - (1 - 1 / scale) ** members)
    ones = min(channels, max(round(channels / expected), -(-channels // members)))
    positions = max(channels, round(ones * scale))
    order = torch.rand(members, positions, generator=generator).argsort(1)
    drawn = torch.zeros(members, positions).scatter_(1, order[:, :ones], 1.0)
    return _settle(drawn[:, drawn.any(0)], channels, generator)


def _settle(drawn: Tensor, channels: int, generator: torch.Generator | None) -> Tensor:
    """Move single ones until exactly `channels` positions are used."""

    def pick(candidates: Tensor) -> int:
        index = torch.randint(len(candidates), (), generator=generator)
        return int(candidates[index])

    while drawn.shape[1] < channels:  # a one from a position that several share gets a position of its own
        position = pick((drawn.sum(0) > 1).nonzero()[:, 0])
        member = pick(drawn[:, position].nonzero()[:, 0])
        drawn[member, position] = 0.0
        alone = torch.zeros(len(drawn), 1)
        alone[member] = 1.0
        drawn = torch.cat([drawn, alone], 1)
    while drawn.shape[1] > channels:  # the fewest ones at a position go where their members have none
        position = int(drawn.sum(0).argmin())
        owners = drawn[:, position].nonzero()[:, 0]
        drawn = torch.cat([drawn[:, :position], drawn[:, position + 1 :]], 1)
        for member in owners:
            drawn[member, pick((drawn[member] == 0).nonzero()[:, 0])] = 1.0
    return drawn[:, torch.randperm(channels, generator=generator)]


class Masked(MemberLayer):
    """A shared layer behind masks `[M, C]` on its input channels: the tiled batch `[M*B, C, ...]` in and out."""

    def __init__(self, layer: Any, drawn: Tensor) -> None:
        (affine,) = maps_of(layer)
        super().__init__(layer, len(drawn), axis_of(layer))
        self.transposed, self.groups = affine.inputs == 0, affine.groups
        self.ones = int(drawn[0].sum())
        self.scale = 1.0  # of a weight that is computed from others
        self.register_buffer("masks", drawn.to(_like(layer)))

    masks: Tensor

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = self._weight()
        if self.member is not None or self._changes_weight(x, weight):
            return self._each(x, lambda index, rows: self._own(index, rows, weight, *args, **kwargs))
        return self._run(self._by_member(torch.mul, x, self.masks), weight, *args, **kwargs)

    def _run(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias = getattr(self.layer, "bias", None)
        return run_with(self.layer, self._affine(), x, weight, bias, *args, **kwargs)

    def _own(self, index: int, rows: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Channels that a member does not see are left out; in layers whose groups would become uneven, they have zeros
        for weights, and in layers with hooks, which may ask for the shape."""
        if self.groups > 1 or self.layer._forward_hooks or self.layer._forward_pre_hooks:
            weight = weight * self._factor(index, weight)
        else:
            seen = self.masks[index].topk(self.ones).indices.sort().values
            weight, rows = weight.index_select(self._affine().inputs, seen), rows.index_select(self.axis, seen)
        return self._run(rows, weight, *args, **kwargs)

    def _weight(self) -> Tensor:
        weight = weight_of(self.layer)
        return weight if self.scale == 1 else weight * self.scale

    def _affine(self) -> AffineMap:
        inputs = 0 if self.transposed else 1
        return AffineMap(inputs=inputs, outputs=1 - inputs, groups=self.groups)

    def _factor(self, index: int, weight: Tensor) -> Tensor:
        """Zeros in the shape of the weight for the inputs that a member does not see."""
        mask, affine = self.masks[index], self._affine()
        ones = mask.new_ones(*mask.shape[:-1], affine.widths(weight.shape)[1])
        return affine.outer(mask, ones, weight.dim())

    def note(self) -> str:
        return f"each member sees {self.ones} of {self.masks.shape[1]} inputs"

    def fold(self, index: int) -> nn.Module:
        with evaluating(self.layer):
            weight = self._weight()
        return plain_copy(self.layer, weight * self._factor(index, weight))


class MaskedWhole(WholeMemberLayer):
    """A shared layer of several maps, each behind masks of its own on its inputs."""

    def __init__(self, layer: nn.Module, members: int, scale: float) -> None:
        super().__init__(layer, members)
        for affine in self.affine_maps():
            weight = layer.get_parameter(affine.weight)
            drawn = masks(affine.widths(weight.shape)[0], members, scale).to(weight)
            self.register_buffer(_mask_name(affine), drawn)

    def tensors(self, index: int) -> dict[str, Tensor]:
        tensors = {}
        for affine in self.affine_maps():
            weight, mask = self.layer.get_parameter(affine.weight), getattr(self, _mask_name(affine))[index]
            outputs = affine.widths(weight.shape)[1]
            tensors[affine.weight] = weight * affine.outer(mask, mask.new_ones(outputs), weight.dim())
        return tensors

    def note(self) -> str:
        drawn = [getattr(self, _mask_name(affine)) for affine in self.affine_maps()]
        return "each member sees " + ", ".join(f"{int(d[0].sum())} of {d.shape[1]}" for d in drawn) + " inputs"


def _mask_name(affine: AffineMap) -> str:
    return f"{affine.weight.replace('.', '_')}_masks"


def _like(layer: nn.Module) -> Tensor:
    return next(layer.parameters()).detach()


def masked(layer: nn.Module, members: int, scale: float) -> Masked | MaskedWhole:
    """A layer behind newly drawn masks."""
    if kind_of(layer) in SEVERAL:
        return MaskedWhole(layer, members, scale)
    (affine,) = maps_of(layer)
    with evaluating(layer):
        inputs, _ = affine.widths(weight_of(layer).shape)
    return Masked(layer, masks(inputs, members, scale))


def masksembles(
    model: nn.Module | Factory,
    members: int = 4,
    scale: float = 2.0,
    *,
    rows: str = "shared",
    layers: Selector = None,
    example: Input | None = None,
    init: str | None = None,
    heads: Selector = None,
    task: str | None = None,
    seed: int | None = None,
) -> SharedMembers:
    """Masksembles: fixed masks on the inputs of convolutions and linear layers, the first one's excepted.

    `scale` is 1 to 1000: 1 gives every member every channel, larger values less overlap. `layers` selects the
    masked layers. From a pretrained network, their weights are scaled so that activations are as large as they
    were on `example`, one batch of inputs; where it is left out, noise of the usual sizes is tried. The same
    `seed` gives the same masks. `model`, `init` and `heads` are as in `deep_ensemble`, for the weights that all members
    share. With `rows="own"` each member trains on its own part of the batch, as in `batch_ensemble`.

    >>> net = masksembles(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), members=4, scale=2.0)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """
    start = starting(model, members, init, heads, example=example, seed=seed)
    model = start.network
    check_number("scale", scale, 1, 1000)
    check_choice("rows", rows, ("shared", "own"))
    chosen = select_affine(model, layers)
    left: list[str] = []
    with start.seeded():
        x = example_for(model, example) if layers is None or not start.fresh else example
        if layers is None and x is not None:
            left = _of_the_data(model, chosen, x)
            chosen = {name: layer for name, layer in chosen.items() if name not in left}
        model = start.begin(copied(model))
        converted = {name: masked(copied(model.get_submodule(name)), members, scale) for name in chosen}
        if members > 1 and all(map(_sees_all, converted.values())):
            raise ValueError(
                f"scale={scale!r} shows all inputs to all members, so they would be one network for ever: a larger one "
                "gives each its own"
            )
        for name, layer in converted.items():
            layer.place = name
        net = SharedMembers(replace(model, converted), members).like(start.given, task)
        if not start.fresh and scale > 1 and x is not None:
            _keep_scale(model, net, x, list(converted))
    net.rows = rows
    net.notes = start.noted({name: layer.note() for name, layer in converted.items()})
    tell_reach(net, model, converted, x, on_purpose=left, warn=layers is None)
    return net


def _keep_scale(model: nn.Module, net: SharedMembers, x: Input, names: list[str]) -> None:
    """Scale the masked layers' weights by all members at once, or by the first where a batch cannot hold them all."""
    kept = {name: None for name in names}
    with evaluating(net):
        trouble = net._difference(x, SideBySide(net.network, net.members))
    if trouble:
        first: Any = member_view(net.network, 0)
        keep_scale(model, first, x, x, kept)
        for name in names:
            if isinstance(layer := net.network.get_submodule(name), Masked):
                layer.scale = first.get_submodule(name).scale
    else:
        keep_scale(model, net.network, x, tile(x, net.members), kept)


def _sees_all(layer: nn.Module) -> bool:
    return all(bool(masks.all()) for name, masks in layer.named_buffers() if name.endswith("masks"))


def _of_the_data(model: nn.Module, chosen: dict[str, nn.Module], x: Input) -> list[str]:
    """The first layer, whose input is the data, which every member should see whole; none where those are embedded."""
    order = executed(model, x, (*chosen, nn.Embedding))
    if not order or order[0] not in chosen:
        return []
    if len(chosen) == 1:
        first = model.get_submodule(order[0])
        others = kinds_left(model, chosen)
        but = f"; not of a kind that can be: {others}" if others else ""
        raise ValueError(
            f"model ({type(model).__name__}) has only one layer that can be masked, {order[0]!r} "
            f"({type(first).__name__}), and its input is the data, which every member sees whole{but}"
        )
    return order[:1]


ROWS = (
    Method(
        "masksembles", by(masksembles), {"members": 4, "scale": 2.0},
        "The parameters of one network; the time of all members.",
        "Pick it when no parameter may be added, and scale can set how much the members share.",
        place=40,
    ),
)  # fmt: skip
