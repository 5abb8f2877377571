"""Criteria: recognize those of torch, and compute the loss and the weight of each target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.networks.calls import InputError

Criterion = Callable[[Tensor, Tensor], Tensor]
"""`(prediction [B, ...], target [B, ...]) -> mean over the batch`."""

CROSS_ENTROPIES = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)


# -- recognition -------------------------------------------------------------------------------------------


def unwrap(criterion: Any) -> Any:
    """Return the criterion inside partial applications."""
    while isinstance(criterion, partial):
        criterion = criterion.func
    return criterion


def is_any(criterion: Criterion, known: tuple[Any, ...]) -> bool:
    """Return whether a criterion is one of these functions, or an instance of one of these classes."""
    own = unwrap(criterion)
    return any(own is one or (isinstance(one, type) and isinstance(own, one)) for one in known)


def setting_of(criterion: Any, name: str, default: Any) -> Any:
    """Return a setting of a criterion that is a module or a `functools.partial`."""
    if isinstance(criterion, partial):
        return criterion.keywords.get(name, setting_of(criterion.func, name, default))
    return getattr(criterion, name, default) if isinstance(criterion, nn.Module) else default


# -- reduction ---------------------------------------------------------------------------------------------


def at_least_float32(x: Tensor) -> Tensor:
    """Convert values of lower precision to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Reduce losses by `"mean"`, `"sum"` or `"none"`, as torch's criteria do."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


# -- targets with weights ----------------------------------------------------------------------------------


def target_losses(criterion: Criterion, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the count of each target, `[B, ...]` both, for a criterion with torch's `reduction`.

    The criterion's mean is `losses.sum() / counts.sum()`: ignored targets count 0, and counts include class weights.

    >>> target_losses(nn.L1Loss(), torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [5.0]]))
    (tensor([[1.],
            [3.]]), tensor([[1.],
            [1.]]))
    """
    losses = _unreduced(criterion)(prediction, y)
    counts = torch.ones_like(losses)
    if is_any(criterion, CROSS_ENTROPIES) and not y.is_floating_point():
        counted = y != setting_of(criterion, "ignore_index", -100)
        counts = counted.to(losses.dtype)
        own = setting_of(criterion, "weight", None)
        if own is not None:
            counts = counts * own.to(losses)[torch.where(counted, y, 0)]
    return losses, counts


def weighted_mean(criterion: Criterion, prediction: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of a criterion's losses times weights, per row `[B]` or per target.

    >>> two = torch.tensor([[1.0], [2.0]])
    >>> weighted_mean(F.l1_loss, two, torch.zeros(2, 1), torch.tensor([1.0, 0.5]))  # (1 * 1 + 0.5 * 2) / 2
    tensor(1.)
    """
    losses, counts = target_losses(criterion, prediction, y)
    total = (losses * expand_weight(weight, losses)).sum()
    return total if setting_of(criterion, "reduction", "mean") == "sum" else total / counts.sum()


def weighted_by_row(criterion: Criterion, prediction: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of the losses of single rows times weights `[B]`, for any criterion that is a mean over rows."""
    if weight.dim() != 1:
        raise InputError(
            "weights of single targets need a known criterion, such as nn.CrossEntropyLoss(); with a criterion of your "
            f"own, pass one weight per row, got weights of shape {list(weight.shape)}"
        )
    losses = torch.stack([criterion(prediction[i : i + 1], y[i : i + 1]) for i in range(len(prediction))])
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            whole = criterion(prediction, y)
        near = {"rtol": max(1e-3, torch.finfo(whole.dtype).eps ** 0.5), "atol": 1e-5, "equal_nan": True}
        if losses.dim() != 1 or not torch.allclose(losses.detach().mean(), whole, **near):
            raise InputError(
                "criterion must be a mean over the rows of a batch if these have weights, got "
                f"{whole.detach().mean().item():g} where the mean over rows is {losses.detach().mean().item():g}"
            )
    return (losses * weight.to(losses)).mean()


def expand_weight(weight: Tensor, losses: Tensor) -> Tensor:
    """Expand weights `[B]` or `[B, ...]` to the shape of losses."""
    if weight.shape != losses.shape[: weight.dim()]:
        raise InputError(
            f"weight must hold one number for each of {losses.shape[0]} rows, got shape {list(weight.shape)}"
        )
    return weight.to(losses).view(*weight.shape, *[1] * (losses.dim() - weight.dim())).expand_as(losses)


def _unreduced(criterion: Any) -> Criterion:
    if not isinstance(criterion, nn.Module):
        return partial(criterion, reduction="none")
    criterion = copy.copy(criterion)
    criterion.reduction = "none"
    return criterion
