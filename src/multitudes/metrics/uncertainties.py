"""Uncertainties: scores `[N]` of the inputs or pixels of `[B, C, ...]`.

The score is higher for predictions that look out-of-distribution or wrong:

| uncertainty | score | |
|---|---|---|
| `max_probability` | `-max_c p_c` of the mean prediction p | Hendrycks & Gimpel, 2017 |
| `entropy` | `H(p)`, the entropy of the mean prediction | |
| `expected_entropy` | `mean_s H(p_s)`, the mean entropy of the members | |
| `mutual_information` | `H(p) - mean_s H(p_s)`, the expected-entropy gap | Houlsby et al., 2011 |
| `variance` | the members' variance of a class's probability, mean over classes | |
| `disagreement` | the share of pairs of members whose labels differ | |
| `max_logit` | `-max_c mean_s z_sc` | Hendrycks et al., 2022 |
| `energy` | `-mean_s log sum_c exp z_sc` | Liu et al., 2020 |

The first two accept plain probabilities, and use calibrated probabilities for calibrated predictions. The others need
a `Predictive` and use its members. Binary predictions have no `max_logit`. For an input with several labels, take the
mean over its labels (for energies: Wang et al., *Can Multi-Label Classification Networks Know What They Don't Know?*,
2021).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from multitudes.metrics.class_inputs import Prediction, Rows, read_without_target
from multitudes.tasks import task_of

__all__ = ["UNCERTAINTIES"]


def max_probability(prediction: Prediction) -> Tensor:
    """Return minus the largest mean probability, `[N]`.

    >>> max_probability(torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    tensor([-0.7500, -0.5000])
    """
    return -read_without_target(prediction).confidence


def entropy(prediction: Prediction) -> Tensor:
    """Return the entropy of the mean prediction in nats, `[N]`.

    >>> entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    rows = read_without_target(prediction)
    return torch.special.entr(rows.probs).sum(1) if rows.predictive is None else rows.predictive.entropy


def _quantity(name: str, prediction: Prediction) -> Tensor:
    """Return a quantity of the members' `Predictive`, `[N]`."""
    quantity: Tensor = getattr(read_without_target(prediction).members(name), name)
    return quantity


def max_logit(prediction: Prediction) -> Tensor:
    """Return minus the largest of the members' mean logits, `[N]`.

    Raises:
        ValueError: For binary predictions, which have a single logit.
    """
    rows = read_without_target(prediction)
    if not has_logits(rows):
        raise ValueError(f"max_logit needs logits of several classes, got predictions of task {rows.task}")
    return -rows.members("max_logit").max_logit


def has_logits(rows: Rows) -> bool:
    """Return True if rows come from a task with one logit per class."""
    return "max_logit" in task_of(rows.task).quantities


def energy(prediction: Prediction) -> Tensor:
    """Return the members' mean energy, `[N]`: minus the log-sum-exp of a member's logits.

    >>> from multitudes import Predictive
    >>> energy(Predictive(torch.tensor([[[3.0, 3.0], [0.0, 0.0]]])))  # -3 - log 2, and -log 2
    tensor([-3.6931, -0.6931])
    """
    logits = read_without_target(prediction).members("energy").predictions
    return -logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(2).mean(0)


UNCERTAINTIES: dict[str, Callable[[Prediction], Tensor]] = {
    "max_probability": max_probability,
    "entropy": entropy,
    **{
        name: partial(_quantity, name)
        for name in ("expected_entropy", "mutual_information", "variance", "disagreement")
    },
    "max_logit": max_logit,
    "energy": energy,
}
OF_PROBABILITIES = ("max_probability", "entropy")
"""Uncertainties of plain probabilities."""
