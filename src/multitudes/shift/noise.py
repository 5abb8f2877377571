"""Random numbers that leave torch's random state as it is; and noise: Gaussian, shot, impulse, speckle.

Each channel of each pixel has noise of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multitudes.core.checks import check_seed


def generator_of(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator with this seed; without one, a seed is drawn from torch's random state."""
    check_seed(seed)
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)


def uniform(shape: Sequence[int], low: float, high: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers between low and high, in the type of `like`."""
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)


def normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, in the type of `like`."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


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
