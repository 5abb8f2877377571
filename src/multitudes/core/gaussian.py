"""Mean and variance heads: one reading of their outputs, for training and for prediction.

Lakshminarayanan, Pritzel & Blundell, *Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles*
(2017), section 2.2.1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["VARIANCE_FLOOR", "at_least_float32", "gaussian_nll", "join_gaussian", "split_gaussian"]

VARIANCE_FLOOR = 1e-6  # added to every predicted variance, so that no likelihood is infinite


def split_gaussian(prediction: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Read the outputs of mean and variance heads: `[B, 2D, ...]` -> means, variances `[B, D, ...]`.

    The first half of `dim` holds the means, the second half `r` with variance `softplus(r) + 1e-6`.

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
    """The outputs that `split_gaussian` reads as these means and variances: `[B, D, ...]` twice -> `[B, 2D, ...]`.

    A variance below 1e-6 becomes 1e-6, the least that can be read.

    >>> split_gaussian(join_gaussian(torch.tensor([[3.0]]), torch.tensor([[0.25]])))
    (tensor([[3.]]), tensor([[0.2500]]))
    """
    above = (variance - VARIANCE_FLOOR).clamp(min=torch.finfo(variance.dtype).tiny)
    return torch.cat([mean, above + torch.log(-torch.expm1(-above))], dim)  # softplus backwards


def gaussian_nll(prediction: Tensor, target: Tensor) -> Tensor:
    """The training criterion of `task="gaussian"`: `[B, 2D, ...]`, `[B, D, ...]` -> mean over everything.

    `-log N(y; mean, variance) = (log(2 pi variance) + (y - mean)^2 / variance) / 2`, where `split_gaussian`
    reads mean and variance from the prediction.

    >>> gaussian_nll(torch.tensor([[3.0, 0.0]]), torch.tensor([[4.0]]))  # variance log 2
    tensor(1.4570)
    """
    mean, variance = split_gaussian(prediction)
    if target.shape != mean.shape:
        # [B] against [B, 1] would broadcast to [B, B] and train on nonsense.
        raise ValueError(f"target must have the means' shape {list(mean.shape)}, got {list(target.shape)}")
    return 0.5 * (torch.log(2 * math.pi * variance) + (target - mean).square() / variance).mean()


def at_least_float32(x: Tensor) -> Tensor:
    """The same numbers, in float32 where their precision is lower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
