"""Random numbers of a seed's own, which leave torch's random state as it is."""

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
