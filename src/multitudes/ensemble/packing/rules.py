"""Rules that run torch's functions on packed channels, `[B, M*C, ...]`.

A rule takes the function and its arguments and returns the result for all members. If it returns `NotImplemented`,
the function runs under `torch.vmap`. Weights are stacked, `[M, ...]`, and used as views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.ensemble.packing.packed_values import RULES, CannotPack, Many, Packed, PackingState, Stacked, Value
from multitudes.ensemble.packing.pointwise import pointwise, worth_a_product
from multitudes.ensemble.packing.quick_dropout import QuickDropout
from multitudes.networks.vmap import products

Weight = Many | None


def _state(*values: Any) -> PackingState:
    return next(value.state for value in values if isinstance(value, Many))


def _are_many(*weights: Any) -> bool:
    return all(weight is None or isinstance(weight, Many) for weight in weights)


def _flat(weight: Weight) -> Any:
    """View stacked weights `[M, C, ...]` as those of one wide layer, `[M*C, ...]`."""
    return None if weight is None else weight.stacked().flatten(0, 1)


def _packed(value: Value, state: PackingState) -> Tensor:
    """Return a value as `[B, M*C, ...]`; repeat a shared one."""
    return value.packed() if isinstance(value, Many) else value.repeat(1, state.members, *[1] * (value.dim() - 2))


def _stacked(value: Value, state: PackingState) -> Tensor:
    """Return a value as `[M, B, ...]`; expand a shared one."""
    return value.stacked() if isinstance(value, Many) else value.expand(state.members, *value.shape)


# -- layers with weights -----------------------------------------------------------------------------------


def convolution(
    function: Any,
    input: Value,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Run one plain convolution on a shared input, or a grouped one on packed members."""
    if weight is None or not _are_many(weight, bias) or input.dim() != weight.dim():
        return NotImplemented
    state = weight.state
    if state.channels_last and isinstance(input, Tensor) and input.dim() == 4 and input.device.type == "cpu":
        input = input.clone(memory_format=torch.channels_last)
    if isinstance(input, Many) and worth_a_product(input.packed(), weight, padding, groups):
        return Packed(pointwise(input.packed(), weight.stacked(), _flat(bias), stride), state)
    if isinstance(input, Many) or groups > 1:
        input, groups = _packed(input, state), groups * state.members
    return Packed(function(input, _flat(weight), _flat(bias), stride, padding, dilation, groups), state)


