"""`Results`: everything a page shows, read only from the files of a run directory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes.base.archives import ARRAYS, reading_tensors
from multitudes.base.sealed_files import DamagedError
from multitudes.lab import data as datasets
from multitudes.lab.report.chart import HIGHLIGHTED
from multitudes.lab.study.results.leaderboard import leaderboard
from multitudes.lab.study.results.recommendation import Recommendation, recommend
from multitudes.lab.study.results.result_rows import TARGETS, Row
from multitudes.lab.study.results.score_columns import imbalance
from multitudes.lab.study.run.store import PREDICTIONS, REWRITE, Run


@dataclass(frozen=True)
class JobResult:
    """Results of one job: one method with one seed."""

    method: str
    """Name of the method in the study."""
    seed: int
    metrics: Mapping[str, Any]
    config: Mapping[str, Any]
    arrays: Path
    """File of the predictions; arrays are read one at a time, since together they may be large."""

    def score(self, name: str) -> float:
        """Return a score, or a cost as `costs/name`; NaN if missing."""
        scores, costs = self.metrics["scores"], self.metrics["costs"]
        value = scores[name]["value"] if name in scores else costs.get(name.removeprefix("costs/"))
        return math.nan if value is None else float(value)

    def tensors(self, *names: str) -> tuple[Tensor, ...] | None:
        """Return prediction arrays such as `probs [N, C]`, half precision as float32; None if one is missing."""
        if not set(names) <= set(self.array_names()):
            return None
        with reading_tensors(self.arrays, ARRAYS, "a report") as (file, _):
            found = [file.get_tensor(name).clone() for name in names]
        return tuple(each.float() if each.dtype == torch.float16 else each for each in found)

    def array_names(self) -> list[str]:
        """List the arrays of predictions; those on out-of-distribution data are named `ood/DATA/ARRAY`."""
        if not self.arrays.is_file():
            return []
        with reading_tensors(self.arrays, ARRAYS, "a report") as (file, _):
            return list(file.keys())


@dataclass(frozen=True)
class Results:
    """Everything that a page is made from."""

    name: str
    """Name of the data."""
    task: str
    """ "classification" or "regression"."""
    outcomes: tuple[JobResult, ...]
    """Results of the finished jobs, method by method."""
    board: tuple[Row, ...]
    """A row for each method and each baseline, the best first."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Unfinished jobs with the reason: damaged, failed, or empty if not run."""
    classes: tuple[str, ...] = ()
    images: Any = None
    """Test images, uint8 `[N, C, H, W]`, or None."""
    texts: Any = None
    """Test texts, a list, or None."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    spec_text: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Description of the data."""
    landscape: Mapping[str, Any] = field(default_factory=dict)
    importance: Mapping[str, Any] = field(default_factory=dict)
    """Importance of each column, if measured."""
    table: Any = None
    """The `Data` if it is a table."""
    times: Mapping[str, Any] = field(default_factory=dict)
    """Times measured after all jobs were done."""

    @property
    def by(self) -> str:
        """Score by which methods are ranked."""
        return self.recommendation.by

    @property
    def tiny(self) -> bool:
        """True if networks are so small that call overhead dominates their time."""
        return bool(self.times.get("tiny"))

    @property
    def imbalance(self) -> str:
        """A sentence on unbalanced classes; empty if they are balanced."""
        return imbalance(self.about)

    @cached_property
    def recommendation(self) -> Recommendation:
        """The recommendation, as printed in the terminal."""
        return recommend(self.board, self.spec.get("by"), self.tiny)

    @property
    def ranked(self) -> list[str]:
        """Methods with a finished job, the best first."""
        return [row.name for row in self.board if not row.baseline]

    @cached_property
    def methods(self) -> list[str]:
        """Methods in style order: highlighted ones first, each part sorted best first.

        Highlighted are the recommended methods, the single network, and the best of the others.
        """
        names = self.ranked
        singles = [row.name for row in self.board if row.method == "single"]
        first = list(dict.fromkeys([*self.recommendation.methods, *singles, *names]))[:HIGHLIGHTED]
        return sorted(names, key=lambda name: (name not in first, names.index(name)))

    def of(self, method: str) -> list[JobResult]:
        """Return the outcomes of a method, one per seed."""
        return [outcome for outcome in self.outcomes if outcome.method == method]

    def comparable(self, method: str) -> list[JobResult]:
        """Return the outcomes of a method on the page's test rows: all of them, or those of the first fold."""
        first, folded = self.about.get("fingerprint"), bool(self.about.get("folds"))
        return [each for each in self.of(method) if not folded or each.config["data"].get("fingerprint") == first]

    def scores(self, method: str, name: str) -> list[float]:
        """Return a score of a method, or a cost as `costs/name`, for the seeds that have it."""
        values = [outcome.score(name) for outcome in self.of(method)]
        return [value for value in values if not math.isnan(value)]

    def tensors(self, method: str, *names: str) -> list[tuple[Tensor, ...]]:
        """Return prediction arrays of a method, for the seeds that have all of them."""
        found = (outcome.tensors(*names) for outcome in self.of(method))
        return [each for each in found if each is not None]

    def score_names(self) -> list[str]:
        """List the names of all scores."""
        return list(dict.fromkeys(name for outcome in self.outcomes for name in outcome.metrics["scores"]))

    def ood_names(self) -> list[str]:
        """List the out-of-distribution data sets with predictions."""
        names = (name for outcome in self.outcomes for name in outcome.array_names() if name.startswith("ood/"))
        return list(dict.fromkeys(name.removeprefix("ood/").rpartition("/")[0] for name in names))


