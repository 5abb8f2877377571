"""Base of recipes that are scripts: a command line, two scales, and resumable pieces.

    python -m recipes.variance_mnist --data-root DIR --scale smoke --out runs/variance_mnist

A recipe consists of named pieces. The result of each is written to `OUT/PIECE.json` with its provenance. Repeating the
command runs missing pieces, and `--only` selects pieces, so a long recipe can run in parts or in parallel.
`python -m recipes.collect OUT` copies the pieces to `results/`.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.base.sealed_files import write_atomically
from multitudes.lab.data import Data, Loader
from multitudes.lab.study.run.costs import commit, machine, versions
from multitudes.networks.devices import device_of

SCALES = ("smoke", "full")
"""smoke: minutes on two cores with a subset of the data, as a test; full: one GPU, up to half an hour."""

ROOT = Path(__file__).parents[1]


class Recipe:
    """A recipe as configured on the command line: its data, its results, and the pieces to run.

    `work` has a function per piece, in order of execution; its result must be plain JSON.
    """

    def __init__(
        self, name: str, description: str | None, work: Mapping[str, Callable[[Recipe], dict[str, Any]]]
    ) -> None:
        self.name, self.work = name, work
        self.description = (description or "").strip()
        self._seen: dict[str, list[str]] = {}
        self._read_before: dict[str, Data] = {}

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Parse the command line, and run the selected pieces that are not done."""
        self._read(arguments)
        for piece in self.pieces:
            path = self.out / f"{piece}.json"
            if path.is_file():
                print(f"{piece}: already done")
                continue
            self._seen.clear()
            start = time.time()
            result = self.work[piece](self)
            seconds = time.time() - start
            write_atomically(
                path, json.dumps(self._about(piece, seconds) | {"result": result}, indent=1, allow_nan=False)
            )
            print(f"{piece}: {seconds:.0f} s", flush=True)

    def data(self, source: str, **options: Any) -> Data:
        """Load data from the data root, once for all pieces; each piece that uses them records their fingerprint."""
        asked = json.dumps([source, options], sort_keys=True, default=str)
        if asked not in self._read_before:
            self._read_before[asked] = mt.data.load(self.data_root / source, **options)
        data = self._read_before[asked]
        self.saw(source, data.fingerprint)
        return data

    def saw(self, source: str, fingerprint: str) -> None:
        """Record the data used by the piece; several parts of a source get a joint fingerprint."""
        seen = self._seen.setdefault(source, [])
        if fingerprint not in seen:
            seen.append(fingerprint)

    @property
    def smoke(self) -> bool:
        """True at the scale that only tests the recipe."""
        return self.scale == "smoke"

    @property
    def fast(self) -> dict[str, Any]:
        """Arguments that make `mt.fit` fast on a GPU, without effect elsewhere."""
        on_gpu = self.device.type == "cuda"
        return {"precision": "bfloat16" if on_gpu else "float32", "channels_last": on_gpu}

    @property
    def networks(self) -> Path:
        """Folder for trained networks, which are not part of the results."""
        folder = self.out / "networks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _read(self, arguments: Sequence[str] | None) -> None:
        parser = argparse.ArgumentParser(
            prog=f"python -m recipes.{self.name}",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--data-root", type=Path, required=True, help="folder with the data sets")
        parser.add_argument("--out", type=Path, default=Path("runs") / self.name, help="output folder (%(default)s)")
        parser.add_argument("--scale", choices=SCALES, default="full", help="amount of work (%(default)s)")
        parser.add_argument("--device", help="cpu, cuda or auto (auto)")
        parser.add_argument("--only", default=",".join(self.work), help="pieces to run (%(default)s)")
        given = parser.parse_args(arguments)
        self.pieces = [piece for piece in given.only.split(",") if piece]
        for piece in self.pieces:
            if piece not in self.work:
                parser.error(f"--only must be among {', '.join(self.work)}, got {piece!r}")
        if not given.data_root.is_dir():
            parser.error(f"--data-root must be a folder, got {str(given.data_root)!r}, which does not exist")
        self.data_root, self.out, self.scale = given.data_root, given.out, given.scale
        self.device: torch.device = device_of(given.device)
        self.commit = commit()  # read now: the files may change during the run
        self.command = shlex.join(["python", "-m", f"recipes.{self.name}", "--scale", self.scale])

    def _about(self, piece: str, seconds: float) -> dict[str, Any]:
        return {
            "recipe": self.name,
            "piece": piece,
            "scale": self.scale,
            "command": self.command,
            "commit": self.commit,
            "data": {source: _together(seen) for source, seen in self._seen.items()},
            "machine": machine(self.device),
            "versions": versions(),
            "seconds": seconds,
        }


def _together(fingerprints: Sequence[str]) -> str:
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("".join(fingerprints).encode()).hexdigest()


# -- networks and numbers ----------------------------------------------------------------------------------


def of_pixels(network: nn.Module, data: Data) -> nn.Module:
    """Put the preprocessing into the network: it takes images in [0, 1], and gradients refer to pixels."""
    seen = copy.deepcopy(data.preprocessing).to(next(network.parameters()).device)
    return nn.Sequential(seen, network).eval()


def loaded(path: Path, piece: str) -> mt.Multitude:
    """Load the network saved by a piece."""
    if not path.is_file():
        raise ValueError(f"the network {str(path)!r} is missing: run the piece {piece} first")
    net = mt.load(path)
    assert isinstance(net, mt.Multitude)
    return net


def accuracy(net: mt.Multitude, loader: Loader, draws: int | None) -> float:
    """Return the accuracy of the mean over draws; 0 draws use the expectations, None is for deterministic networks."""
    right = sum((net.predict(x, draws=draws, seed=number).label == y).sum() for number, (x, y) in enumerate(loader))
    return round(int(right) / len(loader.part), 5)


def accuracies(net: mt.Multitude, loader: Loader, draws: int) -> dict[str, float]:
    """Return the accuracy by the three procedures of the variance networks paper, section 3."""
    return {
        "stochastic": accuracy(net, loader, 1),
        "deterministic": accuracy(net, loader, 0),
        "ensemble": accuracy(net, loader, draws),
    }


def rounded(value: Any, digits: int = 6) -> Any:
    """Convert tensors to lists and round numbers to this many digits, for small and readable files.

    Non-finite numbers, which JSON cannot represent, become None.

    >>> rounded({"nll": [0.123456789, 1e-9, math.inf], "loss": torch.tensor([0.5])})
    {'nll': [0.123457, 1e-09, None], 'loss': [0.5]}
    """
    if isinstance(value, Tensor):
        return rounded(value.tolist(), digits)
    if isinstance(value, Mapping):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(each, digits) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
