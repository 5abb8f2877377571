"""Checks where no task was chosen: the shapes of predictions and targets must leave no doubt about the classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multitudes.core.calling import Input, InputError, tensors_in

__all__ = ["adds_up", "check_class_axis", "check_clear"]


def check_class_axis(predictions: Tensor, x: Input) -> None:
    """Raise InputError where the shape of predictions `[S, B, ...]` of inputs does not tell that they classify.

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


def check_clear(predictions: Tensor, y: Tensor) -> None:
    """Raise InputError where targets do not tell that predictions `[S, B, C, ...]` classify."""
    shape = predictions.shape[1:]
    _check_several(predictions.shape)
    if not isinstance(y, Tensor) or len(shape) < 3:
        return
    in_dim_1, last = y.shape == shape[:1] + shape[2:], y.shape == shape[:-1]
    if y.shape == shape and y.is_floating_point():
        in_dim_1, last = adds_up(y, 1), adds_up(y, -1)
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


def adds_up(y: Tensor, dim: int) -> bool:
    """Whether class probabilities add up to 1 over an axis."""
    total = y.float().sum(dim)
    return torch.allclose(total, torch.ones_like(total), atol=1e-2)
