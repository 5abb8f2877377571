"""Assign rows to training, validation and test part: by name, or at random."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from multitudes.base.checks import needed
from multitudes.networks.seeds import mixed

PARTS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval"),
}
"""The parts, and the words that name them."""


def part_named(name: str) -> str | None:
    """Return the part named by a file or split, if any.

    >>> part_named("train-00-of-10.parquet"), part_named("my_val"), part_named("latest")
    ('train', 'validation', None)
    """
    words = re.split("[^a-z]+", name.lower())
    return next((part for word in words for part, names in PARTS.items() if word in names), None)


def spread(groups: Tensor, count: int, seed: int) -> Tensor:
    """Draw `count` of the N rows of `groups`, stratified by group with shares rounded up or down; sorted.

    >>> rows = spread(torch.tensor([0, 1, 0, 1, 0, 0]), 3, seed=0)
    >>> len(rows), int((rows % 2 == 1).sum())  # of four and two, two and one
    (3, 1)
    """
    every = (2 * torch.arange(count) + 1) * len(groups) // (2 * count)
    return _by_group(groups, seed)[every].sort().values


def fold_rows(groups: Tensor, folds: int, fold: int, seed: int) -> Tensor:
    """Return the rows of one of K folds of the N rows of `groups`, sorted: a partition, stratified by group.

    >>> rows = [fold_rows(torch.tensor([0, 1, 0, 1, 0, 1]), 3, fold, seed=0) for fold in range(3)]
    >>> sorted(torch.cat(rows).tolist()), [int((own % 2 == 1).sum()) for own in rows]
    ([0, 1, 2, 3, 4, 5], [1, 1, 1])
    """
    return _by_group(groups, seed)[fold::folds].sort().values


def _by_group(groups: Tensor, seed: int) -> Tensor:
    """Return all rows sorted by group, in random order within each."""
    # NumPy guarantees a stable stream for this generator, so splits never change.
    random = needed("numpy", "data", "a split").random.RandomState([seed % 2**32, seed >> 32])
    order = torch.from_numpy(random.permutation(len(groups)))
    return order[groups[order].argsort(stable=True)]


def split_rows(
    own: Mapping[str, Tensor],
    groups: Tensor,
    validation: float,
    test: float,
    seed: int,
    fold: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Return the rows of each part; parts that the source lacks are drawn from its training rows.

    `groups` `[N]` are the classes of all rows. Without a training part, a single part counts as all data. With `fold`
    `(f, K)`, fold f of a cross-validation is the test part.
    """
    own = {part: rows for part, rows in own.items() if len(rows)}
    if not own:
        raise ValueError("no rows are left")
    if "train" not in own:
        if len(own) > 1:
            raise ValueError(f"there is no training part, only {' and '.join(own)}")
        own = {"train": next(iter(own.values()))}
    pool, parts = own["train"], dict(own)
    if fold is not None:
        number, folds = fold
        if "test" in own:
            raise ValueError(f"folds={folds} must be left out, since the source has a test part")
        if folds > len(pool):
            raise ValueError(f"folds={folds} must be at most the number of rows, {len(pool)}")
        chosen = fold_rows(groups[pool], folds, number, mixed(seed, 2))
        parts["test"], pool = _split_off(pool, chosen)
    shares = {part: share for part, share in (("test", test), ("validation", validation)) if part not in parts}
    counts = {part: max(1, round(share * len(pool))) for part, share in shares.items()}
    if sum(counts.values()) >= len(pool):
        raise ValueError(f"{len(pool)} rows are too few to take {' and '.join(counts)} from")
    for number, (part, count) in enumerate(counts.items()):
        parts[part], pool = _split_off(pool, spread(groups[pool], count, mixed(seed, number)))
    return {"train": pool, "validation": parts["validation"], "test": parts["test"]}


def _split_off(pool: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rest = torch.ones(len(pool), dtype=torch.bool)
    rest[positions] = False
    return pool[positions], pool[rest]
