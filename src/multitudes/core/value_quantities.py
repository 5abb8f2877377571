"""What predictions of values say together: means, variances, quantiles, intervals."""

from __future__ import annotations

from functools import cached_property
from statistics import NormalDist
from typing import Any

from torch import Tensor

from multitudes.core.gaussian import at_least_float32, split_gaussian
from multitudes.core.quantiles import mixture_quantile, moments, widest_level
from multitudes.core.quantities import Quantities, quantity
from multitudes.core.tasks import VALUES

__all__ = ["ValueQuantities"]


class ValueQuantities(Quantities):
    """The quantities of "regression", "gaussian" and "quantiles"."""

    variance: Any

    @cached_property
    def _means_and_variances(self) -> tuple[Tensor, Tensor]:
        """Each member's mean and predicted variance, `[S, B]` or `[S, B, D, ...]`."""
        if self.task == "gaussian":
            return split_gaussian(self.predictions, dim=2)
        means = at_least_float32(self.predictions)
        if self.task == "quantiles":
            return moments(means, self._levels)
        return means, means.new_zeros(()).expand_as(means)

    @quantity(*VALUES)
    def mean(self) -> Tensor:
        """The members' mean, `[B]` or `[B, D, ...]`."""
        return self._means_and_variances[0].mean(0)

    @quantity(*VALUES)
    def epistemic_variance(self) -> Tensor:
        """How far the members lie apart: the variance of their means, `[B]` or `[B, D, ...]`."""
        return self._means_and_variances[0].var(0, correction=0)

    @quantity(*VALUES)
    def aleatoric_variance(self) -> Tensor:
        """The noise that the members predict: the mean of their variances; 0 for `task="regression"`."""
        return self._means_and_variances[1].mean(0)

    @quantity(*VALUES)
    def std(self) -> Tensor:
        """The square root of `variance`, `[B]` or `[B, D, ...]`."""
        return self.variance.sqrt()

    @property
    def _levels(self) -> tuple[float, ...]:
        assert self.quantiles is not None
        return self.quantiles

    def quantile(self, level: float) -> Tensor:
        """The quantile of the members' mixture, `[B, ...]`, of a level between those of `task="quantiles"`."""
        self._require("quantile", "quantiles")
        return mixture_quantile(self.predictions, self._levels, level)

    @quantity("quantiles")
    def median(self) -> Tensor:
        """The median of the members' mixture, `[B, ...]`."""
        return self.quantile(0.5)

    def interval(self, level: float | None = None) -> tuple[Tensor, Tensor]:
        """The central interval `(low, high)` that holds the target with probability `level`, by default 0.95.

        It is that of the Gaussian with the mean and variance of the members' mixture (Lakshminarayanan et al., 2017,
        section 2.4). Of quantiles it is that of the mixture itself, by default the widest between them. Of a calibrated
        network with conformal scores it is `set(level)`, which holds the target as often as it says, whatever the
        distribution.

        >>> import torch
        >>> from multitudes import Predictive
        >>> p = Predictive(torch.tensor([[1.0], [3.0]]), task="regression")
        >>> p.interval(0.5)
        (tensor([1.3255]), tensor([2.6745]))
        """
        self._require("interval", *VALUES)
        if level is None:
            level = widest_level(self._levels) if self.task == "quantiles" else 0.95
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        if self.calibration is not None and self.calibration.conformal is not None:
            return self.calibration.conformal.set(self, level)
        return self._plain_interval(level)

    def _plain_interval(self, level: float) -> tuple[Tensor, Tensor]:
        if self.task == "quantiles":
            tail = round((1 - level) / 2, 12)
            return self.quantile(tail), self.quantile(1 - tail)
        # From the lower tail, whose probability is exact in floating point even as level nears 1.
        reach = -NormalDist().inv_cdf((1 - level) / 2) * self.std
        return self.mean - reach, self.mean + reach
