"""The runner of draws under `torch.vmap`, and rules for functions that vmap runs slowly.

vmap asks a batched tensor for things it does not know (its memory format), moves whole feature maps to make room for
the new dimension, or calls a fused function once for each draw. A norm with fixed statistics is a product and a sum,
pooling to one point a mean, attention two products and a softmax: all run on batched tensors as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.core.attention import by_math, multihead
from multitudes.core.calling import Input
from multitudes.core.draws.memory import Meter
from multitudes.core.draws.stochastic import Draw, Stochastic, drawing

__all__ = ["CONVOLUTIONS", "Run", "VmapRules", "convolution", "vmapped"]


@dataclass
class Run:
    """A network that draws, and an input; `predict` makes one draw of every member, `[B, ...] -> [M, B, ...]`."""

    network: nn.Module
    layers: Sequence[Stochastic]
    predict: Callable[[Input], Tensor]
    x: Input
    seed: int = 0


def vmapped(run: Run, numbers: range, meter: Meter | None = None) -> Tensor:
    """Make the draws of these numbers under vmap: `[D, M, B, ...]`.

    Everything before the first random number is computed once for all of them.
    """

    draw = Draw(run.seed, meter=meter)

    def one(number: Tensor) -> Tensor:
        draw.index = number
        with VmapRules():
            return run.predict(run.x)

    with drawing(run.layers, draw):
        return torch.vmap(one, randomness="different")(torch.arange(numbers.start, numbers.stop))


class VmapRules(TorchFunctionMode):
    """Decompose a few functions of batched tensors into others that vmap runs well."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(function)
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if rule is None or not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            return function(*args, **kwargs)
        return rule(function, *args, **kwargs)


def _batch_norm(
    function: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return function(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = (running_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    shape = (-1, *[1] * (input.dim() - 2))
    return torch.addcmul(shift.view(shape), input, scale.view(shape)).to(input.dtype)


def convolution(
    function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Cast what vmap's convolution leaves uncast under autocast: the bias, and on a CPU all that it takes."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind) or input.dtype == torch.float64:  # which autocast leaves alone
        return function(input, weight, bias, *rest, **options)
    dtype = torch.get_autocast_dtype(kind)
    y = function(input.to(dtype), weight.to(dtype), None, *rest, **options)
    return y if bias is None else y + bias.to(dtype).view(-1, *[1] * (weight.dim() - 2))


def _average_pool(function: Any, input: Tensor, output_size: Any) -> Tensor:
    if output_size in (1, (1, 1), [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return function(input, output_size)


def _attention(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    return by_math(*args, **kwargs)


def _multihead(function: Any, *args: Any, **kwargs: Any) -> Any:
    with VmapRules():
        return multihead(*args, **kwargs)


CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

_RULES: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.adaptive_avg_pool2d: _average_pool,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multihead,
    **dict.fromkeys(CONVOLUTIONS, convolution),
}
