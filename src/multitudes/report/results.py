"""What a page tells of: `Results`, read from the files of a run directory and from nothing else."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multitudes.core.checks import needed
from multitudes.study.leaderboard import Row, leaderboard
from multitudes.study.store import Job, Run

__all__ = ["Outcome", "Results", "mean_spread", "read_results"]


@dataclass(frozen=True)
class Outcome:
    """What one job found: one method with one seed."""

    method: str
    """What the study calls the method."""
    seed: int
    metrics: Mapping[str, Any]
    config: Mapping[str, Any]
    arrays: Path
    """The file of its predictions, which are read one by one: all of them together may be large."""

    def score(self, name: str) -> float:
        """A score by name; NaN where there is none."""
        found = self.metrics.get("scores", {}).get(name, {})
        value = found.get("value") if isinstance(found, Mapping) else found
        return math.nan if value is None else float(value)

    def cost(self, name: str) -> float:
        """A cost by name; NaN where there is none."""
        value = self.metrics.get("costs", {}).get(name)
        return math.nan if value is None else float(value)

    def array(self, name: str) -> Any:
        """An array of the predictions, such as `probs [N, C]`; None where there is none."""
        if not self.arrays.is_file():
            return None
        with needed("numpy", "study", "a report").load(self.arrays, allow_pickle=False) as arrays:
            return arrays.get(name)

    def foreign(self) -> list[str]:
        """The names of the out-of-distribution data that there are predictions of."""
        if not self.arrays.is_file():
            return []
        with needed("numpy", "study", "a report").load(self.arrays, allow_pickle=False) as arrays:
            return [name.split("/", 1)[1].rsplit("/", 1)[0] for name in arrays if name.startswith("ood/")]


@dataclass(frozen=True)
class Results:
    """Everything that a page is made from."""

    name: str
    """Of the data."""
    task: str
    """ "classification" or "regression"."""
    outcomes: tuple[Outcome, ...]
    """Of the jobs that are done, method by method."""
    board: tuple[Row, ...]
    """A row for each method, the best first."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """The jobs that are not done, and why those failed that did."""
    classes: tuple[str, ...] = ()
    images: Any = None
    """The test images, uint8 `[N, C, H, W]`; None where there are none."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    spec_text: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What is known about the data."""
    landscape: Mapping[str, Any] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """Those that something is known about, in the order of the study: their place is their look."""
        return list(dict.fromkeys(outcome.method for outcome in self.outcomes))

    def of(self, method: str) -> list[Outcome]:
        """The outcomes of a method, one a seed."""
        return [outcome for outcome in self.outcomes if outcome.method == method]

    def scores(self, method: str, name: str) -> list[float]:
        """A score of a method, for the seeds that have it."""
        return _known(outcome.score(name) for outcome in self.of(method))

    def costs(self, method: str, name: str) -> list[float]:
        """A cost of a method, for the seeds that have it."""
        return _known(outcome.cost(name) for outcome in self.of(method))

    def score_names(self) -> list[str]:
        """Of all scores that some outcome has."""
        return list(dict.fromkeys(name for outcome in self.outcomes for name in outcome.metrics.get("scores", {})))


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def mean_spread(values: list[float]) -> tuple[float, float]:
    """The mean over seeds and the standard deviation between them, NaN where there is none.

    >>> mean_spread([1.0, 3.0])
    (2.0, 1.4142135623730951)
    >>> mean_spread([1.0])
    (1.0, nan)
    """
    if not values:
        return math.nan, math.nan
    told = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.fmean(values), statistics.stdev(values) if told else math.nan


# -- reading -----------------------------------------------------------------------------------------------


def read_results(directory: str | Path) -> Results:
    """Read a run directory; jobs that are missing or failed are told of, not waited for."""
    run = Run(directory)
    outcomes = tuple(_outcome(job) for job in run.done)
    if not outcomes:
        failed = "".join(f"; {name} failed: {reason}" for name, reason in run.failed.items())
        raise ValueError(f"there is nothing to report in {str(run.directory)!r}: none of its jobs is done{failed}")
    regression = any("rmse" in outcome.metrics.get("scores", {}) for outcome in outcomes)
    name, classes, images = _data(run, outcomes[0].config)
    landscape = run.directory / "landscape.json"
    return Results(
        name=name,
        task="regression" if regression else "classification",
        outcomes=outcomes,
        board=tuple(leaderboard(run)),
        missing={job.name: run.failed.get(job.name, "") for job in run.missing},
        classes=classes,
        images=images,
        spec=run.spec,
        spec_text=run.spec_path.read_text(encoding="utf-8"),
        about=run.about or {},
        landscape=json.loads(landscape.read_text(encoding="utf-8")) if landscape.is_file() else {},
    )


def _outcome(job: Job) -> Outcome:
    return Outcome(job.label, job.seed, job.metrics, job.config or {}, job.directory / "predictions.npz")


def _data(run: Run, config: Mapping[str, Any]) -> tuple[str, tuple[str, ...], Any]:
    """The name of the data, its classes, and its test images, from the run's own file or from the embedded digits."""
    from multitudes import data

    source = str(run.spec.get("data", {}).get("source", config.get("data", {}).get("source", "")))
    if run.data_path.is_file():
        read = data.read(run.data_path)
    elif source == "digits":
        read = data.load("digits")
    else:
        return Path(source).name or "data", (), None
    images = read.test.x.numpy() if read.kind.pictured(read.shape) else None
    return read.name, read.classes, images
