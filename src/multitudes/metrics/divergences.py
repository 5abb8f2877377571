"""KL and Jensen-Shannon divergences between members' probabilities, in nats.

Fort et al., *Deep Ensembles: A Loss Landscape Perspective*, 2019. All are means over rows and over pairs of different
members; `pairwise_*` are matrices `[S, S]`. A single member has divergence 0. `target` is optional: it only serves
`ignore`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.metrics.class_inputs import Rows
from multitudes.metrics.declare import NEITHER, TARGETLESS, counted, metric
from multitudes.metrics.diversity import over_pairs
from multitudes.tasks.predictive import Predictive

_CHUNK = 2**20  # float64 numbers to process at a time


def _log_probs(predictive: Predictive) -> Iterator[Tensor]:
    """Yield the members' log-probabilities in float64, some rows at a time, `[S, n, C]`."""
    members, _, classes = predictive.predictions.shape
    for logits in predictive.predictions.split(max(1, _CHUNK // (members * classes)), 1):
        yield F.log_softmax(logits.double(), 2)


def _kl(rows: Rows, metric: str) -> Tensor:
    """Sum `KL(p_i || p_j)` over rows, `[S, S]`; `metric` names the metric in errors."""
    predictive = rows.members(metric)
    total = rows.probs.new_zeros(predictive.members, predictive.members, dtype=torch.float64)
    for log_probs in _log_probs(predictive):
        logs = log_probs.flatten(1)
        possible = logs > -math.inf
        cross = logs.exp() @ logs.masked_fill(~possible, 0).T  # sum_nc p_i log p_j, where p_j is not 0
        total += (cross.diagonal()[:, None] - cross).clamp(min=0)
        if not bool(possible.all()):
            total[possible.double() @ (~possible).double().T > 0] = math.inf
    return total


def _js(rows: Rows, metric: str) -> Tensor:
    """Sum the Jensen-Shannon divergences between members over rows, `[S, S]`."""
    predictive = rows.members(metric)
    total = rows.probs.new_zeros(predictive.members, predictive.members, dtype=torch.float64)
    for log_probs in _log_probs(predictive):
        p = log_probs.exp()
        entropy = -torch.xlogy(p, p).sum((1, 2))
        for i in range(len(p)):
            mean = (p[i] + p[i:]) / 2
            divergence = -torch.xlogy(mean, mean).sum((1, 2)) - (entropy[i] + entropy[i:]) / 2
            total[i, i:] += divergence.clamp(min=0)
    return total + total.triu(1).T


@metric("PairwiseKL", better=NEITHER, kind=TARGETLESS, shape=(2, "members", "members"))
def pairwise_kl(rows: Rows) -> Tensor:
    """KL divergence of each pair of members, `sum_c p_ic log(p_ic / p_jc)`, mean over rows, at `[i, j]` of `[S, S]`.

    It is exact even if probabilities underflow, and infinite only if a logit is.

    >>> p = Predictive(torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]).log())
    >>> pairwise_kl(p)  # (log 2 + log(2/3)) / 2, and (log(1/2) + 3 log(3/2)) / 4
    tensor([[0.0000, 0.1438],
            [0.1308, 0.0000]], dtype=torch.float64)
    """
    return counted(_kl(rows, "pairwise_kl"), len(rows))


@metric("PairwiseJS", better=NEITHER, kind=TARGETLESS, shape=(2, "members", "members"))
def pairwise_js(rows: Rows) -> Tensor:
    """JS divergence of each pair, `H((p_i + p_j) / 2) - (H(p_i) + H(p_j)) / 2`, mean over rows, `[S, S]`.

    >>> p = Predictive(torch.tensor([[[0.0, 99.0]], [[99.0, 0.0]]]))
    >>> pairwise_js(p)  # at most log 2
    tensor([[0.0000, 0.6931],
            [0.6931, 0.0000]], dtype=torch.float64)
    """
    return counted(_js(rows, "pairwise_js"), len(rows))


@metric("KLDivergence", better=NEITHER, kind=TARGETLESS)
def kl_divergence(rows: Rows) -> Tensor:
    """KL divergence, mean over rows and over both orders of every pair of members: see `pairwise_kl`."""
    return counted(over_pairs(_kl(rows, "kl_divergence")), len(rows))


@metric("JSDivergence", better=NEITHER, kind=TARGETLESS)
def js_divergence(rows: Rows) -> Tensor:
    """Jensen-Shannon divergence, mean over rows and pairs of members: see `pairwise_js`."""
    return counted(over_pairs(_js(rows, "js_divergence")), len(rows))


@metric("EnsembleJS", better=NEITHER, kind=TARGETLESS, group="diversity")
def ensemble_js(rows: Rows) -> Tensor:
    """JS divergence of all members at once, `H(mean) - mean H = 1/S sum_s KL(p_s || mean)`, mean over rows.

    It is the mean of `Predictive.mutual_information`. The equation of Fort et al. has a sum over members; their code
    computes the mean, as here.

    >>> p = Predictive(torch.tensor([[[0.0, 99.0, 0.0]], [[99.0, 0.0, 0.0]], [[0.0, 0.0, 99.0]]]))
    >>> round(float(ensemble_js(p)), 4)  # log 3
    1.0986
    """
    total = rows.probs.new_zeros((), dtype=torch.float64)
    for log_probs in _log_probs(rows.members("ensemble_js")):
        p = log_probs.exp()
        mean = p.mean(0)
        total += (torch.xlogy(p, p).sum() / len(p) - torch.xlogy(mean, mean).sum()).clamp(min=0)
    return counted(total, len(rows))
