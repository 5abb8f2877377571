"""Optimizers by name, and default batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from multitudes.base.checks import check_count, check_number

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda groups, lr, momentum, **more: torch.optim.SGD(groups, lr, momentum, nesterov=momentum > 0, **more),
    "adam": lambda groups, lr, momentum, **more: torch.optim.Adam(groups, lr, **more),
    "adamw": lambda groups, lr, momentum, **more: torch.optim.AdamW(groups, lr, **more),
}
RATES = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3}


def can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether torch's fused optimizers, the fastest ones, support these parameters.

    >>> can_fuse(nn.Linear(1, 1).parameters()), can_fuse(nn.Linear(1, 1, dtype=torch.complex64).parameters())
    (True, False)
    """
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def make_optimizer(optimizer: Any, net: nn.Module, lr: float | None, momentum: float, weight_decay: float) -> Optimizer:
    """Return the optimizer of `net` for `fit(optimizer=optimizer)`."""
    if isinstance(optimizer, Optimizer) or (callable(optimizer) and not isinstance(optimizer, str)):
        if lr is not None:
            raise ValueError(f"lr={lr!r} applies to an optimizer by name only: set the rate in your optimizer")
        return optimizer if isinstance(optimizer, Optimizer) else optimizer(net.parameters())
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, or a torch optimizer, got {optimizer!r}")
    rate = RATES[optimizer] if lr is None else lr
    check_number("lr", rate, 0, above=True)
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if not learning:
        raise ValueError("net must have parameters with requires_grad, got none")
    fused = can_fuse(learning) or None  # not False: that disables the foreach implementation too
    return OPTIMIZERS[optimizer](learning, rate, momentum, weight_decay=weight_decay, fused=fused)


# -- batches -----------------------------------------------------------------------------------------------

SMALLEST, LARGEST, STEPS = 32, 1024, 128
"""Minimum and maximum batch size, and batches per epoch in between."""


def batch_size_for(rows: int) -> int:
    """Return a batch size for this many training rows: the power of two nearest to a 128th, in 32 to 1024.

    >>> [batch_size_for(rows) for rows in (100, 1000, 10_000, 1_000_000)]
    [32, 32, 64, 1024]
    """
    wanted = max(1, check_count("rows", rows) // STEPS)
    below = 1 << (wanted.bit_length() - 1)
    nearest = 2 * below if wanted / below > 2**0.5 else below
    return min(LARGEST, max(SMALLEST, nearest))
