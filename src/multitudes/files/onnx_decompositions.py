"""Decompose torch functions that ONNX lacks or gets wrong.

Some translations of torch's exporter agree with torch for usual numbers only: the log of a sigmoid is minus infinity
below -88, and -7 % 0.7 is 0. The verification on an example cannot find this. Each function here has the signature of
a torch operator, and tests compare it with the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multitudes.networks.attention import AttentionArguments

aten: Any = torch.ops.aten
Number = Tensor | float


# -- logarithms of sums ------------------------------------------------------------------------------------


def _log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - torch.log1p(torch.exp(-x.abs()))


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, y) + torch.log1p(torch.exp(-_gap(x, y)))


def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, y) + torch.log1p(torch.exp2(-_gap(x, y))) / math.log(2)


def _gap(x: Tensor, y: Tensor) -> Tensor:
    """Return the distance of two numbers; 0 for equal infinities."""
    return torch.where(x == y, torch.zeros_like(x), (x - y).abs())


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Compute each prefix separately: a running sum would lose small terms."""
    x = x.movedim(dim, -1)
    before = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
    return torch.where(before, x.unsqueeze(-2), -torch.inf).logsumexp(-1).movedim(-1, dim)


# -- division ----------------------------------------------------------------------------------------------


def _remainder(x: Number, y: Number) -> Tensor:
    """Use the exact `fmod`: x - y * floor(x / y) is off by y if x / y is rounded."""
    dividend, divisor = _promoted(x, y)
    rest = torch.fmod(dividend, divisor)
    return torch.where((rest != 0) & ((rest < 0) != (divisor < 0)), rest + divisor, rest)


def _floor_divide(x: Number, y: Number) -> Any:
    dividend, divisor = _promoted(x, y)
    if not dividend.is_floating_point():
        return NotImplemented  # integer division is exact
    rest = torch.fmod(dividend, divisor)
    ratio = (dividend - rest) / divisor
    ratio = torch.where((rest != 0) & ((rest < 0) != (divisor < 0)), ratio - 1, ratio)
    whole = torch.floor(ratio)
    whole = torch.where(ratio - whole > 0.5, whole + 1, whole)
    return torch.where(divisor == 0, dividend / divisor, whole)


def _divide(x: Number, y: Number, rounding_mode: str | None = None) -> Any:
    return _floor_divide(x, y) if rounding_mode == "floor" else NotImplemented


def _promoted(x: Number, y: Number) -> tuple[Tensor, Tensor]:
    """Return both as tensors of the result dtype on one device."""
    dtype = torch.result_type(x, y)
    device = x.device if isinstance(x, Tensor) else y.device if isinstance(y, Tensor) else None
    one, other = (
        v.to(dtype) if isinstance(v, Tensor) else torch.full((), v, dtype=dtype, device=device) for v in (x, y)
    )
    return one, other


# -- signs and angles --------------------------------------------------------------------------------------


def _signbit(x: Tensor) -> Tensor:
    """Return whether a number is negative, including negative zero."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def _copysign(x: Tensor, y: Number) -> Tensor:
    size, sign = _promoted(x, y)
    size = size if size.is_floating_point() else size.float()
    return torch.where(_signbit(sign), -size.abs(), size.abs())


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    y, x = _promoted(y, x)
    y, x = (v if v.is_floating_point() else v.float() for v in (y, x))
    half = torch.where(y == 0, 0.0, torch.where(y < 0, -math.pi / 2, math.pi / 2))
    angle = torch.where(x == 0, half, torch.atan(y / torch.where(x == 0, 1.0, x)))
    behind = torch.where(_signbit(y), -math.pi, math.pi)
    return torch.where(_signbit(x), torch.where(x == 0, torch.where(y == 0, behind, half), angle + behind), angle)


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    long, short = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    return long * torch.sqrt(1 + (short / torch.where(long == 0, 1.0, long)).square())


def _fmax(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y)))


def _fmin(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))


# -- order and search --------------------------------------------------------------------------------------


def _sort(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = aten.sort.default(x, dim, descending)  # stable in ONNX
    return values, indices


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    found = (part.narrow(dim, k - 1, 1) for part in aten.sort.default(x, dim, False))
    values, indices = (part if keepdim else part.squeeze(dim) for part in found)
    return values, indices


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _kthvalue(x, (x.shape[dim] + 1) // 2 if x.dim() else 1, dim, keepdim)


def _searchsorted(
    knots: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Count the knots `[..., K]` below each value `[..., N]`, with `right=True` including equal ones."""
    if sorter is not None:
        _unsupported("torch.searchsorted with a sorter")()
    knots, values = knots.unsqueeze(-2), values.unsqueeze(-1)
    below = knots <= values if right or side == "right" else knots < values
    return below.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _isin(x: Tensor, members: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    found = (x.unsqueeze(-1) == members.flatten()).any(-1)
    return ~found if invert else found


def _scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **_: Any) -> Any:
    return _unsupported("torch.scatter_reduce with reduce='mean'")() if reduce == "mean" else NotImplemented


def _unsupported(name: str) -> Callable[..., Any]:
    """Return a function that refuses an operator whose ONNX translation is inaccurate."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"ONNX has no operator for {name}")

    return refuse


# -- layers ------------------------------------------------------------------------------------------------


def _rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    return NotImplemented if training else torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def _std_mean(
    x: Tensor,
    dim: list[int] | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Use two functions, because the exporter fails on the combined one after decompositions."""
    correction = int(unbiased) if correction is None else correction
    return torch.std(x, dim, correction=correction, keepdim=keepdim), x.mean(dim, keepdim)


def _cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Run 3-d attention as 4-d with one head, the only form that the exporter supports."""
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = AttentionArguments(*args, **kwargs)
    if query.dim() != 3 or enable_gqa or dropout_p:
        return NotImplemented
    mask = mask.unsqueeze(-3) if mask is not None and mask.dim() == 3 else mask
    heads = (x.unsqueeze(1) for x in (query, key, value))
    return aten.scaled_dot_product_attention.default(*heads, mask, 0.0, is_causal, scale=scale).squeeze(1)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.log_sigmoid.default: _log_sigmoid,
    aten.logaddexp.default: _logaddexp,
    aten.logaddexp2.default: _logaddexp2,
    aten.logcumsumexp.default: _logcumsumexp,
    **dict.fromkeys((aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor), _remainder),
    **dict.fromkeys((aten.floor_divide.default, aten.floor_divide.Scalar), _floor_divide),
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _divide),
    aten.signbit.default: _signbit,
    **dict.fromkeys((aten.copysign.Tensor, aten.copysign.Scalar), _copysign),
    aten.atan2.default: _atan2,
    aten.hypot.default: _hypot,
    aten.fmax.default: _fmax,
    aten.fmin.default: _fmin,
    aten.sort.stable: _sort,
    aten.kthvalue.default: _kthvalue,
    aten.median.dim: _median,
    aten.searchsorted.Tensor: _searchsorted,
    aten.isin.Tensor_Tensor: _isin,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.special_log_ndtr.default: _unsupported("torch.special.log_ndtr"),
    aten.special_erfcx.default: _unsupported("torch.special.erfcx"),
    aten.rrelu.default: _rrelu,
    **dict.fromkeys((aten.std_mean.correction, aten.std_mean.dim), _std_mean),
    aten.std_mean.default: lambda x, unbiased=True: _std_mean(x, None, unbiased),
    aten.cdist.default: _cdist,
    aten.scaled_dot_product_attention.default: _attention,
}
"""Decompositions by torch operator; one that returns NotImplemented keeps the operator."""
