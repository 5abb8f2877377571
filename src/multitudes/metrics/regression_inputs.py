"""Inputs of regression metrics: members' Gaussians and true values, checked and arranged in rows.

Each member predicts `N(mu_s, sigma_s^2)`. The S members together predict the mixture

    p(y) = 1/S sum_s N(y; mu_s, sigma_s^2),    F(y) = 1/S sum_s Phi((y - mu_s) / sigma_s).

`task="gaussian"` predicts the variances. For `task="regression"`, `noise_precision` gives all members the variance
`1 / noise_precision` (tau of Gal & Ghahramani, *Dropout as a Bayesian Approximation*, 2016). Without it the members
are points, and F is the step function of their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import NormalDist
from typing import Annotated

import torch
from torch import Tensor

from multitudes.base.checks import check_number
from multitudes.metrics.class_inputs import check_finite
from multitudes.metrics.declare import InputFormat
from multitudes.tasks import TASKS
from multitudes.tasks.predictive import Predictive

__all__ = ["Forecasts", "Intervals", "read_forecasts", "read_intervals"]


@dataclass(frozen=True, eq=False, repr=False)
class Forecasts:
    """Predictions of S members and true values for N outputs of inputs, in float64."""

    means: Tensor
    """`mu_s`, `[S, N]`."""
    variances: Tensor
    """`sigma_s^2`, `[S, N]`; 0 if members are points."""
    target: Tensor
    """True values, `[N]`."""
    calibrated: Callable[[float], tuple[Tensor, Tensor]] | None = None
    """Intervals of a calibrated network with conformal scores, as a function of the level."""

    def __len__(self) -> int:
        """Return N, the number of values."""
        return len(self.target)

    def __repr__(self) -> str:
        return f"Forecasts(members={len(self.means)}, values={len(self)})"

    @property
    def noisy(self) -> bool:
        """True if the mixture has a density: every variance is above 0."""
        return bool((self.variances > 0).all())

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the mixture, `[N]`."""
        return self.means.mean(0)

    @cached_property
    def std(self) -> Tensor:
        """Standard deviation of the mixture, `[N]`."""
        return ((self.means - self.mean).square() + self.variances).mean(0).sqrt()

    @cached_property
    def log_density(self) -> Tensor:
        """`log p(y)` of the mixture, `[N]`."""
        squares = (self.target - self.means).square() / self.variances
        logs = -0.5 * (squares + self.variances.log() + math.log(2 * math.pi))
        return logs.logsumexp(0) - math.log(len(self.means))

    @cached_property
    def cdf(self) -> Tensor:
        """`F(y)` of the mixture, `[N]`: uniform on [0, 1] if the forecasts are correct."""
        below = torch.special.ndtr((self.target - self.means) / self.variances.sqrt())
        on_a_point = (self.variances == 0) & (self.target == self.means)  # 0 / 0 above; F includes the step
        return torch.where(on_a_point, 1.0, below).mean(0)

    @cached_property
    def crps(self) -> Tensor:
        """`integral (F(x) - 1[y <= x])^2 dx` of the mixture, `[N]`."""
        error = _mean_distance(self.target - self.means, self.variances).mean(0)
        spread = torch.zeros_like(error)
        for mean, variance in zip(self.means, self.variances, strict=True):  # all pairs at once may not fit in memory
            spread += _mean_distance(self.means - mean, self.variances + variance).mean(0)
        return error - 0.5 * spread / len(self.means)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Return the central interval of the Gaussian with the mixture's moments, noise included.

        For a calibrated network with conformal scores, return the conformal interval.
        """
        if self.calibrated is not None:
            return self.calibrated(level)
        reach = -NormalDist().inv_cdf((1 - level) / 2) * self.std
        return self.mean - reach, self.mean + reach


def _mean_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the mean of |X| for X ~ `N(mu, sigma^2)`: `2 sigma phi(z) + mu (2 Phi(z) - 1)` with `z = mu / sigma`."""
    sigma = variance.sqrt()
    z = torch.where(mean == 0, 0.0, mean / sigma)  # infinite for a point, whose A is |mu|
    return sigma * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square()) + mean * torch.erf(z / math.sqrt(2))


Forecast = Predictive | Tensor | Forecasts


def read_forecasts(
    prediction: Forecast, target: Tensor | None = None, noise_precision: NoisePrecision = None, scale: Scale = 1.0
) -> Forecasts:
    """Check predictions and values, and arrange them in rows, one for each output of each input.

    Args:
        prediction: `Predictive` of regression, `[S, B]` or `[S, B, D, ...]`, or of Gaussians, `[S, B, 2D, ...]`;
            means of a single member in the target's shape; or `Forecasts`.
        target: True values, `[B]` or `[B, D, ...]`; None for `Forecasts`.
        noise_precision: 1 / variance of the noise around the means, for members that predict no variance.
        scale: Factor on all outputs, such as the standard deviation of standardised targets. `noise_precision` refers
            to outputs before scaling.

    Example:
        >>> p = Predictive(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), task="regression")
        >>> forecasts = read_forecasts(p, torch.tensor([2.0, 2.5]), noise_precision=4.0)
        >>> forecasts, forecasts.std
        (Forecasts(members=2, values=2), tensor([1.1180, 0.5000], dtype=torch.float64))
    """
    check_noise_precision("noise_precision", noise_precision)
    check_scale("scale", scale)
    if isinstance(prediction, Forecasts):
        if target is not None or noise_precision is not None or scale != 1:
            raise ValueError(f"target, noise_precision and scale must be left out if prediction is {prediction!r}")
        return prediction
    means, variances = _members(prediction, noise_precision)
    target = check_values(target, list(means.shape[1:]), means.device)
    calibrated = None
    if isinstance(prediction, Predictive) and getattr(prediction.calibration, "conformal", None) is not None:
        calibrated = partial(_conformal, prediction, scale)
    return Forecasts(means.flatten(1) * scale, variances.flatten(1) * scale**2, target.flatten() * scale, calibrated)


