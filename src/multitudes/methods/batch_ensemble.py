"""BatchEnsemble: members share each weight and have rank-one factors of their own.

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
    """A shared layer with factors per member on the inputs (`r [M, I]`) and outputs (`s [M, O]`) of each affine map.

    With `sides="inputs"` there are no output factors, and members share the biases.
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
    """Distribution of the factors; the fields are arguments of `batch_ensemble`."""

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
                f"spread={self.spread!r} gives all members the same factors, so they stay identical: use a larger one"
            )

    def draw(self, layers: Sequence[RankOne], first_kept: bool) -> None:
        """Draw the factors of the layers in order. With `first_kept`, the first member's factors stay one."""
        for number, layer in enumerate(layers):
            for place, factor in enumerate(layer.factors()):
                if self.random == "first" and (number or place):
                    continue
                own = factor.data[1:] if first_kept else factor.data
                chunks = self.chunks if number == place == 0 else None
                own.copy_(self._samples(own) if chunks is None else self._chunk_samples(own, chunks))

    def _chunk_samples(self, like: Tensor, chunks: Sequence[int]) -> Tensor:
        if sum(chunks) != like.shape[1]:
            raise ValueError(f"chunks must add up to {like.shape[1]}, the first layer's inputs, got {sum(chunks)}")
        samples = self._samples(like.new_empty(len(like), len(chunks)))
        return samples.repeat_interleave(torch.tensor(list(chunks), device=like.device), 1)

    def _samples(self, like: Tensor) -> Tensor:
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
    """Convert a network to a BatchEnsemble (Wen et al., 2020), in which members share almost all weights.

    Each convolution and linear layer gets factors and a bias per member: `y = W (x * r_i) * s_i + b_i`. Of a pretrained
    network, member 0 starts exactly as the network, and the others start close to it.

    Args:
        model: The network, or a function that builds one. It is not changed. Frozen weights stay frozen; the factors
            around them are trained.
        members: Number of members.
        factors: Distribution of the factors: `"normal"`, N(`center`, `spread`), or `"sign"`, random signs.
        spread: Standard deviation of the factors, by default 0.5 in fresh and 0.1 in pretrained networks.
        center: Mean of the factors.
        random: Factors that start random: `"all"`, or `"first"` for those on the first layer's inputs only (as in
            Gorishniy et al., *TabM*, 2025). The others start at one.
        chunks: Widths of parts of the first layer's inputs, such as embeddings. Each part has one random factor.
        sides: `"both"`, or `"inputs"` for no output factors and shared biases.
        own: Selects layers that each member has with all weights: `own=["fc"]` gives each an output layer.
        rows: `"shared"`, or `"own"` to train each member on its own part of the batch, in little more than the time of
            one network. Parts have equal size; if the batch does not divide evenly, some rows go to two members.
        layers: Selects the converted layers.
        init: Where the shared weights start: `"fresh"`, `"heads"` or `"pretrained"`, as in `deep_ensemble`.
        heads: Selects the output layers that `init="heads"` resets.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights and factors.

    Returns:
        A multitude with predictions `[M, B, ...]`.

    Example:
        >>> net = batch_ensemble(nn.Linear(3, 2), members=4)
        >>> net(torch.ones(5, 3)).shape
        torch.Size([4, 5, 2])
    """
    start = Start(model, members, init, heads, seed=seed)
    model = start.network
    check_choice("sides", sides, ("both", "inputs"))
    check_choice("rows", rows, ("shared", "own"))
    distribution = Factors(factors, (0.5 if start.fresh else 0.1) if spread is None else spread, center, random, chunks)
    distribution.check(members)
    whole = {} if own is None else select(model, own, affine_layers(model), "own")
    chosen = [name for name in select_affine(model, layers) if name not in whole]
    with start.seeded():
        model = start.initialize(copied(model))
        shared = {name: RankOne(model.get_submodule(name), members, sides) for name in chosen}
        converted: dict[str, MemberLayer] = {**shared}
        for name in whole:
            layer = model.get_submodule(name)
            if kind_of(layer) in SEVERAL:
                kind = type(layer).__name__
                raise ValueError(
                    f"own: layer {name!r} ({kind}) has several maps; own= is for linear layers and convolutions"
                )
            reset = start.fresh or (start.mode == "heads" and name in start.heads)
            with evaluating(layer):
                converted[name] = Own([reinitialize(copied(layer)) if reset else copied(layer) for _ in range(members)])
        distribution.draw(list(shared.values()), not start.fresh)
    net = make_shared_members(SharedMembers, start, model, converted, members, rows, task)
    notes = dict.fromkeys(shared, "a rank-one factor for each member") | dict.fromkeys(whole, "each member's own")
    net.notes = start.summary_notes(notes)
    note_reach(net, model, converted, warn=layers is None)
    return net


ROWS = (
    Method(
        "batch_ensemble", by(batch_ensemble), {"members": 4, "factors": "normal", "spread": None},
        "Parameters of one network, plus two vectors per layer and member. Time of all members.",
        "Pick it if memory for parameters is scarce but time is not.",
        place=30,
    ),
)  # fmt: skip
