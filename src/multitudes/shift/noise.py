"""Noise: Gaussian, shot, impulse, speckle. Each channel of each pixel has noise of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from multitudes.shift.filters import level, normal

GAUSSIAN = (0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)  # standard deviation
SHOT = (500, 250, 100, 75, 50), (60, 25, 12, 5, 3)  # photons at full brightness
IMPULSE = (0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)  # share of values replaced
SPECKLE = (0.06, 0.1, 0.12, 0.16, 0.2), (0.15, 0.2, 0.35, 0.45, 0.6)  # relative standard deviation


def gaussian_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """`x + c n`, n standard normal: a camera in low light."""
    return x + level(x, severity, *GAUSSIAN) * normal(x.shape, x, generator)


def shot_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """`Poisson(c x) / c`: light comes in photons."""
    photons = level(x, severity, *SHOT)
    return torch.poisson(x * photons, generator=generator) / photons


def impulse_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A share c of the values becomes 0 or 1, either as likely: salt and pepper."""
    share = level(x, severity, *IMPULSE)
    u = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return torch.where(u < share, (u < share / 2).to(x.dtype), x)


def speckle_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """`x + c x n`, n standard normal: noise that grows with the light."""
    return x + level(x, severity, *SPECKLE) * x * normal(x.shape, x, generator)
