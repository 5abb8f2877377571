"""Diversity of the members of a multitude in labels, errors and weights.

- Disagreement, its share of the error, cosine similarity of weights: Fort et al., *Deep Ensembles: A Loss Landscape
  Perspective*, 2019.
- Q-statistic and correlation of errors: Kuncheva & Whitaker, *Measures of Diversity in Classifier Ensembles*, 2003.

`divergences.py` compares probabilities, `ambiguity.py` losses. All are means over rows and over pairs of different
members; `pairwise_*` are matrices `[S, S]`, which torchmetrics turns into a scalar for a single member. A single member
has disagreement 0, and NaN for Q-statistic and correlation. Metrics that need no classes do not require `target`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.metrics.class_inputs import Rows
from multitudes.metrics.declare import NEITHER, TARGETLESS, metric
from multitudes.metrics.streaming import counted
from multitudes.training.recorder import Recorder, checked_state, flat_state

__all__ = ["cosine_similarity"]

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
    """`d / (1 - a)`: the disagreement d relative to the members' mean error, for mean accuracy a; NaN at a = 1.

    Less accurate members can differ more by chance (Fort et al., section 4.2). At a = 1, d is 0 too.

    >>> from multitudes import Predictive
    >>> votes = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]])
    >>> p = Predictive(nn.functional.one_hot(votes).float())
    >>> float(normalised_disagreement(p, torch.tensor([0, 0, 1, 1])))  # 0.25 / (1 - 0.875)
    2.0
    """
    wrong = rows.members("normalised_disagreement").predictions.argmax(2) != rows.target
    differing = over_pairs(_differing(rows, "normalised_disagreement"))
    return torch.stack([differing, wrong.mean(0, dtype=torch.float64).sum()])


def _together(rows: Rows, name: str) -> Tensor:
    """Rows -> how often both members of a pair are right or wrong, `[4, S, S]`.

    The tables are `N11` (both right), `N10` (only the first right), `N01` (only the second) and `N00` (both wrong).
    """
    right = (rows.members(name).predictions.argmax(2) == rows.target).double()
    wrong = 1 - right
    return torch.stack([one @ other.T for one in (right, wrong) for other in (right, wrong)])


def _q(tables: Tensor) -> Tensor:
    """Tables `[4, S, S]` -> Q, mean over pairs, a float64 scalar; NaN if undefined for a pair."""
    n11, n10, n01, n00 = tables
    return _off_diagonal((n11 * n00 - n01 * n10) / (n11 * n00 + n01 * n10)).mean()


def _correlation(tables: Tensor) -> Tensor:
    """Tables `[4, S, S]` -> correlation, mean over pairs, a float64 scalar; NaN if undefined for a pair."""
    n11, n10, n01, n00 = tables
    spread = (n11 + n10) * (n01 + n00) * (n11 + n01) * (n10 + n00)
    return _off_diagonal((n11 * n00 - n01 * n10) / spread.sqrt()).mean()


@metric("QStatistic", _q, better=NEITHER, shape=(4, "members", "members"))
def q_statistic(rows: Rows) -> Tensor:
    """Yule's Q of two members' errors, `(N11 N00 - N01 N10) / (N11 N00 + N01 N10)`, mean over pairs; from -1 to 1.

    It is 0 if members err independently, and positive if they err on the same rows. It is NaN if the denominator is 0,
    as for a member that is always right.

    >>> from multitudes import Predictive
    >>> votes = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 0]])
    >>> p, y = Predictive(nn.functional.one_hot(votes).float()), torch.tensor([0, 0, 1, 0, 0])
    >>> round(float(q_statistic(p, y)), 4), round(float(error_correlation(p, y)), 4)  # N11, N10, N01, N00 = 2, 1, 1, 1
    (0.3333, 0.1667)
    """
    return _together(rows, "q_statistic")


@metric("ErrorCorrelation", _correlation, better=NEITHER, shape=(4, "members", "members"))
def error_correlation(rows: Rows) -> Tensor:
    """Pearson correlation of two members' errors, mean over pairs; NaN if a member is always right or always wrong."""
    return _together(rows, "error_correlation")


# Weights ------------------------------------------------------------------------------------------------


def cosine_similarity(
    networks: Multitude | Recorder | Iterable[nn.Module | Mapping[str, Tensor]], model: nn.Module | None = None
) -> Tensor:
    """`theta_i . theta_j / (|theta_i| |theta_j|)` of the weights of any two networks, `[M, M]` on the CPU.

    The networks are the members of a multitude, networks of one architecture, a recorder's checkpoints, or state dicts;
    the latter need `model` to distinguish weights from buffers. NaN if all weights of a network are 0.

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
            raise ValueError("model must be given with state dicts, to tell weights from buffers, got None")
        vectors.append(
            flat_state(checked_state(network, model, f"networks[{index}]", "a network or a state dict"), model)
        )
    if not vectors:
        raise ValueError("networks must hold at least one network, got none")
    return torch.stack(vectors)
