"""Minimum number of random networks that must be right, since a library that refuses everything is never wrong.

Counts are by method, over its runners, so that runners may change their names: those of the best runner, and all added
up. They may rise. One that falls needs a reason in the changelog.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

__all__ = ["CAMPAIGN", "FEW", "FLOORS", "Floor", "below", "sample"]

CAMPAIGN = range(1000)
"""The networks of the campaign, for which `FLOORS` is."""

FEW = range(10)
"""Networks of the quick sample; each method takes a quarter of them."""


class Floor(NamedTuple):
    """The fewest that are right."""

    best: int
    """Under the best runner."""
    all: int
    """Under all runners together."""


FLOORS: dict[str, tuple[Floor, Floor]] = {
    "fuse": (Floor(1000, 1930), Floor(2, 5)),
    "deep_ensemble": (Floor(1000, 1930), Floor(2, 5)),
    "packed": (Floor(444, 974), Floor(2, 5)),
    "snapshots": (Floor(1000, 1930), Floor(2, 3)),
    "batch_ensemble": (Floor(960, 960), Floor(3, 3)),
    "masksembles": (Floor(960, 960), Floor(3, 3)),
    "mimo": (Floor(395, 395), Floor(1, 1)),
    "heads": (Floor(1000, 1000), Floor(2, 2)),
    "lora": (Floor(915, 915), Floor(3, 3)),
    "mc_dropout": (Floor(907, 907), Floor(1, 1)),
    "drop_connect": (Floor(960, 960), Floor(2, 2)),
    "variance": (Floor(880, 880), Floor(2, 2)),
    "patched": (Floor(907, 907), Floor(2, 2)),
    "swa": (Floor(1000, 1000), Floor(3, 3)),
    "swag": (Floor(1000, 1000), Floor(2, 2)),
    "subspace": (Floor(1000, 1000), Floor(3, 3)),
    "smooth": (Floor(159, 159), Floor(3, 3)),
    "laplace": (Floor(1000, 1000), Floor(3, 3)),
}
"""The floors of each method: in the campaign, as in docs/networks.md of November 2026, and in its `sample`."""


def sample(method: str) -> list[int]:
    """The numbers of the networks that a method takes in the quick sample, the same however methods are ordered.

    >>> sample("packed")
    [0, 4, 8]
    """
    return [number for number in FEW if (number + crc32(method.encode())) % 4 == 0]


def below(right: Mapping[tuple[str, str], int], floors: Mapping[str, Floor]) -> list[str]:
    """Return a sentence per method with too few right networks; `right` counts by method and runner.

    >>> below({("packed", "loop"): 3, ("packed", "vmapped"): 2}, {"packed": Floor(best=3, all=7)})
    ['packed: 5 right by all runners, at least 7 must be']
    """
    by_method: dict[str, list[int]] = defaultdict(list)
    for (method, _), count in right.items():
        by_method[method].append(count)
    found = []
    for method, counts in by_method.items():
        best, total = floors[method]
        if max(counts) < best:
            found.append(f"{method}: {max(counts)} right by its best runner, at least {best} must be")
        if sum(counts) < total:
            found.append(f"{method}: {sum(counts)} right by all runners, at least {total} must be")
    return found
