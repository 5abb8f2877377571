"""Task "quantiles": quantile heads and their distribution.

Koenker & Bassett, *Regression Quantiles* (1978). A network predicts Q quantiles of a value, at rising levels. Its
quantile function is linear between them and extrapolated linearly; quantiles that cross are sorted (Chernozhukov,
Fernández-Val & Galichon, *Quantile and Probability Curves Without Crossing*, 2010). The joint prediction is the mixture
of the members' distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.networks.calls import InputError
from multitudes.tasks.criteria import Criterion, at_least_float32, reduced, unwrap
from multitudes.tasks.regression import ValueTask

_HALVINGS = 64  # bisection steps: to the last bit in float64
_CHUNK = 2**24  # number of segments of quantile functions processed at once


def default_levels(count: int) -> tuple[float, ...]:
    """Return the default levels of `count` quantiles: evenly spaced from 0.05 to 0.95; 0.5 for a single one.

    >>> default_levels(3), default_levels(1)
    ((0.05, 0.5, 0.95), (0.5,))
    """
    if count == 1:
        return (0.5,)
    return tuple(round(0.05 + 0.9 * index / (count - 1), 12) for index in range(count))


def check_levels(levels: Any, count: int | None = None) -> tuple[float, ...]:
    """Check that `count` levels rise and lie between 0 and 1; return them as a tuple."""
    numbers = isinstance(levels, Sequence) and not isinstance(levels, str) and len(levels) > 0
    if not numbers or not all(isinstance(each, (int, float)) and 0 < each < 1 for each in levels):
        raise ValueError(f"quantiles must be levels between 0 and 1, such as (0.05, 0.5, 0.95), got {levels!r}")
    if any(one >= other for one, other in pairwise(levels)):
        raise ValueError(f"quantiles must be levels in rising order, got {levels!r}")
    if count is not None and len(levels) != count:
        raise ValueError(f"quantiles must hold one level for each of the network's {count} predictions, got {levels!r}")
    return tuple(float(each) for each in levels)


def pinball(
    prediction: Tensor, target: Tensor, levels: Sequence[float] | None = None, reduction: str = "mean"
) -> Tensor:
    """Return the pinball loss, the training criterion of `task="quantiles"`: `[B, Q, ...]`, `[B, ...]` -> mean.

    It is `tau (y - q)` if the quantile q of level tau is too low, and `(1 - tau) (q - y)` if it is too high.

    >>> pinball(torch.tensor([[1.0, 3.0]]), torch.tensor([2.0]), (0.1, 0.9))  # (0.1 * 1 + 0.1 * 1) / 2
    tensor(0.1000)
    """
    prediction = at_least_float32(prediction)
    if target.shape != prediction.shape[:1] + prediction.shape[2:]:
        want = list(prediction.shape[:1] + prediction.shape[2:])
        raise ValueError(
            f"target must have the predictions' shape without their quantiles, {want}, got {list(target.shape)}"
        )
    levels = default_levels(prediction.shape[1]) if levels is None else check_levels(levels, prediction.shape[1])
    tau = torch.tensor(levels, dtype=prediction.dtype, device=prediction.device)
    tau = tau.view(-1, *[1] * (prediction.dim() - 2))
    off = target.to(prediction.dtype).unsqueeze(1) - prediction
    return reduced(tau * off + F.relu(-off), reduction)


def _knots(values: Tensor, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return quantile functions from level 0 to 1: `[S, B, Q, ...]` -> `[S, B, ..., Q + 2]`, levels `[Q + 2]`."""
    q = values.movedim(2, -1).sort(-1).values
    first, last = q[..., :1], q[..., -1:]
    low, high = torch.zeros_like(first), torch.zeros_like(last)
    if len(levels) > 1:
        low = (q[..., 1:2] - first) * (levels[0] / (levels[1] - levels[0]))
        high = (last - q[..., -2:-1]) * ((1 - levels[-1]) / (levels[-1] - levels[-2]))
    tau = torch.tensor([0.0, *levels, 1.0], dtype=q.dtype, device=q.device)
    return torch.cat([first - low, q, last + high], -1), tau


