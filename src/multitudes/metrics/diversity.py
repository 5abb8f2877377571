"""Diversity of the members of a multitude in labels, errors, losses and weights.

- Disagreement, its share of the error, cosine similarity of weights: Fort et al., *Deep Ensembles: A Loss Landscape
  Perspective*, 2019.
- Q-statistic and correlation of errors: Kuncheva & Whitaker, *Measures of Diversity in Classifier Ensembles*, 2003.
- Gain of an ensemble from diversity, `mean member loss = ensemble loss + diversity`: Krogh & Vedelsby, *Neural Network
  Ensembles, Cross Validation, and Active Learning*, 1995, for squared errors; Wood et al., *A Unified Theory of
  Diversity in Ensemble Learning*, 2023, for other losses.

`divergences.py` compares probabilities. Labels and errors are means over rows and over pairs of different members.
`pairwise_*` are matrices `[S, S]`, which torchmetrics turns into a scalar for a single member. A single member has
disagreement 0, and NaN for Q-statistic and correlation. Metrics that need no classes do not require `target`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.metrics.class_inputs import Rows
from multitudes.metrics.declare import NEITHER, TARGETLESS, InputFormat, counted, metric
from multitudes.metrics.regression_inputs import Forecast, Forecasts, read_forecasts
from multitudes.training.recorder import Recorder, checked_state, flat_state

__all__ = ["Ambiguity", "cosine_similarity"]

_CHUNK = 2**20  # float64 numbers to process at a time


def _off_diagonal(matrix: Tensor) -> Tensor:
    """Return the entries `[S * (S - 1)]` of `[S, S]` for two different members."""
    return matrix[~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)]


def over_pairs(matrix: Tensor) -> Tensor:
    """Return the mean of `[S, S]` over pairs of different members; 0 without pairs."""
    pairs = _off_diagonal(matrix)
    return pairs.sum() / max(1, len(pairs))


# Labels -------------------------------------------------------------------------------------------------


def _differing(rows: Rows, metric: str) -> Tensor:
    """Count the rows on which two members' labels differ, `[S, S]`; `metric` names the metric in errors."""
    labels = rows.members(metric).predictions.argmax(2)
    return torch.stack([(labels != own).sum(1) for own in labels]).double()


@metric("PairwiseDisagreement", better=NEITHER, kind=TARGETLESS, shape=(2, "members", "members"))
def pairwise_disagreement(rows: Rows) -> Tensor:
    """Share of rows on which two members' labels differ, `[S, S]`.

    >>> from multitudes import Predictive
    >>> votes = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0], [1, 0, 0, 0]])
    >>> pairwise_disagreement(Predictive(nn.functional.one_hot(votes).float()))
    tensor([[0.0000, 0.2500, 0.7500],
            [0.2500, 0.0000, 0.5000],
            [0.7500, 0.5000, 0.0000]], dtype=torch.float64)
    """
    return counted(_differing(rows, "pairwise_disagreement"), len(rows))


@metric("Disagreement", better=NEITHER, kind=TARGETLESS, group="diversity")
def disagreement(rows: Rows) -> Tensor:
    """Mean over pairs of members of the share of rows on which their labels differ: see `pairwise_disagreement`."""
    return counted(over_pairs(_differing(rows, "disagreement")), len(rows))


# Errors -------------------------------------------------------------------------------------------------


@metric("NormalisedDisagreement", better=NEITHER)
def normalised_disagreement(rows: Rows) -> Tensor:
    """Disagreement relative to the members' mean error, `d / (1 - a)` for mean accuracy a; NaN at a = 1.

    Less accurate members differ more by chance (Fort et al., section 4.2).

    >>> from multitudes import Predictive
    >>> votes = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]])
    >>> p = Predictive(nn.functional.one_hot(votes).float())
    >>> float(normalised_disagreement(p, torch.tensor([0, 0, 1, 1])))  # 0.25 / (1 - 0.875)
    2.0
    """
    wrong = rows.members("normalised_disagreement").predictions.argmax(2) != rows.target
    differing = over_pairs(_differing(rows, "normalised_disagreement"))
    return torch.stack([differing, wrong.mean(0, dtype=torch.float64).sum()])


