"""Random states: seeds for numbered parts, and code that runs with a random state of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multitudes.core.checks import check_seed

__all__ = ["mixed", "seeded"]


def mixed(seed: int, number: int) -> int:
    """A seed for a numbered part of what has a seed, by the finaliser of SplitMix64."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % 2**63


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Random numbers from `seed`, and torch's own random state as it was, after. None: torch's own state."""
    check_seed(seed)
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