def moments(values: Tensor, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of distributions with these quantiles: `[S, B, Q, ...]` -> `[S, B, ...]` each.

    >>> mean, variance = moments(torch.tensor([[[0.25, 0.5, 0.75]]]), (0.25, 0.5, 0.75))  # uniform from 0 to 1
    >>> mean, variance
    (tensor([[0.5000]]), tensor([[0.0833]]))
    """
    knots, tau = _knots(values, levels)
    share = tau.diff()
    mean = (share * (knots[..., 1:] + knots[..., :-1]) / 2).sum(-1)
    a, b = knots[..., :-1] - mean[..., None], knots[..., 1:] - mean[..., None]
    return mean, (share * (a * a + a * b + b * b) / 3).sum(-1)


def mixture_quantile(values: Tensor, levels: Sequence[float], level: float) -> Tensor:
    """Return the quantile of a mixture of S members at a level: quantiles `[S, B, Q, ...]` -> `[B, ...]`.

    >>> two = torch.tensor([[[0.25, 0.75]], [[10.25, 10.75]]])  # uniform from 0 to 1, and from 10 to 11
    >>> mixture_quantile(two, (0.25, 0.75), 0.25)
    tensor([0.5000])
    """
    if not levels[0] <= level <= levels[-1]:
        raise ValueError(
            f"the quantile of level {level:g} is outside of the levels that the network predicts, {levels[0]:g} to "
            f"{levels[-1]:g}"
        )
    knots, tau = _knots(values.double(), levels)
    shape, share = knots.shape[1:-1], tau.diff()
    flat = knots.flatten(1, -2)
    step = max(1, _CHUNK * flat.shape[1] // max(1, flat.numel()))
    found = torch.cat([_inverted(part, share, level) for part in flat.split(step, 1)])
    return found.view(shape).to(at_least_float32(values).dtype)


def _inverted(knots: Tensor, share: Tensor, level: float) -> Tensor:
    """Find by bisection where the mean of the S distribution functions of `knots [S, N, K]` reaches a level, `[N]`."""
    start, width = knots[..., :-1], knots.diff(dim=-1)
    low, high = knots.amin((0, 2)), knots.amax((0, 2))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        off = middle[:, None] - start
        below = torch.where(width > 0, (off / width).clamp(0, 1), (off >= 0).to(off))
        enough = (share * below).sum(-1).mean(0) >= level
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


@dataclass(frozen=True)
class Quantiles(ValueTask):
    """Quantiles of each value, at rising levels: `[S, B, Q, ...]`."""

    quantiles: Any = None
    """The levels: the chosen ones, or default ones as soon as the number of predictions is known."""

    name = "quantiles"
    criteria = (pinball,)
    form = "[S, B, quantiles, ...]"
    settings = ("quantiles",)
    quantities = ValueTask.quantities | {"quantile", "median"}
    metrics = ("quantiles", "quantile intervals")
    scores = ("cqr",)

    def sized(self, shape: Sequence[int]) -> Self:
        count = shape[2]
        levels = default_levels(count) if self.quantiles is None else check_levels(self.quantiles, count)
        return type(self)(quantiles=levels)

    def check_targets(self, predictions: Tensor, y: Tensor, values: bool = True) -> None:
        super().check_targets(predictions, y, values)
        self.check_shape(predictions.shape)
        want = predictions.shape[1:2] + predictions.shape[3:]
        if y.shape != want:
            raise InputError(
                f"y must have the predictions' shape without their quantiles, {list(want)}, got {list(y.shape)}"
            )

    def _fitted(self, criterion: Criterion, prediction: Tensor, y: Tensor) -> tuple[Criterion, Tensor, Tensor]:
        if unwrap(criterion) is pinball and self.quantiles is not None:
            criterion = partial(pinball, levels=self.quantiles)
        return super()._fitted(criterion, prediction, y)

    def means_and_variances(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        return moments(at_least_float32(predictions), self.quantiles)

    def member_values(self, predictions: Tensor) -> Tensor:
        return at_least_float32(predictions).sort(2).values

    def quantile(self, predictions: Tensor, level: float) -> Tensor:
        """Return a quantile of the members' mixture, `[B, ...]`; `level` lies between the predicted ones."""
        return mixture_quantile(predictions, self.quantiles, level)

    @property
    def level(self) -> float:
        """The level of the interval between the outermost quantiles."""
        widest = round(1 - 2 * max(self.quantiles[0], 1 - self.quantiles[-1]), 12)
        if widest <= 0:
            raise ValueError(f"an interval needs quantiles below and above the median, got levels {self.quantiles}")
        return widest

    def interval(self, predictions: Tensor, mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
        tail = round((1 - level) / 2, 12)
        return self.quantile(predictions, tail), self.quantile(predictions, 1 - tail)
