"""Task "gaussian": mean and variance heads.

Lakshminarayanan, Pritzel & Blundell, *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*
(2017), section 2.2.1. Seitzer, Tavakoli, Antic & Martius, *On the Pitfalls of Heteroscedastic Uncertainty Estimation
with Probabilistic Neural Networks* (2022), for `beta_nll`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.base.checks import check_number
from multitudes.tasks.criteria import at_least_float32, expand_weight, reduced
from multitudes.tasks.regression import ValueTask

VARIANCE_FLOOR = 1e-6  # added to every predicted variance, so that likelihoods stay finite


def split_gaussian(prediction: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Split the outputs of mean and variance heads: `[B, 2D, ...]` -> means, variances `[B, D, ...]`.

    The first half of `dim` holds the means; the second half, `r`, gives the variances `softplus(r) + 1e-6`.

    >>> split_gaussian(torch.tensor([[3.0, 0.0]]))
    (tensor([[3.]]), tensor([[0.6931]]))
    """
    if prediction.ndim <= dim or prediction.shape[dim] % 2:
        raise ValueError(
            f"gaussian predictions need as many raw variances as means, an even number in dim {dim}, "
            f"got shape {list(prediction.shape)}"
        )
    mean, raw = at_least_float32(prediction).chunk(2, dim)
    return mean, F.softplus(raw) + VARIANCE_FLOOR


def join_gaussian(mean: Tensor, variance: Tensor, dim: int = 1) -> Tensor:
    """Invert `split_gaussian`: means and variances, `[B, D, ...]` each -> outputs `[B, 2D, ...]`.

    Variances below 1e-6 become 1e-6.

    >>> split_gaussian(join_gaussian(torch.tensor([[3.0]]), torch.tensor([[0.25]])))
    (tensor([[3.]]), tensor([[0.2500]]))
    """
    above = (variance - VARIANCE_FLOOR).clamp(min=torch.finfo(variance.dtype).tiny)
    return torch.cat([mean, above + torch.log(-torch.expm1(-above))], dim)  # inverse softplus


def gaussian_nll(prediction: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Return the negative log-likelihood of Gaussians, the training criterion of `task="gaussian"`.

    `-log N(y; mean, variance) = (log(2 pi variance) + (y - mean)^2 / variance) / 2`

    Args:
        prediction: means, then raw variances `r` with `variance = softplus(r) + 1e-6`, `[B, 2D, ...]`.
        target: values, `[B, D, ...]`.
        reduction: `"mean"`, `"sum"` or `"none"`, as in torch.

    >>> gaussian_nll(torch.tensor([[3.0, 0.0]]), torch.tensor([[4.0]]))  # variance log 2
    tensor(1.4570)
    """
    mean, variance = split_gaussian(prediction)
    return reduced(_nll(mean, variance, target), reduction)


def beta_nll(prediction: Tensor, target: Tensor, beta: float = 0.5, reduction: str = "mean") -> Tensor:
    """Weigh each value's `gaussian_nll` by its variance to the power of `beta` (Seitzer et al. 2022, equation 5).

    `variance^beta * -log N(y; mean, variance)`, without gradients through the weight. With `beta=0` (`gaussian_nll`),
    the gradient of a mean is `(mean - y) / variance`, so values with large variance are learned least. With `beta=1`,
    it is the gradient of half the squared error. Set it by `functools.partial(beta_nll, beta=1.0)`.

    >>> beta_nll(torch.tensor([[3.0, 0.0]]), torch.tensor([[4.0]]), beta=1.0)  # log 2 * 1.4570
    tensor(1.0099)
    """
    check_number("beta", beta, 0, high=1)
    mean, variance = split_gaussian(prediction)
    return reduced(variance.detach() ** beta * _nll(mean, variance, target), reduction)


def mixture_nll(predictions: Tensor, target: Tensor) -> Tensor:
    """Return minus the log density of a mixture of Gaussians: `[S, B, 2D, ...]`, `[B, D, ...]` -> `[B, D, ...]`.

    >>> mixture_nll(torch.tensor([[[3.0, 0.0]], [[3.0, 0.0]]]), torch.tensor([[4.0]]))  # two equal members
    tensor([[1.4570]])
    """
    means, variances = split_gaussian(predictions, dim=2)
    nll = torch.stack([_nll(mean, variance, target) for mean, variance in zip(means, variances, strict=True)])
    return math.log(len(nll)) - (-nll).logsumexp(0)


def _nll(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    if target.shape != mean.shape:
        # [B] against [B, 1] would broadcast to [B, B].
        raise ValueError(f"target must have the means' shape {list(mean.shape)}, got {list(target.shape)}")
    return 0.5 * (torch.log(2 * math.pi * variance) + (target - mean).square() / variance)


class Gaussian(ValueTask):
    """Means, followed by raw variances, of each value: `[S, B, 2D, ...]`."""

    name = "gaussian"
    criteria = (gaussian_nll, beta_nll)
    scalings = ("variance", None)
    scores = ("scaled", "absolute")
    likelihood = True
    compared = True
    per_value = 2
    predicts_noise = True

    def _needs(self, shape: Sequence[int]) -> str | None:
        return "hold as many raw variances as means in dim 2, an even number together" if shape[2] % 2 else None

    def _averaged(self, values: Tensor, weights: Tensor) -> Tensor:
        means, variances = split_gaussian(values, dim=2)
        mean = (weights * means).sum(0)
        return join_gaussian(mean, (weights * (variances + (means - mean).square())).sum(0))

    def means_and_variances(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        return split_gaussian(predictions, dim=2)

    def validation_losses(
        self, predictions: Tensor, together: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the negative log density of the members' mixture, which is not Gaussian."""
        losses = mixture_nll(predictions, y)
        return losses, expand_weight(weight, losses)

    def stretched(self, predictions: Tensor, factor: Tensor) -> Tensor:
        means, variances = split_gaussian(predictions, dim=2)
        return join_gaussian(super().stretched(means, factor), factor * variances, dim=2)
