"""Gain of an ensemble from the diversity of its members: `mean member loss = ensemble loss + diversity`, exactly.

Krogh & Vedelsby, *Neural Network Ensembles, Cross Validation, and Active Learning*, 1995, for squared errors; Wood et
al., *A Unified Theory of Diversity in Ensemble Learning*, 2023, for other losses.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from multitudes.metrics.class_inputs import Rows
from multitudes.metrics.declare import NEITHER, Kind, metric
from multitudes.metrics.regression_inputs import Forecast, Forecasts, read_forecasts

__all__ = ["Ambiguity"]


class Ambiguity(NamedTuple):
    """`member = ensemble + diversity`: the members' mean loss, the loss of the mean prediction, and the gain."""

    member: Tensor
    ensemble: Tensor
    diversity: Tensor


def _parts(sums: Tensor) -> Ambiguity:
    """Sums `[4]` of member loss, ensemble loss, diversity and rows -> the means over rows; NaN without rows."""
    return Ambiguity(*(sums[:3] / sums[3]).unbind())


@metric("AmbiguityNLL", _parts, better=NEITHER, shape=(4,))
def ambiguity_nll(rows: Rows) -> Tensor:
    """Split the members' mean NLL into the NLL of the mean probabilities `m` and the members' diversity.

    `mean_s -log p_s(y) = -log m(y) + mean_s log(m(y) / p_s(y))`. If all members give the true class probability 0, the
    losses are infinite and the diversity is NaN. For calibrated predictions, m is the mean before calibration.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[[0.5, 0.5]], [[0.125, 0.875]]]).log())
    >>> [round(float(part), 4) for part in ambiguity_nll(p, torch.tensor([0]))]  # 2 log 2, log(16/5), log(5/4)
    [1.3863, 1.1632, 0.2231]
    """
    predictive = rows.members("ambiguity_nll")
    index = rows.target[None, :, None].expand(predictive.members, -1, 1)
    own = predictive.member_log_probs.gather(2, index)[..., 0].double()  # log p_s(y), [S, N]
    mean = own.logsumexp(0) - math.log(len(own))
    terms = [-own.mean(0), -mean, (mean - own).mean(0), torch.ones_like(mean)]
    return torch.stack([term.sum() for term in terms])


def _read_members(prediction: Forecast, target: Tensor | None = None) -> Forecasts:
    """Read a regression or gaussian `Predictive` with `read_forecasts`."""
    if isinstance(prediction, Tensor):
        raise ValueError("prediction must be a Predictive, since ambiguity_mse looks at each member, got only means")
    return read_forecasts(prediction, target)


@metric("AmbiguityMSE", _parts, better=NEITHER, kind=Kind("regression by members", _read_members), shape=(4,))
def ambiguity_mse(forecasts: Forecasts) -> Tensor:
    """Split the members' mean squared error into that of their mean `m` and their diversity; means over all values.

    `mean_s (f_s - y)^2 = (m - y)^2 + mean_s (f_s - m)^2`. The `Predictive` is of regression, `[S, B]` or
    `[S, B, D, ...]`, or of mean and variance heads, whose variances are ignored; `target` is `[B]` or `[B, D, ...]`.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[1.0], [3.0]]), task="regression")
    >>> [float(part) for part in ambiguity_mse(p, torch.tensor([5.0]))]  # (16 + 4) / 2 = 9 + 1
    [10.0, 9.0, 1.0]
    """
    f, y, mean = forecasts.means, forecasts.target, forecasts.mean
    terms = [(f - y).square().mean(0), (mean - y).square(), (f - mean).square().mean(0), torch.ones_like(mean)]
    return torch.stack([term.sum() for term in terms])
