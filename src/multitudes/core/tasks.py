"""Tasks: what predictions are of, which decides how they are read and averaged, and what they are trained by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.core.calling import InputError
from multitudes.core.gaussian import at_least_float32, gaussian_nll, join_gaussian, split_gaussian

__all__ = ["TASKS", "Criterion", "averaged", "check_task", "criterion_for", "task_of"]

Criterion = Callable[[Tensor, Tensor], Tensor]
"""`(prediction [B, ...], target [B, ...]) -> mean over the batch`."""

TASKS: dict[str, Criterion] = {"classification": F.cross_entropy, "regression": F.mse_loss, "gaussian": gaussian_nll}
"""Every task, with its default criterion."""

_OF_TASK: dict[str, tuple[Any, ...]] = {
    "classification": (F.cross_entropy, F.nll_loss, F.multi_margin_loss, nn.CrossEntropyLoss, nn.NLLLoss),
    "regression": (
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
        *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    ),
    "gaussian": (gaussian_nll,),
}
"""Criteria that are known to be for one task alone."""


def check_task(task: str) -> str:
    """A task's name, which it returns."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    return task


def criterion_for(task: str | None, criterion: Criterion | None, averages: bool = False) -> Criterion:
    """The criterion to train with: the task's own, or the given one, unless it is for another task.

    A task of None has not been chosen: it stands for classification. Where several draws are averaged (`averages`),
    which depends on the task, a criterion that is not known needs one that was chosen.

    >>> criterion_for("regression", None).__name__
    'mse_loss'
    >>> criterion_for(None, F.mse_loss)
    Traceback (most recent call last):
    multitudes.core.calling.InputError: criterion mse_loss is for task 'regression', and the task is 'classification'...
    """
    chosen = check_task(task or "classification")
    if criterion is None:
        return TASKS[chosen]
    if not callable(criterion):
        raise InputError(f"criterion must be a function of (prediction, target), got {criterion!r}")
    known = task_of(criterion)
    if known not in (None, chosen):
        name = getattr(_unwrapped(criterion), "__name__", type(criterion).__name__)
        raise InputError(f"criterion {name} is for task {known!r}, and the task is {chosen!r}: pass task={known!r}")
    if known is None and task is None and averages:
        raise InputError(
            "task must be given beside a criterion of your own where draws are averaged, since probabilities and "
            f"values are averaged differently: pass task=, one of {', '.join(TASKS)}"
        )
    return criterion


def task_of(criterion: Criterion) -> str | None:
    """The only task that a criterion is for; None where it is not known."""
    own = _unwrapped(criterion)
    return next((task for task, known in _OF_TASK.items() if own in known or type(own) in known), None)


def _unwrapped(criterion: Any) -> Any:
    while isinstance(criterion, partial):
        criterion = criterion.func
    return criterion


def averaged(predictions: Tensor, task: str, weights: Tensor | None = None) -> Tensor:
    """The prediction that several predictions `[D, B, ...]` make together, in the form of one of them `[B, ...]`.

    Classification: logits whose probabilities are the mean of theirs. Regression: their mean. Gaussian: the mean and
    variance of their mixture. `weights [D]` add up to 1; without them all count the same.

    >>> averaged(torch.tensor([[[2.0, 2.0]], [[1.0, 1.0]]]), "classification").exp()
    tensor([[0.5000, 0.5000]])
    """
    if len(predictions) == 1:
        return predictions[0]
    values = at_least_float32(predictions)
    if weights is None:
        weights = torch.full((len(values),), 1 / len(values))
    weights = weights.to(values).view(-1, *[1] * (values.dim() - 1))
    if task == "classification":
        return (F.log_softmax(values, 2) + weights.log()).logsumexp(0)
    if task == "regression":
        return (weights * values).sum(0)
    means, variances = split_gaussian(values, dim=2)
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean).square())).sum(0)
    return join_gaussian(mean, variance)
