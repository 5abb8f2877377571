"""What a job and those who use its network are fed with: its data, its device, and batches."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes import data as datasets
from multitudes.core.devices import device_of
from multitudes.data import Data
from multitudes.training.precision import AUTO, precision_dtype

__all__ = ["Batches", "data_of", "device_of", "inside_run", "precision_on"]


class Batches:
    """Scaled inputs, batch by batch, and where they are given targets as the network learned them.

    With a device they are there, and the inputs are as a network is called with them.
    """

    def __init__(
        self, data: Data, x: Tensor, y: Tensor | None = None, size: int = 256, device: torch.device | None = None
    ) -> None:
        self.data, self.x, self.y, self.size, self.device = data, x, y, size, device

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.x), self.size):
            rows = slice(start, start + self.size)
            x = self.data.scaled(self.x[rows])
            if self.device is not None:
                x = self.data.preprocess(x.to(self.device))
            if self.y is None:
                yield x
            else:
                y = self.y[rows]
                yield x, (y if self.data.classes else self.data.standardised(y)[:, None]).to(x.device)


def data_of(config: Mapping[str, Any], directory: Path) -> Data:
    """The data of a job, as its configuration names them: the digits, or a prepared file in the run directory.

    A configuration may be somebody else's, so that it cannot make this read other files, or reach the network.
    """
    if "file" not in config:
        if config.get("source") != "digits":
            raise ValueError(f"the data of a job must be a prepared file or digits, got {config.get('source')!r}")
        return datasets.load(**config)
    inside_run(directory, str(config["file"]))
    found = datasets.read(directory / config["file"])
    if config.get("fingerprint") not in (None, found.fingerprint):
        raise ValueError(f"data file {config['file']!r} is not the one that the study was made for: prepare it again")
    return found


def inside_run(directory: Path, file: str) -> Path:
    """The path of a file that a job's configuration names, which must lie in the run directory."""
    run = os.path.normpath(directory.absolute().parent.parent)
    path = os.path.normpath(directory.absolute() / file)
    if os.path.commonpath([run, path]) != run:
        raise ValueError(f"the configuration of {str(directory)!r} names {file!r}, a file outside of its run directory")
    return Path(path)


def precision_on(name: str | None, device: torch.device) -> str:
    """The precision of a name on a device; auto is bfloat16 on a GPU that computes with it."""
    if name == AUTO:
        return "float32" if precision_dtype(name, device) is None else "bfloat16"
    return name or "float32"
