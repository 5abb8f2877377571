"""Find the device for a name, and the device of a network."""

from __future__ import annotations

import torch
from torch import nn


def device_of(name: str | torch.device | None) -> torch.device:
    """Return the device of a name; "auto" and None are a GPU if there is one.

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


def device_in(network: nn.Module) -> torch.device:
    """Return the device of a network's tensors."""
    return next(iter([*network.parameters(), *network.buffers()]), torch.zeros(0)).device
