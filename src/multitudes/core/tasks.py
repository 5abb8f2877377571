"""Tasks: what predictions are of, which decides how they are read and averaged, and what they are trained by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.core.calling import InputError
from multitudes.core.gaussian import at_least_float32, beta_nll, gaussian_nll, join_gaussian, split_gaussian
from multitudes.core.quantiles import pinball
from multitudes.core.weighting import setting_of, spread, target_losses, unwrapped, weighted_by_row, weighted_mean

__all__ = [
    *("CLASSES", "TASKS", "VALUES", "Criterion", "averaged", "averages_rows", "by_class", "check_task"),
    *("criterion_for", "fitted_loss", "loss_of", "losses_of", "one_of", "shifted_targets", "tasks_of"),
    "without_channel",
]

Criterion = Callable[[Tensor, Tensor], Tensor]
"""`(prediction [B, ...], target [B, ...]) -> mean over the batch`."""

TASKS: dict[str, Criterion] = {
    "classification": F.cross_entropy,
    "tokens": F.cross_entropy,
    "binary": F.binary_cross_entropy_with_logits,
    "multilabel": F.binary_cross_entropy_with_logits,
    "regression": F.mse_loss,
    "gaussian": gaussian_nll,
    "quantiles": pinball,
}
"""Every task, with its default criterion."""

CLASSES = ("classification", "tokens", "binary", "multilabel")
"""The tasks whose predictions are logits of classes."""

VALUES = ("regression", "gaussian", "quantiles")
"""The tasks whose predictions are of numbers."""

_OF_TASKS: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("classification", "tokens"): (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss),
    ("classification",): (F.multi_margin_loss, nn.MultiMarginLoss),
    ("binary", "multilabel"): (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
    ("multilabel",): (F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss),
    ("regression",): (
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
        *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    ),
    ("gaussian",): (gaussian_nll, beta_nll),
    ("quantiles",): (pinball,),
}
"""Criteria that are known, and the tasks that they are for."""

_OF_PROBABILITIES = (F.binary_cross_entropy, nn.BCELoss)


def one_of(tasks: Sequence[str], sign: str = "") -> str:
    """Tasks as an error names them: `'binary' or 'multilabel'`."""
    return " or ".join(f"{sign}{task!r}" for task in tasks)


def check_task(task: str) -> str:
    """A task's name, which it returns."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    return task


# -- criteria ----------------------------------------------------------------------------------------------


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
    known = tasks_of(criterion)
    if known and chosen not in known:
        raise InputError(
            f"criterion {_name(criterion)} is for task {one_of(known)}, and the task is {chosen!r}: "
            f"pass {one_of(known, 'task=')}"
        )
    if _is_any(criterion, _OF_PROBABILITIES):
        raise InputError(
            f"criterion {_name(criterion)} takes probabilities, and a network must give logits: "
            "leave the sigmoid out, and pass nn.BCEWithLogitsLoss()"
        )
    if not known and task is None and averages:
        raise InputError(
            "task must be given beside a criterion of your own where draws are averaged, since probabilities and "
            f"values are averaged differently: pass task=, one of {', '.join(TASKS)}"
        )
    return criterion


def tasks_of(criterion: Criterion) -> tuple[str, ...]:
    """The tasks that a criterion is for; none where it is not known."""
    return next((tasks for tasks, known in _OF_TASKS.items() if _is_any(criterion, known)), ())


def averages_rows(criterion: Criterion) -> bool:
    """Whether a criterion is known to be the mean over the rows of a batch, so that batches can be put together.

    >>> averages_rows(F.mse_loss), averages_rows(nn.MSELoss(reduction="sum")), averages_rows(lambda p, y: p.max())
    (True, False, False)
    """
    own = unwrapped(criterion)
    known = [each for criteria in _OF_TASKS.values() for each in criteria]
    whole = type(own) in known if isinstance(own, nn.Module) else own in known  # a subclass may compute anything
    of_classes = "tokens" in tasks_of(criterion)  # its own weights are of classes, others' may be of rows
    weighs_rows = not of_classes and setting_of(criterion, "weight", None) is not None
    return whole and not weighs_rows and setting_of(criterion, "reduction", "mean") == "mean"


