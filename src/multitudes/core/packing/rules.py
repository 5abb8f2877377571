"""How each kind of layer and function runs on packed channels, `[B, M*C, ...]`.

A rule takes a layer (or function) and a value and gives the result for all members at once, or
`NotImplemented`, and then the step runs under `torch.vmap` instead. Layers' weights are stacked, `[M, ...]`,
and are used as views.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.core.at_once import products
from multitudes.core.packing.pointwise import pointwise, worth_a_product
from multitudes.core.packing.values import Many, Packed, Stacked, Value, as_packed, as_stacked, rank_of
from multitudes.core.quick_dropout import QuickDropout


def _flat(tensor: Tensor | None) -> Any:
    """Stacked weights `[M, C, ...]` as those of one wide layer, `[M*C, ...]`, a view."""
    return None if tensor is None else tensor.flatten(0, 1)


# -- layers ------------------------------------------------------------------------------------------------


def convolution(layer: Any, value: Value, members: int) -> Any:
    """A shared input needs one plain convolution; after that, grouped ones."""
    spatial = len(layer.kernel_size)
    if rank_of(value) != spatial + 2:
        return NotImplemented
    shared = isinstance(value, Tensor)
    x = value.packed() if isinstance(value, Many) else value
    weight, bias = _flat(layer.weight), _flat(layer.bias)
    if not shared and worth_a_product(layer, x):
        return Packed(pointwise(x, layer.weight, bias, layer.stride), members)
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
    groups = layer.groups if shared else layer.groups * members
    if shared and layer.groups > 1:
        x, groups = as_packed(x, members), layer.groups * members
    run = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    return Packed(run(x, weight, bias, layer.stride, padding, layer.dilation, groups), members)


def transposed_convolution(layer: Any, value: Value, members: int) -> Any:
    """Grouped, as `convolution`; a shared input is repeated."""
    x = as_packed(value, members)
    spatial = len(layer.kernel_size)
    run = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    groups = layer.groups * members
    weight, bias = _flat(layer.weight), _flat(layer.bias)
    return Packed(
        run(x, weight, bias, layer.stride, layer.padding, layer.output_padding, groups, layer.dilation),
        members,
    )


def linear(layer: Any, value: Value, members: int) -> Many:
    """One wide product for a shared input, a batched one for the members' own."""
    return _linear(value, layer.weight, layer.bias, members)


def _linear(value: Value, weight: Tensor, bias: Tensor | None, members: int) -> Many:
    if isinstance(value, Tensor):
        wide = F.linear(value, weight.flatten(0, 1), _flat(bias))
        if wide.dim() == 2:
            return Packed(wide, members)
        return Stacked(wide.unflatten(-1, (members, -1)).movedim(-2, 0), members)
    x = value.stacked()
    return Stacked(products(x.flatten(1, -2), weight, bias).unflatten(1, x.shape[1:-1]), members)


def batch_norm(layer: Any, value: Value, members: int) -> Packed:
    """Per channel, so the members' channels are only more channels."""
    x = as_packed(value, members)
    use_batch = layer.training or layer.running_mean is None
    momentum = layer.momentum
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked[0])
    tracked = not layer.training or layer.track_running_stats
    mean, variance = (_flat(layer.running_mean), _flat(layer.running_var)) if tracked else (None, None)
    weight, bias = _flat(layer.weight), _flat(layer.bias)
    return Packed(F.batch_norm(x, mean, variance, weight, bias, use_batch, momentum or 0.0, layer.eps), members)


def instance_norm(layer: Any, value: Value, members: int, rank: int) -> Any:
    """Per channel and input."""
    x = as_packed(value, members)
    if x.dim() != rank:
        return NotImplemented
    use_input = layer.training or not layer.track_running_stats
    stats = _flat(layer.running_mean), _flat(layer.running_var)
    weight, bias = _flat(layer.weight), _flat(layer.bias)
    return Packed(F.instance_norm(x, *stats, weight, bias, use_input, layer.momentum or 0.0, layer.eps), members)


def group_norm(layer: Any, value: Value, members: int) -> Packed:
    """M times the groups."""
    weight, bias = _flat(layer.weight), _flat(layer.bias)
    x = as_packed(value, members)
    return Packed(F.group_norm(x, members * layer.num_groups, weight, bias, layer.eps), members)


