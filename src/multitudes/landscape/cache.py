"""What long work has computed, kept in a folder, so that it can be interrupted and gone on with: `Cache`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from multitudes.core.files import replacing
from multitudes.landscape.weights import Scores

__all__ = ["Cache"]

SECONDS = 5.0
"""How often the file is written, at most."""

Row = list[Any]
"""Loss, accuracy and agreements of one point; accuracy and agreements may be None."""


class Cache:
    """The scores of numbered points of numbered landscapes, in memory and, where there is a folder, in a JSON file.

    The file bears the fingerprint of what was asked, so that different questions never meet. It is written inside
    `with`, every few seconds, and at the end of it, also where that is an error or an interrupt; whatever happens, it
    is whole.

    >>> with Cache() as kept:
    ...     kept.add(0, [3, 4], Scores(torch.tensor([0.5, 0.7]), None, None))
    >>> (0, 3) in kept.rows, (0, 5) in kept.rows
    (True, False)
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, name: str = "", fingerprint: str = "") -> None:
        self.rows: dict[tuple[int, int], Row] = {}
        self.fingerprint = fingerprint
        self.path = None if folder is None else Path(folder) / f"{name}-{fingerprint[:16]}.json"
        self.written = time.monotonic()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take_up(self.path)

    def add(self, landscape: int, points: Sequence[int], scores: Scores) -> None:
        """Keep the scores of some points."""
        columns = [scores.loss, scores.accuracy, scores.agreement]
        values = [[None] * len(points) if column is None else column.tolist() for column in columns]
        for point, *row in zip(points, *values, strict=True):
            self.rows[landscape, point] = row
        if time.monotonic() - self.written > SECONDS:
            self.write()

    def scores(self, landscape: int, count: int) -> Scores:
        """The scores of points 0 to `count - 1` of a landscape."""
        columns = zip(*(self.rows[landscape, point] for point in range(count)), strict=True)
        loss, accuracy, agreement = (
            None if column[0] is None else torch.tensor(column, dtype=torch.float64) for column in columns
        )
        assert loss is not None
        return Scores(loss, accuracy, agreement)

    def write(self) -> None:
        """Write the file, where there is one."""
        self.written = time.monotonic()
        if self.path is None:
            return
        rows = {f"{landscape} {point}": row for (landscape, point), row in self.rows.items()}
        with replacing(self.path) as unfinished:
            unfinished.write_text(json.dumps({"fingerprint": self.fingerprint, "points": rows}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.write()

    def _take_up(self, path: Path) -> None:
        if not path.exists():
            return
        held = json.loads(path.read_text())
        if held["fingerprint"] != self.fingerprint:  # the names of files are cut short
            raise ValueError(f"folder has {path.name!r} of something else: choose another folder")
        for key, row in held["points"].items():
            landscape, point = key.split()
            self.rows[int(landscape), int(point)] = row
