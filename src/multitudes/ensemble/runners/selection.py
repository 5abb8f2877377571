"""Runner selection: a table; the first row that fits lists the runners to try.

The numbers come from `benchmarks/`. Every runner except the plain one is verified before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Workload:
    """The facts that the choice depends on: device, mode, and the kind and size of network and input."""

    device: str
    training: bool
    rows: int
    """Rows of the batch."""
    table: bool
    """True where the input is a table, `[B, F]` of floats."""
    shared: float = 0.0
    """Share of the multiply-adds that all members have in common, before the first layer that differs."""
    products: float = inf
    """Bytes that all members' input of a layer takes, where all layers that differ are batched products."""
    convolves: bool = False
    """True if the network has at least as many kernels as matrices."""
    small: bool = False
    """True if calling a member's layers takes most of its time (`runners/member_size.py`)."""


@dataclass(frozen=True)
class Choice:
    """Runners to try, in order, and the uses that they are for; None stands for any."""

    runners: tuple[str, ...]
    device: str | None = None
    training: bool | None = None
    table: bool | None = None
    most_rows: float = inf
    least_shared: float = 0.0
    most_products: float = inf
    convolves: bool | None = None
    small: bool | None = None

    def fits(self, workload: Workload) -> bool:
        exact = ("device", "training", "table", "convolves", "small")
        return (
            all(getattr(self, name) in (None, getattr(workload, name)) for name in exact)
            and workload.rows <= self.most_rows
            and workload.shared >= self.least_shared
            and workload.products <= self.most_products
        )


LATE, EARLY = ("tiled_late", "side_by_side", "tiled"), ("tiled_late", "tiled", "side_by_side")
"""All members in one run: tiled by the first layer that differs, under vmap from there on, or tiled from the start.

Vmap takes some time for each function, so it comes last where little is shared.
"""

SHARED = (
    Choice(LATE, training=True, least_shared=0.05),
    Choice(LATE, device="cuda", least_shared=0.05),
    Choice(LATE, least_shared=0.25),
    Choice(EARLY, training=True),
    Choice(EARLY, device="cuda"),
    Choice(EARLY, table=True, most_rows=4096),
    Choice(EARLY, most_products=16e6),
    Choice(("one_by_one",)),
)
"""Members that share weights: a CPU takes longer for one large batch than for M small ones."""

INDEPENDENT = (
    Choice(("packed",), device="cuda", convolves=True),
    Choice(("vmapped",), device="cuda"),
    Choice(("packed",), device="cpu", small=True),
    Choice(("loop",)),
)
"""Members that share no weight: a CPU is fastest with one after the other, unless they are small; a GPU, with all at
once, which fills it."""


def runners_for(table: Sequence[Choice], workload: Workload) -> tuple[str, ...]:
    """Return the runners to try, in order: those of the first row that fits.

    >>> runners_for(SHARED, Workload("cpu", training=False, rows=32, table=False))
    ('one_by_one',)
    """
    return next(row.runners for row in table if row.fits(workload))
