"""Whether the classes of a study are unbalanced, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["imbalance"]

UNBALANCED = 3.0
"""How many times as many training rows the largest class has as the smallest before that is said."""


def imbalance(about: Mapping[str, Any]) -> str:
    """A sentence where classes are unbalanced, from the description of the data (`data.json`); else nothing.

    >>> print(imbalance({"classes": {"no": 90, "yes": 10}}))
    Classes are unbalanced: no has 90 % of the training rows, yes 10 %. Balanced accuracy and AUROC count them alike.
    >>> imbalance({"classes": {"no": 60, "yes": 40}})
    ''
    """
    counts = about.get("classes")
    if not isinstance(counts, Mapping) or len(counts) < 2:
        return ""
    total = sum(counts.values())
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[most] < UNBALANCED * max(counts[least], 1):
        return ""
    shares = [f"{100 * counts[name] / total:.2g} %" for name in (most, least)]
    return (
        f"Classes are unbalanced: {most} has {shares[0]} of the training rows, {least} {shares[1]}. "
        f"Balanced accuracy and AUROC count them alike."
    )
