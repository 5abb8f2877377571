"""What a method costs: parameters, multiply-adds, training time, speed and memory, beside those of a single network.

Times depend on the machine and on what else runs there. So the single network is measured in the same process, right
after, and each cost is also given as a ratio to its.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from multitudes.core.draws.memory import Meter
from multitudes.core.multitude import Multitude
from multitudes.training.fit import Progress, fit

__all__ = [
    "Inference",
    "Step",
    "commit",
    "inference_cost",
    "machine",
    "multiply_adds",
    "parameters",
    "training_cost",
    "versions",
    "with_ratios",
]

BATCH = 256
"""The most inputs that are timed at once."""
LONG = 0.2
"""Seconds that are long enough to be timed."""
MOST = 100
"""How often something short is timed."""


def parameters(net: nn.Module) -> int:
    """How many numbers are learned; shared ones count once.

    >>> parameters(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in net.parameters())


def multiply_adds(net: Multitude, x: Tensor) -> int:
    """The multiply-adds of predicting one input, the first of `x [B, ...]`, with all members and draws.

    Those of matrix products, convolutions and attention, as torch's counter sees them; half of its flops.

    >>> multiply_adds(Multitude(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))), torch.ones(5, 3))
    20
    """
    one = x[:1]
    net.predict(one, seed=0)  # what is measured once for a shape, such as the fastest runner, is not counted
    counter = FlopCounterMode(display=False)
    with counter:
        net.predict(one, seed=0)
    return counter.get_total_flops() // 2


@dataclass(frozen=True)
class Inference:
    """How fast a network predicts."""

    per_second: float
    """Inputs a second."""
    batch: int
    """How many of them at once."""


def inference_cost(net: Multitude, x: Tensor, batch: int | None = None) -> Inference:
    """How many inputs like `x [B, ...]` are predicted in a second, the median of several times.

    As many at once as are given, 256 at most, or fewer where that takes long enough; or `batch` of them.
    """
    most = min(len(x), BATCH)
    size = min(16, most) if batch is None else min(batch, most)
    while batch is None and size < most and _warm_seconds(net, x[:size]) < LONG:
        size = min(2 * size, most)
    _warm_seconds(net, x[:size])
    times: list[float] = []
    while not _enough(times):
        times.append(_seconds(net, x[:size]))
    return Inference(size / statistics.median(times), size)


def _enough(times: list[float]) -> bool:
    """Whether there are enough times for a median: five or more of some length in all, or few long ones."""
    return len(times) >= MOST or sum(times) > 10 * LONG or (len(times) >= 5 and sum(times) > LONG)


def _warm_seconds(net: Multitude, x: Tensor) -> float:
    """The time of a second prediction: the first also measures what is measured once for a shape."""
    return [_seconds(net, x) for _ in range(2)][1]


def _seconds(net: Multitude, x: Tensor) -> float:
    _wait_for(x.device)
    start = time.perf_counter()
    net.predict(x, seed=0)
    _wait_for(x.device)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Step:
    """What a step of training costs."""

    seconds: float
    peak_bytes: int
    """Of the network's tensors, gradients, the optimizer's state and all other tensors that are alive at once."""


def training_cost(net: Multitude, x: Tensor, y: Tensor, how: Callable[[Multitude], Mapping[str, Any]]) -> Step:
    """The median time of some training steps on one batch, and the peak of the memory.

    `how` gives the arguments of `fit` for a network. A copy is trained, for one epoch and at a learning rate of 0:
    `net` is not changed, and no loss becomes infinite for the lack of a warm-up.
    """
    trained = copy.deepcopy(net)
    short = {"epochs": 1, "schedule": lambda done: 0.0, "warmup": 0, "compile": False, "seed": 0, "progress": False}
    arguments = {**how(trained), **short}
    own = sum(tensor.nbytes for tensor in [*trained.parameters(), *trained.buffers()])
    if x.device.type == "cuda":
        fit(
            trained, [(x, y)], **arguments
        )  # what comes once: workspaces of CUDA's libraries, the timing of the runners
        _wait_for(x.device)
        before = torch.cuda.memory_allocated(x.device)
        torch.cuda.reset_peak_memory_stats(x.device)
        fit(trained, [(x, y)], **arguments)
        peak = torch.cuda.max_memory_allocated(x.device) - before
    else:
        with Meter() as meter:
            fit(trained, [(x, y)], **arguments)
        peak = meter.peak
    clock = _Clock(x.device)
    fit(trained, [(x, y)] * (MOST + 1), **arguments, callbacks=(clock,))
    return Step(statistics.median(clock.times), own + peak)


class _Clock:
    """Times the steps of `fit` after the first, which warms up, and ends the training when there are enough.

    On a GPU several at once, since the next is on its way there before one is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.at_once = device, 5 if device.type == "cuda" else 1
        self.last: float | None = None
        self.times: list[float] = []

    def __call__(self, progress: Progress) -> bool:
        if progress.epoch_ended or (progress.step - 1) % self.at_once:
            return False
        _wait_for(self.device)
        now = time.perf_counter()
        if self.last is not None:
            self.times.append((now - self.last) / self.at_once)
        self.last = now
        return _enough(self.times)


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
