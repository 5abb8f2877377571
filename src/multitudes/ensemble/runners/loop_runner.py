"""The loop: members run one after the other, each by its own code. Always right, and the fastest on most CPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multitudes.networks.calls import Input, call
from multitudes.networks.stochastic import as_member


class LoopRunner:
    """`torch.stack([member(x) for member in members])`, each member with its own random numbers where it draws."""

    name = "loop"

    def __init__(self, networks: nn.ModuleList) -> None:
        self.networks = networks

    def __call__(self, x: Input) -> Tensor:
        return torch.stack([self.one(index, network, x) for index, network in enumerate(self.networks)])

    def one(self, index: int, network: nn.Module, x: Input) -> Tensor:
        """Run one member, `[B, ...]`."""
        with as_member(network, index, len(self.networks)):
            return call(network, x)
