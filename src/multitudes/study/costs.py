"""What a method costs: parameters, multiply-adds and memory, and what is timed of it (`timing.py` does, in turns)."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.copying import copied
from multitudes.core.draws.memory import Meter
from multitudes.core.multitude import Multitude
from multitudes.core.trace import recording
from multitudes.training.fit import Progress, fit

__all__ = [
    "Prediction",
    "TrainingStep",
    "commit",
    "machine",
    "multiply_adds",
    "parameters",
    "versions",
    "with_ratios",
]

BATCH = 256
"""The most inputs that are timed at once."""
LONG = 0.5
"""Seconds that a prediction shall not take, where fewer inputs at once take less."""
SHORT = 0.05
"""Seconds that are long enough to be timed."""
MOST = 100
"""How often something short is done to time it."""


def parameters(net: nn.Module) -> int:
    """How many numbers are learned; shared ones count once.

    >>> parameters(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in net.parameters())


def multiply_adds(net: Multitude, x: Tensor) -> int:
    """The multiply-adds of predicting one input, the first of `x [B, ...]`, with all members and draws.

    Those of matrix products, convolutions, attention and recurrent layers.

    >>> multiply_adds(Multitude(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))), torch.ones(5, 3))
    20
    """
    one = x[:1]
    net.predict(one, seed=0)  # what is measured once for a shape, such as the fastest runner, is not counted
    with recording(net.network, (), work=True) as trace:
        net.predict(one, seed=0)
    return trace.multiply_adds


class Prediction:
    """The prediction of inputs `x [B, ...]`, to be timed: as many at once as take some time, `BATCH` at most."""

    def __init__(self, net: Any, x: Tensor, batch: int | None = None) -> None:
        self.net, self.x = net, x[: batch or BATCH]
        while batch is None and len(self.x) > 1 and self.once() > LONG:
            self.x = self.x[: max(1, len(self.x) // 4)]
        self.once()  # warm: the first also measures what is measured once for a shape
        self.times = _times(self.once())

    @property
    def batch(self) -> int:
        """How many inputs are predicted at once."""
        return len(self.x)

    def seconds(self) -> float:
        """Of one batch: the mean over as many as can be timed."""
        return statistics.fmean(self.once() for _ in range(self.times))

    def once(self) -> float:
        """The seconds of one prediction."""
        _wait_for(self.x.device)
        start = time.perf_counter()
        self.net.predict(self.x, seed=0)
        _wait_for(self.x.device)
        return time.perf_counter() - start


def _times(once: float) -> int:
    """How often something is done so that it can be timed."""
    return max(1, min(MOST, math.ceil(SHORT / max(once, 1e-6))))


class TrainingStep:
    """A step of training on a batch `(x, y)`, to be measured.

    `how` gives the arguments of `fit` for a network. A copy is trained, for one epoch and at a learning rate of 0:
    `net` is not changed, and no loss becomes infinite for the lack of a warm-up.
    """

    def __init__(self, net: Multitude, x: Tensor, y: Tensor, how: Callable[[Multitude], Mapping[str, Any]]) -> None:
        self.net, self.batch, self.device = copied(net), (x, y), x.device
        short = {"epochs": 1, "schedule": lambda done: 0.0, "warmup": 0, "compile": False, "seed": 0, "progress": False}
        self.arguments = {**how(self.net), **short}
        self.steps = 0

    def peak_bytes(self) -> int:
        """Of the network's tensors, gradients, the optimizer's state and all other tensors that are alive at once."""
        own = sum(tensor.nbytes for tensor in [*self.net.parameters(), *self.net.buffers()])
        if self.device.type != "cuda":
            with Meter() as meter:
                self._fit(1)
            return own + meter.peak
        self._fit(1)  # what comes once: workspaces of CUDA's libraries, the timing of the runners
        _wait_for(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._fit(1)
        return own + torch.cuda.max_memory_allocated(self.device) - before

    def seconds(self) -> float:
        """Of one step: the mean over as many as can be timed, the first one left out."""
        if not self.steps:
            self.steps = _times(self._timed(1))
        return self._timed(self.steps)

    def _timed(self, steps: int) -> float:
        clock = _Clock(self.device)
        self._fit(steps + 1, callbacks=(clock,))
        return (clock.last - clock.first) / steps

    def _fit(self, steps: int, **more: Any) -> None:
        fit(self.net, [self.batch] * steps, **self.arguments, **more)


class _Clock:
    """When the first step of `fit` was done, and when the last."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.first, self.last = device, 0.0, 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.epoch_ended or progress.step == 1:
            _wait_for(self.device)
            self.last = time.perf_counter()
            self.first = self.first or self.last


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_ratios(costs: Mapping[str, float], single: Mapping[str, float]) -> dict[str, float]:
    """The costs, and each as a ratio to the single network's, under its name and `_ratio`.

    >>> with_ratios({"parameters": 8}, {"parameters": 2})
    {'parameters': 8, 'parameters_ratio': 4.0}
    """
    return {**costs, **{f"{name}_ratio": value / single[name] for name, value in costs.items()}}


def machine(device: torch.device) -> dict[str, Any]:
    """What the costs were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    about = {"system": platform.system(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"device": str(device), "name": name, **about}


def versions() -> dict[str, str]:
    """Of what they were measured with."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
    }  # with its build, which metadata leave out
    for package in ("multitudes", "torchmetrics", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """The commit of the code that runs, with a + where code was changed since; None outside of a checkout.

    `MULTITUDES_COMMIT` overrides it, for machines that the code was copied to.
    """
    if given := os.environ.get("MULTITUDES_COMMIT"):
        return given
    folder, name = os.path.split(__file__)

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", name)  # not a repository in which the library is only installed
        changed = git("status", "--porcelain", ":/src", ":/recipes")
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
