"""Seeds for numbered parts, and code that runs with a seeded random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from multitudes.core.calling import tensors_in
from multitudes.core.checks import check_seed

__all__ = ["mixed", "seeded", "torch_generators"]


def mixed(seed: int, number: int) -> int:
    """Return a seed for a numbered part of something that has a seed, by the finaliser of SplitMix64."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % 2**63


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's random state for the duration of a call, and put it back; do nothing where `seed` is None."""
    check_seed(seed)
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def torch_generators(x: Any) -> list[torch.Generator]:
    """Return torch's own random sources, of the CPU and of the devices of an input."""
    devices = {tensor.device.index for tensor in tensors_in(x) if tensor.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
