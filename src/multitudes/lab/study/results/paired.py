"""Confidence of a difference between two methods, over seeds and over test rows.

Both methods predict the same rows, so rows are compared in pairs: `var_n(mean over seeds of a - b) / N`. Training is
random too: each method's seeds add `variance / seeds`. Two or three seeds are too few to estimate a method's variance,
so it is shrunk towards the median variance of all methods, as if that came from `PRIOR` further seeds (after Smyth,
*Linear Models and Empirical Bayes Methods*, 2004). The sum has Satterthwaite's degrees of freedom. With one seed only
the rows count.

In cross-validation each fold has its own test rows and seed, the same for both methods, so folds are compared in pairs.
The trainings of K folds share most of their rows, so the variance of the mean difference is the variance of the fold
differences times `1 / K + test rows / training rows`, with K - 1 degrees of freedom (Nadeau & Bengio, *Inference for
the Generalization Error*, 2003).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multitudes.base.checks import needed
from multitudes.lab.study.results.result_rows import Row
from multitudes.metrics.declare import RANKS, Better

LEVEL = 0.95
PRIOR = 4
"""Degrees of freedom of the median variance, next to a method's own."""


@dataclass(frozen=True)
class Difference:
    """A difference of means, its standard error, and the degrees of freedom of that error."""

    mean: float
    error: float
    freedom: float

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the interval of Student's t.

        >>> low, high = Difference(1.0, 0.5, freedom=9.0).interval()
        >>> round(low, 3), round(high, 3)
        (-0.131, 2.131)
        """
        reach = self._reach((1 + level) / 2)
        return self.mean - reach, self.mean + reach

    def at_least(self, among: int = 1) -> float:
        """Return the 95 % lower bound; `among` such bounds hold jointly (Bonferroni)."""
        return self.mean - self._reach(1 - (1 - LEVEL) / among)

    def at_most(self, among: int = 1) -> float:
        """Return the 95 % upper bound; `among` such bounds hold jointly (Bonferroni)."""
        return self.mean + self._reach(1 - (1 - LEVEL) / among)

    def significant(self) -> bool:
        """Return whether the interval excludes zero."""
        low, high = self.interval()
        return low > 0 or high < 0

    def _reach(self, quantile: float) -> float:
        special = needed("scipy.special", "study", "a comparison")
        return self.error * float(special.stdtrit(self.freedom, quantile)) if self.error else 0.0


class Comparison:
    """Compare methods by one score, using their seeds and test rows to estimate chance."""

    def __init__(self, rows: Sequence[Row], name: str) -> None:
        self.name = name
        special = needed("scipy.special", "study", "a comparison")
        found = [row.values[name] for row in rows if name in row.values]
        known = [(value.spread**2, len(value.values) - 1) for value in found if value.spread is not None]
        # Correct the median bias: chi-squared's median is below its mean, so most variance estimates are too small.
        each = [variance * freedom / float(special.chdtri(freedom, 0.5)) for variance, freedom in known]
        self.middle = statistics.median(each) if each else None
        """Median variance of the methods."""

    def difference(self, a: Row, b: Row) -> Difference | None:
        """Return `a - b`; None if the chance part cannot be estimated."""
        ours, theirs = a[self.name], b[self.name]
        if RANKS.get(self.name.rpartition("/")[2]) is Better.ZERO:  # compare distances from zero
            ours, theirs = abs(ours), abs(theirs)
        mean = ours - theirs
        if not math.isfinite(mean):
            return None
        if a.folds and b.folds:
            return self._over_folds(a, b)
        parts = [part for part in (self._of_rows(a, b), self._of_seeds(a), self._of_seeds(b)) if part is not None]
        if not parts:
            return None
        total = math.fsum(variance for variance, _ in parts)
        squares = math.fsum(variance**2 / freedom for variance, freedom in parts)
        return Difference(mean, math.sqrt(total), total**2 / squares if squares else 1.0)

    def _over_folds(self, a: Row, b: Row) -> Difference | None:
        """Compare the folds that both have; None if fewer than two."""
        ours, theirs = (dict(zip(row.folds, row.values[self.name].values, strict=True)) for row in (a, b))
        each = [ours[fold] - theirs[fold] for fold in ours if fold in theirs]
        if len(each) < 2:
            return None
        factor = 1 / len(each) + max(a.overlap, b.overlap)
        return Difference(statistics.fmean(each), math.sqrt(statistics.variance(each) * factor), len(each) - 1.0)

    def _of_seeds(self, row: Row) -> tuple[float, float] | None:
        """Return the variance of a method's mean over its seeds and its degrees of freedom; None without seeds."""
        if self.middle is None or not row.seeds:
            return None
        spread, own = row.values[self.name].spread, len(row.seeds) - 1
        total = PRIOR * self.middle + (0.0 if spread is None else own * spread**2)
        return total / (PRIOR + own) / len(row.seeds), float(PRIOR + own)

    def _of_rows(self, a: Row, b: Row) -> tuple[float, float] | None:
        """Return the variance due to the test rows and its degrees of freedom."""
        ours, theirs = (_rows(row.examples(), self.name) for row in (a, b))
        if ours is None or theirs is None or len(ours) != len(theirs) or len(ours) < 2:
            return None
        each = ours - theirs
        if self.name.rpartition("/")[2] == "rmse":
            # Rows are squares: a difference of roots is the difference of squares over the sum of roots.
            each = each / max(math.sqrt(float(ours.mean())) + math.sqrt(float(theirs.mean())), 1e-300)
        return float(each.var(ddof=1)) / len(each), len(each) - 1.0


def _rows(examples: Mapping[str, Any], name: str) -> Any:
    """Return per-row scores averaged over seeds, `[N]`; None if unknown."""
    found = examples.get(name)
    return None if found is None else found.mean(0)
