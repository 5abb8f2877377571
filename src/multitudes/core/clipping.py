"""Clipping gradients, member by member."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_each(parameters: Iterable[Tensor], members: int, max_norm: float) -> Tensor:
    """Scale each member's gradient, of parameters `[M, ...]`, to at most `max_norm`; the norms, `[M]`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(members)
    norms = torch.stack([g.reshape(members, -1).norm(dim=1) for g in gradients]).norm(dim=0)
    scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
    return norms
