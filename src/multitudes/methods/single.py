"""The single network, with which everything is compared."""

from __future__ import annotations

from multitudes.methods.registry import Method, single

ROWS = (
    Method(
        "single", single, {},
        "One network: the reference for all costs.",
        "Pick it when one prediction is enough; everything here is compared with it.",
        place=0,
    ),
)  # fmt: skip
