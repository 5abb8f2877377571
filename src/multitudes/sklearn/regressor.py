"""`MultitudeRegressor`: numbers, their standard deviations, and conformal intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import check_array

from multitudes.sklearn.base import MultitudeEstimator
from multitudes.tasks.predictive import Predictive
from multitudes.tasks.quantiles import check_levels


@dataclass(kw_only=True, eq=False, repr=False)
class MultitudeRegressor(RegressorMixin, MultitudeEstimator):
    """A regressor for tables that predicts means and deviations, or quantiles, with many members; TabM by default.

    Args:
        quantiles: levels, such as (0.05, 0.5, 0.95): networks predict these quantiles of one target, instead of a mean
            and a variance.
        module: as in `MultitudeClassifier`; for D targets it must have 2 D outputs, first the means and then the raw
            variances (see `core.tasks.gaussian`), or one output per quantile.

    The other arguments and the types of X are those of `MultitudeClassifier`; y may have several columns. Networks are
    trained on standardised targets. Their variances are scaled to fit the held-out rows if that helps.

    >>> X = np.linspace(0, 1, 80)[:, None]
    >>> model = MultitudeRegressor("packed", epochs=30, random_state=0).fit(X, 3 * X[:, 0])
    >>> mean, std = model.predict([[0.5]], return_std=True)
    >>> mean.shape, std.shape
    ((1,), (1,))
    """

    quantiles: Sequence[float] | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows X `[N, F]` with targets y `[N]` or `[N, D]`, optionally weighted."""
        table = self._table(X, reset=True)
        target = self._targets(y)
        check_consistent_length(next(iter(table.columns.values())).values, target)
        weight = self._weights(sample_weight, len(target))
        count = 1 if target.ndim == 1 else target.shape[1]
        levels = None if self.quantiles is None else check_levels(_as_levels(self.quantiles))
        if levels is not None and count > 1:
            raise ValueError(f"quantiles={self.quantiles!r} are of one target, got y with {count} columns")
        wide = torch.tensor(target.reshape(len(target), count))
        if levels is None:
            recipe = self._recipe("gaussian", 2 * count)
        else:
            recipe = self._recipe("quantiles", len(levels), levels)
        self._learn(table, wide, torch.zeros(len(wide), dtype=torch.int64), weight, recipe)
        return self

    def _targets(self, y: Any) -> Any:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        target = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=self)
        return target[:, 0] if target.ndim == 2 and target.shape[1] == 1 else target

    # -- predictions -------------------------------------------------------------------------------------

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each row, `[N]` or `[N, D]`; with `return_std` also its standard deviation."""
        columns, model = self._columns(X), self.model_

        def read(p: Predictive) -> tuple[Any, ...]:
            p = model.scaled(p)
            return model.in_units(p.mean), model.spread_in_units(p.std)

        mean, std = self._read(columns, read)
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Any, Any]:
        """Return `(low, high)`, each shaped like the means: the target is between them with probability `level`.

        Split conformal prediction on the held-out rows, or with `folds` on all rows, each predicted by the network not
        trained on it (see `evaluation.conformal`): intervals proportional to the predicted deviation, or shifted
        predicted quantiles. For several targets, the level is the mean coverage.
        """
        columns, model = self._columns(X), self.model_
        conformal = model.conformal_at(level)
        low, high = self._read(columns, lambda p: tuple(map(model.in_units, conformal.set(p, level))))
        return low, high

    def predict_quantiles(self, X: Any, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> Any:
        """Return quantiles of the predicted distributions, `[N, Q]` or `[N, Q, D]`.

        They are those of the normal distribution with the members' mean and deviation; with `quantiles`, those of the
        members' mixture, between the smallest and largest trained level.
        """
        columns, model = self._columns(X), self.model_
        chosen = check_levels(_as_levels(levels))

        def read(p: Predictive) -> tuple[Any, ...]:
            p = model.scaled(p)
            if p.quantiles is not None:
                return tuple(model.in_units(p.quantile(level)) for level in chosen)
            return tuple(model.in_units(p.mean + NormalDist().inv_cdf(level) * p.std) for level in chosen)

        return np.stack(self._read(columns, read), 1)

    def uncertainty(self, X: Any) -> dict[str, Any]:
        """Return the uncertainty of each row as variances: `total`, `aleatoric` and `epistemic`, shaped like the means.

        The aleatoric part is the noise that the members predict, the epistemic one the variance of their means: what
        more data could remove. They add up to the total.
        """
        columns, model = self._columns(X), self.model_

        def read(p: Predictive) -> tuple[Any, ...]:
            p = model.scaled(p)
            return tuple(model.spread_in_units(v, 2) for v in (p.variance, p.aleatoric_variance, p.epistemic_variance))

        return dict(zip(("total", "aleatoric", "epistemic"), self._read(columns, read), strict=True))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _as_levels(levels: Any) -> Any:
    """Convert an array or a list of levels to a tuple of numbers."""
    return tuple(float(level) for level in levels) if np.ndim(levels) == 1 else levels
