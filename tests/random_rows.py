"""Blocks that read and give features last, `[..., 8]`: affine maps of every kind, norms, experts, moving buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.random_dice import WIDTH, Dice, block


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


class Complex(nn.Module):
    """A product with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.complex(x, x.flip(-1)) @ self.weight).real


@block("rows", "sequences")
def complex_weights(dice: Dice) -> nn.Module:
    return Complex()


class SparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixing", torch.eye(WIDTH).roll(1, 0).to_sparse())
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.sparse.mm(self.mixing, x.reshape(-1, WIDTH).T).T
        return self.linear(mixed.view_as(x))


@block("rows", "sequences")
def sparse_buffer(dice: Dice) -> nn.Module:
    return SparseBuffer()


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = 1 + x.abs().mean(-1, keepdim=True)
        return x / size + self.linear(x.detach())


@block("rows", "sequences")
def without_gradient(dice: Dice) -> nn.Module:
    return WithoutGradient()


class Moving(nn.Module):
    """State that `forward` moves: a buffer in place, a buffer that is assigned, or a Python number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH), persistent=how != "in place")
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.how == "in place":
                self.calls += 1
            elif self.how == "assigned":
                self.average = 0.9 * self.average + 0.1 * x.detach().flatten(0, -2).mean(0)
            else:
                self.steps += 1
        return self.linear(x) * (1 + 0.1 * self.calls) + self.average + 0.1 * self.steps


@block("rows", "sequences")
def moving(dice: Dice) -> nn.Module:
    return Moving(dice.one(("in place", "assigned", "number")))


class Branching(nn.Module):
    """Control flow on values, or on the mode."""

    def __init__(self, on_values: bool) -> None:
        super().__init__()
        self.on_values = on_values
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = bool(x.sum() > 0) if self.on_values else self.training
        return x + (self.one if first else self.other)(x)


@block("rows", "sequences")
def branching(dice: Dice) -> nn.Module:
    return Branching(dice.chance(0.5))


class Hooked(nn.Module):
    def __init__(self, before: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if before:
            self.linear.register_forward_pre_hook(halve_input)
        else:
            self.linear.register_forward_hook(double_output)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def halve_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] / 2,)


def double_output(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * 2


@block("rows", "sequences")
def hooked(dice: Dice) -> nn.Module:
    return Hooked(dice.chance(0.5))


class Tied(nn.Module):
    """Two layers with one weight, and one layer that runs twice."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.into, self.back, self.twice = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.back.weight = self.into.weight
        self.activation = dice.activation()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.back(self.activation(self.into(x)))
        return self.twice(self.activation(self.twice(x)))


@block("rows", "sequences")
def tied(dice: Dice) -> nn.Module:
    return Tied(dice)


class Checkpointed(nn.Module):
    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.reentrant = dice.chance(0.5)
        self.body = nn.Sequential(nn.Linear(WIDTH, 12), dice.activation(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + checkpoint(self.body, x, use_reentrant=self.reentrant)
        return x + self.body(x)


@block("rows", "sequences")
def checkpointed(dice: Dice) -> nn.Module:
    return Checkpointed(dice)


class FunctionalNoise(nn.Module):
    """Dropout that is a call: of activations, of whole samples (stochastic depth), of a learned vector."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.how = dice.one(("activations", "samples", "vector"))
        self.rate = dice.rate({"activations": "function", "samples": "drop path", "vector": "vector"}[self.how])
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.vector = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "activations":
            return self.linear(F.dropout(x, self.rate, self.training))
        if self.how == "vector":
            return self.linear(x) * F.dropout(self.vector, self.rate, self.training)
        change = self.linear(x)
        if self.training and self.rate:
            shape = (x.shape[0],) + (1,) * (x.dim() - 1)
            change = change * (torch.rand(shape) >= self.rate) / (1 - self.rate)
        return x + change


@block("rows", "sequences")
def functional_noise(dice: Dice) -> nn.Module:
    return FunctionalNoise(dice)


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
