"""Scores of predicted values: RMSE, log density, CRPS, intervals, and calibration of quantiles.

Predictions are mixtures of the members' Gaussians (see `regression_inputs.py`, also for `noise_precision`). Means are
over all outputs of all inputs.

- Density, CRPS and quantiles are those of the mixture. Without `noise_precision`, members of `task="regression"` are
  points: they have no density, and CRPS and quantiles use their step function.
- Intervals and `gaussian_ece` use the Gaussian with the mixture's moments, as in `Predictive.interval`.

Log density: Gal & Ghahramani, *Dropout as a Bayesian Approximation* (2016). CRPS of a mixture: Grimit et al., *The
continuous ranked probability score for circular variables and its application to mesoscale forecast ensemble
verification* (2006). Calibration: Kuleshov et al., *Accurate Uncertainties for Deep Learning Using Calibrated
Regression* (2018).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from multitudes.metrics.declare import HIGHER, LOWER, NEITHER, Count, counted, mean_of, metric, total_of
from multitudes.metrics.regression_inputs import (
    DENSITY,
    INTERVALS,
    REGRESSION,
    Forecast,
    Forecasts,
    Intervals,
    read_forecasts,
)

__all__ = ["QuantileCalibration", "fit_noise_precision"]

# The mean -----------------------------------------------------------------------------------------------


def _root(sums: Tensor) -> Tensor:
    return mean_of(sums).sqrt()


@metric("RMSE", _root, better=LOWER, kind=REGRESSION, group="scores", shifted=True, order=["scale"])
def rmse(forecasts: Forecasts) -> Tensor:
    """Root mean squared error of the members' mean, with one root over all outputs of all inputs.

    >>> round(float(rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))), 4)  # sqrt((0 + 4) / 2)
    1.4142
    """
    return total_of((forecasts.mean - forecasts.target).square())


# Proper scores ------------------------------------------------------------------------------------------


@metric("LogDensity", better=HIGHER, kind=DENSITY, group="scores")
def log_density(forecasts: Forecasts) -> Tensor:
    """Mean log predictive density in nats, `log 1/S sum_s N(y; mu_s, sigma_s^2)`; positive for densities above 1.

    With noise precision tau it is `logsumexp_s(-tau/2 (y - mu_s)^2) - log S - 1/2 log(2 pi) + 1/2 log tau`. Several
    outputs of one input count separately: the score is the mean of their densities, not their joint density.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[0.0], [2.0]]), task="regression")  # both members are 1 off
    >>> round(float(log_density(p, torch.tensor([1.0]), noise_precision=1.0)), 4)  # -1/2 - 1/2 log(2 pi)
    -1.4189
    """
    if not forecasts.noisy:
        raise ValueError("noise_precision is needed if members predict no variance: points have no density, got None")
    return total_of(forecasts.log_density)


def fit_noise_precision(prediction: Forecast, target: Tensor | None = None) -> float:
    """Return the `noise_precision` that maximizes `log_density` on held-out data.

    For a single member it is 1 / MSE. For several, the best variance is between the mean over values of the smallest
    squared error and the mean of all squared errors; a grid is refined there.

    Args:
        prediction: Means, a `Predictive` of regression, `[S, B]` or `[S, B, D, ...]`, or a tensor.
        target: True values, `[B]` or `[B, D, ...]`.

    Example:
        >>> fit_noise_precision(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]))
        0.2
    """
    forecasts = read_forecasts(prediction, target)
    if bool((forecasts.variances > 0).any()):
        raise ValueError("prediction must be means: members that predict variances need no noise_precision")
    squares = (forecasts.target - forecasts.means).square()
    least, most = float(squares.amin(0).mean()), float(squares.mean())
    if not least > 0:  # 0, or NaN without values
        raise ValueError(
            f"target must differ from all members in some value, or the best precision is infinite, got {forecasts!r}"
        )

    def mean_log_density(log_precision: Tensor) -> Tensor:
        return (-0.5 * log_precision.exp() * squares).logsumexp(0).mean() + 0.5 * log_precision

    low, high = -math.log(most), -math.log(least)
    while high - low > 1e-9:
        grid = torch.linspace(low, high, 33, dtype=torch.float64, device=squares.device)
        best = int(torch.stack([mean_log_density(point) for point in grid]).argmax())
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 32)])
    return math.exp((low + high) / 2)


@metric("CRPS", better=LOWER, kind=REGRESSION, group="scores", shifted=True)
def crps(forecasts: Forecasts) -> Tensor:
    """Continuous ranked probability score of the mixture, the mean of `integral (F(x) - 1[y <= x])^2 dx`; 0 is best.

    `1/S sum_s A(y - mu_s, sigma_s^2) - 1/(2 S^2) sum_st A(mu_s - mu_t, sigma_s^2 + sigma_t^2)`, where
    `A(mu, sigma^2)` is the mean of `|N(mu, sigma^2)|`. For points A is the distance, and a single point's CRPS is its
    absolute error.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[0.0], [2.0]]), task="regression")
    >>> float(crps(p, torch.tensor([1.0])))  # F is 1/2 from 0 to 2, and 1/2 off everywhere there
    0.5
    """
    return total_of(forecasts.crps)


# Intervals ----------------------------------------------------------------------------------------------


@metric("IntervalCoverage", better=NEITHER, kind=INTERVALS, group="calibration", score="coverage_95")
def interval_coverage(intervals: Intervals) -> Tensor:
    """Share of values in the central intervals, ends included.

    >>> low, high = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> float(interval_coverage((low, high), torch.tensor([0.5, 2.0])))
    0.5
    """
    return total_of((intervals.low <= intervals.target) & (intervals.target <= intervals.high))


@metric("IntervalWidth", better=NEITHER, kind=INTERVALS, group="calibration", score="width_95")
def interval_width(intervals: Intervals) -> Tensor:
    """Mean width of the central intervals.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[1.0], [3.0]]), task="regression")  # mean 2, standard deviation 1
    >>> round(float(interval_width(p, torch.tensor([0.0]), level=0.95)), 4)  # 2 * 1.96
    3.9199
    """
    return total_of(intervals.high - intervals.low)


# Calibration --------------------------------------------------------------------------------------------


def _levels(count: int, like: Tensor) -> Tensor:
    """Return the levels `1 / (count + 1), ..., count / (count + 1)`, in float64."""
    return torch.arange(1, count + 1, dtype=torch.float64, device=like.device) / (count + 1)


def _at_most(values: Tensor, levels: int) -> Tensor:
    """Count the values `[N]` in [0, 1] at or below each level; stack the counts with N, `[2, levels]`."""
    return counted((values <= _levels(levels, values)[:, None]).sum(1), len(values))


class QuantileCalibration:
    """Data of a quantile calibration diagram. Calibrated forecasts have `observed = levels`.

    Args:
        levels: Levels p, `[L]`.
        observed: Share of values with `F(y) <= p`, `[L]`; NaN without values.
        count: Number of values.
    """

    # Not a dataclass: torchmetrics would squeeze its fields if there is one level.
    def __init__(self, levels: Tensor, observed: Tensor, count: int) -> None:
        self.levels = levels
        self.observed = observed
        self.count = count

    @property
    def error(self) -> Tensor:
        """Mean of `|observed - level|`, a float64 scalar."""
        return (self.observed - self.levels).abs().mean()

    @property
    def squared_error(self) -> Tensor:
        """Mean of `(observed - level)^2`: the calibration error of Kuleshov et al. (eq. 9) with equal weights."""
        return (self.observed - self.levels).square().mean()

    def __repr__(self) -> str:
        pairs = zip(self.levels.tolist(), self.observed.tolist(), strict=True)
        return "\n".join([" level  observed", *(f"{level:.4f}    {share:.4f}" for level, share in pairs)])


def _diagram(sums: Tensor) -> QuantileCalibration:
    """Map sums `[2, levels]` to the data of the diagram."""
    return QuantileCalibration(_levels(sums.shape[1], sums), mean_of(sums), int(sums[1, 0]))


_OF_LEVELS: dict[str, Any] = {"kind": REGRESSION, "shape": (2, "levels"), "order": ["levels", "noise_precision"]}


@metric("QuantileDiagram", _diagram, better=NEITHER, **_OF_LEVELS)
def quantile_calibration(forecasts: Forecasts, levels: Count = 19) -> Tensor:
    """Share of values with `F(y) <= p` for the levels `p = 1 / (levels + 1), ..., levels / (levels + 1)`.

    Args:
        levels: Number of levels.

    >>> y = torch.tensor([-2.0, -1.0, -0.5, 0.5])
    >>> found = quantile_calibration(torch.zeros(4), y, levels=3, noise_precision=1.0)
    >>> found
     level  observed
    0.2500    0.5000
    0.5000    0.7500
    0.7500    1.0000
    >>> float(found.error), float(found.squared_error)
    (0.25, 0.0625)
    """
    return _at_most(forecasts.cdf, levels)


@metric("GaussianECE", lambda sums: _diagram(sums).error, better=LOWER, group="calibration", **_OF_LEVELS)
def gaussian_ece(forecasts: Forecasts, levels: Count = 19) -> Tensor:
    """Expected calibration error of intervals: mean over levels p of `|coverage of the central interval - p|`.

    Args:
        levels: Number of levels.

    >>> y = torch.tensor([-1.5, -0.5, 0.2, 0.8])  # intervals of 1/4, 1/2, 3/4 reach 0.32, 0.67, 1.15
    >>> float(gaussian_ece(torch.zeros(4), y, levels=3, noise_precision=1.0))
    0.0
    """
    off = forecasts.target - forecasts.mean
    z = torch.where(off == 0, 0.0, off / forecasts.std)
    return _at_most(torch.erf(z.abs() / math.sqrt(2)), levels)  # the smallest level whose interval contains the value