def _conformal(prediction: Predictive, scale: float, level: float) -> tuple[Tensor, Tensor]:
    low, high = prediction.interval(level)
    return low.double().flatten() * scale, high.double().flatten() * scale


def _members(prediction: Predictive | Tensor, noise_precision: float | None) -> tuple[Tensor, Tensor]:
    """Return each member's means and variances, `[S, B, ...]` in float64."""
    if isinstance(prediction, Predictive):
        reading = prediction.reading
        if REGRESSION.name not in reading.metrics:
            known = " or ".join(name for name, task in TASKS.items() if REGRESSION.name in task.metrics)
            raise ValueError(f"prediction must be of task {known}, got task {prediction.task}")
        if reading.predicts_noise and noise_precision is not None:
            raise ValueError(
                f"noise_precision must be None for task {reading.name}, which predicts variances, got {noise_precision}"
            )
        check_finite("prediction", prediction.predictions)
        values = prediction.predictions.detach().double()
        if noise_precision is None:
            means, variances = reading.means_and_variances(values)
            return means, variances
    else:
        if not isinstance(prediction, Tensor) or not prediction.is_floating_point():
            kind = getattr(prediction, "dtype", type(prediction).__name__)
            raise ValueError(f"prediction must be a Predictive or a floating-point tensor of means, got {kind}")
        if prediction.ndim < 1:
            raise ValueError("prediction must be means [B] or [B, D, ...], got a single number")
        check_finite("prediction", prediction)
        values = prediction.detach().double()[None]
    return values, torch.full_like(values, 0.0 if noise_precision is None else 1 / noise_precision)


# Intervals ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Intervals:
    """N intervals and true values, `[N]` each."""

    low: Tensor
    high: Tensor
    target: Tensor


def read_intervals(
    prediction: Forecast | tuple[Tensor, Tensor],
    target: Tensor | None = None,
    level: Level = 0.95,
    noise_precision: NoisePrecision = None,
    scale: Scale = 1.0,
) -> Intervals:
    """Read intervals and true values.

    Args:
        prediction: As in `read_forecasts`, or intervals as a pair `(low, high)`, whose ends may be infinite.
        target: True values, `[B]` or `[B, D, ...]`; None for `Forecasts`.
        level: Probability of the central intervals.
        noise_precision: 1 / variance of the noise around the means, for members that predict no variance.
        scale: Factor on all values, such as the standard deviation of standardised targets.
    """
    check_level("level", level)
    if not isinstance(prediction, tuple):
        forecasts = read_forecasts(prediction, target, noise_precision, scale)
        return Intervals(*forecasts.interval(level), forecasts.target)
    check_scale("scale", scale)
    if noise_precision is not None:
        raise ValueError(f"noise_precision must be None if prediction is (low, high), got {noise_precision}")
    if len(prediction) != 2 or not all(isinstance(end, Tensor) for end in prediction):
        kinds = [type(end).__name__ for end in prediction]
        raise ValueError(f"prediction must be a pair of tensors (low, high), got a tuple of {kinds}")
    low, high = prediction
    if low.shape != high.shape or low.ndim < 1:
        shapes = f"{list(low.shape)} and {list(high.shape)}"
        raise ValueError(f"low and high must have the same shape, [B] or [B, D, ...], got {shapes}")
    bad = ~(low <= high)  # also for NaN
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        ends = [float(end[tuple(at)]) for end in (low, high)]
        raise ValueError(f"low must be at most high, got {ends[0]:.6g} and {ends[1]:.6g} at index {at}")
    target = check_values(target, list(low.shape), low.device)
    return Intervals(*(end.detach().double().flatten() * scale for end in (low, high, target)))


# Checks -------------------------------------------------------------------------------------------------


def check_noise_precision(name: str, value: float | None) -> None:
    """Raise ValueError unless it is a positive number or None."""
    if value is not None:
        check_number(name, value, 0, above=True)


check_scale = partial(check_number, low=0, above=True)
check_level = partial(check_number, low=0, above=True, below=1)
NoisePrecision = Annotated[float | None, check_noise_precision]
Scale = Annotated[float, check_scale]
Level = Annotated[float, check_level]


def check_values(target: Tensor | None, shape: list[int], device: torch.device) -> Tensor:
    """Return `target` in float64 on `device`, or raise unless it holds finite numbers in the shape `[B, ...]`."""
    kind = getattr(target, "dtype", type(target).__name__)
    if not isinstance(target, Tensor) or target.is_complex() or kind == torch.bool:
        raise ValueError(f"target must be a tensor of real values {shape}, got {kind}")
    if list(target.shape) != shape:
        # [B] against [B, 1] would broadcast to [B, B].
        raise ValueError(f"target must have the shape of one member's means, {shape}, got {list(target.shape)}")
    check_finite("target", target)
    return target.detach().to(device, torch.float64)


# Kinds --------------------------------------------------------------------------------------------------

REGRESSION = InputFormat("regression", read_forecasts)
INTERVALS = InputFormat("intervals", read_intervals)
DENSITY = InputFormat(  # points have no density
    "density",
    read_forecasts,
    lambda p, noise_precision: p.reading.predicts_noise or noise_precision is not None,
)
