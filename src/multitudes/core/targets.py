"""Whether predictions, targets and a task belong together, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multitudes.core.calling import Input, InputError, tensors_in

__all__ = ["check_class_axis", "check_clear", "check_shape", "check_targets"]


# -- predictions alone ---------------------------------------------------------------------------------------


def check_shape(shape: Sequence[int], task: str) -> None:
    """Raise ValueError unless predictions `[S, B, ...]` of this shape can be read as `task`."""
    channels = {"regression": 2, "binary": 2, "tokens": 4}.get(task, 3)
    form = {
        "regression": "[S, B] or [S, B, D, ...]",
        "binary": "[S, B] or [S, B, 1, ...]",
        "tokens": "[S, B, T, C], classes last",
        "multilabel": "[S, B, labels, ...]",
        "quantiles": "[S, B, quantiles, ...]",
    }.get(task, "[S, B, channels, ...]")
    if len(shape) < channels:
        need = f"be {form}"
    elif shape[0] == 0:
        need = "hold at least one member in dim 0"
    elif task == "gaussian" and shape[2] % 2:
        need = "hold as many raw variances as means in dim 2, an even number together"
    elif task == "binary" and len(shape) > 2 and shape[2] != 1:
        need = f"be {form}, one logit for each input or pixel (use task='multilabel' for several)"
    elif task == "tokens" and shape[-1] < 2:
        need = "hold 2 or more classes in the last dim"
    elif task == "classification" and shape[2] < 2:
        # The softmax of a single logit is 1, whatever the network says.
        need = "hold 2 or more classes in dim 2 (use task='binary' for one logit, task='regression' for one value)"
    else:
        return
    raise ValueError(f"predictions of task {task} must {need}, got shape {list(shape)}")


def check_class_axis(predictions: Tensor, x: Input) -> None:
    """An error where nobody has said what predictions `[S, B, ...]` of inputs are, and their shape leaves it open.

    Classes in dim 2, one axis, are classification. Of images, `[S, B, C, H, W]`, the last two axes must be the input's
    own, or in proportion to them, and the two before the last must not.
    """
    shape = predictions.shape
    _check_several(shape)
    if len(shape) < 4:
        return
    if len(shape) == 4:
        raise InputError(
            f"predictions of shape {list(shape)} may have their classes in dim 2 or last, and no task was chosen: "
            "pass task='classification' for classes in dim 2, or task='tokens' for classes last"
        )
    dims = len(shape) - 3
    sizes = [tensor.shape[-dims:] for tensor in tensors_in(x) if tensor.dim() >= dims + 1]
    first = any(_in_proportion(shape[3:], size) for size in sizes)
    last = any(_in_proportion(shape[2:-1], size) for size in sizes)
    if not first or last:
        raise InputError(
            f"predictions of shape {list(shape)} do not tell where their classes are, and no task was chosen: "
            "pass task='classification' for classes in dim 2, or task='tokens' for classes last"
        )


def _in_proportion(places: Sequence[int], size: Sequence[int]) -> bool:
    return all(one * size[0] == places[0] * other for one, other in zip(places, size, strict=True))


def _check_several(shape: Sequence[int]) -> None:
    if len(shape) < 3 or (shape[2] == 1 and len(shape) != 4):  # one token of several classes has four axes
        raise InputError(
            f"predictions of shape {list(shape)} are one number for each input, and no task was chosen: pass "
            "task='binary' for the logit of yes or no; for values pass task='regression'"
        )


# -- predictions and targets ---------------------------------------------------------------------------------


def check_clear(predictions: Tensor, y: Tensor) -> None:
    """An error where no task was chosen, and targets do not tell that predictions `[S, B, C, ...]` classify."""
    shape = predictions.shape[1:]
    _check_several(predictions.shape)
    if not isinstance(y, Tensor) or len(shape) < 3:
        return
    in_dim_1, last = y.shape == shape[:1] + shape[2:], y.shape == shape[:-1]
    if y.shape == shape and y.is_floating_point():
        in_dim_1, last = _adds_up(y, 1), _adds_up(y, -1)
    if last and in_dim_1:
        raise InputError(
            f"predictions of shape {list(shape)} for targets of shape {list(y.shape)} may have their classes in dim 1 "
            "or last, and no task was chosen: pass task='classification' for dim 1, or task='tokens' for classes last"
        )
    if last:
        raise InputError(
            f"predictions of shape {list(shape)} for targets of shape {list(y.shape)} have their classes last: "
            "pass task='tokens'"
        )


def check_targets(task: str, predictions: Tensor, y: Tensor, values: bool = True) -> None:
    """An error where targets `[B, ...]` cannot be what predictions `[S, B, ...]` are trained on.

    Where `values` says so, classes must be classes as well, or probabilities of them.
    """
    if not isinstance(y, Tensor) or not y.numel():
        got = f"shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise InputError(f"y must be a tensor with at least one target, got {got}")
    shape = predictions.shape[1:]
    if task not in ("classification", "regression", "gaussian"):
        check_shape(predictions.shape, task)
    if task == "regression" and y.shape != shape:  # `[B]` against `[B, 1]` would broadcast
        raise InputError(f"y must have the predictions' shape {list(shape)}, got {list(y.shape)}")
    if task == "quantiles" and y.shape != shape[:1] + shape[2:]:
        want = list(shape[:1] + shape[2:])
        raise InputError(f"y must have the predictions' shape without their quantiles, {want}, got {list(y.shape)}")
    if task in ("binary", "multilabel"):
        _check_labels(task, shape, y, values)
    if task == "tokens" and y.shape not in (shape[:-1], shape):
        raise InputError(f"y must have the predictions' shape without classes, {list(shape[:-1])}, got {list(y.shape)}")
    if task == "classification":
        _check_size(shape, y)
    if task in ("classification", "tokens") and values:
        _check_classes(predictions if task == "classification" else predictions.movedim(-1, 2), y, task)


def _check_labels(task: str, shape: torch.Size, y: Tensor, values: bool) -> None:
    single = task == "binary" and len(shape) > 1
    if y.shape != shape and not (single and y.shape == shape[:1] + shape[2:]):
        also = " or that without the single channel" if single else ""
        raise InputError(f"y must have the predictions' shape {list(shape)}{also}, got {list(y.shape)}")
    if not values or y.dtype == torch.bool:
        return
    wrong = y[~((y >= 0) & (y <= 1))]  # so for NaN
    if wrong.numel():
        raise InputError(f"y must hold 0 or 1, or probabilities between, for task {task!r}, got {wrong[0].item():g}")


def _check_size(shape: torch.Size, y: Tensor) -> None:
    """Classes have no axis of their own, and dense ones must be of the predictions' size."""
    if y.shape == shape and not y.is_floating_point():
        raise InputError(
            f"y of shape {list(y.shape)} ({y.dtype}) does not fit predictions of shape {list(shape)}, which are the "
            "classes of one target: for several labels of one input pass task='multilabel'"
        )
    if len(shape) > 3 and y.dim() == len(shape) - 1 and y.shape[1:] != shape[2:]:
        size = tuple(y.shape[1:])
        raise InputError(
            f"predictions are of size {list(shape[2:])} and y of size {list(y.shape[1:])}: scale one of them, say by "
            f"mt.Multitude(model, output=lambda answer: F.interpolate(answer.logits, size={size}))"
        )


