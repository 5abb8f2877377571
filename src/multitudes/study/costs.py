"""What a method costs: parameters, multiply-adds and memory; and times, of all methods beside each other, in turns.

Times depend on the machine, and on what else it does just then. Methods that take turns meet the same disturbances, and
the ratio of a method's time to the single network's in the same round is freer of them than either time.
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

from multitudes.core.copying import copied
from multitudes.core.draws.memory import Meter
from multitudes.core.multitude import Multitude
from multitudes.core.seeding import seeded
from multitudes.core.trace import recording
from multitudes.evaluation.calibrate import Calibrated
from multitudes.storage.save import load
from multitudes.study.assignment import Assignment
from multitudes.study.store import Job, Run
from multitudes.training.fit import fit
from multitudes.training.trainer import Progress

BATCH = 256
"""The most inputs that are timed at once."""
LONG = 0.5
"""Seconds that a prediction shall not take, where fewer inputs at once take less."""
SHORT = 0.05
"""Seconds that are long enough to be timed."""
MOST = 100
"""How often something short is done to time it."""
ROUNDS = 9
LIMIT = 60.0
"""Seconds after which no further round is begun; three times as many before there are three rounds."""
FEWEST_ROWS = 16
"""That a step of training is timed with."""
SMALL = 8
"""A batch is compared with one this many times smaller: where that takes half the time, Python takes most of it."""


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


@dataclass(frozen=True)
class Ratio:
    """A time as a multiple of another's: the median over rounds, and the quartiles."""

    ratio: float
    low: float
    high: float
    seconds: float
    """The median of the time itself."""

    def times(self, factor: float) -> Ratio:
        """The ratios of what is done so many times more often than the other."""
        return replace(self, ratio=factor * self.ratio, low=factor * self.low, high=factor * self.high)


def in_turns(
    timed: Mapping[str, Callable[[], float]], base: str, rounds: int = ROUNDS, limit: float = LIMIT
) -> dict[str, Ratio]:
    """Time each in turn, round after round; `base` is what the others are multiples of.

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
    """What the costs were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    about = {"system": platform.system(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"device": str(device), "name": name, **about}


def versions() -> dict[str, str]:
    """Of what they were measured with."""
    found = {"python": platform.python_version(), "torch": torch.__version__}  # with its build, unlike metadata
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


# -- of a study --------------------------------------------------------------------------------------------


def measure_times(run: Run, say: Callable[[str], None] = lambda message: None) -> dict[str, Any] | None:
    """The times of all methods of a run that have a job done, of its first seed; None where nothing is done.

    Training is timed on a method's network as it is before training, prediction as it is after.
    """
    jobs = _assignments(run.done)
    if not jobs:
        return None
    say(f"Timing {len(jobs)} methods in turns")
    some = next(iter(jobs.values()))
    alone = next((label for label, job in jobs.items() if job.method.name == "single"), "")
    with seeded(0):
        network = some.network()
        single = some.of_single.built(network)
        x = some.data.normalised(some.data.test.x[:BATCH]).to(some.device)
        base, batch = Prediction(single, x), _batch(some.of_single, single)
        predicting = {label: Prediction(_trained(job), x, base.batch).seconds for label, job in jobs.items()}
        training = {
            label: TrainingStep(job.built(network), *batch, job.arguments).seconds for label, job in jobs.items()
        }
        if not alone:  # what the others are multiples of
            predicting[alone] = base.seconds
            training[alone] = TrainingStep(single, *batch, some.of_single.arguments).seconds
        tiny = _tiny(base)
        inference, steps = in_turns(predicting, alone), in_turns(training, alone)
    epochs = {label: len(Job(job.directory).metrics["history"]) for label, job in jobs.items()}
    times = {
        label: epochs[label] / max(epochs.get(alone, job.config["training"]["epochs"]), 1)
        for label, job in jobs.items()
    }
    return {
        "tiny": tiny,
        "batch": base.batch,
        "machine": machine(some.device),
        "methods": {
            label: {"inference": asdict(inference[label]), "training": asdict(steps[label].times(times[label]))}
            for label in jobs
        },
    }


def _assignments(jobs: list[Job]) -> dict[str, Assignment]:
    """Of each method's first job, with the data read once."""
    found: dict[str, Assignment] = {}
    for job in jobs:
        if job.label not in found:
            place = (job.config or {}).get("data")
            data = next((one.data for one in found.values() if one.config["data"] == place), None)
            found[job.label] = Assignment.read(job.directory, data=data)
    return found


def _trained(job: Assignment) -> Any:
    net = load(job.directory / "model.safetensors", job.network(with_weights=False))
    job.prepared(net.net if isinstance(net, Calibrated) else net)
    return net.to(job.device).eval()


def _batch(job: Assignment, single: Any) -> tuple[Tensor, Tensor]:
    """A batch of the training, or fewer rows where its step takes long."""
    x, y = next(iter(job.loader))
    while len(x) > FEWEST_ROWS and TrainingStep(single, x, y, job.arguments).seconds() > LONG:
        x, y = x[: len(x) // 2], y[: len(x) // 2]
    return x, y


def _tiny(base: Prediction) -> bool:
    """Whether calling the network takes most of the time, rather than computing it."""
    if base.batch < SMALL:
        return False
    small = Prediction(base.net, base.x, max(1, base.batch // SMALL))
    return in_turns({"small": small.seconds, "": base.seconds}, "", 5)["small"].ratio > 0.5
