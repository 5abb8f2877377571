"""What vmap does badly, done well: a few functions for evaluation, put in other words while draws run under vmap.

vmap asks a batched tensor for things it does not know (its memory format), moves whole feature maps to make room for
the new dimension, or calls a fused function once for each draw. A norm with fixed statistics is a product and a sum,
pooling to one point a mean, attention two products and a softmax: all run on batched tensors as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def vmap_friendly() -> Iterator[None]:
    """Inside, batch norm in evaluation, global average pooling and attention are computed in vmap's own terms."""
    with _OtherWords(), sdpa_kernel(SDPBackend.MATH):
        yield


class _OtherWords(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm:
            return _batch_norm(*args, **kwargs)
        if function is F.adaptive_avg_pool2d:
            return _average_pool(*args, **kwargs)
        return function(*args, **kwargs)


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
    return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)


def _average_pool(input: Tensor, output_size: Any) -> Tensor:
    if output_size in (1, (1, 1), [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(input, output_size)
