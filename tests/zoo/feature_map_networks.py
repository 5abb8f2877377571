"""Networks for tests of smoothing and heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.models.resnet import BasicBlock

STAGES = ["layer2.0", "layer3.0", "layer4.0"]
FOUR = [*STAGES, "avgpool"]
"""Layers of a ResNet with a `Smooth` before them."""


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small_resnet(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return mt.models.ResNet(BasicBlock, (1, 1, 1, 1), classes=5, width=8, **options).eval()


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *layers)


class Functional(nn.Module):
    """A network that pools with functions in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(F.max_pool2d(self.conv(x), 2), 1).flatten(1))
