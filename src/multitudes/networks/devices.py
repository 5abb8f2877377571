"""Devices and their memory."""

from __future__ import annotations

import re
import weakref
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multitudes.networks.calls import InputError
from multitudes.networks.dispatch import ThreadSafeMode


def device_of(name: str | torch.device | None) -> torch.device:
    """Return the device with a name; "auto" and None select a GPU if there is one.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be auto, cpu, cuda or another device name of torch, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch finds no usable GPU")
    return device


def device_in(network: nn.Module) -> torch.device:
    """Return the device of a network's tensors."""
    return next(iter([*network.parameters(), *network.buffers()]), torch.zeros(0)).device


# -- memory ---------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class OverBudget(Exception):
    """Raised if a computation exceeds its memory budget."""


class Meter(ThreadSafeMode, TorchDispatchMode):
    """Measure the peak memory of the tensors created inside; raise `OverBudget` above `budget` bytes.

    Earlier tensors and the scratch memory of operations do not count. `base` is the amount at the first `reserve`, and
    `peak` the maximum since then.
    """

    def __init__(self, budget: float = inf) -> None:
        super().__init__()
        self.budget = budget
        self.live = 0
        self.peak = 0
        self.base: int | None = None
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        self._check(self.live)
        return result

    def reserve(self, size: int) -> None:
        """Check the budget before an allocation; the first call sets `base`."""
        if self.base is None:
            self.base = self.peak = self.live
        self._check(self.live + size)

    def _check(self, live: int) -> None:
        if live > self.budget:
            raise OverBudget

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.live += self._known[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def in_bytes(memory: str | int | float) -> float:
    """Return a size in bytes, given as `"2GB"`, `"512 MiB"`, or a number.

    >>> in_bytes("2GB"), in_bytes("0.5 MiB"), in_bytes(1000)
    (2000000000.0, 524288.0, 1000.0)
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(|B|[KMG]I?B)\s*", str(memory).upper())
    size = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if size <= 0:
        raise InputError(f"memory must be a size such as '2GB' or '512MB', or a number of bytes, got {memory!r}")
    return size


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a device in bytes; 8 GB if that is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return float(found[1]) * 1024 if found else 8e9
