"""What vmap does badly, done well: a few functions for evaluation, put in other words while draws run under vmap.

vmap asks a batched tensor for things it does not know (its memory format), moves whole feature maps to make room for
the new dimension, or calls a fused function once for each draw. A norm with fixed statistics is a product and a sum,
pooling to one point a mean, attention two products and a softmax: all run on batched tensors as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from multitudes.core.attention import by_math


@contextmanager
def vmap_friendly(batched: Callable[[], bool]) -> Iterator[None]:
    """Inside, batch norm in evaluation, global average pooling and attention are computed in vmap's own terms.

    `batched` says whether there are batched tensors yet: before that, torch's own functions are the faster ones.
    """
    with _OtherWords(batched):
        yield


class _OtherWords(TorchFunctionMode):
    def __init__(self, batched: Callable[[], bool]) -> None:
        super().__init__()
        self.batched = batched

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.batched():
            return function(*args, **kwargs)
        if function is F.batch_norm:
            return _batch_norm(*args, **kwargs)
        if function is F.adaptive_avg_pool2d:
            return _average_pool(*args, **kwargs)
        if function in CONVOLUTIONS:
            return convolution(function, *args, **kwargs)
        return by_math(function)(*args, **kwargs)


CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _batch_norm(
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
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
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
    """Under autocast, vmap's convolution forgets to cast the bias, and on a CPU whatever else is not cast already."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind) or input.dtype == torch.float64:  # which autocast leaves alone
        return function(input, weight, bias, *rest, **options)
    dtype = torch.get_autocast_dtype(kind)
    y = function(input.to(dtype), weight.to(dtype), None, *rest, **options)
    return y if bias is None else y + bias.to(dtype).view(-1, *[1] * (weight.dim() - 2))


def _average_pool(input: Tensor, output_size: Any) -> Tensor:
    if output_size in (1, (1, 1), [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(input, output_size)
