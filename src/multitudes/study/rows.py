"""What a study found out about one method: its scores and costs over its seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Row", "Value"]


@dataclass(frozen=True)
class Value:
    """A score or cost of a method, over its seeds."""

    values: tuple[float, ...]
    """For each seed."""
    count: int = 0
    """How many inputs each was computed over; 0 for costs."""
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

    def __getitem__(self, name: str) -> float:
        """The mean of a score or cost; NaN where there is none."""
        return self.values[name].mean if name in self.values else math.nan
