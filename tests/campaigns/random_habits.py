"""Blocks of `[..., 8]` with habits that networks have: state that moves, hooks, ties, noise in calls, odd tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.campaigns.random_dice import WIDTH, Dice, block


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
        # Every third value, since a norm or a mean that is taken away brings the sum of all to 0.
        first = bool(x.flatten()[::3].sum() > 0) if self.on_values else self.training
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
