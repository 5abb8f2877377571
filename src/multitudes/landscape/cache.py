"""Scores of points, cached in a folder, so that an interrupted call continues where it stopped: `Cache`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from multitudes.core.files import DamagedError, read_json, write_json
from multitudes.landscape.weights import Scores

__all__ = ["Cache", "fingerprint"]

SECONDS = 5.0
"""How often the file is written, at most."""

Row = list[Any]
"""Loss, accuracy and agreements of one point; accuracy and agreements may be None."""


class Cache:
    """Scores of numbered points of numbered landscapes, in memory and, where there is a folder, in a JSON file.

    The file's name has the fingerprint of the call's arguments. It is written atomically inside `with`, every few
    seconds, and at its end, also after an error or an interrupt.

    >>> with Cache() as cache:
    ...     cache.add(0, [3, 4], Scores(torch.tensor([0.5, 0.7]), None, None))
    >>> cache.missing(0, 5)
    [0, 1, 2]
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, name: str = "", fingerprint: str = "") -> None:
        self.rows: dict[str, Row] = {}
        self.fingerprint = fingerprint
        self.path = None if folder is None else Path(folder) / f"{name}-{fingerprint[:16]}.json"
        self.written = time.monotonic()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._read(self.path)

    def missing(self, landscape: int, count: int) -> list[int]:
        """The points from 0 to `count - 1` of a landscape that have no scores yet."""
        return [point for point in range(count) if f"{landscape} {point}" not in self.rows]

    def add(self, landscape: int, points: Sequence[int], scores: Scores) -> None:
        """Store the scores of some points."""
        columns = [scores.loss, scores.accuracy, scores.agreement]
        values = [[None] * len(points) if column is None else column.tolist() for column in columns]
        for point, *row in zip(points, *values, strict=True):
            self.rows[f"{landscape} {point}"] = row
        if time.monotonic() - self.written > SECONDS:
            self.write()

    def scores(self, landscape: int, count: int) -> Scores:
        """The scores of points 0 to `count - 1` of a landscape."""
        columns = zip(*(self.rows[f"{landscape} {point}"] for point in range(count)), strict=True)
        loss, accuracy, agreement = (
            None if column[0] is None else torch.tensor(column, dtype=torch.float64) for column in columns
        )
        assert loss is not None
        return Scores(loss, accuracy, agreement)

    def write(self) -> None:
        """Write the file, where there is one."""
        self.written = time.monotonic()
        if self.path is not None:
            write_json(self.path, {"fingerprint": self.fingerprint, "points": self.rows})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.write()

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            held = read_json(path)
        except DamagedError:
            return  # its points are computed again
        if held["fingerprint"] != self.fingerprint:  # the names of files are cut short
            raise ValueError(f"folder has {path.name!r} of another call: choose another folder")
        self.rows = held["points"]


def fingerprint(*parts: Any) -> str:
    """A hash of tensors, and of anything else by its `repr`.

    >>> fingerprint(torch.ones(2), "loss") == fingerprint(torch.ones(2), "loss") != fingerprint(torch.zeros(2), "loss")
    True
    """
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{list(part.shape)}".encode())
            held = part.detach().cpu().contiguous()
            digest.update(ctypes.string_at(held.data_ptr(), held.nbytes))
        elif isinstance(part, Mapping):
            add([entry for item in part.items() for entry in item])
        elif isinstance(part, (list, tuple)):
            digest.update(f"[{len(part)}".encode())
            for entry in part:
                add(entry)
        else:
            digest.update(f"{type(part).__name__}{part!r}".encode())

    add(parts)
    return digest.hexdigest()
