"""Scores of predicted quantiles: pinball loss, and coverage and width of intervals.

The quantiles are those of the members' mixture (`Predictive.quantile`). The intervals are the widest central ones
(`Predictive.interval`), or conformal ones for a calibrated network. Koenker & Bassett, *Regression Quantiles* (1978).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from multitudes.metrics.class_inputs import check_finite
from multitudes.metrics.declare import LOWER, NEITHER, InputFormat, metric, total_of
from multitudes.metrics.regression_inputs import Scale, check_scale, check_values
from multitudes.tasks.predictive import Predictive

__all__ = ["QuantileRows", "read_quantiles"]


@dataclass(frozen=True, eq=False, repr=False)
class QuantileRows:
    """Predicted quantiles and N true values, one for each output of each input; shared by metrics."""

    predictive: Predictive
    target: Tensor
    """True values, `[N]` in float64."""
    scale: float = 1.0

    def __len__(self) -> int:
        """Return N, the number of values."""
        return len(self.target)

    @property
    def levels(self) -> tuple[float, ...]:
        """Levels of the quantiles."""
        return self.predictive.quantiles or ()

    @cached_property
    def quantiles(self) -> Tensor:
        """Quantiles of the mixture, `[Q, N]`."""
        each = [self.predictive.quantile(level).double().flatten() for level in self.levels]
        return torch.stack(each) * self.scale

    @cached_property
    def interval(self) -> tuple[Tensor, Tensor]:
        """Low and high ends of the widest central interval, `[N]` each."""
        low, high = self.predictive.interval()
        return low.double().flatten() * self.scale, high.double().flatten() * self.scale


def read_quantiles(
    prediction: Predictive | QuantileRows, target: Tensor | None = None, scale: Scale = 1.0
) -> QuantileRows:
    """Check predicted quantiles and values.

    Args:
        prediction: `Predictive` of quantiles `[S, B, Q, ...]`, or `QuantileRows`.
        target: True values `[B, ...]`; None for `QuantileRows`.
        scale: Factor on quantiles and values, if they were standardised.
    """
    check_scale("scale", scale)
    if isinstance(prediction, QuantileRows):
        if target is not None or scale != 1:
            raise ValueError("target and scale must be left out if prediction is QuantileRows, which have both")
        return prediction
    if not isinstance(prediction, Predictive) or QUANTILES.name not in prediction.reading.metrics:
        task = prediction.task if isinstance(prediction, Predictive) else type(prediction).__name__
        raise ValueError(f"prediction must be a Predictive of task quantiles, got {task}")
    check_finite("prediction", prediction.predictions)
    shape = prediction.predictions.shape
    values = check_values(target, [*shape[1:2], *shape[3:]], prediction.predictions.device)
    return QuantileRows(prediction, values.flatten() * scale, scale)


QUANTILES = InputFormat("quantiles", read_quantiles)
QUANTILE_INTERVALS = InputFormat(
    "quantile intervals",
    read_quantiles,
    lambda p, _: p.quantiles is not None and p.quantiles[0] < 0.5 < p.quantiles[-1],
)


@metric("PinballLoss", better=LOWER, kind=QUANTILES, group="scores", score="pinball", shifted=True)
def pinball_loss(rows: QuantileRows) -> Tensor:
    """Mean over values and levels tau of `tau (y - q)` if q is too low, and `(1 - tau) (q - y)` if too high.

    >>> p = Predictive(torch.tensor([[[1.0, 3.0]]]), task="quantiles", quantiles=(0.1, 0.9))
    >>> round(float(pinball_loss(p, torch.tensor([2.0]))), 4)
    0.1
    """
    tau = torch.tensor(rows.levels, dtype=torch.float64, device=rows.target.device)[:, None]
    off = rows.target - rows.quantiles
    return total_of((tau * off + (-off).clamp(min=0)).mean(0))


@metric("QuantileCoverage", better=NEITHER, kind=QUANTILE_INTERVALS, group="calibration", score="coverage")
def quantile_coverage(rows: QuantileRows) -> Tensor:
    """Share of values in the widest central interval, ends included; ideally `1 - 2 tau` for lowest level tau.

    >>> p = Predictive(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]), task="quantiles")
    >>> float(quantile_coverage(p, torch.tensor([0.5, 2.0])))
    0.5
    """
    low, high = rows.interval
    return total_of((low <= rows.target) & (rows.target <= high))


@metric("QuantileWidth", better=NEITHER, kind=QUANTILE_INTERVALS, group="calibration", score="width")
def quantile_width(rows: QuantileRows) -> Tensor:
    """Mean width of the widest central interval.

    >>> p = Predictive(torch.tensor([[[0.0, 1.0], [0.0, 3.0]]]), task="quantiles")
    >>> round(float(quantile_width(p, torch.tensor([0.5, 2.0]))), 4)
    2.0
    """
    low, high = rows.interval
    return total_of(high - low)