def transposed_convolution(
    function: Any,
    input: Value,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Run a grouped transposed convolution; repeat a shared input."""
    if weight is None or not _are_many(weight, bias) or input.dim() != weight.dim():
        return NotImplemented
    state, x = weight.state, _packed(input, weight.state)
    groups *= state.members
    return Packed(function(x, _flat(weight), _flat(bias), stride, padding, output_padding, groups, dilation), state)


def linear(function: Any, input: Value, weight: Any, bias: Any = None) -> Any:
    """Run one wide product on a shared input, or a batched one on the members' own inputs."""
    if not _are_many(weight, bias) or weight.dim() != 2:
        return NotImplemented
    state = weight.state
    if isinstance(input, Tensor):
        wide = function(input, _flat(weight), _flat(bias))
        if wide.dim() == 2:
            return Packed(wide, state)
        return Stacked(wide.unflatten(-1, (state.members, -1)).movedim(-2, 0), state)
    if input.dim() < 2:
        return NotImplemented
    x = input.stacked()
    rows = products(x.flatten(1, -2), weight.stacked(), None if bias is None else bias.stacked())
    return Stacked(rows.view(*x.shape[:-1], rows.shape[-1]), state)


def batch_norm(
    function: Any,
    input: Value,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    *settings: Any,
    **options: Any,
) -> Any:
    """Run one batch norm over all members' channels."""
    tensors = running_mean, running_var, weight, bias
    if not _are_many(*tensors):
        return NotImplemented
    state = _state(input, *tensors)
    return Packed(function(_packed(input, state), *map(_flat, tensors), *settings, **options), state)


def instance_norm(
    function: Any,
    input: Value,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    **options: Any,
) -> Any:
    """Run one instance norm over all members' channels."""
    if input.dim() < 3:
        return NotImplemented
    return batch_norm(function, input, running_mean, running_var, weight, bias, **options)


def group_norm(
    function: Any, input: Value, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Run one group norm with M times the groups."""
    if not _are_many(weight, bias):
        return NotImplemented
    state = _state(input, weight, bias)
    return Packed(function(_packed(input, state), state.members * num_groups, _flat(weight), _flat(bias), eps), state)


def layer_norm(
    function: Any,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    """Run layer norm over the last dimensions of stacked members."""
    if not _are_many(weight, bias):
        return NotImplemented
    state = _state(input, weight, bias)
    x = function(_stacked(input, state), normalized_shape, eps=eps)
    shape = (state.members, *[1] * (x.dim() - 1 - len(normalized_shape)), *normalized_shape)
    x = x if weight is None else x * weight.stacked().view(shape)
    return Stacked(x if bias is None else x + bias.stacked().view(shape), state)


def prelu(function: Any, input: Value, weight: Any) -> Any:
    """Run PReLU per channel; expand a single slope to all channels."""
    if not isinstance(weight, Many) or input.dim() < 2:
        return NotImplemented
    x, slopes = _packed(input, weight.state), weight.stacked()
    if slopes.shape[1] == 1:
        slopes = slopes.expand(len(slopes), x.shape[1] // len(slopes))
    return Packed(function(x, slopes.flatten(0, 1)), weight.state)


# -- other functions ---------------------------------------------------------------------------------------


def elementwise(function: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an elementwise function on one value."""
    if not isinstance(input, Many) or any(isinstance(each, (Many, Tensor)) for each in (*args, *kwargs.values())):
        return NotImplemented
    return input.like(function(input.tensor, *args, **kwargs))


def binary(function: Any, a: Any, b: Any) -> Any:
    """Run an elementwise function of two values with the same layout and channels, or of a value and a number."""
    if not isinstance(a, (Many, Tensor)) or not isinstance(b, (Many, Tensor)):
        many = a if isinstance(a, Many) else b
        return many.like(function(*(each.tensor if isinstance(each, Many) else each for each in (a, b))))
    if not isinstance(a, Many) or not isinstance(b, Many) or a.dim() != b.dim():
        return NotImplemented
    if isinstance(a, Packed):
        other = b.packed()
        return a.like(function(a.tensor, other)) if other.shape[1] == a.tensor.shape[1] else NotImplemented
    return a.like(function(a.tensor, b.stacked()))


def per_channel(function: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Run pooling and other functions of single channels."""
    if not isinstance(input, Many) or input.dim() < 3 or kwargs.get("return_indices"):
        return NotImplemented
    return Packed(function(input.packed(), *args, **kwargs), input.state)


def pad(function: Any, input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pad spatial dimensions only."""
    return NotImplemented if len(pad) > 2 * (input.dim() - 2) else per_channel(function, input, pad, mode, value)


def flatten(function: Any, input: Many, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Flatten features, which stay next to those of their member."""
    return NotImplemented if start_dim < 1 else Packed(function(input.packed(), start_dim, end_dim), input.state)


def reshape(function: Any, input: Any, *shape: Any) -> Any:
    """Run `x.view(batch, -1)`, which keeps the members' features side by side."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    if not isinstance(input, Packed) or len(sizes) != 2 or sizes[0] != len(input.tensor) or sizes[1] != -1:
        return NotImplemented
    return Packed(input.tensor.reshape(len(input.tensor), -1), input.state)


def reduce(function: Any, input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Reduce spatial dimensions only."""
    if not isinstance(input, Packed) or dim is None:
        return NotImplemented
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    if min(each % input.dim() for each in dims) < 2:
        return NotImplemented
    return Packed(function(input.tensor, dim, *args, **kwargs), input.state)


def concatenate(function: Any, tensors: Any, dim: int = 0) -> Any:
    """Concatenate along channels; each member's parts go next to each other."""
    values = list(tensors)
    if not all(isinstance(value, (Packed, Tensor)) and value.dim() >= 2 for value in values):
        return NotImplemented
    if dim % values[0].dim() != 1:
        return NotImplemented
    state = _state(*values)
    parts = [_packed(value, state).unflatten(1, (state.members, -1)) for value in values]
    return Packed(torch.cat(parts, 2).flatten(1, 2), state)


def number(function: Any, input: Many) -> float:
    """Return a number that is equal for all members, such as the batch count of batch norms; else raise an error."""
    values = input.stacked()
    if not bool((values == values[0]).all()):
        raise CannotPack("its code reads numbers that differ between members")
    return float(values[0])


def _both(*names: str) -> list[Any]:
    """Return torch's functions and methods of these names."""
    return [getattr(home, name) for name in names for home in (torch, Tensor) if hasattr(home, name)]


RULES |= {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), transposed_convolution),
    F.linear: linear,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
    torch.prelu: prelu,
    **dict.fromkeys(
        (F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid,
         F.softplus, F.softsign, F.hardtanh, F.tanh, F.sigmoid, F.logsigmoid, F.dropout, F.alpha_dropout,
         *_both("relu", "relu_", "tanh", "sigmoid", "exp", "log", "sqrt", "abs", "square", "neg", "clamp"),
         *_both("contiguous", "float", "half", "bfloat16", "double", "to", "clone", "detach")),
        elementwise,
    ),
    **dict.fromkeys(
        _both("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "pow", "maximum", "minimum", "ge", "gt"),
        binary,
    ),
    **dict.fromkeys(
        (F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d,
         F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.adaptive_max_pool1d, F.adaptive_max_pool2d,
         F.adaptive_max_pool3d, F.lp_pool1d, F.lp_pool2d, F.interpolate, F.dropout1d, F.dropout2d, F.dropout3d,
         F.feature_alpha_dropout),
        per_channel,
    ),
    F.pad: pad,
    **dict.fromkeys(_both("flatten"), flatten),
    **dict.fromkeys(_both("reshape", "view"), reshape),
    **dict.fromkeys(_both("mean", "sum", "amax"), reduce),
    **dict.fromkeys((torch.cat, torch.concat), concatenate),
    Tensor.__float__: number,
}  # fmt: skip

LAYERS: dict[type, Callable[..., Any]] = {
    **dict.fromkeys(
        (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
         nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
         nn.LogSigmoid, nn.Tanhshrink, nn.Threshold, nn.Identity),
        elementwise,
    ),
    **dict.fromkeys(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
         nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.LPPool1d, nn.LPPool2d, nn.Upsample),
        per_channel,
    ),
}  # fmt: skip
"""Rules for the forward of layers without weights: faster than the rule for the function that they call."""

DROPOUTS: dict[type, Callable[..., Any]] = {
    **dict.fromkeys((nn.Dropout, QuickDropout, nn.AlphaDropout), elementwise),
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout), per_channel),
}
"""Rules for the forward of dropout layers, on values that differ between members."""
