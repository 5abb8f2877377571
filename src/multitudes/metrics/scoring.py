"""Scores of predictions: accuracy, AUROC, NLL, Brier score, errors of the members and of the ensemble.

All are means over rows (inputs or pixels), computed from float64 sums. NLL and Brier score: Gneiting & Raftery,
*Strictly Proper Scoring Rules, Prediction, and Estimation* (2007).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multitudes.metrics.class_inputs import Rows, read_rows
from multitudes.metrics.declare import (
    BY_CLASS,
    HIGHER,
    LOWER,
    TOKENS,
    YES_OR_NO,
    Count,
    mean_of,
    metric,
    ranked,
    total_of,
)
from multitudes.metrics.ood import auroc

__all__ = ["macro_auroc"]

# Accuracy -----------------------------------------------------------------------------------------------


@metric("Accuracy", better=HIGHER, group="scores", shifted=True)
def accuracy(rows: Rows) -> Tensor:
    """Share of rows whose most probable class is the true one; the first class wins a tie.

    >>> float(accuracy(torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1, 0, 1])))
    0.75
    """
    return total_of(rows.correct)


@metric("TopKAccuracy", better=HIGHER)
def topk_accuracy(rows: Rows, k: Count = 5) -> Tensor:
    """Share of rows whose true class is among the `k` most probable ones; `k=1` is `accuracy`.

    Args:
        k: Number of classes.

    >>> p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    >>> float(topk_accuracy(p, torch.tensor([1, 2]), k=2))
    0.5
    """
    if k > rows.classes:
        raise ValueError(f"k must be at most the number of classes, {rows.classes}, got {k}")
    own = rows.probs.gather(1, rows.target[:, None])
    # `topk` does not define the order of ties; here the first comes first, as in `argmax`.
    earlier = torch.arange(rows.classes, device=own.device) < rows.target[:, None]
    ahead = (rows.probs > own) | ((rows.probs == own) & earlier)
    return total_of(ahead.sum(1) < k)


def _mean_recall(sums: Tensor) -> Tensor:
    """Map the numbers of correct rows and of all rows per class, `[2, C]`, to the mean over the classes that occur."""
    return mean_of(sums).nanmean()


@metric("BalancedAccuracy", _mean_recall, better=HIGHER, kind=BY_CLASS, shape=(2, "classes"), group="scores")
def balanced_accuracy(rows: Rows) -> Tensor:
    """Mean over classes of the accuracy on the class's own rows: rare classes count like frequent ones.

    Classes without rows are left out. Brodersen et al., *The Balanced Accuracy and Its Posterior Distribution* (2010).

    >>> p = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.5, 0.5], [0.8, 0.2]])
    >>> float(balanced_accuracy(p, torch.tensor([0, 0, 0, 1])))  # all of the first, none of the second
    0.5
    """
    right = rows.target[rows.correct].bincount(minlength=rows.classes)
    return torch.stack([right, rows.target.bincount(minlength=rows.classes)]).double()


@ranked(HIGHER)
def macro_auroc(prediction: Any, target: Tensor) -> Tensor:
    """Return the area under the ROC curve of each class against all others, mean over classes.

    Classes of no row or of all rows are left out; NaN if none is left. Hand & Till, *A Simple Generalisation of the
    Area Under the ROC Curve* (2001), section 2.

    Args:
        prediction: `Predictive` of classes or probabilities `[B, C, ...]`, for all inputs at once.
        target: True classes `[B, ...]`.

    Example:
        >>> p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
        >>> float(macro_auroc(p, torch.tensor([0, 0, 1, 1])))
        0.75
    """
    rows = read_rows(prediction, target)
    each = [auroc(rows.probs[:, label], rows.target == label) for label in range(rows.classes)]
    return torch.stack(each).nanmean()


# Proper scores ------------------------------------------------------------------------------------------


@metric("NLL", better=LOWER, group="scores", shifted=True)
def nll(rows: Rows) -> Tensor:
    """Mean over rows of `-log p(y)` in nats, where `p` is the mean of the members' probabilities.

    For a `Predictive` it is exact despite underflow. For plain probabilities, a 0 for the true class makes it infinite.

    >>> round(float(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))), 4)  # (log 2 + log 4) / 2
    1.0397
    """
    return total_of(-rows.target_log_prob)


@metric("Brier", better=LOWER, group="scores", shifted=True)
def brier(rows: Rows) -> Tensor:
    """Mean over rows of `sum_c (p_c - 1[y = c])^2`: a sum, not a mean, over classes; from 0 to 2.

    For two classes it is twice the score of the second class's probability.

    >>> round(float(brier(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))), 4)  # (0.02 + 0.72) / 2
    0.37
    """
    # Subtract before squaring: keeps precision for nearly perfect predictions.
    distance = rows.probs.scatter_add(1, rows.target[:, None], rows.probs.new_full((len(rows), 1), -1.0))
    return total_of(distance.square().sum(1, dtype=torch.float64))


@metric("Perplexity", lambda sums: mean_of(sums).exp(), better=LOWER, kind=TOKENS, group="scores", shifted=True)
def perplexity(rows: Rows) -> Tensor:
    """Exponential of `nll` over tokens: the number of equally probable tokens with the same NLL.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.zeros(1, 1, 3, 8), task="tokens")
    >>> round(float(perplexity(p, torch.tensor([[1, 5, -100]]))), 4)
    8.0
    """
    return total_of(-rows.target_log_prob)


def _mean_auroc(rows: Tensor) -> Tensor:
    """Map scores, targets and labels `[N, 3]` to the mean AUROC over labels."""
    scores, positive, column = rows[:, 0], rows[:, 1] == 1, rows[:, 2]
    each = [auroc(scores[column == label], positive[column == label]) for label in column.unique()]
    return torch.stack(each).nanmean() if each else torch.tensor(torch.nan, dtype=torch.float64)


@metric("LabelAUROC", _mean_auroc, better=HIGHER, kind=YES_OR_NO, kept=3, group="scores", score="auroc")
def label_auroc(rows: Rows) -> Tensor:
    """Probability that a positive input has a higher predicted probability than a negative one; mean over labels.

    Labels that are always positive or always negative are left out; NaN if none is left.

    >>> from multitudes import Predictive
    >>> p = Predictive(torch.tensor([[-2.0, -1.0, 1.0, 2.0]]), task="binary")
    >>> float(label_auroc(p, torch.tensor([0, 1, 0, 1])))
    0.75
    """
    column = torch.zeros_like(rows.target) if rows.column is None else rows.column
    # Log-odds, since probabilities near 1 are equal in float32.
    odds = rows.log_probs[:, 1] - rows.log_probs[:, 0]
    return torch.stack([odds, rows.target.to(odds), column.to(odds)], 1)


# Errors of the ensemble and of its members --------------------------------------------------------------


@metric("EnsembleError", better=LOWER)
def ensemble_error(rows: Rows) -> Tensor:
    """Share of wrong labels of the members' mean prediction: `1 - accuracy`."""
    return total_of(~rows.correct)


@metric("MemberError", better=LOWER, group="diversity")
def member_error(rows: Rows) -> Tensor:
    """Share of wrong labels of a single member, mean over the members of a `Predictive`.

    >>> from multitudes import Predictive  # three members, each wrong on another input
    >>> p = Predictive(5 * (1 - torch.eye(3))[:, :, None] * torch.tensor([0.0, 1.0]) + torch.tensor([1.0, 0.0]))
    >>> y = torch.ones(3, dtype=torch.long)
    >>> round(float(member_error(p, y)), 4), float(ensemble_error(p, y))
    (0.3333, 0.0)
    """
    labels = rows.members("member_error").predictions.argmax(2)
    return total_of((labels != rows.target).mean(0, dtype=torch.float64))
