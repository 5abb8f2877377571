"""How long predicting and training take: all methods beside each other, in turns, in one process.

Times depend on the machine, and on what else it does just then. Methods that take turns meet the same disturbances, and
the ratio of a method's time to the single network's in the same round is freer of them than either time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from multitudes.core.seeding import seeded
from multitudes.evaluation.calibrate import Calibrated
from multitudes.storage.save import load
from multitudes.study import costs
from multitudes.study.assignment import Assignment
from multitudes.study.methods import METHODS
from multitudes.study.store import Job, Run

__all__ = ["Ratio", "in_turns", "measure_times"]

ROUNDS = 9
LIMIT = 60.0
"""Seconds after which no further round is begun; three times as many before there are three rounds."""
FEWEST_ROWS = 16
"""That a step of training is timed with."""
SMALL = 8
"""A batch is compared with one this many times smaller: where that takes half the time, Python takes most of it."""


@dataclass(frozen=True)
class Ratio:
    """A time as a multiple of another's: the median over rounds, and the quartiles."""

    ratio: float
    low: float
    high: float
    seconds: float
    """The median of the time itself."""


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
        single = some.built(network, METHODS["single"])
        x = some.data.normalised(some.data.test.x[: costs.BATCH]).to(some.device)
        base, batch = costs.Prediction(single, x), _batch(some, single)
        predicting = {label: costs.Prediction(_trained(job), x, base.batch).seconds for label, job in jobs.items()}
        training = {label: _step(job, job.built(network), batch).seconds for label, job in jobs.items()}
        if not alone:  # what the others are multiples of
            predicting[alone], training[alone] = base.seconds, _step(some, single, batch, alone=True).seconds
        tiny = _tiny(base)
        times = {"inference": in_turns(predicting, alone), "training": in_turns(training, alone)}
    return {
        "tiny": tiny,
        "batch": base.batch,
        "machine": costs.machine(some.device),
        "methods": {
            label: {
                kind: _longer(asdict(found[label]), _epochs(jobs, label, alone) if kind == "training" else 1.0)
                for kind, found in times.items()
            }
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
    inner = net.net if isinstance(net, Calibrated) else net
    job.prepared(inner)
    return net.to(job.device).eval()


Batch = tuple[Tensor, Tensor]


def _batch(job: Assignment, single: Any) -> Batch:
    """A batch of the training, or fewer rows where its step takes long."""
    x, y = next(iter(job.loader))
    while len(x) > FEWEST_ROWS and _step(job, single, (x, y), alone=True).seconds() > costs.LONG:
        x, y = x[: len(x) // 2], y[: len(x) // 2]
    return x, y


def _step(job: Assignment, net: Any, batch: Batch, alone: bool = False) -> costs.TrainingStep:
    method = METHODS["single"] if alone else None
    return costs.TrainingStep(net, *batch, lambda net: job.arguments(net, method))


def _epochs(jobs: Mapping[str, Assignment], label: str, alone: str) -> float:
    """How many times as many epochs the method has trained as the single network, or as it was asked to."""
    count = len(_history(jobs[label]))
    given = len(_history(jobs[alone])) if alone in jobs else jobs[label].config["training"]["epochs"]
    return count / max(given, 1)


def _history(job: Assignment) -> list[Any]:
    return list(Job(job.directory).metrics["history"])


def _longer(ratio: dict[str, float], times: float) -> dict[str, float]:
    return {name: value if name == "seconds" else value * times for name, value in ratio.items()}


def _tiny(base: costs.Prediction) -> bool:
    """Whether calling the network takes most of the time, rather than computing it."""
    if base.batch < SMALL:
        return False
    small = costs.Prediction(base.net, base.x, max(1, base.batch // SMALL))
    return in_turns({"small": small.seconds, "": base.seconds}, "", 5)["small"].ratio > 0.5
