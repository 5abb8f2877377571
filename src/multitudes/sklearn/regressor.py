"""`MultitudeRegressor`: means, standard deviations, quantiles, and conformal intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import check_array, check_is_fitted

from multitudes.sklearn.base import MultitudeEstimator
from multitudes.tasks.predictive import Predictive
from multitudes.tasks.quantiles import check_levels


@dataclass(kw_only=True, eq=False, repr=False)
class MultitudeRegressor(RegressorMixin, MultitudeEstimator):
    """Regressor for tables that predicts means and deviations, or quantiles, with many members; TabM by default.

    X is an array of numbers, or a pandas, polars or Arrow frame with numbers, texts, categories and dates. Missing
    values are imputed and flagged. y has one or several columns. Networks are trained on standardised targets.

    Args:
        method: Name of a method, as listed by `multitudes methods`.
        members: Number of members. Default: that of the method.
        module: Network that maps features `[B, inputs]` to outputs `[B, outputs]`, or a function or class that builds
            it from `(inputs, outputs)`. For D targets it has 2 D outputs, the means and then the raw variances, or one
            output per quantile. Default: `multitudes.models.tabular`.
        settings: Other settings of the method, by name.
        epochs: Maximum number of epochs. Default: 200, and fewer above 10,000 rows.
        patience: Number of epochs without a better validation score before training stops with the best weights. None
            trains all epochs, and uses the held-out rows only for calibration.
        batch_size: Number of rows in a batch; "auto" depends on the number of rows.
        lr: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        validation: Share of the rows that is held out for early stopping and calibration, or None.
        folds: Number of networks to train by cross-validation and to predict with, instead of one. All rows are used
            for training, and for calibration by the network that was not trained on them.
        quantiles: Levels, such as (0.05, 0.5, 0.95), to predict for one target instead of a mean and a variance.
        random_state: Seed, random state or None, as in scikit-learn.
        n_jobs: Number of threads, or of processes with `folds`. None uses torch's setting.
        device: Device for training; "auto" uses a GPU if there is one.
        verbose: Show progress. Default: on a terminal, after two seconds.

    Attributes:
        model_: Fitted encoder, networks and calibration.
        history_: Epochs of each network.
        n_iter_: Maximum number of epochs of a network.
        n_features_in_: Number of columns.
        feature_names_in_: Names of columns, if X is a frame.

    Example:
        >>> X = np.linspace(0, 1, 80)[:, None]
        >>> model = MultitudeRegressor("packed", epochs=30, random_state=0).fit(X, 3 * X[:, 0])
        >>> mean, std = model.predict([[0.5]], return_std=True)
        >>> mean.shape, std.shape
        ((1,), (1,))
    """

    quantiles: Sequence[float] | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows X `[N, F]` with targets y `[N]` or `[N, D]` and optional weights `[N]`."""
        table = self._read_table(X, reset=True)
        target = self._targets(y)
        check_consistent_length(next(iter(table.columns.values())).values, target)
        weight = self._weights(sample_weight, len(target))
        count = 1 if target.ndim == 1 else target.shape[1]
        levels = None if self.quantiles is None else check_levels(_as_levels(self.quantiles))
        if levels is not None and count > 1:
            raise ValueError(f"quantiles={self.quantiles!r} require one target, got y with {count} columns")
        wide = torch.tensor(target.reshape(len(target), count))
        if levels is None:
            fit_settings = self._fit_settings("gaussian", 2 * count)
        else:
            fit_settings = self._fit_settings("quantiles", len(levels), levels)
        self._learn(table, wide, torch.zeros(len(wide), dtype=torch.int64), weight, fit_settings)
        return self

    def _targets(self, y: Any) -> Any:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        target = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=self)
        return target[:, 0] if target.ndim == 2 and target.shape[1] == 1 else target

    # -- predictions -------------------------------------------------------------------------------------

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each row, `[N]` or `[N, D]`; with `return_std` also the standard deviation."""

        def read(p: Predictive) -> tuple[Any, ...]:
            p = self.model_.scaled(p)
            return self.model_.in_units(p.mean), self.model_.spread_in_units(p.std)

        mean, std = self._predict(X, read)
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Any, Any]:
        """Return intervals that contain the target with a given probability.

        The intervals are conformal: they are calibrated on the held-out rows, or with `folds` on all rows. They are
        proportional to the predicted deviation, or shifted predicted quantiles.

        Args:
            X: Rows, `[N, F]`.
            level: Probability; for several targets the mean probability.

        Returns:
            Lower and upper bounds, each with the shape of the means.
        """
        check_is_fitted(self)
        conformal = self.model_.conformal_at(level)
        low, high = self._predict(X, lambda p: tuple(map(self.model_.in_units, conformal.set(p, level))))
        return low, high

    def predict_quantiles(self, X: Any, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> Any:
        """Return quantiles of the predicted distributions.

        The distributions are normal, with the mean and deviation of the members. With `quantiles` they are the mixture
        of the members, between the smallest and largest trained level.

        Args:
            X: Rows, `[N, F]`.
            levels: Q levels.

        Returns:
            Quantiles `[N, Q]` or `[N, Q, D]`.
        """
        chosen = check_levels(_as_levels(levels))

        def read(p: Predictive) -> tuple[Any, ...]:
            p = self.model_.scaled(p)
            if p.quantiles is not None:
                return tuple(self.model_.in_units(p.quantile(level)) for level in chosen)
            return tuple(self.model_.in_units(p.mean + NormalDist().inv_cdf(level) * p.std) for level in chosen)

        return np.stack(self._predict(X, read), 1)

    def uncertainty(self, X: Any) -> dict[str, Any]:
        """Return the uncertainty of each row as variances: "total", "aleatoric" and "epistemic".

        The aleatoric part is the noise that the members predict. The epistemic part is the variance of their means,
        which more data could remove. Both add up to the total. Arrays have the shape of the means.
        """

        def read(p: Predictive) -> tuple[Any, ...]:
            p = self.model_.scaled(p)
            parts = (p.variance, p.aleatoric_variance, p.epistemic_variance)
            return tuple(self.model_.spread_in_units(part, 2) for part in parts)

        return dict(zip(("total", "aleatoric", "epistemic"), self._predict(X, read), strict=True))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _as_levels(levels: Any) -> Any:
    """Convert an array or list of levels to a tuple of numbers."""
    return tuple(float(level) for level in levels) if np.ndim(levels) == 1 else levels
