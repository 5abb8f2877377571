"""How far the distribution of one random weight is from its prior: Neklyudov et al., 2018 (see `variance`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

K1, K2, K3 = 0.63576, 1.87320, 1.48695
AT_INFINITY = (math.log(2) + 0.5772156649015329) / 2
"""-E log|eps|: what eq. (9) lacks to fall to 0 as alpha grows."""
SMALL = 1e-8


def approximate_kl(log_alpha: Tensor) -> Tensor:
    """KL(N(mu, alpha mu^2) || log-uniform) of a weight, by eq. (10) with its sign put right.

    The prior is improper and leaves a constant open, chosen here so that the divergence falls to 0 as alpha grows.

    >>> approximate_kl(torch.tensor([-8.0, 0.0, 8.0])).round(decimals=3)
    tensor([4.6360, 0.4310, 0.0000])
    """
    return K1 * torch.sigmoid(-K2 - K3 * log_alpha) + 0.5 * F.softplus(-log_alpha)


def stochastic_kl(log_alpha: Tensor, eps: Tensor) -> Tensor:
    """An unbiased estimate of the same from standard normal `eps`, by eq. (9).

    That is -1/2 log alpha + 1/2 log (1 + sqrt(alpha) eps)^2 = log|1 / sqrt(alpha) + eps|. The small number under the
    logarithm bounds a gradient that has no mean otherwise; it moves the mean of the estimate by 1.3e-4 at most.
    """
    return 0.5 * torch.log((torch.exp(-0.5 * log_alpha) + eps).square() + SMALL) + AT_INFINITY


def student_kl(mean: Tensor, variance: Tensor, eps: Tensor, nu: float) -> Tensor:
    """An unbiased estimate of KL(N(mean, variance) || t(nu)) of a weight, Student's prior, by eq. (25).

    The small number under the logarithm is there for the same reason, in units of the variance.
    """
    square = (mean + variance.sqrt() * eps).square() + SMALL * variance
    constant = math.lgamma(nu / 2) - math.lgamma((nu + 1) / 2) - 0.5 * nu * math.log(nu) - 0.5 * math.log(2 * math.e)
    return constant - 0.5 * variance.log() + 0.5 * (nu + 1) * torch.log(nu + square)
