"""What a study found out about one method: its scores and costs over its seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BY", "MODELS", "Row", "Value", "known_score"]

BY = {"classification": ("nll", "brier", "accuracy"), "regression": ("log_density", "crps", "rmse")}
"""The scores that methods can be ranked by, the default first: those that test rows add up to."""

MODELS = ("gradient_boosting", "gradient_boosting_quantiles", "random_forest", "linear")
"""The baselines that are models themselves, each a choice in place of a network."""


def known_score(task: str, by: str | None) -> str:
    """The score to rank by of a name, or the default one; NLL of numbers is the log density.

    >>> known_score("classification", None), known_score("regression", "nll")
    ('nll', 'log_density')
    """
    wanted = "log_density" if (task, by) == ("regression", "nll") else by
    if wanted is not None and wanted not in BY[task]:
        raise ValueError(f"--by must be one of {', '.join(BY[task])} for {task}, got {by!r}")
    return wanted or BY[task][0]


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
