"""What an ensemble gains from the diversity of its members: `mean member loss = ensemble loss + diversity`, exactly.

Krogh & Vedelsby, *Neural Network Ensembles, Cross Validation, and Active Learning*, 1995, for squared errors; Wood et
al., *A Unified Theory of Diversity in Ensemble Learning*, 2023, for other losses.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multitudes.metrics.inputs import Prediction, Rows, read_rows
from multitudes.metrics.regression_inputs import Forecast, ForecastMetric, Forecasts, read_forecasts
from multitudes.metrics.streaming import RowsMetric

__all__ = [
    "Ambiguity",
    "AmbiguityMSE",
    "AmbiguityNLL",
    "ambiguity_mse",
    "ambiguity_nll",
]


class Ambiguity(NamedTuple):
    """`member = ensemble + diversity`, float64 scalars."""

    member: Tensor
    """The members' mean loss."""
    ensemble: Tensor
    """The loss of their mean prediction."""
    diversity: Tensor
    """What the members gain by differing, 0 or more."""


def ambiguity_nll_update(rows: Rows) -> Tensor:
    """Rows -> the sums of member loss, ensemble loss and diversity, and the number of rows, `[4]`."""
    predictive = rows.members("ambiguity_nll")
    index = rows.target[None, :, None].expand(predictive.members, -1, 1)
    own = predictive.member_log_probs.gather(2, index)[..., 0].double()  # log p_s(y), [S, N]
    mean = own.logsumexp(0) - math.log(len(own))
    terms = [-own.mean(0), -mean, (mean - own).mean(0), torch.ones_like(mean)]
    return torch.stack([term.sum() for term in terms])


def ambiguity_compute(sums: Tensor) -> Ambiguity:
    """Sums `[4]` -> the means over rows; NaN without rows."""
    return Ambiguity(*(sums[:3] / sums[3]).unbind())


ambiguity_nll_compute = ambiguity_mse_compute = ambiguity_compute


def ambiguity_nll(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Ambiguity:
    """How the NLL of the mean probabilities `m` follows from that of the members and their diversity.

    `mean_s -log p_s(y) = -log m(y) + mean_s log(m(y) / p_s(y))`. Where every member has ruled the true class out, the
    losses are infinite, and the diversity NaN. Of calibrated predictions, m is the mean before calibration.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[[0.5, 0.5]], [[0.125, 0.875]]]).log())
    >>> [round(float(part), 4) for part in ambiguity_nll(p, torch.tensor([0]))]  # 2 log 2, log(16/5), log(5/4)
    [1.3863, 1.1632, 0.2231]
    """
    return ambiguity_nll_compute(ambiguity_nll_update(read_rows(prediction, target, ignore)))


def _read_members(prediction: Forecast, target: Tensor | None) -> Forecasts:
    if isinstance(prediction, Tensor):
        raise ValueError("prediction must be a Predictive, since ambiguity_mse looks at each member, got only means")
    return read_forecasts(prediction, target)


def ambiguity_mse_update(forecasts: Forecasts) -> Tensor:
    """Forecasts -> the sums of member loss, ensemble loss and diversity, and the number of values, `[4]`."""
    f, y, mean = forecasts.means, forecasts.target, forecasts.mean
    terms = [(f - y).square().mean(0), (mean - y).square(), (f - mean).square().mean(0), torch.ones_like(mean)]
    return torch.stack([term.sum() for term in terms])


def ambiguity_mse(prediction: Forecast, target: Tensor | None = None) -> Ambiguity:
    """How the squared error of the members' mean `m` follows from theirs and their diversity, mean over all values.

    `mean_s (f_s - y)^2 = (m - y)^2 + mean_s (f_s - m)^2`, of a `Predictive` of regression, `[S, B]` or
    `[S, B, D, ...]`, or of mean and variance heads, whose variances are left aside; `target` is `[B]` or `[B, D, ...]`.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[1.0], [3.0]]), task="regression")
    >>> [float(part) for part in ambiguity_mse(p, torch.tensor([5.0]))]  # (16 + 4) / 2 = 9 + 1
    [10.0, 9.0, 1.0]
    """
    return ambiguity_mse_compute(ambiguity_mse_update(_read_members(prediction, target)))


class AmbiguityNLL(RowsMetric):
    """`ambiguity_nll`, streaming."""

    higher_is_better = None

    def __init__(self, ignore: int | None = None, **kwargs: Any) -> None:
        super().__init__(ignore, shape=(4,), **kwargs)

    def _sums(self, rows: Rows) -> Tensor:
        return ambiguity_nll_update(rows)

    def compute(self) -> Ambiguity:  # type: ignore[override]
        """The decomposition over all rows so far."""
        return ambiguity_compute(self.sums)


class AmbiguityMSE(ForecastMetric):
    """`ambiguity_mse`, streaming."""

    higher_is_better = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(shape=(4,), **kwargs)

    def update(self, prediction: Forecast, target: Tensor | None = None) -> None:
        """Add a batch of predictions and targets."""
        self._add(ambiguity_mse_update(_read_members(prediction, target)))

    def compute(self) -> Ambiguity:  # type: ignore[override]
        """The decomposition over all values so far."""
        return ambiguity_compute(self.sums)
