"""Random numbers independent of torch's global generator, and noise of each value: Gaussian, shot, impulse, speckle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multitudes.base.checks import check_seed


def generator_of(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator with this seed, or with one drawn from torch's global generator."""
    check_seed(seed)
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)


def uniform(shape: Sequence[int], low: float, high: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return uniform numbers between low and high, with the dtype of `like`."""
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)


def normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers, with the dtype of `like`."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def gaussian_noise(x: Tensor, generator: torch.Generator, deviation: float) -> Tensor:
    """Return `x + c n` with n standard normal, like a camera in low light."""
    return x + deviation * normal(x.shape, x, generator)


def shot_noise(x: Tensor, generator: torch.Generator, photons: int) -> Tensor:
    """Return `Poisson(c x) / c`, the noise of single photons."""
    return torch.poisson(x * photons, generator=generator) / photons


def impulse_noise(x: Tensor, generator: torch.Generator, fraction: float) -> Tensor:
    """Set a fraction c of the values to 0 or 1 with equal probability: salt and pepper."""
    u = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return torch.where(u < fraction, (u < fraction / 2).to(x.dtype), x)


def speckle_noise(x: Tensor, generator: torch.Generator, deviation: float) -> Tensor:
    """Return `x + c x n` with n standard normal: noise proportional to brightness."""
    return x + deviation * x * normal(x.shape, x, generator)
