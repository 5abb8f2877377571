"""Helpers for recipes: raw files from made-up results, random images, and a smoke run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from multitudes.lab.data import Data, Part
from recipes.report.raw import Raw

DATA = os.environ.get("MULTITUDES_DATA")


def with_data(source: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a slow test that requires a data set."""
    missing = DATA is None or not (Path(DATA) / source).exists()
    needed = pytest.mark.skipif(missing, reason=f"MULTITUDES_DATA names no folder with {source}")
    return lambda test: pytest.mark.slow(needed(test))


def raw_of(folder: Path, results: Mapping[str, Any], **about: Any) -> Raw:
    """Write the result of each piece to a folder, and read it like the report."""
    folder.mkdir(exist_ok=True)
    for piece, result in results.items():
        (folder / f"{piece}.json").write_text(json.dumps({**about, "result": result}))
    return Raw(folder)


def smoke(run: Callable[[Sequence[str]], None], pieces: Iterable[str], out: Path, capsys: Any) -> Raw:
    """Run a recipe at smoke scale twice; the second run does nothing."""
    arguments = ["--data-root", str(DATA), "--scale", "smoke", "--out", str(out), "--device", "cpu"]
    run(arguments)
    raw = Raw(out)
    assert set(raw.pieces) == set(pieces)
    capsys.readouterr()
    run(arguments)
    assert capsys.readouterr().out.splitlines() == [f"{piece}: already done" for piece in pieces]
    return raw


def noise(count: int, *shape: int) -> Data:
    """Return random images of ten classes."""
    torch.manual_seed(0)
    part = Part(torch.randint(256, (count, *shape), dtype=torch.uint8), torch.arange(count) % 10)
    return Data("noise", part, part, part, tuple("0123456789"))
