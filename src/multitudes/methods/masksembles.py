"""Masksembles: each member uses its own fixed subset of the channels.

Durasov, Bagautdinov, Baque and Fua, *Masksembles for uncertainty estimation*, 2021. N masks of K ones each are
drawn over `K * scale` positions. Positions that no mask uses are dropped. In expectation this leaves

    C = K * scale * (1 - (1 - 1/scale)^N)

channels. Here C is the layer's width, so K follows from it. The paper draws again until exactly C channels are used;
here single ones are moved instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_number
from multitudes.ensemble.runners.one_by_one import member_view
from multitudes.ensemble.shared import SharedMembers
from multitudes.methods.registry import Method, by
from multitudes.networks.calls import Input, evaluating, tile
from multitudes.networks.copies import copied
from multitudes.surgery.activation_size import keep_scale
from multitudes.surgery.affine import SEVERAL, AffineMap, kind_of, maps_of, select_affine, weight_of
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.member_affine import AffineMemberLayer, make_shared_members
from multitudes.surgery.observe import example_for, execution_order, note_reach, unconverted_kinds
from multitudes.surgery.select import Factory, Selector


def masks(channels: int, members: int, scale: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw masks `[M, C]` of zeros and ones. Each member has equally many ones, and each channel has at least one.

    With `scale=1` all members use all channels. With larger scales they share fewer.

    >>> torch.manual_seed(0).seed() and None
    >>> mask = masks(64, members=4, scale=2.0)
    >>> mask.shape, mask.sum(1).unique().numel(), bool(mask.any(0).all())
    (torch.Size([4, 64]), 1, True)
    """
    expected = scale * (1 - (1 - 1 / scale) ** members)
    ones = min(channels, max(round(channels / expected), -(-channels // members)))
    positions = max(channels, round(ones * scale))
    order = torch.rand(members, positions, generator=generator).argsort(1)
    mask = torch.zeros(members, positions).scatter_(1, order[:, :ones], 1.0)
    return _fit_width(mask[:, mask.any(0)], channels, generator)


def _fit_width(mask: Tensor, channels: int, generator: torch.Generator | None) -> Tensor:
    """Move single ones until exactly `channels` positions are used."""

    def pick(candidates: Tensor) -> int:
        index = torch.randint(len(candidates), (), generator=generator)
        return int(candidates[index])

    while mask.shape[1] < channels:  # move a one from a shared position to a new one
        position = pick((mask.sum(0) > 1).nonzero()[:, 0])
        member = pick(mask[:, position].nonzero()[:, 0])
        mask[member, position] = 0.0
        mask = torch.cat([mask, torch.zeros(len(mask), 1)], 1)
        mask[member, -1] = 1.0
    while mask.shape[1] > channels:  # remove the position with the fewest ones; its members get a one elsewhere
        position = int(mask.sum(0).argmin())
        owners = mask[:, position].nonzero()[:, 0]
        mask = torch.cat([mask[:, :position], mask[:, position + 1 :]], 1)
        for member in owners:
            mask[member, pick((mask[member] == 0).nonzero()[:, 0])] = 1.0
    return mask[:, torch.randperm(channels, generator=generator)]


class Masked(AffineMemberLayer):
    """A shared layer with masks `[M, C]` on the input channels of each affine map."""

    def __init__(self, layer: nn.Module, *mask: Tensor) -> None:
        super().__init__(layer, len(mask[0]))
        self.ones = int(mask[0][0].sum())
        self.scale = 1.0  # factor on the shared weight
        like = next(layer.parameters()).detach()
        for affine, own in zip(self.affine_maps(), mask, strict=True):
            self.register_buffer(f"{self.prefixes[affine.weight]}masks", own.to(like))

    def all_masks(self) -> list[Tensor]:
        return [self.get_buffer(f"{prefix}masks") for prefix in self.prefixes.values()]

    def run_all(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = self.shared_weight(AffineMap(*self.maps[0]))
        if self.member is not None or self._changes_weight(x, weight):
            return self._each(x, lambda index, rows: self.run_member(index, rows, weight, *args, **kwargs))
        return self.run(self._by_member(torch.mul, x, self.masks), weight, *args, **kwargs)

    def run_member(self, index: int, rows: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a member without its masked channels.

        If groups would become uneven, or hooks may depend on the shape, keep all channels and zero the weights.
        """
        affine = AffineMap(*self.maps[0])
        if affine.groups > 1 or self._hooked:
            return super().run_member(index, rows, weight, *args, **kwargs)
        kept = self.masks[index].topk(self.ones).indices.sort().values
        weight, rows = weight.index_select(affine.inputs, kept), rows.index_select(self.axis, kept)
        return self.run(rows, weight, *args, **kwargs)

    def shared_weight(self, affine: AffineMap) -> Tensor:
        weight = self.layer.get_parameter(affine.weight) if self.several else weight_of(self.layer)
        return weight if self.scale == 1 else weight * self.scale

    def weight_of_member(self, index: int, affine: AffineMap, weight: Tensor) -> Tensor:
        mask = getattr(self, f"{self.prefixes[affine.weight]}masks")[index]
        return weight * affine.outer(mask, mask.new_ones(affine.widths(weight.shape)[1]), weight.dim())


def masked(layer: nn.Module, members: int, scale: float) -> Masked:
    """Wrap a layer with new masks."""
    several = kind_of(layer) in SEVERAL
    with evaluating(layer):
        weights = [layer.get_parameter(m.weight) if several else weight_of(layer) for m in maps_of(layer)]
    widths = [affine.widths(weight.shape)[0] for affine, weight in zip(maps_of(layer), weights, strict=True)]
    return Masked(layer, *(masks(width, members, scale) for width in widths))


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
    """Convert a network to a Masksembles ensemble (Durasov et al., 2021): each member uses some channels of each layer.

    Convolutions and linear layers except the first get a fixed mask per member on their inputs: `y = W (m_i * x) + b`.

    Args:
        model: The network, or a function that builds one. It is not changed.
        members: Number of members.
        scale: 1 to 1000. With 1 every member has all channels; larger values give less overlap.
        rows: `"shared"`, or `"own"` to train each member on its own part of the batch, as in `batch_ensemble`.
        layers: Selects the masked layers.
        example: One batch of inputs; by default noise of the usual sizes is tried. Weights of a pretrained network are
            scaled to keep the size of activations on it.
        init: Where the shared weights start: `"fresh"`, `"heads"` or `"pretrained"`, as in `deep_ensemble`.
        heads: Selects the output layers that `init="heads"` resets.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the masks and the random weights.

    Returns:
        A multitude with predictions `[M, B, ...]`.

    Example:
        >>> net = masksembles(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), members=4, scale=2.0)
        >>> net(torch.ones(5, 3)).shape
        torch.Size([4, 5, 2])
    """
    start = Start(model, members, init, heads, example=example, seed=seed)
    model = start.network
    check_number("scale", scale, 1, 1000)
    check_choice("rows", rows, ("shared", "own"))
    chosen = select_affine(model, layers)
    left: list[str] = []
    with start.seeded():
        x = example_for(model, example) if layers is None or not start.fresh else example
        if layers is None and x is not None:
            left = _input_layer(model, chosen, x)
            chosen = {name: layer for name, layer in chosen.items() if name not in left}
        model = start.initialize(copied(model))
        converted = {name: masked(copied(model.get_submodule(name)), members, scale) for name in chosen}
        if members > 1 and all(bool(mask.all()) for layer in converted.values() for mask in layer.all_masks()):
            raise ValueError(
                f"scale={scale!r} gives all members all inputs, so they stay identical: use a larger scale"
            )
        net = make_shared_members(SharedMembers, start, model, converted, members, rows, task)
        if not start.fresh and scale > 1 and x is not None:
            _keep_scale(model, net, x, list(converted))
    kept = {n: ", ".join(f"{int(d[0].sum())} of {d.shape[1]}" for d in m.all_masks()) for n, m in converted.items()}
    net.notes = start.summary_notes({name: f"each member uses {text} inputs" for name, text in kept.items()})
    note_reach(net, model, converted, x, on_purpose=left, warn=layers is None)
    return net


def _keep_scale(model: nn.Module, net: SharedMembers, x: Input, names: list[str]) -> None:
    """Scale the masked layers' weights using all members in one batch, or the first member if that is impossible."""
    kept = {name: None for name in names}
    with evaluating(net):
        tiles = net._runners.takes_tiled(x)
    if not tiles:
        first: Any = member_view(net.network, 0)
        keep_scale(model, first, x, x, kept)
        for name in names:
            layer: Any = net.network.get_submodule(name)
            layer.scale = first.get_submodule(name).scale
    else:
        keep_scale(model, net.network, x, tile(x, net.members), kept)


def _input_layer(model: nn.Module, chosen: dict[str, nn.Module], x: Input) -> list[str]:
    """Return the first layer, as the data must not be masked; return nothing if an embedding comes first."""
    order = execution_order(model, x, (*chosen, nn.Embedding))
    if not order or order[0] not in chosen:
        return []
    if len(chosen) == 1:
        first = model.get_submodule(order[0])
        others = unconverted_kinds(model, chosen)
        but = f"; these kinds of layers cannot be masked: {others}" if others else ""
        raise ValueError(
            f"model ({type(model).__name__}) has only one layer that can be masked, {order[0]!r} "
            f"({type(first).__name__}), but its input is the data, which is not masked{but}"
        )
    return order[:1]


ROWS = (
    Method(
        "masksembles", by(masksembles), {"members": 4, "scale": 2.0},
        "Parameters of one network. Time of all members.",
        "Pick it if no parameters may be added. The setting scale controls how much members share.",
        place=40,
    ),
)  # fmt: skip
