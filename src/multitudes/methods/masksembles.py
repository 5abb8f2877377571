"""Masksembles: each member sees its own fixed subset of the channels.

Durasov, Bagautdinov, Baque and Fua, *Masksembles for uncertainty estimation*, 2021. N masks of K ones each are
drawn over `K * scale` positions and positions that no mask uses are dropped, which leaves

    C = K * scale * (1 - (1 - 1/scale)^N)

channels in expectation. Here C is the layer's width, so K follows from it, and the last few channels are
settled by moving single ones instead of by drawing again until the count happens to fit.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.core.calling import Input, tile
from multitudes.core.checks import check_number
from multitudes.core.shared import MemberLayer, SharedMembers
from multitudes.methods.registry import Method, by
from multitudes.surgery.activation_size import keep_scale
from multitudes.surgery.layers import PRODUCTS, TRANSPOSED, Factory, Selector, replace, select
from multitudes.surgery.observe import example_for, executed
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

    def __init__(self, layer: nn.Module, drawn: Tensor) -> None:
        super().__init__(layer, len(drawn))
        self.ones = int(drawn[0].sum())
        self.register_buffer("masks", drawn.to(layer.get_parameter("weight")))

    masks: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.member is not None or self._changes_weight(x):
            return self._each(x)
        y: Tensor = self.layer(self._by_member(torch.mul, x, self.masks))
        return y

    def _own(self, index: int, rows: Tensor) -> Tensor:
        """Channels that a member does not see are left out; in layers whose groups would become uneven, they have zeros
        for weights."""
        weight: Any = self.layer.weight
        if isinstance(self.layer, TRANSPOSED) or getattr(self.layer, "groups", 1) > 1:
            weight = weight * _factor(self.masks[index], self.layer)
        else:
            seen = self.masks[index].topk(self.ones).indices.sort().values
            weight, rows = weight.index_select(1, seen), rows.index_select(self.axis, seen)
        return functional_call(self.layer, {"weight": weight}, (rows,))

    def fold(self, index: int) -> nn.Module:
        plain = copy.deepcopy(self.layer)
        plain.get_parameter("weight").data.mul_(_factor(self.masks[index], plain))
        return plain


def _factor(mask: Tensor, layer: nn.Module) -> Tensor:
    """Zeros in the shape of a layer's weight for the inputs that a mask `[C]` leaves out."""
    weight = layer.get_parameter("weight")
    if isinstance(layer, TRANSPOSED):  # [I, O/G, ...]
        factor = mask.view(-1, 1)
    else:  # [O, I/G, ...]: each group of outputs sees its own inputs
        groups = getattr(layer, "groups", 1)
        factor = mask.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1).flatten(0, 1)
    return factor.reshape(*factor.shape, *[1] * (weight.dim() - 2))


def masksembles(
    model: nn.Module | Factory,
    members: int = 4,
    scale: float = 2.0,
    *,
    layers: Selector = None,
    example: Input | None = None,
    init: str | None = None,
    heads: Selector = None,
    task: str | None = None,
    seed: int | None = None,
) -> SharedMembers:
    """Masksembles: fixed masks on the inputs of convolutions and linear layers, the first one's excepted.

    `scale` is 1 or more: 1 gives every member every channel, larger values less overlap. `layers` selects the
    masked layers. From a pretrained network, their weights are scaled so that activations are as large as they
    were on `example`, one batch of inputs; where it is left out, noise of the usual sizes is tried. The same
    `seed` gives the same masks.

    >>> net = masksembles(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), members=4, scale=2.0)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """
    start = starting(model, members, init, heads, seed=seed)
    model = start.network
    check_number("scale", scale, 1)
    chosen = select(model, layers, PRODUCTS)
    with start.seeded():
        if layers is None:
            chosen = _all_but_first(model, chosen, example)
        model = start.begin(copy.deepcopy(model))
        layer_of = {name: copy.deepcopy(model.get_submodule(name)) for name in chosen}
        converted = {name: Masked(layer, masks(_inputs(layer), members, scale)) for name, layer in layer_of.items()}
        network = replace(model, converted)
        if not start.fresh and scale > 1:
            x = example_for(model, example)
            keep_scale(model, network, x, tile(x, members), {name: None for name in converted})
    net = SharedMembers(network, members).like(start.given, task)
    for name, layer in converted.items():
        net.notes[name] = f"each member sees {int(layer.masks[0].sum())} of {layer.masks.shape[1]} inputs"
    return net


def _inputs(layer: Any) -> int:
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)


def _all_but_first(model: nn.Module, chosen: dict[str, nn.Module], example: Input | None) -> dict[str, nn.Module]:
    """The first layer's input is the data, which every member should see whole."""
    first = executed(model, example_for(model, example), PRODUCTS)[0]
    rest = {name: layer for name, layer in chosen.items() if name != first}
    if not rest:
        raise ValueError(f"model ({type(model).__name__}) has only one layer, {first!r}, and its input is the data")
    return rest


ROWS = (
    Method(
        "masksembles", by(masksembles), {"members": 4, "scale": 2.0},
        "The parameters of one network; the time of all members.",
        "Pick it when no parameter may be added, and scale can set how much the members share.",
        place=40,
    ),
)  # fmt: skip
