"""Costs of a method: parameters, multiply-adds, memory, and time measured in turns with all other methods.

Times depend on the machine and its load. Methods timed in turns share the same disturbances, so the ratio of a method's
time to the single network's in the same round is less noisy than either time.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.calibrate import Calibrated
from multitudes.files.save import load
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.spec.assignment import Assignment
from multitudes.networks.copies import copied
from multitudes.networks.devices import Meter
from multitudes.networks.seeds import seeded
from multitudes.networks.trace import recording
from multitudes.training.fit import fit
from multitudes.training.trainer import Progress

BATCH = 256
"""Largest timed batch."""
LONG = 0.5
"""Seconds that a timed prediction should stay below; the batch shrinks until it does."""
SHORT = 0.05
"""Shortest duration that can be timed, in seconds."""
MOST = 100
"""Maximum repetitions when timing something short."""
ROUNDS = 9
LIMIT = 60.0
"""Seconds after which no new round starts; three times as many for the first three rounds."""
FEWEST_ROWS = 16
"""Smallest batch for timing a training step."""
SMALL = 8
"""Factor between two compared batch sizes: if the smaller batch takes over half the time, Python overhead dominates."""


def parameters(net: nn.Module) -> int:
    """Count the learned parameters; shared ones count once.

    >>> parameters(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in net.parameters())


def multiply_adds(net: Multitude, x: Tensor) -> int:
    """Count the multiply-adds of predicting one input, the first of `x [B, ...]`, with all members and draws.

    Counts matrix products, convolutions, attention and recurrent layers.

    >>> multiply_adds(Multitude(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))), torch.ones(5, 3))
    20
    """
    one = x[:1]
    net.predict(one, seed=0)  # do not count one-time measurements per shape, such as choosing a runner
    with recording(net.network, (), work=True) as trace:
        net.predict(one, seed=0)
    return trace.multiply_adds


