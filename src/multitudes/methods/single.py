"""The single network, with which everything is compared."""

from __future__ import annotations

from multitudes.methods.registry import Method, single

ROWS = (
    Method(
        "single", single, {},
        "One network: the yardstick of all costs.",
        "Pick it when one answer is enough; everything here is measured against it.",
        place=0,
    ),
)  # fmt: skip
