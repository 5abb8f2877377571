"""Tensors that only have a shape, dtype and device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multitudes.networks.calls import InputError, tensors_in
from multitudes.networks.trace import asks


class Unreadable(Tensor):
    """A placeholder for a tensor that differs between members; computing with it is an error."""

    reason: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "type") or asks(name):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        raise InputError(next((t.reason for t in given if isinstance(t, Unreadable)), "a tensor cannot be read"))


def unreadable(like: Tensor, reason: str) -> Tensor:
    """Return a tensor of the same shape, dtype and device; computing with it raises an error with the reason.

    In compiled graphs, its values are NaN instead.
    """
    values = like.detach().new_full((), torch.nan).expand(like.shape)
    if torch.compiler.is_compiling():
        return values
    asked = values.as_subclass(Unreadable)
    asked.reason = reason
    return asked
