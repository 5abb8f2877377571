"""Noise: Gaussian, shot, impulse, speckle. Each channel of each pixel has noise of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from multitudes.shift.randomness import normal


def gaussian_noise(x: Tensor, generator: torch.Generator, deviation: float) -> Tensor:
    """`x + c n`, n standard normal: a camera in low light."""
    return x + deviation * normal(x.shape, x, generator)


def shot_noise(x: Tensor, generator: torch.Generator, photons: int) -> Tensor:
    """`Poisson(c x) / c`: light comes in photons."""
    return torch.poisson(x * photons, generator=generator) / photons


def impulse_noise(x: Tensor, generator: torch.Generator, fraction: float) -> Tensor:
    """A fraction c of the values becomes 0 or 1, either as likely: salt and pepper."""
    u = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return torch.where(u < fraction, (u < fraction / 2).to(x.dtype), x)


def speckle_noise(x: Tensor, generator: torch.Generator, deviation: float) -> Tensor:
    """`x + c x n`, n standard normal: noise that grows with the light."""
    return x + deviation * x * normal(x.shape, x, generator)
