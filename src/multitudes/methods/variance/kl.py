"""Divergence of one random weight from its prior: Neklyudov et al., 2018 (see `variance`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

K1, K2, K3 = 0.63576, 1.87320, 1.48695
AT_INFINITY = (math.log(2) + 0.5772156649015329) / 2
"""-E log|eps|: with this constant, eq. (9) falls to 0 as alpha grows."""
SMALL = 1e-8


def approximate_kl(log_alpha: Tensor) -> Tensor:
    """Return KL(N(mu, alpha mu^2) || log-uniform) of a weight, by eq. (10) with a corrected sign.

    The prior is improper, so a constant is arbitrary. It is chosen such that the divergence falls to 0 as alpha grows.

    >>> approximate_kl(torch.tensor([-8.0, 0.0, 8.0])).round(decimals=3)
    tensor([4.6360, 0.4310, 0.0000])
    """
    return K1 * torch.sigmoid(-K2 - K3 * log_alpha) + 0.5 * F.softplus(-log_alpha)


def stochastic_kl(log_alpha: Tensor, eps: Tensor) -> Tensor:
    """Estimate the same without bias from standard normal `eps`, by eq. (9).

    The term is -1/2 log alpha + 1/2 log (1 + sqrt(alpha) eps)^2 = log|1 / sqrt(alpha) + eps|. The small number in the
    logarithm bounds a gradient that otherwise has no mean; it changes the mean of the estimate by at most 1.3e-4.
    """
    return 0.5 * torch.log((torch.exp(-0.5 * log_alpha) + eps).square() + SMALL) + AT_INFINITY


def student_kl(mean: Tensor, variance: Tensor, eps: Tensor, nu: float) -> Tensor:
    """Estimate KL(N(mean, variance) || t(nu)) of a weight without bias, for Student's prior, by eq. (25).

    The small number in the logarithm bounds the gradient here too, in units of the variance.
    """
    square = (mean + variance.sqrt() * eps).square() + SMALL * variance
    constant = math.lgamma(nu / 2) - math.lgamma((nu + 1) / 2) - 0.5 * nu * math.log(nu) - 0.5 * math.log(2 * math.e)
    return constant - 0.5 * variance.log() + 0.5 * (nu + 1) * torch.log(nu + square)