class TimedPrediction:
    """A prediction to be timed, for inputs `x [B, ...]`; the batch shrinks from `BATCH` until it is fast enough."""

    def __init__(self, net: Any, x: Tensor, batch: int | None = None) -> None:
        self.net, self.x = net, x[: batch or BATCH]
        while batch is None and len(self.x) > 1 and self.once() > LONG:
            self.x = self.x[: max(1, len(self.x) // 4)]
        self.once()  # warm up, including one-time measurements per shape
        self.times = _times(self.once())

    @property
    def batch(self) -> int:
        """Batch size."""
        return len(self.x)

    def seconds(self) -> float:
        """Return the mean seconds per batch."""
        return statistics.fmean(self.once() for _ in range(self.times))

    def once(self) -> float:
        """Return the seconds of one prediction."""
        _wait_for(self.x.device)
        start = time.perf_counter()
        self.net.predict(self.x, seed=0)
        _wait_for(self.x.device)
        return time.perf_counter() - start


def _times(once: float) -> int:
    """Return how many repetitions are needed to time something."""
    return max(1, min(MOST, math.ceil(SHORT / max(once, 1e-6))))


class TrainingStep:
    """A training step on a batch `(x, y)`, to be measured.

    `how` returns the arguments of `fit` for a network. A copy is trained for one epoch at a learning rate of 0, so
    `net` does not change and the loss cannot diverge without a warm-up.
    """

    def __init__(self, net: Multitude, x: Tensor, y: Tensor, how: Callable[[Multitude], Mapping[str, Any]]) -> None:
        self.net, self.batch, self.device = copied(net), (x, y), x.device
        short = {"epochs": 1, "schedule": lambda done: 0.0, "warmup": 0, "compile": False, "seed": 0, "progress": False}
        self.arguments = {**how(self.net), **short}
        self.steps = 0

    def peak_bytes(self) -> int:
        """Return the peak memory of parameters, buffers, gradients, optimizer state and all other live tensors."""
        own = sum(tensor.nbytes for tensor in [*self.net.parameters(), *self.net.buffers()])
        if self.device.type != "cuda":
            with Meter() as meter:
                self._fit(1)
            return own + meter.peak
        self._fit(1)  # one-time allocations: CUDA workspaces, timing of the runners
        _wait_for(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._fit(1)
        return own + torch.cuda.max_memory_allocated(self.device) - before

    def seconds(self) -> float:
        """Return the mean seconds per step, excluding the first one."""
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
    """Record when the first and the last step of `fit` ended."""

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


@dataclass(frozen=True)
class Ratio:
    """A time as a multiple of another: the median over rounds, and the quartiles."""

    ratio: float
    low: float
    high: float
    seconds: float
    """Median of the time itself."""

    def times(self, factor: float) -> Ratio:
        """Scale the ratios by a factor."""
        return replace(self, ratio=factor * self.ratio, low=factor * self.low, high=factor * self.high)


def in_turns(
    timed: Mapping[str, Callable[[], float]], base: str, rounds: int = ROUNDS, limit: float = LIMIT
) -> dict[str, Ratio]:
    """Time each function in turn, round after round, and return its ratio to `base`.

    >>> in_turns({"one": lambda: 0.5, "two": lambda: 1.0}, "one")["two"]
    Ratio(ratio=2.0, low=2.0, high=2.0, seconds=1.0)
    """
    started = time.monotonic()
    found: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds):
        if number and time.monotonic() - started > (limit if number >= 3 else 3 * limit):
            break
        for name, measure in timed.items():
            found[name].append(measure())
    ratios = {name: [a / b for a, b in zip(own, found[base], strict=True)] for name, own in found.items()}
    return {name: _ratio(own, found[name]) for name, own in ratios.items()}


def _ratio(ratios: list[float], seconds: list[float]) -> Ratio:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Ratio(middle, low, high, statistics.median(seconds))


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    about = {"system": platform.system(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"device": str(device), "name": name, **about}


def versions() -> dict[str, str]:
    """Return the versions of Python and packages."""
    found = {"python": platform.python_version(), "torch": torch.__version__}  # includes the build, unlike metadata
    for package in ("multitudes", "torchmetrics", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """Return the commit of the running code, with a + if it was modified; None outside of a checkout.

    `MULTITUDES_COMMIT` overrides it, for machines to which the code was copied.
    """
    if given := os.environ.get("MULTITUDES_COMMIT"):
        return given
    folder, name = os.path.split(__file__)

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", name)  # fails in a repository that merely has the library installed
        changed = git("status", "--porcelain", ":/src", ":/recipes")
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


# -- times of a study --------------------------------------------------------------------------------------


def measure_times(run: Run, notify: Callable[[str], None] = lambda message: None) -> dict[str, Any] | None:
    """Time all methods with a finished job, on their first seed; None if nothing is done.

    Training is timed on the untrained network, prediction on the trained one.
    """
    jobs = _assignments(run.done)
    if not jobs:
        return None
    notify(f"Timing {len(jobs)} methods in turns")
    some = next(iter(jobs.values()))
    alone = next((label for label, job in jobs.items() if job.method.name == "single"), "")
    with seeded(0):
        network = some.network()
        single = some.as_single.convert(network)
        x = some.data.normalised(some.data.test.x[:BATCH]).to(some.device)
        base, batch = TimedPrediction(single, x), _batch(some.as_single, single)
        predicting = {label: TimedPrediction(_trained(job), x, base.batch).seconds for label, job in jobs.items()}
        training = {
            name: TrainingStep(job.convert(network), *batch, job.arguments).seconds for name, job in jobs.items()
        }
        if not alone:  # the base of the ratios
            predicting[alone] = base.seconds
            training[alone] = TrainingStep(single, *batch, some.as_single.arguments).seconds
        tiny = _tiny(base)
        inference, trained = in_turns(predicting, alone), in_turns(training, alone)
    epochs = {label: len(Job(job.directory).metrics["history"]) for label, job in jobs.items()}
    methods = {}
    for label, job in jobs.items():
        factor = epochs[label] / max(epochs.get(alone, job.config["training"]["epochs"]), 1)
        methods[label] = {"inference": asdict(inference[label]), "training": asdict(trained[label].times(factor))}
    return {"tiny": tiny, "batch": base.batch, "machine": machine(some.device), "methods": methods}


def _assignments(jobs: list[Job]) -> dict[str, Assignment]:
    """Return the assignment of each method's first job, reading shared data once."""
    found: dict[str, Assignment] = {}
    for job in jobs:
        if job.label not in found:
            place = (job.config or {}).get("data")
            data = next((one.data for one in found.values() if one.config["data"] == place), None)
            found[job.label] = Assignment.read(job.directory, data=data)
    return found


def _trained(job: Assignment) -> Any:
    net = load(job.directory / "model.safetensors", job.network(with_weights=False))
    job.prepare(net.net if isinstance(net, Calibrated) else net)
    return net.to(job.device).eval()


def _batch(job: Assignment, single: Any) -> tuple[Tensor, Tensor]:
    """Return a training batch, with fewer rows if a step takes long."""
    x, y = next(iter(job.loader))
    while len(x) > FEWEST_ROWS and TrainingStep(single, x, y, job.arguments).seconds() > LONG:
        x, y = x[: len(x) // 2], y[: len(x) // 2]
    return x, y


def _tiny(base: TimedPrediction) -> bool:
    """Return whether call overhead dominates the network's run time."""
    if base.batch < SMALL:
        return False
    small = TimedPrediction(base.net, base.x, max(1, base.batch // SMALL))
    return in_turns({"small": small.seconds, "": base.seconds}, "", 5)["small"].ratio > 0.5