def _pair_counts(rows: Rows, name: str) -> Tensor:
    """Count the rows on which both members of a pair are right (`N11`), one is (`N10`, `N01`), or none is (`N00`)."""
    right = (rows.members(name).predictions.argmax(2) == rows.target).double()
    wrong = 1 - right
    return torch.stack([one @ other.T for one in (right, wrong) for other in (right, wrong)])


def _q(counts: Tensor) -> Tensor:
    """Map counts `[4, S, S]` to Q, mean over pairs; NaN if undefined for a pair."""
    n11, n10, n01, n00 = counts
    return _off_diagonal((n11 * n00 - n01 * n10) / (n11 * n00 + n01 * n10)).mean()


def _correlation(counts: Tensor) -> Tensor:
    """Map counts `[4, S, S]` to the correlation, mean over pairs; NaN if undefined for a pair."""
    n11, n10, n01, n00 = counts
    spread = (n11 + n10) * (n01 + n00) * (n11 + n01) * (n10 + n00)
    return _off_diagonal((n11 * n00 - n01 * n10) / spread.sqrt()).mean()


@metric("QStatistic", _q, better=NEITHER, shape=(4, "members", "members"))
def q_statistic(rows: Rows) -> Tensor:
    """Yule's Q of two members' errors, `(N11 N00 - N01 N10) / (N11 N00 + N01 N10)`, mean over pairs; from -1 to 1.

    It is 0 for independent errors and positive for errors on the same rows. It is NaN if the denominator is 0, such as
    for a member that is always right.

    >>> from multitudes import Predictive
    >>> votes = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 0]])
    >>> p, y = Predictive(nn.functional.one_hot(votes).float()), torch.tensor([0, 0, 1, 0, 0])
    >>> round(float(q_statistic(p, y)), 4), round(float(error_correlation(p, y)), 4)  # N11, N10, N01, N00 = 2, 1, 1, 1
    (0.3333, 0.1667)
    """
    return _pair_counts(rows, "q_statistic")


@metric("ErrorCorrelation", _correlation, better=NEITHER, shape=(4, "members", "members"))
def error_correlation(rows: Rows) -> Tensor:
    """Pearson correlation of two members' errors, mean over pairs; NaN if a member is always right or always wrong."""
    return _pair_counts(rows, "error_correlation")


# Losses -------------------------------------------------------------------------------------------------


class Ambiguity(NamedTuple):
    """`member = ensemble + diversity`: the members' mean loss, the loss of the mean prediction, and the gain."""

    member: Tensor
    ensemble: Tensor
    diversity: Tensor


def _parts(sums: Tensor) -> Ambiguity:
    """Divide sums of member loss, ensemble loss and diversity by the number of rows, all in `[4]`."""
    return Ambiguity(*(sums[:3] / sums[3]).unbind())


@metric("AmbiguityNLL", _parts, better=NEITHER, shape=(4,))
def ambiguity_nll(rows: Rows) -> Tensor:
    """Members' mean NLL, split into the NLL of the mean probabilities `m` and the members' diversity.

    `mean_s -log p_s(y) = -log m(y) + mean_s log(m(y) / p_s(y))`. If all members give the true class probability 0, the
    losses are infinite and the diversity is NaN. For calibrated predictions, m is the mean before calibration.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[[0.5, 0.5]], [[0.125, 0.875]]]).log())
    >>> [round(float(part), 4) for part in ambiguity_nll(p, torch.tensor([0]))]  # 2 log 2, log(16/5), log(5/4)
    [1.3863, 1.1632, 0.2231]
    """
    predictive = rows.members("ambiguity_nll")
    index = rows.target[None, :, None].expand(predictive.members, -1, 1)
    own = predictive.member_log_probs.gather(2, index)[..., 0].double()  # log p_s(y), [S, N]
    mean = own.logsumexp(0) - math.log(len(own))
    terms = [-own.mean(0), -mean, (mean - own).mean(0), torch.ones_like(mean)]
    return torch.stack([term.sum() for term in terms])


