"""Choices of a random network: which parts there are, and one source of random numbers that chooses among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

T = TypeVar("T")
Block = Callable[["Dice"], nn.Module]

WIDTH = 8
"""The width of what goes from block to block: `[B, 8]`, `[B, T, 8]` or `[B, 8, H, W]`."""

BLOCKS: dict[str, list[Block]] = {"rows": [], "sequences": [], "maps": []}
"""Blocks by the form of their inputs and outputs: features last, `[B, T, 8]`, or `[B, 8, H, W]`."""


PLAIN: dict[str, list[Block]] = {"rows": [], "sequences": [], "maps": []}
"""Common blocks, by the same forms."""


def block(*forms: str, plain: bool = False) -> Callable[[Block], Block]:
    """Enter a block under what it reads and gives."""

    def enter(build: Block) -> Block:
        for form in forms:
            BLOCKS[form].append(build)
            if plain:
                PLAIN[form].append(build)
        return build

    return enter


class Dice:
    """Random choices for one network.

    `noise` says which of its dropouts are felt, None for all, or their numbers; the others have a rate that never drops
    anything, or 0 where none is felt. The choices are the same.
    """

    def __init__(self, seed: int, noise: Sequence[int] | None = None) -> None:
        self.random = random.Random(seed)
        self.noise = noise
        self.rates: list[str] = []

    def one(self, of: Sequence[T]) -> T:
        return of[self.random.randrange(len(of))]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def rate(self, what: str) -> float:
        """A dropout rate; `what` names the kind of noise, for the judge."""
        rate = self.one((0.1, 0.25, 0.4))
        on = self.noise is None or len(self.rates) in self.noise
        self.rates.append(what)
        return rate if on else 1e-9 if self.noise else 0.0

    def activation(self) -> nn.Module:
        return self.one((nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, Sine))()

    def function(self) -> Callable[[Tensor], Tensor]:
        return self.one((F.relu, F.gelu, F.silu, F.softplus))

    def hidden(self) -> int:
        return self.one((6, 8, 12, 16))


class Sine(nn.Module):
    """An activation that no library knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()
