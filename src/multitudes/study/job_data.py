"""What a job and those who use its network are fed with: its data, its device, and batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes import data as datasets
from multitudes.data import Data

__all__ = ["ScaledBatches", "data_of", "device_of"]


class ScaledBatches:
    """Scaled inputs, batch by batch, and where they are given targets as the network learned them."""

    def __init__(self, data: Data, x: Tensor, y: Tensor | None = None, size: int = 256) -> None:
        self.data, self.x, self.y, self.size = data, x, y, size

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        for start in range(0, len(self.x), self.size):
            rows = slice(start, start + self.size)
            x = self.data.scaled(self.x[rows])
            yield x if self.y is None else (x, self._target(self.y[rows]))

    def _target(self, y: Tensor) -> Tensor:
        return y if self.data.classes else self.data.standardised(y)[:, None]


def data_of(config: Mapping[str, Any], directory: Path) -> Data:
    """The data of a job, as its configuration names them; files are found from its directory."""
    if "file" not in config:
        return datasets.load(**config)
    found = datasets.read(directory / config["file"])
    if config.get("fingerprint") not in (None, found.fingerprint):
        raise ValueError(f"data file {config['file']!r} is not the one that the study was made for: prepare it again")
    return found


def device_of(name: str | None) -> torch.device:
    """The device of a name; auto, or None, is a GPU where there is one."""
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if str(name).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: there is no GPU here that torch can use")
    return torch.device(str(name))
