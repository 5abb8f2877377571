"""Blocks that read and give features last, `[..., 8]`: affine maps of every kind, norms, experts, moving buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.campaigns.random_dice import WIDTH, Dice, block


class Residual(nn.Module):
    """`x + f(x)`, or with a gate that may start at 0."""

    def __init__(self, body: nn.Module, gate: float | None = None) -> None:
        super().__init__()
        self.body = body
        self.gate = None if gate is None else nn.Parameter(torch.full((1,), gate))

    def forward(self, x: Tensor) -> Tensor:
        change = self.body(x)
        return x + (change if self.gate is None else self.gate * change)


class PlainLinear(nn.Linear):
    """A subclass that inherits `forward`."""


class StandardisedLinear(nn.Linear):
    """A subclass with a `forward` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, weight, self.bias)


class TransposedAffine(nn.Module):
    """Hugging Face's `Conv1D`, of GPT-2: a weight `[I, O]`."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.3)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(shape)


@block("rows", "sequences", plain=True)
def perceptron(dice: Dice) -> nn.Module:
    hidden, linear = dice.hidden(), dice.one((nn.Linear, nn.Linear, PlainLinear, StandardisedLinear))
    layers = [linear(WIDTH, hidden, bias=dice.chance(0.8)), dice.activation()]
    if dice.chance(0.4):
        layers.append(nn.Dropout(dice.rate("layer")))
    layers.append(linear(hidden, WIDTH))
    body = nn.Sequential(*layers)
    return Residual(body, dice.one((None, 0.0, 0.5))) if dice.chance(0.6) else body


@block("rows", "sequences")
def transposed_affine(dice: Dice) -> nn.Module:
    hidden = dice.hidden()
    return Residual(nn.Sequential(TransposedAffine(hidden, WIDTH), dice.activation(), TransposedAffine(WIDTH, hidden)))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(x, x.flip(-1)))


@block("rows", "sequences")
def bilinear(dice: Dice) -> nn.Module:
    return Bilinear()


class OwnNorm(nn.Module):
    """RMSNorm as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@block("rows", "sequences", plain=True)
def norm(dice: Dice) -> nn.Module:
    return dice.one((lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH), OwnNorm))()


class BatchNormOfFeatures(nn.Module):
    """Batch norm of features that are last."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


@block("rows", "sequences", plain=True)
def batch_norm(dice: Dice) -> nn.Module:
    return BatchNormOfFeatures(
        affine=dice.chance(0.7), track_running_stats=dice.chance(0.7), momentum=dice.one((0.1, None))
    )


class CentredOnBatch(nn.Module):
    """Normalisation over the batch in a network's own code."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


@block("rows", "sequences")
def centred_on_batch(dice: Dice) -> nn.Module:
    return CentredOnBatch()


class Einsum(nn.Module):
    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2, 4) * 0.3)
        self.out = nn.ParameterList([nn.Parameter(torch.randn(2, 4, WIDTH) * 0.3)])
        self.scale = nn.ParameterDict({"s": nn.Parameter(torch.ones(WIDTH))})
        self.activation = dice.function()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(torch.einsum("...i,ihk->...hk", x, self.weight))
        return x + torch.einsum("...hk,hko->...o", hidden, self.out[0]) * self.scale["s"]


@block("rows", "sequences")
def einsum(dice: Dice) -> nn.Module:
    return Einsum(dice)


class Experts(nn.Module):
    """A mixture of experts, weighted by a gate, or routed to the best one, each expert on its own rows."""

    def __init__(self, routed: bool) -> None:
        super().__init__()
        self.routed = routed
        self.gate = nn.Linear(WIDTH, 3)
        self.inside = nn.Parameter(torch.randn(3, WIDTH, 6) * 0.3)
        self.outside = nn.Parameter(torch.randn(3, 6, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        if not self.routed:
            hidden = torch.einsum("...i,eih->...eh", x, self.inside).relu()
            return x + torch.einsum("...eh,eho,...e->...o", hidden, self.outside, gates)
        rows, flat = x.flatten(0, -2), gates.flatten(0, -2)
        best, out = flat.argmax(-1), torch.zeros_like(rows)
        for expert in range(3):
            mine = (best == expert).nonzero().squeeze(-1)
            if len(mine):
                answer = torch.relu(rows[mine] @ self.inside[expert]) @ self.outside[expert]
                out = out.index_add(0, mine, answer * flat[mine, expert, None])
        return x + out.view_as(x)


@block("rows", "sequences")
def experts(dice: Dice) -> nn.Module:
    return Experts(dice.chance(0.5))


NORMALISED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "old weight_norm": nn.utils.weight_norm,
    "weight_norm": parametrizations.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "spectral_norm": parametrizations.spectral_norm,
}


@block("rows", "sequences")
def normalised_weights(dice: Dice) -> nn.Module:
    kind = NORMALISED[dice.one(list(NORMALISED))]
    return nn.Sequential(kind(nn.Linear(WIDTH, 12)), dice.activation(), nn.Linear(12, WIDTH))


class Frozen(nn.Module):
    """A layer that is not trained, and one bare constant."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.backbone = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.tuned = nn.Linear(WIDTH, WIDTH)
        self.activation = dice.activation()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.tuned(self.activation(self.backbone(x) + self.shift))


@block("rows", "sequences", plain=True)
def frozen(dice: Dice) -> nn.Module:
    return Frozen(dice)


class Dense(nn.Module):
    """A dense join and a gate."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.one, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.activation = dice.function()

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.join(torch.cat([x, self.activation(self.one(x))], -1)), -1)


@block("rows", "sequences", plain=True)
def dense(dice: Dice) -> nn.Module:
    return Dense(dice)