def _check_classes(predictions: Tensor, y: Tensor, task: str) -> None:
    """Classes, or their probabilities, of predictions `[S, B, C, ...]`."""
    if predictions.dim() < 3 or predictions.shape[2] == 1:
        raise InputError(
            f"cross entropy needs predictions for two classes or more, got {list(predictions.shape)}; for one logit "
            "pass task='binary', for values pass task='regression' or task='gaussian'"
        )
    if y.is_floating_point():
        own = y if task == "classification" or y.dim() < 3 else y.movedim(-1, 1)
        if own.shape != predictions.shape[1:] or bool((own < 0).any()) or not _adds_up(own, 1):
            raise InputError(
                f"y must hold classes, or their probabilities {list(predictions.shape[1:])}, got values of shape "
                f"{list(y.shape)}: for values pass task='regression' or task='gaussian', and for several labels of "
                "one input task='multilabel'"
            )
        return
    classes, y = predictions.shape[2], y.long()
    wrong = y[(y != -100) & ((y < 0) | (y >= classes))]
    if wrong.numel():
        raise InputError(f"y must hold classes 0 to {classes - 1}, got {wrong[0].item()}")
    if bool((y == -100).all()):
        raise InputError("y must hold at least one target that is not ignored, got -100 throughout")


def _adds_up(y: Tensor, dim: int) -> bool:
    """Whether class probabilities add up to 1 over an axis."""
    total = y.float().sum(dim)
    return torch.allclose(total, torch.ones_like(total), atol=1e-2)
