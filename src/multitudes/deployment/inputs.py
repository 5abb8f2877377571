"""Inputs: what two of them must have in common for one's quick way to be the other's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multitudes.core.calling import Input, tensors_in

__all__ = ["rows_of", "signature", "unusual"]

_PLAIN = (bool, int, float, str, type(None))


def signature(x: Any, shapes: bool = True) -> Any:
    """Shapes and dtypes of the tensors of an input, in their order, and the plain values beside them.

    None where it holds anything else, whose values nobody can compare.

    >>> signature({"x": torch.ones(2, 3), "flag": True})
    (<class 'dict'>, (('x', ((2, 3), torch.float32)), ('flag', (<class 'bool'>, 'True'))))
    """
    if isinstance(x, Tensor):
        return (tuple(x.shape) if shapes else x.dim()), x.dtype
    if type(x) is dict:
        held = [(name, signature(value, shapes)) for name, value in x.items()]
        return None if any(own is None for _, own in held) else (dict, tuple(held))
    if type(x) in (tuple, list):
        own = [signature(value, shapes) for value in x]
        return None if any(each is None for each in own) else (type(x), tuple(own))
    return (type(x), repr(x)) if type(x) in _PLAIN else None


def rows_of(x: Input) -> int:
    """The length of the batch, 0 where the first tensor has none."""
    first = next(iter(tensors_in(x)), None)
    return 0 if first is None or not first.dim() else len(first)


def unusual(x: Input) -> bool:
    """Return whether an input has numbers of which runtimes differ: ids below 0, and masks that leave nothing of a row.

    One floating-point tensor alone is no mask.
    """
    tensors = tensors_in(x)
    for tensor in tensors:
        numbers = tensor.is_floating_point() or tensor.is_complex()
        if not tensor.numel() or (numbers and len(tensors) == 1):
            continue
        if not numbers and tensor.dtype != torch.bool and int(tensor.min()) < 0:
            return True
        if tensor.dim() > 1 and not bool(tensor.flatten(1).bool().any(1).all()):
            return True
    return False
