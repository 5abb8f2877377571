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

__all__ = ["TASKS", "Criterion", "averaged", "check_targets", "check_task", "criterion_for", "loss_of", "task_of"]

Criterion = Callable[[Tensor, Tensor], Tensor]
"""`(prediction [B, ...], target [B, ...]) -> mean over the batch`."""

TASKS: dict[str, Criterion] = {"classification": F.cross_entropy, "regression": F.mse_loss, "gaussian": gaussian_nll}
"""Every task, with its default criterion."""

_OF_TASK: dict[str, tuple[Any, ...]] = {
    "classification": (
        *(F.cross_entropy, F.nll_loss, F.multi_margin_loss),
        *(nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss),
    ),
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
    """The one task that a criterion is for; None where it is not known."""
    own = _unwrapped(criterion)
    for task, known in _OF_TASK.items():
        if any(own is one or (isinstance(one, type) and isinstance(own, one)) for one in known):
            return task
    return None


def _unwrapped(criterion: Any) -> Any:
    while isinstance(criterion, partial):
        criterion = criterion.func
    return criterion


def check_targets(task: str, predictions: Tensor, y: Tensor, values: bool = True) -> None:
    """An error where targets `[B, ...]` cannot be what predictions `[S, B, ...]` are trained on.

    Where `values` says so, classes must be classes as well, or probabilities of them.
    """
    if not isinstance(y, Tensor) or not y.numel():
        got = f"shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise InputError(f"y must be a tensor with at least one target, got {got}")
    if task == "regression" and y.shape != predictions.shape[1:]:  # `[B]` against `[B, 1]` would broadcast
        raise InputError(f"y must have the predictions' shape {list(predictions.shape[1:])}, got {list(y.shape)}")
    if task == "classification" and values:
        _check_classes(predictions, y)


def _check_classes(predictions: Tensor, y: Tensor) -> None:
    if predictions.dim() < 3 or predictions.shape[2] == 1:
        raise InputError(
            f"cross entropy needs predictions for two classes or more, got {list(predictions.shape)}; "
            "for values pass task='regression' or task='gaussian'"
        )
    if y.is_floating_point():
        if y.shape != predictions.shape[1:] or bool((y < 0).any()) or not _adds_up(y):
            raise InputError(
                f"y must hold classes, or their probabilities {list(predictions.shape[1:])}, got values of shape "
                f"{list(y.shape)}: for values pass task='regression' or task='gaussian'"
            )
        return
    classes = predictions.shape[2]
    wrong = y[(y != -100) & ((y < 0) | (y >= classes))]
    if wrong.numel():
        raise InputError(f"y must hold classes 0 to {classes - 1}, got {wrong[0].item()}")


def _adds_up(y: Tensor) -> bool:
    """Whether class probabilities `[B, C, ...]` add up to 1."""
    total = y.float().sum(1)
    return torch.allclose(total, torch.ones_like(total), atol=1e-2)


def loss_of(criterion: Criterion, prediction: Tensor, y: Tensor) -> Tensor:
    """A known criterion of a prediction and its targets, whole numbers of any type among them; or a sentence."""
    if not y.is_floating_point():
        y = y.to(prediction.dtype if task_of(criterion) != "classification" else torch.int64)
    try:
        return criterion(prediction, y)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if "CUDA error" in str(error):
            raise
        what = f"y of shape {list(y.shape)} ({y.dtype})"
        raise InputError(f"{what} does not fit predictions of shape {list(prediction.shape)}: {error}") from error


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
