"""Torch's attention without fused kernels, so that its parts can be replaced.

Torch itself does not change: modes are local to a thread, and copied functions have their own globals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


class AttentionArguments(NamedTuple):
    """The arguments of `F.scaled_dot_product_attention`: `AttentionArguments(*args, **kwargs)`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


# -- multi-head attention ----------------------------------------------------------------------------------


def _unwatched(function: Any) -> Callable[..., Any]:
    """Copy a torch function that function modes see as a whole, so that they see its parts instead."""
    own = {**function.__globals__, "has_torch_function": lambda tensors: False}
    own["_check_key_padding_mask"] = _check_padding  # compilers cannot trace torch's own in a mode
    copy = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _check_padding(mask: Tensor, length: int, batch: int) -> None:
    if mask.shape != (batch, length):
        raise ValueError(f"key_padding_mask must have shape {[batch, length]}, got {list(mask.shape)}")


multihead_attention = _unwatched(F.multi_head_attention_forward)


# -- without fused kernels ---------------------------------------------------------------------------------


def math_attention() -> AbstractContextManager[Any]:
    """Replace attention by two products and a softmax, which support vmap, second derivatives and NaN."""
    return sdpa_kernel(SDPBackend.MATH) if torch.compiler.is_compiling() else _MathAttention()


class _MathAttention(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self:
                return multihead_attention(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return _by_math(AttentionArguments(*args, **kwargs))
        return function(*args, **kwargs)


def _by_math(given: AttentionArguments) -> Tensor:
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = given
    if dropout_p:  # torch's own function, so that another mode may replace its numbers
        return attend_with_dropout(partial(F.dropout, p=dropout_p), given)
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:  # autocast ignores float64
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    elif mask is not None:
        mask = mask.to(query.dtype)
    with torch.autocast(kind, enabled=False):
        result: Tensor = torch._scaled_dot_product_attention_math(
            query, key, value, mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return result


def attend_with_dropout(drop: Callable[[Tensor], Tensor], given: AttentionArguments) -> Tensor:
    """Compute attention, and apply `drop` to its weights `[..., T, S]`."""
    query, key, value, mask, _, is_causal, scale, enable_gqa = given
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return drop(weights) @ value
