"""BatchEnsemble: one shared weight, and rank-one factors for each member.

Wen, Tran and Ba, *BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning*, 2020.
Member i has the weight `W_i = W * (s_i r_i^T)`, so its layer computes

    y = W (x * r_i) * s_i + b_i.

In training and on a GPU all members run in one tiled batch; a CPU often runs them one by one in evaluation. If a weight
is smaller than a member's input (most convolutions), a CPU scales the weight, so autograd stores no scaled input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_number
from multitudes.ensemble.member_layer import MemberLayer
from multitudes.ensemble.shared import SharedMembers
from multitudes.methods.registry import Method, by
from multitudes.networks.calls import evaluating
from multitudes.networks.copies import copied
from multitudes.surgery.affine import SEVERAL, AffineMap, affine_layers, kind_of, select_affine, weight_of
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.initialize import reinitialize
from multitudes.surgery.member_affine import AffineMemberLayer, make_shared_members
from multitudes.surgery.observe import note_reach
from multitudes.surgery.own_layers import Own
from multitudes.surgery.select import Factory, Selector, select


class RankOne(AffineMemberLayer):
    """A layer shared by all members, with factors on the inputs (`r [M, I]`) and outputs (`s [M, O]`) of each map.

    With `sides="inputs"` there is no `s`, and members share the biases.
    """

    def __init__(self, layer: nn.Module, members: int, sides: str = "both") -> None:
        super().__init__(copied(layer), members)
        if self.several and sides != "both":
            raise ValueError(f"sides={sides!r} is for linear layers and convolutions, got a {type(layer).__name__}")
        self.kinds = "rs" if sides == "both" else "r"
        for affine in self.affine_maps():
            weight = self.shared_weight(affine).detach()
            for kind, width in zip(self.kinds, affine.widths(weight.shape), strict=False):
                ones = nn.Parameter(weight.new_ones(members, width))
                self.register_parameter(f"{self.prefixes[affine.weight]}{kind}", ones)
            if sides == "both":
                self.repeat_bias(affine)

    def factors(self) -> list[nn.Parameter]:
        return [self.get_parameter(f"{prefix}{kind}") for prefix in self.prefixes.values() for kind in self.kinds]

    def run_all(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = weight_of(self.layer)
        if self._changes_weight(x, weight):
            return self._each(x, lambda index, rows: self.run_member(index, rows, weight, *args, **kwargs))
        y = self.run(self._by_member(torch.mul, x, self.r), weight, *args, **kwargs)
        if self.kinds == "r":
            return y
        if self.biases is None:
            return self._by_member(torch.mul, y, self.s, made=True)
        return self._by_member(lambda y, s, b: torch.addcmul(b, y, s), y, self.s, self.biases, made=True)

    def weight_of_member(self, index: int, affine: AffineMap, weight: Tensor) -> Tensor:
        prefix = self.prefixes[affine.weight]
        r = getattr(self, f"{prefix}r")[index]
        s = getattr(self, f"{prefix}s")[index] if "s" in self.kinds else r.new_ones(affine.widths(weight.shape)[1])
        return weight * affine.outer(r, s, weight.dim())


@dataclass(frozen=True)
class Factors:
    """Distribution of the factors: N(`center`, `spread`) or random signs, for all layers or the first one's inputs.

    `chunks` are widths of parts of the first layer's inputs. Each part has one number.
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

    def draw(self, layers: Sequence[RankOne], first_kept: bool) -> None:
        """Draw the factors of the layers in order. With `first_kept`, the first member's factors stay one."""
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
    """Convert a network to a BatchEnsemble: its convolutions and linear layers get factors and a bias per member.

    The factors are drawn from N(`center`, `spread`) (`factors="normal"`) or are random signs (`"sign"`). With a
    pretrained network, member 0 starts exactly as that network and the others start close to it. `spread` defaults to
    0.5 for fresh networks and 0.1 for pretrained ones. `layers` selects the layers. `model`, `init` and `heads` work as
    in `deep_ensemble`, on the shared weights: frozen weights stay frozen, with factors around them.

    With `random="first"` only the factors on the first layer's inputs are drawn, and all others start at one (Gorishniy
    et al., *TabM*, 2025). `chunks` are widths of parts of these inputs, such as embeddings; each part has one number.
    `sides="inputs"` leaves out the output factors and the members' biases. `own` selects layers that each member has
    for itself, with all weights: `own=["fc"]` gives each member an output layer. With `rows="own"` each member trains
    on its own part of the batch: `net.loss` is the mean over members of the loss on their parts, in little more than
    the time of one network. Parts have equal size; if the batch does not divide evenly, some rows go to two members.

    >>> net = batch_ensemble(nn.Linear(3, 2), members=4)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    """
    start = Start(model, members, init, heads, seed=seed)
    model = start.network
    check_choice("sides", sides, ("both", "inputs"))
    check_choice("rows", rows, ("shared", "own"))
    drawn = Factors(factors, (0.5 if start.fresh else 0.1) if spread is None else spread, center, random, chunks)
    drawn.check(members)
    apart = {} if own is None else select(model, own, affine_layers(model), "own")
    chosen = {name: layer for name, layer in select_affine(model, layers).items() if name not in apart}
    with start.seeded():
        model = start.initialize(copied(model))
        converted: dict[str, MemberLayer] = {}
        for name in chosen:
            converted[name] = RankOne(model.get_submodule(name), members, sides)
        for name in apart:
            layer = model.get_submodule(name)
            if kind_of(layer) in SEVERAL:
                kind = type(layer).__name__
                raise ValueError(
                    f"own: layer {name!r} ({kind}) has several maps; own= is for linear layers and convolutions"
                )
            anew = start.fresh or (start.mode == "heads" and name in start.heads)
            with evaluating(layer):
                converted[name] = Own([reinitialize(copied(layer)) if anew else copied(layer) for _ in range(members)])
        drawn.draw([layer for layer in converted.values() if isinstance(layer, RankOne)], not start.fresh)
    net = make_shared_members(SharedMembers, start, model, converted, members, rows, task)
    notes = {name: "each member's own" if name in apart else "a rank-one factor for each member" for name in converted}
    net.notes = start.summary_notes(notes)
    note_reach(net, model, converted, warn=layers is None)
    return net


ROWS = (
    Method(
        "batch_ensemble", by(batch_ensemble), {"members": 4, "factors": "normal", "spread": None},
        "The parameters of one network and two vectors a layer for each member; the time of all members.",
        "Pick it when parameters are scarce and time is not.",
        place=30,
    ),
)  # fmt: skip
