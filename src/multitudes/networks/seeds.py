"""Seeds for numbered parts, and code with a seeded random state."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from multitudes.base.checks import check_seed
from multitudes.networks.calls import tensors_in

State = tuple[torch.Generator, torch.Tensor]
"""One of torch's random generators, and its state at some time."""


def mixed(seed: int, number: int) -> int:
    """Derive the seed of a numbered part from a seed, by the finaliser of SplitMix64."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % 2**63


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's random state for the duration of a call, then restore it; do nothing if `seed` is None."""
    check_seed(seed)
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def torch_generators(x: Any) -> list[torch.Generator]:
    """Return torch's own random generators, of the CPU and of the devices of an input."""
    devices = {tensor.device.index for tensor in tensors_in(x) if tensor.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]


def torch_states(x: Any = ()) -> list[State]:
    """Return torch's own random generators with their states."""
    return [(generator, generator.get_state()) for generator in torch_generators(x)]


class RandomStates:
    """The current random states: torch's, on the CPU and on the devices of `x`, Python's, and NumPy's if imported."""

    def __init__(self, x: Any = ()) -> None:
        self.torchs = torch_states(x)
        self.python = random.getstate()
        self.numpy = _numpy_state()

    @property
    def moved(self) -> bool:
        """True if Python's or NumPy's state has moved; other threads may move torch's (see `NumbersDrawn`)."""
        return random.getstate() != self.python or self.numpy not in (None, _numpy_state())

    def restore(self, torchs: bool) -> None:
        """Restore Python's and NumPy's states, and torch's if `torchs` is true."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for generator, state in self.torchs if torchs else ():
            generator.set_state(state)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return [value.tolist() if hasattr(value, "tolist") else value for value in state] or None
