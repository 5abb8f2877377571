"""How good predictions are: accuracy, top-k accuracy, NLL, Brier score, error of the members and of the ensemble.

All are means over rows (inputs, or pixels), computed from float64 sums. Gneiting & Raftery, *Strictly Proper Scoring
Rules, Prediction, and Estimation* (2007), on NLL and the Brier score.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multitudes.core.checks import check_count
from multitudes.metrics.inputs import Prediction, Rows, read_rows
from multitudes.metrics.streaming import RowsMetric, mean_of, total_of

__all__ = [
    "NLL",
    "Accuracy",
    "Brier",
    "EnsembleError",
    "MemberError",
    "TopKAccuracy",
    "accuracy",
    "brier",
    "ensemble_error",
    "member_error",
    "nll",
    "topk_accuracy",
]


# Accuracy -----------------------------------------------------------------------------------------------


def accuracy_update(rows: Rows) -> Tensor:
    """Rows -> how many were right, and of how many, `[2]`."""
    return total_of(rows.correct)


accuracy_compute = mean_of


def accuracy(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """The share of `[B, C, ...]` whose most probable class is the true one; of equally probable ones the first counts.

    >>> float(accuracy(torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1, 0, 1])))
    0.75
    """
    return accuracy_compute(accuracy_update(read_rows(prediction, target, ignore)))


class Accuracy(RowsMetric):
    """`accuracy`, streaming."""

    higher_is_better = True

    def _sums(self, rows: Rows) -> Tensor:
        return accuracy_update(rows)


def topk_accuracy_update(rows: Rows, k: int) -> Tensor:
    """Rows -> how many had the true class among the first `k`, and of how many, `[2]`."""
    if check_count("k", k) > rows.classes:
        raise ValueError(f"k must be at most the number of classes, {rows.classes}, got {k}")
    own = rows.probs.gather(1, rows.target[:, None])
    # The order of `topk` among equals is left open; here the first of them comes first, as in `argmax`.
    earlier = torch.arange(rows.classes, device=own.device) < rows.target[:, None]
    ahead = (rows.probs > own) | ((rows.probs == own) & earlier)
    return total_of(ahead.sum(1) < k)


topk_accuracy_compute = mean_of


def topk_accuracy(
    prediction: Prediction, target: Tensor | None = None, k: int = 5, ignore: int | None = None
) -> Tensor:
    """The share of `[B, C, ...]` whose true class is among the `k` most probable ones; `k=1` is `accuracy`.

    >>> p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    >>> float(topk_accuracy(p, torch.tensor([1, 2]), k=2))
    0.5
    """
    return topk_accuracy_compute(topk_accuracy_update(read_rows(prediction, target, ignore), k))


class TopKAccuracy(RowsMetric):
    """`topk_accuracy`, streaming."""

    higher_is_better = True

    def __init__(self, k: int = 5, ignore: int | None = None, **kwargs: Any) -> None:
        super().__init__(ignore, settings=(check_count("k", k),), **kwargs)
        self.k = k

    def _sums(self, rows: Rows) -> Tensor:
        return topk_accuracy_update(rows, self.k)


# Proper scores ------------------------------------------------------------------------------------------


def nll_update(rows: Rows) -> Tensor:
    """Rows -> the sum of `-log p(y)`, and the number of rows, `[2]`."""
    return total_of(-rows.target_log_prob)


nll_compute = mean_of


def nll(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """The mean of `-log p(y)` in nats over `[B, C, ...]`, where `p` is the mean of the members' probabilities.

    From a `Predictive` it is exact also where probabilities underflow. In a tensor of probabilities a true class of
    probability 0 makes it infinite.

    >>> round(float(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))), 4)  # (log 2 + log 4) / 2
    1.0397
    """
    return nll_compute(nll_update(read_rows(prediction, target, ignore)))


class NLL(RowsMetric):
    """`nll`, streaming."""

    higher_is_better = False

    def _sums(self, rows: Rows) -> Tensor:
        return nll_update(rows)


def brier_update(rows: Rows) -> Tensor:
    """Rows -> the sum of squared distances to the true class's corner, and the number of rows, `[2]`."""
    # Subtracting before squaring keeps what is left when a prediction is nearly perfect.
    distance = rows.probs.scatter_add(1, rows.target[:, None], rows.probs.new_full((len(rows), 1), -1.0))
    return total_of(distance.square().sum(1, dtype=torch.float64))


brier_compute = mean_of


def brier(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """The mean over `[B, C, ...]` of `sum_c (p_c - 1[y = c])^2`: summed, not averaged, over classes; from 0 to 2.

    For two classes it is twice the score of the second class's probability alone.

    >>> round(float(brier(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))), 4)  # (0.02 + 0.72) / 2
    0.37
    """
    return brier_compute(brier_update(read_rows(prediction, target, ignore)))


class Brier(RowsMetric):
    """`brier`, streaming."""

    higher_is_better = False

    def _sums(self, rows: Rows) -> Tensor:
        return brier_update(rows)


# Errors of the ensemble and of its members --------------------------------------------------------------


def ensemble_error_update(rows: Rows) -> Tensor:
    """Rows -> how many were wrong, and of how many, `[2]`."""
    return total_of(~rows.correct)


ensemble_error_compute = mean_of


def ensemble_error(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """The share of wrong labels of the members' mean prediction: `1 - accuracy`."""
    return ensemble_error_compute(ensemble_error_update(read_rows(prediction, target, ignore)))


class EnsembleError(RowsMetric):
    """`ensemble_error`, streaming."""

    higher_is_better = False

    def _sums(self, rows: Rows) -> Tensor:
        return ensemble_error_update(rows)


def member_error_update(rows: Rows) -> Tensor:
    """Rows -> the sum over rows of the share of members that were wrong, and the number of rows, `[2]`."""
    labels = rows.members("member_error").predictions.argmax(2)
    return total_of((labels != rows.target).mean(0, dtype=torch.float64))


member_error_compute = mean_of


def member_error(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """The share of wrong labels of a member alone, mean over the members of a `Predictive` `[S, B, C, ...]`.

    Three members of which each errs once, but never two together:

    >>> from multitudes import Predictive
    >>> p = Predictive(5 * (1 - torch.eye(3))[:, :, None] * torch.tensor([0.0, 1.0]) + torch.tensor([1.0, 0.0]))
    >>> y = torch.ones(3, dtype=torch.long)
    >>> round(float(member_error(p, y)), 4), float(ensemble_error(p, y))
    (0.3333, 0.0)
    """
    return member_error_compute(member_error_update(read_rows(prediction, target, ignore)))


class MemberError(RowsMetric):
    """`member_error`, streaming."""

    higher_is_better = False

    def _sums(self, rows: Rows) -> Tensor:
        return member_error_update(rows)
