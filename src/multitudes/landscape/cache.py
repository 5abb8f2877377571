"""Cache of scores in a folder, from which an interrupted call resumes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from multitudes.base.archives import read_tensors, write_tensors
from multitudes.base.sealed_files import DamagedError

SECONDS = 5.0
"""Minimum seconds between writes of the file."""
ENTRY, WHAT = "multitudes.scores", "a cache of scores"


class Cache:
    """Scores `[L, K, C]` of K points in L landscapes, in memory and optionally in a file.

    The file name contains a fingerprint of the arguments of the call. Inside `with`, the file is written atomically
    every few seconds, and at the end also after an error or interrupt.

    >>> with Cache((1, 5, 2)) as cache:
    ...     cache.add(0, torch.tensor([3, 4]), torch.tensor([[0.5, 1.0], [0.7, 0.5]]).double())
    >>> cache.missing(0, at_once=2)
    [tensor([0, 1]), tensor([2])]
    """

    def __init__(
        self, shape: tuple[int, int, int], folder: str | os.PathLike[str] | None = None, fingerprint: str = ""
    ) -> None:
        self.table = torch.full(shape, torch.nan, dtype=torch.float64)
        self.done = torch.zeros(shape[:2], dtype=torch.bool)
        self.path = None if folder is None else Path(folder) / f"plane-{fingerprint}.safetensors"
        self.written = time.monotonic()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path is not None and self.path.exists():
            with suppress(DamagedError):  # a damaged file is computed again
                saved, _ = read_tensors(self.path, ENTRY, WHAT)
                self.table, self.done = saved["table"], saved["done"]

    def missing(self, landscape: int, at_once: int) -> list[Tensor]:
        """Return the points of a landscape without scores, in chunks of at most `at_once`."""
        return [part for part in (~self.done[landscape]).nonzero()[:, 0].split(at_once) if len(part)]

    def add(self, landscape: int, points: Tensor, rows: Tensor) -> None:
        """Store the scores `[N, C]` of the points `[N]`."""
        self.table[landscape, points] = rows
        self.done[landscape, points] = True
        if time.monotonic() - self.written > SECONDS:
            self.write()

    def write(self) -> None:
        """Write the file, if there is a folder."""
        self.written = time.monotonic()
        if self.path is not None:
            write_tensors(self.path, {"table": self.table, "done": self.done}, ENTRY, {}, WHAT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.write()


def fingerprint(*parts: Any) -> str:
    """Hash tensors by content and other values by `repr`.

    >>> fingerprint(torch.ones(2), "loss") == fingerprint(torch.ones(2), "loss") != fingerprint(torch.zeros(2), "loss")
    True
    """
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{list(part.shape)}".encode())
            values = part.detach().cpu().contiguous()
            digest.update(ctypes.string_at(values.data_ptr(), values.nbytes))
        elif isinstance(part, Mapping):
            add(list(part.items()))
        elif isinstance(part, (list, tuple)):
            digest.update(f"[{len(part)}".encode())
            for entry in part:
                add(entry)
        else:
            digest.update(f"{type(part).__name__}{part!r}".encode())

    add(parts)
    return digest.hexdigest()