def _read_members(prediction: Forecast, target: Tensor | None = None) -> Forecasts:
    """Read the members' means with `read_forecasts`.

    Args:
        prediction: `Predictive` of regression, `[S, B]` or `[S, B, D, ...]`, or of Gaussians, whose variances are
            ignored.
        target: True values, `[B]` or `[B, D, ...]`.
    """
    if isinstance(prediction, Tensor):
        raise ValueError("ambiguity_mse needs the members' predictions: pass a Predictive, got only means")
    return read_forecasts(prediction, target)


@metric("AmbiguityMSE", _parts, better=NEITHER, kind=InputFormat("regression by members", _read_members), shape=(4,))
def ambiguity_mse(forecasts: Forecasts) -> Tensor:
    """Members' mean squared error, split into that of their mean `m` and their diversity; means over all values.

    `mean_s (f_s - y)^2 = (m - y)^2 + mean_s (f_s - m)^2`.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[1.0], [3.0]]), task="regression")
    >>> [float(part) for part in ambiguity_mse(p, torch.tensor([5.0]))]  # (16 + 4) / 2 = 9 + 1
    [10.0, 9.0, 1.0]
    """
    f, y, mean = forecasts.means, forecasts.target, forecasts.mean
    terms = [(f - y).square().mean(0), (mean - y).square(), (f - mean).square().mean(0), torch.ones_like(mean)]
    return torch.stack([term.sum() for term in terms])


# Weights ------------------------------------------------------------------------------------------------


def cosine_similarity(
    networks: Multitude | Recorder | Iterable[nn.Module | Mapping[str, Tensor]], model: nn.Module | None = None
) -> Tensor:
    """Return cosine similarities of the weights of networks, `theta_i . theta_j / (|theta_i| |theta_j|)`.

    Args:
        networks: A multitude, for its members; or a recorder, for its checkpoints; or networks of one architecture, or
            their state dicts.
        model: Network of the same architecture, needed for state dicts to distinguish weights from buffers.

    Returns:
        Matrix `[M, M]` in float64 on the CPU; NaN for networks whose weights are all 0.

    Example:
        >>> nets = [nn.Linear(2, 1, bias=False) for _ in range(2)]
        >>> for net, weight in zip(nets, ([3.0, 4.0], [4.0, 3.0]), strict=True):
        ...     net.weight.data = torch.tensor([weight])
        >>> cosine_similarity(nets)
        tensor([[1.0000, 0.9600],
                [0.9600, 1.0000]], dtype=torch.float64)
    """
    theta = _weights(networks, model)
    products = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    for part in theta.split(max(1, _CHUNK // len(theta)), 1):
        products += part.double() @ part.double().T
    norms = products.diagonal().sqrt()
    return (products / norms / norms[:, None]).clamp(-1, 1)


def _weights(networks: Any, model: nn.Module | None) -> Tensor:
    """Return all weights, `[M, P]`, on the CPU, in at least float32."""
    if isinstance(networks, Multitude):
        networks = map(networks.member, range(networks.members))
    elif isinstance(networks, Recorder):
        model = networks.net if model is None else model
    elif isinstance(networks, (nn.Module, Mapping)) or not isinstance(networks, Iterable):
        raise ValueError(f"networks must be a multitude, or several networks, got {type(networks).__name__}")
    vectors = []
    for index, network in enumerate(networks):
        if isinstance(network, nn.Module):
            model = network if model is None else model
            network = network.state_dict()
        if model is None:
            raise ValueError("model is needed to distinguish weights from buffers in state dicts, got None")
        vectors.append(
            flat_state(checked_state(network, model, f"networks[{index}]", "a network or a state dict"), model)
        )
    if not vectors:
        raise ValueError("networks must hold at least one network, got none")
    return torch.stack(vectors)
