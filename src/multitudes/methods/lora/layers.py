"""A frozen shared layer with a low-rank adapter for each member.

Hu et al., *LoRA: low-rank adaptation of large language models*, 2021. Member i's layer is

    y = W x + b + s_i B_i A_i x,

with random `A_i [r, I]` and `B_i [O, r]` initially zero. W x is one product for all members; the adapters take two
batched products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.networks.calls import evaluating
from multitudes.networks.copies import copied
from multitudes.surgery.affine import AffineMap, kind_of, weight_of
from multitudes.surgery.member_affine import AffineMemberLayer
from multitudes.surgery.select import CONVOLUTIONS


def widths_of(weight: Tensor, affine: AffineMap) -> tuple[int, int]:
    """Return inputs and outputs of a weight as a matrix; a convolution's inputs include the kernel positions."""
    return weight.numel() // weight.shape[affine.outputs], weight.shape[affine.outputs]


class Lora(AffineMemberLayer):
    """A frozen layer with adapters `A [M, r, I]` and `B [M, O, r]` of each affine map.

    `scales [M]` are the factors alpha / rank of the members' adapters. `ranks [M]` are their ranks, below r if an
    adapter is padded with zeros. In training, `dropout` applies to the adapters' input, in layers of one affine map.
    """

    def __init__(self, layer: nn.Module, members: int, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__(copied(layer).requires_grad_(False), members)
        for affine in self.affine_maps():
            with evaluating(self.layer):
                weight = self.shared_weight(affine).detach()
            for kind, own in zip("AB", _adapters(weight, members, rank, *widths_of(weight, affine)), strict=True):
                self.register_parameter(f"{self.prefixes[affine.weight]}{kind}", own)
        self.scales, self.ranks = [alpha / rank] * members, [rank] * members
        self.dropout = dropout

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return not self.several and kind_of(self.layer) not in CONVOLUTIONS

    def run_all(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = weight_of(self.layer)
        if not self.batched or self._hooked or args or kwargs:
            return self._each(x, lambda index, rows: self.run_member(index, rows, weight, *args, **kwargs))
        y = self.run(x, weight)
        if self.member is not None:
            return self._added(y[None], x[None], slice(self.member, self.member + 1))[0]
        return self._all(lambda y, x: self._added(y, x, slice(None)), y, x)

    def _added(self, y: Tensor, x: Tensor, members: slice) -> Tensor:
        """Add the updates of these members' adapters on x `[M, B, ..., I]` to the layer's output y `[M, B, ..., O]`."""
        A, B, scales = self.A[members], self.B[members], self.scales[members]
        x = F.dropout(x, self.dropout, self.training) if self.dropout and self.training else x
        down = torch.bmm(x.flatten(1, -2).to(A.dtype), A.mT)
        flat = y.flatten(1, -2)
        if len(set(scales)) > 1:
            down = down * down.new_tensor(scales).view(-1, 1, 1)
        scale = scales[0] if len(set(scales)) == 1 else 1.0
        if flat.dtype == down.dtype:
            return torch.baddbmm(flat, down, B.mT, alpha=scale).view(y.shape)
        return (flat + torch.bmm(down, B.mT).mul(scale).to(flat.dtype)).view(y.shape)

    def weight_of_member(self, index: int, affine: AffineMap, weight: Tensor) -> Tensor:
        A, B = (getattr(self, f"{self.prefixes[affine.weight]}{kind}")[index] for kind in "AB")
        update = self.scales[index] * B @ A
        return weight + (update.mT if affine.inputs == 0 else update.view(weight.shape)).to(weight.dtype)


def _adapters(weight: Tensor, members: int, rank: int, inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Initialize adapters as PEFT does: A like a linear layer's weight, B zero; float32 for half-precision layers."""
    half = weight.dtype in (torch.float16, torch.bfloat16)
    like = weight.new_empty(0, dtype=torch.float32 if half else weight.dtype)
    A = like.new_empty(members, rank, inputs)
    for own in A:
        nn.init.kaiming_uniform_(own, a=math.sqrt(5))
    return nn.Parameter(A), nn.Parameter(like.new_zeros(members, outputs, rank))
