"""Read losses without waiting for the GPU, where possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Loss:
    """The loss of a step, converted to a number on demand, with its batch."""

    def __init__(self, value: Tensor, batch: Any, step: int) -> None:
        self.batch, self.step = batch, step
        self._arrived: torch.cuda.Event | None = None
        self._value = value
        if value.device.type == "cuda":  # reading then waits for this copy only, not for later work
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)


class DelayedLosses:
    """Losses that are not read yet; a bad loss must not change the weights.

    A fused optimizer on a GPU skips a step if `found_inf` is set, so its losses are read one step later. With other
    optimizers, each loss is read before its step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.late = can_skip_steps(optimizer)
        self._unread: list[Loss] = []
        self._bad: Tensor | None = None

    def add(self, value: Tensor, batch: Any, step: int) -> Loss:
        """Add the loss of a step, before the optimizer runs; a fused one then skips the step if the loss is bad."""
        loss = Loss(value.detach(), batch, step)
        self._unread.append(loss)
        if self.late:
            bad = (~value.detach().isfinite()).float()
            self._bad = bad if self._bad is None else torch.maximum(self._bad, bad)
            self.optimizer.found_inf = self._bad  # type: ignore[attr-defined]  # fused ones check it
        return loss

    def take(self, all_of_them: bool = False) -> list[Loss]:
        """Return the losses not returned yet; with a fused optimizer, keep the last one for the next call."""
        count = len(self._unread) - (self.late and not all_of_them)
        taken, self._unread = self._unread[:count], self._unread[count:]
        return taken

    def close(self) -> None:
        """Remove `found_inf` from the optimizer."""
        if hasattr(self.optimizer, "found_inf"):
            del self.optimizer.found_inf


def can_skip_steps(optimizer: Optimizer) -> bool:
    """Return whether the optimizer skips steps if its `found_inf`, a tensor on the GPU, is 1.

    >>> can_skip_steps(torch.optim.SGD([torch.zeros(1)], fused=True))
    False
    """
    skips = getattr(optimizer, "_step_supports_amp_scaling", False)  # checked by torch's own gradient scaler
    return skips and all(p.device.type == "cuda" for group in optimizer.param_groups for p in group["params"])
