"""An exponential moving average of the weights, which often predicts better than the last weights.

Polyak and Juditsky, *Acceleration of stochastic approximation by averaging* (1992); with exponential decay, as in
Tarvainen and Valpola, *Mean teachers are better role models* (2017).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

EARLY = 10
"""The decay is at most `(1 + step) / (EARLY + step)`, to forget the initial weights soon."""


class MovingAverage:
    """The average of a network's trained parameters, `average = rate * average + (1 - rate) * weights` in each step.

    `kept` holds the average by parameter name. If it is not empty, the average continues from it.
    """

    def __init__(self, net: nn.Module, rate: float, kept: dict[str, Tensor]) -> None:
        self.rate, self.kept = rate, kept
        own = {name: p for name, p in net.named_parameters() if p.requires_grad and p.is_floating_point()}
        self.parameters: list[Tensor] = list(own.values())
        for name, parameter in own.items():
            kept[name] = kept[name].to(parameter.device) if name in kept else parameter.detach().clone()
        self.values = [kept[name] for name in own]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after this step, counted from 1."""
        rate = min(self.rate, (1 + step) / (EARLY + step))
        torch._foreach_lerp_(self.values, [parameter.detach() for parameter in self.parameters], 1 - rate)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the average as the network's weights inside the context."""
        now = [parameter.detach().clone() for parameter in self.parameters]
        self.apply()
        try:
            yield
        finally:
            self._set(now)

    def apply(self) -> None:
        """Replace the network's weights with the average."""
        self._set(self.values)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self.parameters, values)
