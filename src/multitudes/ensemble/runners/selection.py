"""Tables of the runners to try; the first row that fits counts.

The numbers come from `benchmarks/`. Every runner except the plain one is verified before use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Workload:
    """The device, mode, and kind and size of network and input, on which the choice of a runner depends."""

    device: str
    training: bool
    rows: int
    """Rows of the batch."""
    table: bool
    """True if the input is a table, `[B, F]` of floats."""
    shared: float = 0.0
    """Share of the multiply-adds before the first layer that differs between members."""
    products: float = inf
    """Bytes of the largest layer input over all members; infinite unless every differing layer is a batched product."""
    convolves: bool = False
    """True if the network has at least as many kernels as matrices."""
    work: float = 0.0
    """Rows of the batch times a member's parameters."""
    small: bool = False
    """True if a member spends most of its time on calling layers (`runners/member_size.py`)."""


@dataclass(frozen=True)
class Choice:
    """Runners to try, in order, for workloads with these facts; None means any."""

    runners: tuple[str, ...]
    device: str | None = None
    training: bool | None = None
    table: bool | None = None
    most_rows: float = inf
    least_shared: float = 0.0
    most_products: float = inf
    least_work: float = 0.0
    convolves: bool | None = None
    small: bool | None = None

    def fits(self, workload: Workload) -> bool:
        exact = ("device", "training", "table", "convolves", "small")
        return (
            all(getattr(self, name) in (None, getattr(workload, name)) for name in exact)
            and workload.rows <= self.most_rows
            and workload.shared >= self.least_shared
            and workload.products <= self.most_products
            and workload.work >= self.least_work
        )


VMAP_BEFORE_TILED = "tiled_late", "side_by_side", "tiled"
TILED_BEFORE_VMAP = "tiled_late", "tiled", "side_by_side"
"""All members at once: tiled at the first layer that differs, under vmap from there on, or tiled from the start.

vmap adds time to each function call, so it comes last if little is shared.
"""

SHARED = (
    Choice(VMAP_BEFORE_TILED, training=True, least_shared=0.05),
    Choice(VMAP_BEFORE_TILED, device="cuda", least_shared=0.05),
    Choice(VMAP_BEFORE_TILED, least_shared=0.25),
    Choice(TILED_BEFORE_VMAP, training=True),
    Choice(TILED_BEFORE_VMAP, device="cuda"),
    Choice(TILED_BEFORE_VMAP, table=True, most_rows=4096),
    Choice(TILED_BEFORE_VMAP, most_products=16e6),
    Choice(("one_by_one",)),
)
"""For members that share weights. A CPU takes longer for one large batch than for M small ones."""

INDEPENDENT = (
    Choice(("loop",), device="cuda", convolves=True, least_work=8e9),
    Choice(("packed",), device="cuda", convolves=True),
    Choice(("vmapped",), device="cuda"),
    Choice(("packed",), device="cpu", small=True),
    Choice(("loop",)),
)
"""For members with their own weights. On a CPU, one after the other is fastest unless they are small.

A GPU runs them together unless one member alone keeps it busy, such as a ResNet-50 on 512 images.
"""


def runners_for(table: Sequence[Choice], workload: Workload) -> tuple[str, ...]:
    """Return the runners of the first row that fits, in the order in which to try them.

    >>> runners_for(SHARED, Workload("cpu", training=False, rows=32, table=False))
    ('one_by_one',)
    """
    return next(row.runners for row in table if row.fits(workload))
