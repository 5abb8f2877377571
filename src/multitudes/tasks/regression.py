"""Task "regression", and the base class of tasks of values."""

from __future__ import annotations

from statistics import NormalDist
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.networks.calls import InputError
from multitudes.tasks.criteria import at_least_float32
from multitudes.tasks.task import Task


class ValueTask(Task):
    """A task whose predictions are numbers, by default means."""

    classes = False
    quantities = frozenset({"mean", "epistemic_variance", "aleatoric_variance", "std", "interval"})
    outputs: ClassVar[dict[str, str]] = {"mean": "mean", "std": "std", "members": "member_values"}
    metrics: ClassVar[tuple[str, ...]] = ("regression", "intervals", "density")

    def _averaged(self, values: Tensor, weights: Tensor) -> Tensor:
        return (weights * values).sum(0)

    def means_and_variances(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return each member's mean and predicted variance (0 if it predicts none), `[S, B]` or `[S, B, D, ...]`."""
        means = at_least_float32(predictions)
        return means, means.new_zeros(()).expand_as(means)

    def member_values(self, predictions: Tensor) -> Tensor:
        """Return values whose mean over members is the joint prediction, `[S, B, ...]`."""
        return self.means_and_variances(predictions)[0]

    @property
    def level(self) -> float:
        """The default probability of intervals."""
        return 0.95

    def interval(self, predictions: Tensor, mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """Return the central interval `(low, high)` of the Gaussian with the moments of the members' mixture."""
        # Use the lower tail, whose probability is exact in floating point even as level nears 1.
        reach = -NormalDist().inv_cdf((1 - level) / 2) * std
        return mean - reach, mean + reach

    def stretched(self, predictions: Tensor, factor: Tensor) -> Tensor:
        """Scale predictions `[S, B, ...]` so that their mixture has `factor` times the variance and the same mean."""
        values = predictions.to(factor.dtype)
        mean = values.mean(0)
        return mean + factor.sqrt() * (values - mean)


class Regression(ValueTask):
    """One number per value: means `[S, B]` or `[S, B, D, ...]`."""

    name = "regression"
    criteria = (
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
        *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    )
    rank = 2
    form = "[S, B] or [S, B, D, ...]"
    scalings = (None, "variance")
    scores = ("absolute", "scaled")
    likelihood = True
    compared = True

    def check_targets(self, predictions: Tensor, y: Tensor, values: bool = True) -> None:
        super().check_targets(predictions, y, values)
        shape = predictions.shape[1:]
        if y.shape != shape:  # `[B]` against `[B, 1]` would broadcast
            raise InputError(f"y must have the predictions' shape {list(shape)}, got {list(y.shape)}")
