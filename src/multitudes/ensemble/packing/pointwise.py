"""1x1 convolutions of packed members on a GPU, where cuDNN's grouped ones are slow.

Two ways are faster: one dense convolution by the block-diagonal weight, as long as memory is the limit and not
arithmetic; and, for wide layers, a batched product over channels-last views.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DENSE_BELOW = 800.0
"""Half-precision multiply-adds per value moved up to which the block-diagonal convolution wins. Measured on an H200
(see benchmarks/README.md). Arithmetic alone would set it near 200; the rest is the cost of writing a batched product's
result as channels again."""


_plain = False  # True: keep convolutions as they are


@contextmanager
def plain_convolutions() -> Iterator[None]:
    """Keep convolutions as they are, for code that chooses their implementation itself."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def worth_a_product(x: Tensor, weight: Any, padding: Any, groups: int) -> bool:
    """Return whether `pointwise` runs a convolution of packed `x` faster than cuDNN."""
    return (
        x.is_cuda
        and not _plain
        and weight.shape[2:] == (1, 1)
        and padding in (0, (0, 0), "valid")
        and groups == 1
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any) -> Tensor:
    """Compute a 1x1 convolution of `[B, M*I, H, W]` by the members' `[M, O, I, 1, 1]`: `[B, M*O, H', W']`."""
    members, outputs, inputs = weight.shape[:3]
    half = _computing_dtype(x) in (torch.bfloat16, torch.float16)
    if half and members * inputs * outputs / (inputs + outputs) < DENSE_BELOW:
        return F.conv2d(x, block_diagonal(weight), bias, stride)
    down, right = (stride, stride) if isinstance(stride, int) else stride
    x = x[:, :, ::down, ::right]
    batch, _, height, width = x.shape
    rows = x.permute(0, 2, 3, 1).reshape(-1, members, inputs).transpose(0, 1)
    product = torch.bmm(rows, weight.flatten(2).mT).transpose(0, 1)
    product = product.reshape(batch, height, width, members * outputs).permute(0, 3, 1, 2)
    return product if bias is None else product + bias.to(product.dtype).view(1, -1, 1, 1)


def block_diagonal(weight: Tensor) -> Tensor:
    """Arrange weights `[M, O, I, ...]` as `[M*O, M*I, ...]`, zero outside the members' own blocks.

    >>> block_diagonal(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]))
    tensor([[1., 2., 0., 0.],
            [0., 0., 3., 4.]])
    """
    members = weight.shape[0]
    own = torch.eye(members, dtype=weight.dtype, device=weight.device)
    own = own.view(members, 1, members, *[1] * (weight.dim() - 2))
    return (weight.unsqueeze(2) * own).flatten(2, 3).flatten(0, 1)


def _computing_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