def mean_spread(values: list[float]) -> tuple[float, float]:
    """Return mean and standard deviation over seeds; NaN if undefined.

    >>> mean_spread([1.0, 3.0])
    (2.0, 1.4142135623730951)
    >>> mean_spread([1.0])
    (1.0, nan)
    """
    if not values:
        return math.nan, math.nan
    several = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.fmean(values), statistics.stdev(values) if several else math.nan


def read_results(directory: str | Path) -> Results:
    """Read a run directory; missing or failed jobs are listed as such."""
    run = Run(directory)
    outcomes = tuple(
        JobResult(job.label, job.seed, job.metrics, job.config or {}, job.directory / PREDICTIONS) for job in run.done
    )
    if not outcomes:
        reasons = [*run.damaged.values(), *(f"{name} failed: {reason}" for name, reason in run.failed.items())]
        why = "".join(f"; {reason}" for reason in reasons[:2]) + (f"; and {len(reasons) - 2} more" * (len(reasons) > 2))
        raise ValueError(f"nothing to report in {str(run.directory)!r}: no job is done{why}")
    about, trained_on = run.about, outcomes[0].config.get("data", {})
    if about is None or about.get("task") not in TARGETS:
        what = "it is missing" if about is None else f"it names the task {about.get('task')!r}"
        raise DamagedError(run.about_path, f"{what}; {REWRITE}")
    if trained_on.get("fingerprint") not in (None, about.get("fingerprint"), *(about.get("folds") or ())):
        raise DamagedError(run.about_path, f"it describes other data than the jobs used; {REWRITE}")
    source = str(run.spec.get("data", {}).get("source", trained_on.get("source", "")))
    data = None
    if run.data_path.is_file() or source == "digits":
        data = datasets.read(run.data_path) if run.data_path.is_file() else datasets.load("digits")
    pictured = data is not None and data.kind.is_picture(data.shape)
    written = data is not None and data.kind.is_text and len(data.test.files) == len(data.test)
    return Results(
        name=data.name if data is not None else Path(source).name or "data",
        task=about["task"],
        outcomes=outcomes,
        board=tuple(leaderboard(run, run.spec.get("by"))),
        missing={job.name: job.why_not for job in run.missing},
        classes=data.classes if data is not None else (),
        images=data.test.x.numpy() if data is not None and pictured else None,
        texts=[text.decode(errors="replace") for text in data.test.files] if data is not None and written else None,
        table=data if data is not None and data.kind.has_columns and data.kind.dims == 1 else None,
        importance=run.read_table("importance.json") or {},
        spec=run.spec,
        spec_text=run.spec_path.read_text(encoding="utf-8"),
        about=about,
        times=run.times or {},
        landscape=run.read_table("landscape.json") or {},
    )
