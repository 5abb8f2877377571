"""Seeds and random states."""

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
"""A random generator of torch, and its state."""


def mixed(seed: int, number: int) -> int:
    """Derive the seed of part `number` from a seed, by the finalizer of SplitMix64."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % 2**63


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's random state inside `with`, then restore it; do nothing if `seed` is None."""
    check_seed(seed)
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def torch_states(x: Any = ()) -> list[State]:
    """Return torch's default generators, of the CPU and of the devices of an input, with their states."""
    devices = {tensor.device.index for tensor in tensors_in(x) if tensor.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
    return [(generator, generator.get_state()) for generator in generators]


class RandomStates:
    """Random states of torch (on the CPU and the devices of `x`), Python, and NumPy if it is imported."""

    def __init__(self, x: Any = ()) -> None:
        self.torch = torch_states(x)
        self.python = random.getstate()
        self.numpy = _numpy_state()

    @property
    def moved(self) -> bool:
        """True if Python's or NumPy's state has moved. For torch's, which other threads may move, use `RandomUse`."""
        return random.getstate() != self.python or self.numpy not in (None, _numpy_state())

    def restore(self, also_torch: bool) -> None:
        """Restore Python's and NumPy's states, and torch's if `also_torch` is true."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for generator, state in self.torch if also_torch else ():
            generator.set_state(state)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return [value.tolist() if hasattr(value, "tolist") else value for value in state] or None