def _is_any(criterion: Criterion, known: tuple[Any, ...]) -> bool:
    own = unwrapped(criterion)
    return any(own is one or (isinstance(one, type) and isinstance(own, one)) for one in known)


def _name(criterion: Criterion) -> str:
    return getattr(unwrapped(criterion), "__name__", type(criterion).__name__)


def loss_of(
    criterion: Criterion,
    prediction: Tensor,
    y: Tensor,
    task: str,
    quantiles: Sequence[float] | None = None,
    next_tokens: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """A known criterion of a prediction `[B, ...]` of a task and its targets, whole numbers of any type among them.

    Where they do not fit it is a sentence. `quantiles` are the levels of `task="quantiles"`; `next_tokens` says whether
    labels of tokens are those of the next position. With a `weight` of each row, `[B]`, or of each target, in the shape
    of y, it is the mean of the targets' losses times their weights.
    """
    with _fitting(prediction, y):
        return fitted_loss(criterion, prediction, y, task, quantiles, next_tokens, weight)


@contextmanager
def _fitting(prediction: Tensor, y: Tensor) -> Iterator[None]:
    """Torch's errors about targets that do not fit predictions, as a sentence."""
    try:
        yield
    except (torch.OutOfMemoryError, InputError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if "CUDA error" in str(error):
            raise
        what = f"y of shape {list(y.shape)} ({y.dtype})"
        raise InputError(f"{what} does not fit predictions of shape {list(prediction.shape)}: {error}") from error


def fitted_loss(
    criterion: Criterion,
    prediction: Tensor,
    y: Tensor,
    task: str,
    quantiles: Sequence[float] | None = None,
    next_tokens: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """`loss_of`, with torch's own errors: predictions and targets in the shapes and dtypes that its criteria take."""
    criterion, prediction, fitted = _fitted(criterion, prediction, y, task, quantiles, next_tokens)
    if weight is None:
        return criterion(prediction, fitted)
    weight = _fitted_weight(weight, y, fitted, task, next_tokens)
    own = unwrapped(criterion)
    if isinstance(own, nn.Module) and type(own) not in tuple(known for each in _OF_TASKS.values() for known in each):
        return weighted_by_row(criterion, prediction, fitted, weight)  # a subclass may compute anything
    return weighted_mean(criterion, prediction, fitted, weight)


def losses_of(
    task: str, prediction: Tensor, y: Tensor, quantiles: Sequence[float] | None, next_tokens: bool, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Each target's loss by the task's own criterion, and its weight, which is 0 where it is ignored; shaped alike."""
    with _fitting(prediction, y):
        criterion, prediction, fitted = _fitted(TASKS[task], prediction, y, task, quantiles, next_tokens)
        losses, counts = target_losses(criterion, prediction, fitted)
        return losses, counts * spread(_fitted_weight(weight, y, fitted, task, next_tokens), losses)


def _fitted(
    criterion: Criterion, prediction: Tensor, y: Tensor, task: str, quantiles: Sequence[float] | None, next_tokens: bool
) -> tuple[Criterion, Tensor, Tensor]:
    """A criterion, a prediction and targets as torch's criteria take them."""
    if unwrapped(criterion) is pinball and quantiles is not None:
        criterion = partial(pinball, levels=quantiles)
    prediction, criterion = _in_one_dtype(prediction, criterion)
    y = shifted_targets(y) if next_tokens else y
    if task == "tokens":
        y = y.movedim(-1, 1) if y.dim() == prediction.dim() else y
        prediction = prediction.movedim(-1, 1)
    if task == "binary" and y.numel() == prediction.numel():
        y = y.reshape(prediction.shape)
    if not y.is_floating_point():
        y = y.to(torch.int64 if task in ("classification", "tokens") else prediction.dtype)
    elif task in CLASSES:
        y = y.to(prediction.dtype)
    return criterion, prediction, y


def _fitted_weight(weight: Tensor, y: Tensor, fitted: Tensor, task: str, next_tokens: bool) -> Tensor:
    """Weights of single targets, moved as the targets were."""
    if weight.dim() == 1 or weight.shape != y.shape:
        return weight
    weight = shifted_targets(weight, last=0) if next_tokens else weight
    return weight.reshape(fitted.shape) if task == "binary" else weight


def _in_one_dtype(prediction: Tensor, criterion: Any) -> tuple[Tensor, Any]:
    """A prediction and a criterion whose weights have its dtype: in the one that holds both."""
    own = dict(criterion.named_buffers()) if isinstance(criterion, nn.Module) else {}
    own |= criterion.keywords if isinstance(criterion, partial) else {}
    weights = {name: t for name, t in own.items() if isinstance(t, Tensor) and t.is_floating_point()}
    if all(tensor.dtype == prediction.dtype for tensor in weights.values()):
        return prediction, criterion
    dtype = prediction.dtype
    for tensor in weights.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    if isinstance(criterion, nn.Module):
        return prediction.to(dtype), copy.deepcopy(criterion).to(dtype)
    converted = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return prediction.to(dtype), partial(criterion.func, *criterion.args, **(criterion.keywords | converted))


def shifted_targets(y: Tensor, last: int = -100) -> Tensor:
    """Labels `[B, T]` of a causal language model by the position that predicts each: the next one, and `last` at last.

    >>> shifted_targets(torch.tensor([[3, 1, 4]]))
    tensor([[   1,    4, -100]])
    """
    if not isinstance(y, Tensor) or y.dim() < 2:
        return y  # what is wrong with it is said where it is checked
    return torch.cat([y[:, 1:], torch.full_like(y[:, :1], last)], 1)


# -- predictions -------------------------------------------------------------------------------------------


def without_channel(values: Tensor, batch_dims: int = 1) -> Tensor:
    """Predictions or targets of one logit, `[B]` or `[B, 1, ...]`, without the axis that holds it alone."""
    single = values.dim() > batch_dims and values.shape[batch_dims] == 1
    return values.squeeze(batch_dims) if single else values


def by_class(predictions: Tensor, task: str) -> Tensor:
    """Logits of any task of classes as those of classification, classes in dim 2: `[S, B, C, ...]`.

    One logit z of yes or no is the logits (0, z) of no and yes. `[S, B]` and `[S, B, 1, ...]` become `[S, B, 2, ...]`
    for "binary", `[S, B, L, ...]` becomes `[S, B, 2, L, ...]` for "multilabel", and `[S, B, T, C]` `[S, B, C, T]` for
    "tokens".
    """
    if task == "tokens":
        return predictions.movedim(-1, 2)
    if task == "classification":
        return predictions
    logit = without_channel(predictions, 2) if task == "binary" else predictions
    return torch.stack([torch.zeros_like(logit), logit], 2)


def averaged(predictions: Tensor, task: str, weights: Tensor | None = None) -> Tensor:
    """The prediction that several predictions `[D, B, ...]` make together, in the form of one of them `[B, ...]`.

    Of classes: logits whose probabilities are the mean of theirs. Regression, quantiles: their mean. Gaussian: the
    mean and variance of their mixture. `weights [D]` add up to 1; without them all count the same.

    >>> averaged(torch.tensor([[[2.0, 2.0]], [[1.0, 1.0]]]), "classification").exp()
    tensor([[0.5000, 0.5000]])
    >>> averaged(torch.tensor([[3.0], [-3.0]]), "binary").sigmoid()
    tensor([0.5000])
    """
    if len(predictions) == 1:
        return predictions[0]
    values = at_least_float32(predictions)
    if weights is None:
        weights = torch.full((len(values),), 1 / len(values))
    weights = weights.to(values).view(-1, *[1] * (values.dim() - 1))
    if task in ("classification", "tokens"):
        return (F.log_softmax(values, 2 if task == "classification" else -1) + weights.log()).logsumexp(0)
    if task in ("binary", "multilabel"):
        yes, no = ((F.logsigmoid(sign * values) + weights.log()).logsumexp(0) for sign in (1, -1))
        return yes - no
    if task in ("regression", "quantiles"):
        return (weights * values).sum(0)
    means, variances = split_gaussian(values, dim=2)
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean).square())).sum(0)
    return join_gaussian(mean, variance)
