"""Dropout that draws its random numbers four at a time on a CPU, where drawing takes most of the time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = 1 << 16
"""Values of one random number of 16 bits; one of torch's 64-bit numbers holds four."""
FEW = 1 << 14
"""Sizes below which torch's own dropout is as fast."""


class QuickDropout(nn.Dropout):
    """`nn.Dropout` with a rate that is a multiple of 1 / 65536; two or three times as fast on a CPU.

    Under function or dispatch modes, a compiler or `vmap`, it is `nn.Dropout`.
    """

    def forward(self, x: Tensor) -> Tensor:
        dropped = round(self.p * LEVELS)
        usual = not self.training or self.inplace or not 0 < dropped < LEVELS or x.numel() < FEW
        if usual or x.device.type != "cpu" or not x.is_floating_point() or _watched(x):
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
        kept = numbers >= dropped - LEVELS // 2
        return x * kept.to(x.dtype).mul_(LEVELS / (LEVELS - dropped))


def _watched(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(x)
