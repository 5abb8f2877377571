"""The device that a name stands for, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["device_of", "milliseconds"]


def device_of(name: str | torch.device | None) -> torch.device:
    """The device of a name; auto, or None, is a GPU where there is one.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be auto, cpu, cuda or another name that torch knows, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: there is no GPU here that torch can use")
    return device


def milliseconds(function: Callable[[], Any], warmups: int = 2, repeats: int = 3) -> float:
    """How long a call takes on the current GPU, after a few."""
    for _ in range(warmups):
        function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats
