"""The losses of a training, looked at without waiting for the device where that can be: `Losses`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Loss:
    """The loss of a step: a number once somebody asks, and what it is the loss of."""

    def __init__(self, value: Tensor, about: Any, step: int) -> None:
        self.about, self.step = about, step
        self._arrived: torch.cuda.Event | None = None
        self._value = value
        if value.device.type == "cuda":  # sent ahead: asking waits for this number, and not for the work behind it
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)

    @property
    def bad(self) -> bool:
        """Return whether it is NaN or infinite."""
        return not math.isfinite(float(self))


class Losses:
    """Keep a bad loss from changing the weights, and wait for it only where there is no other way.

    A fused optimizer on a GPU skips steps itself where `found_inf` is set, so that a loss may be read while the next
    step is on its way. Any other optimizer waits for the loss.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.late = can_hold_back(optimizer)
        self._unread: list[Loss] = []
        self._bad: Tensor | None = None

    def add(self, value: Tensor, about: Any, step: int) -> Loss:
        """Take the loss of a step before it is made; a late one is then made only if the loss is finite."""
        loss = Loss(value.detach(), about, step)
        self._unread.append(loss)
        if self.late:
            bad = (~value.detach().isfinite()).float()
            self._bad = bad if self._bad is None else torch.maximum(self._bad, bad)
            self.optimizer.found_inf = self._bad  # type: ignore[attr-defined]  # fused ones look for it
        return loss

    def take(self, all_of_them: bool = False) -> list[Loss]:
        """Take the losses that nobody has looked at; the last one can wait for the next time if it is late."""
        count = len(self._unread) - (self.late and not all_of_them)
        taken, self._unread = self._unread[:count], self._unread[count:]
        return taken

    def close(self) -> None:
        """Leave the optimizer as it was given."""
        if hasattr(self.optimizer, "found_inf"):
            del self.optimizer.found_inf


def can_hold_back(optimizer: Optimizer) -> bool:
    """Return whether the optimizer skips a step where its `found_inf`, a tensor on its GPU, is 1.

    >>> can_hold_back(torch.optim.SGD([torch.zeros(1)], fused=True))
    False
    """
    skips = getattr(optimizer, "_step_supports_amp_scaling", False)  # what torch's own gradient scaler looks at
    return skips and all(p.device.type == "cuda" for group in optimizer.param_groups for p in group["params"])
