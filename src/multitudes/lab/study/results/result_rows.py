"""Results of one method in a study: its scores and costs over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Targets:
    """Properties of a data set's targets."""

    classes: bool
    by: tuple[str, ...]
    """Scores to rank methods by, the default first; all have per-row values."""
    error: str
    """Score that measures how much a column matters."""
    uncertainty: str
    """Uncertainty to compare with it."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Aliases of scores."""


TARGETS = {
    "classification": Targets(True, ("nll", "brier", "accuracy"), "accuracy", "entropy"),
    "regression": Targets(False, ("log_density", "crps", "rmse"), "rmse", "std", {"nll": "log_density"}),
}
"""Targets by name (`Data.task`)."""

MODELS = ("gradient_boosting", "gradient_boosting_quantiles", "random_forest", "linear")
"""Baselines that are real models, and so alternatives to a network."""


def known_score(task: str, by: str | None) -> str:
    """Return the score to rank by, or the default; NLL is an alias of log density for regression.

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
    """A score or cost of a method over its seeds."""

    values: tuple[float, ...]
    """One per seed."""
    count: int = 0
    """Number of inputs per seed, or of all folds together; 0 for costs."""
    low: float | None = None
    high: float | None = None
    """Quartiles of a time that was measured several times."""

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return math.fsum(self.values) / len(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None for one seed."""
        if len(self.values) < 2:
            return None
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (len(self.values) - 1))


@dataclass(frozen=True)
class Row:
    """Results of one method."""

    name: str
    """Name in the study."""
    method: str
    seeds: tuple[int, ...]
    """Finished seeds; empty for baselines."""
    values: Mapping[str, Value]
    """Scores by name, and costs by `costs/name`, limited to those that every seed has."""
    examples: Callable[[], Mapping[str, Any]] = field(default=dict, repr=False, compare=False)
    """Per-row scores `[seeds, N]` by name."""
    baseline: bool = False
    """True for methods without a network."""
    folds: tuple[int, ...] = ()
    """Fold of each value in a cross-validation; empty if all values are on the same test rows."""
    overlap: float = 0.0
    """Test rows per training row in a cross-validation."""

    def __getitem__(self, name: str) -> float:
        """Return the mean of a score or cost; NaN if there is none."""
        return self.values[name].mean if name in self.values else math.nan
