"""What a study found out about one method: its scores and costs over its seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Targets:
    """What a study knows of the targets of data."""

    classes: bool
    by: tuple[str, ...]
    """The scores that methods can be ranked by, the default first: those that test rows add up to."""
    error: str
    """The score that tells by how much a column matters."""
    uncertainty: str
    """The uncertainty that is compared with it."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Other names of scores."""


TARGETS = {
    "classification": Targets(True, ("nll", "brier", "accuracy"), "accuracy", "entropy"),
    "regression": Targets(False, ("log_density", "crps", "rmse"), "rmse", "std", {"nll": "log_density"}),
}
"""The targets that data can have, by name (`Data.task`)."""

MODELS = ("gradient_boosting", "gradient_boosting_quantiles", "random_forest", "linear")
"""The baselines that are models themselves, each a choice in place of a network."""


def known_score(task: str, by: str | None) -> str:
    """The score to rank by of a name, or the default one; NLL of numbers is the log density.

    >>> known_score("classification", None), known_score("regression", "nll")
    ('nll', 'log_density')
    """
    targets = TARGETS[task]
    wanted = None if by is None else targets.also.get(by, by)
    if wanted is not None and wanted not in targets.by:
        raise ValueError(f"--by must be one of {', '.join(targets.by)} for {task}, got {by!r}")
    return wanted or targets.by[0]


@dataclass(frozen=True)
class Value:
    """A score or cost of a method, over its seeds."""

    values: tuple[float, ...]
    """For each seed."""
    count: int = 0
    """How many inputs each was computed over, or all folds together; 0 for costs."""
    low: float | None = None
    high: float | None = None
    """Of a time that was measured several times, between what it lies half of the times."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return math.fsum(self.values) / len(self.values)

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds; None of one seed."""
        if len(self.values) < 2:
            return None
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (len(self.values) - 1))


@dataclass(frozen=True)
class Row:
    """What a study found out about one method."""

    name: str
    """The study's name of it."""
    method: str
    seeds: tuple[int, ...]
    """Those that are done; none of what predicts without a network."""
    values: Mapping[str, Value]
    """Scores by name, and costs by `costs/name`; those that every seed has."""
    examples: Callable[[], Mapping[str, Any]] = field(default=dict, repr=False, compare=False)
    """What each test row adds to a score, `[seeds, N]` by name."""
    baseline: bool = False
    """Whether it predicts without a network."""
    folds: tuple[int, ...] = ()
    """Of a cross-validation, which fold each value is of; none where all are of the same test rows."""
    overlap: float = 0.0
    """Of a cross-validation, how many test rows there are for each training row."""

    def __getitem__(self, name: str) -> float:
        """The mean of a score or cost; NaN where there is none."""
        return self.values[name].mean if name in self.values else math.nan
