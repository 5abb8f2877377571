"""Images that nothing can be learned from, for tests of what is done with images."""

from __future__ import annotations

import torch

from multitudes.lab.data import Data, Part


def noise(count: int, *shape: int) -> Data:
    """So many random images of a shape, of ten classes."""
    torch.manual_seed(0)
    part = Part(torch.randint(256, (count, *shape), dtype=torch.uint8), torch.arange(count) % 10)
    return Data("noise", part, part, part, tuple("0123456789"))
