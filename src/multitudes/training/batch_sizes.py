"""How many rows of a table make a batch."""

from __future__ import annotations

from multitudes.core.checks import check_count

__all__ = ["batch_size_for"]

SMALLEST, LARGEST, STEPS = 32, 1024, 128
"""The smallest and the largest batch, and how many of them an epoch has in between."""


def batch_size_for(rows: int) -> int:
    """The batch size for so many training rows: the power of two next to a 128th of them, from 32 to 1024.

    >>> [batch_size_for(rows) for rows in (100, 1000, 10_000, 1_000_000)]
    [32, 32, 64, 1024]
    """
    wanted = max(1, check_count("rows", rows) // STEPS)
    below = 1 << (wanted.bit_length() - 1)
    nearest = 2 * below if wanted / below > 2**0.5 else below
    return min(LARGEST, max(SMALLEST, nearest))