def layer_norm(layer: Any, value: Value, members: int) -> Stacked:
    """Over the last dimensions, which stacking leaves alone."""
    x = as_stacked(value, members)
    x = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    shape = (members, *[1] * (x.dim() - 1 - len(layer.normalized_shape)), *layer.normalized_shape)
    if layer.weight is not None:
        x = x * layer.weight.view(shape)
    if layer.bias is not None:
        x = x + layer.bias.view(shape)
    return Stacked(x, members)


def prelu(layer: Any, value: Value, members: int) -> Any:
    """Per channel; a slope for all channels becomes one for each."""
    x = as_packed(value, members)
    slopes = layer.weight
    if slopes.shape[1] == 1:
        slopes = slopes.expand(members, x.shape[1] // members)
    return Packed(F.prelu(x, slopes.flatten(0, 1)), members)


def elementwise(layer: nn.Module, value: Value, members: int) -> Value:
    """In whatever way the values lie."""
    return value.like(layer(value.tensor)) if isinstance(value, Many) else layer(value)


def per_channel(layer: nn.Module, value: Value, members: int) -> Any:
    """Pooling and the like: each channel by itself."""
    if getattr(layer, "return_indices", False):
        return NotImplemented
    return Packed(layer(value.packed()), members) if isinstance(value, Many) else layer(value)


def dropout(layer: nn.Module, value: Value, members: int) -> Value:
    """Members draw their own noise, also on a shared input."""
    if not layer.training:
        return value
    return (
        value.like(layer(value.tensor))
        if isinstance(value, Many)
        else Stacked(layer(as_stacked(value, members)), members)
    )


def channel_dropout(layer: nn.Module, value: Value, members: int) -> Any:
    """Whole channels, each member's its own."""
    if not layer.training:
        return value
    return Packed(layer(as_packed(value, members)), members) if rank_of(value) >= 3 else NotImplemented


def flatten(layer: Any, value: Value, members: int) -> Any:
    """Features stay next to their member's."""
    if isinstance(value, Tensor):
        return layer(value)
    return Packed(layer(value.packed()), members) if layer.start_dim >= 1 else NotImplemented


# -- functions and methods: rule(function, members, *args, **kwargs) ---------------------------------------


def pointwise_function(function: Callable[..., Any], members: int, x: Any, *args: Any, **kwargs: Any) -> Any:
    """One value at a time."""
    if not isinstance(x, Many) or any(isinstance(a, (Many, Tensor)) for a in (*args, *kwargs.values())):
        return NotImplemented
    return x.like(function(x.tensor, *args, **kwargs))


def binary(function: Callable[..., Any], members: int, a: Any, b: Any, **kwargs: Any) -> Any:
    """Where both lie alike and have the same channels; a number joins anything."""
    if kwargs:
        return NotImplemented
    if not isinstance(a, (Many, Tensor)) or not isinstance(b, (Many, Tensor)):
        many = a if isinstance(a, Many) else b
        return many.like(function(*(v.tensor if isinstance(v, Many) else v for v in (a, b))))
    if not isinstance(a, Many) or not isinstance(b, Many) or a.rank() != b.rank():
        return NotImplemented
    if isinstance(a, Packed):
        other = b.packed()
        return Packed(function(a.tensor, other), members) if other.shape[1] == a.tensor.shape[1] else NotImplemented
    return Stacked(function(a.tensor, b.stacked()), members)


def channelwise_function(function: Callable[..., Any], members: int, x: Any, *args: Any, **kwargs: Any) -> Any:
    """One channel at a time."""
    if not isinstance(x, Many) or x.rank() < 2 or kwargs.get("return_indices"):
        return NotImplemented
    return Packed(function(x.packed(), *args, **kwargs), members)


def flatten_function(function: Callable[..., Any], members: int, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """As the layer."""
    if not isinstance(x, Many) or start_dim < 1:
        return NotImplemented
    return Packed(function(x.packed(), start_dim, end_dim), members)


def reshape(function: Callable[..., Any], members: int, x: Any, *shape: Any) -> Any:
    """`x.view(batch, -1)` keeps the members' features side by side."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    if not isinstance(x, Packed) or len(sizes) != 2 or sizes[0] != x.tensor.shape[0] or sizes[1] != -1:
        return NotImplemented
    return Packed(x.tensor.reshape(x.tensor.shape[0], -1), members)


def reduce(function: Callable[..., Any], members: int, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Over spatial dimensions only."""
    if not isinstance(x, Packed) or dim is None:
        return NotImplemented
    rank = x.tensor.dim()
    dims = [d % rank for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    if min(dims) < 2:
        return NotImplemented
    return Packed(function(x.tensor, dim, *args, **kwargs), members)


def concatenate(function: Callable[..., Any], members: int, tensors: Any, dim: int = 0) -> Any:
    """Along channels, each member's parts go next to each other."""
    values = list(tensors)
    if not all(isinstance(v, (Packed, Tensor)) and rank_of(v) >= 2 for v in values):
        return NotImplemented
    if dim % rank_of(values[0]) != 1:
        return NotImplemented
    parts = [as_packed(v, members).unflatten(1, (members, -1)) for v in values]
    return Packed(torch.cat(parts, 2).flatten(1, 2), members)


def linear_function(function: Callable[..., Any], members: int, x: Any, weight: Any, bias: Any = None) -> Any:
    """As the layer, by a weight that the network holds itself."""
    if not isinstance(weight, Stacked) or not isinstance(bias, (Stacked, type(None))):
        return NotImplemented
    return _linear(x, weight.tensor, None if bias is None else bias.tensor, members)


LAYERS: dict[type, Callable[[Any, Value, int], Any]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), transposed_convolution),
    nn.Linear: linear,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), batch_norm),
    nn.InstanceNorm1d: partial(instance_norm, rank=3),
    nn.InstanceNorm2d: partial(instance_norm, rank=4),
    nn.InstanceNorm3d: partial(instance_norm, rank=5),
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.PReLU: prelu,
    nn.Flatten: flatten,
    **dict.fromkeys((nn.Dropout, QuickDropout, nn.AlphaDropout), dropout),
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout), channel_dropout),
    **dict.fromkeys(
        (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
         nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
         nn.LogSigmoid, nn.Tanhshrink, nn.Threshold, nn.Identity),
        elementwise,
    ),
    **dict.fromkeys(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool1d, nn.LPPool2d,
         nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
         nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
         nn.ReflectionPad2d, nn.ReplicationPad2d, nn.ZeroPad2d),
        per_channel,
    ),
}  # fmt: skip

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.softplus,
         F.hardtanh, torch.relu, torch.relu_, F.relu_, torch.tanh, torch.sigmoid, F.tanh, F.sigmoid, torch.exp,
         torch.log, torch.sqrt, torch.abs, torch.square, operator.neg, torch.clamp),
        pointwise_function,
    ),
    **dict.fromkeys(
        (operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.isub, operator.imul,
         operator.itruediv, operator.pow, torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum),
        binary,
    ),
    **dict.fromkeys(
        (F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d,
         F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.adaptive_max_pool1d, F.adaptive_max_pool2d,
         F.adaptive_max_pool3d, F.interpolate, F.dropout1d, F.dropout2d, F.dropout3d),
        channelwise_function,
    ),
    F.dropout: pointwise_function,
    F.alpha_dropout: pointwise_function,
    torch.flatten: flatten_function,
    **dict.fromkeys((torch.mean, torch.sum, torch.amax), reduce),
    torch.reshape: reshape,
    torch.cat: concatenate,
    torch.concat: concatenate,
    F.linear: linear_function,
}  # fmt: skip

METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("relu", "relu_", "tanh", "sigmoid", "exp", "log", "sqrt", "abs", "square", "clamp", "contiguous", "float",
         "half", "bfloat16", "double", "to", "clone", "detach", "neg"),
        pointwise_function,
    ),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"), binary),
    **dict.fromkeys(("view", "reshape"), reshape),
    **dict.fromkeys(("mean", "sum", "amax"), reduce),
    "flatten": flatten_function,
}  # fmt: skip

RANDOM: set[Any] = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
    F.gumbel_softmax, torch.dropout, torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like,
    torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal, torch.poisson,
    torch.multinomial, "bernoulli", "bernoulli_", "normal_", "uniform_", "random_", "exponential_",
}  # fmt: skip
"""Functions and methods that draw random numbers: members draw their own, also where their input is shared."""
