"""New inputs for a trained network, from image files, folders and tables, with or without what is right for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from multitudes import data as datasets
from multitudes.data import Data
from multitudes.data.columns import Column
from multitudes.data.images import decode, find_image, refit
from multitudes.data.sources import IMAGES, Source, open_source
from multitudes.data.tables import find_target, targets

__all__ = ["Inputs", "labelled", "read_inputs"]


@dataclass(frozen=True)
class Inputs:
    """Inputs like those that a network was trained on, each with a name, and what could not be read."""

    names: list[str]
    x: Tensor
    bad: Mapping[str, str] = field(default_factory=dict)
    """The reason, by name."""
    unknown: int = 0
    """How many rows have a category that the training data had not."""


def read_inputs(paths: Sequence[Path], data: Data, skip_bad: bool = False) -> Inputs:
    """Image files and folders of them, or tables, whichever `data` is; what cannot be read is an error, or left out."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no file or folder {str(path)!r}")
    found = _images(paths, data) if data.kind == "image" else _tables(paths, data)
    if found.bad and not skip_bad:
        first = [f"{name}: {reason}" for name, reason in list(found.bad.items())[:3]]
        more = f"; and {len(found.bad) - 3} more" if len(found.bad) > 3 else ""
        raise ValueError(f"{len(found.bad)} of the inputs cannot be used: {'; '.join(first)}{more}. --skip-bad goes on")
    if not len(found.x):
        raise ValueError(f"there is no input to predict in {', '.join(map(str, paths))}")
    return found


# -- images ------------------------------------------------------------------------------------------------


def _images(paths: Sequence[Path], data: Data) -> Inputs:
    files = [file for path in paths for file in _image_files(path)]
    channels, height, width = data.shape
    names = [str(file) for file in files]
    decoded = decode([file.read_bytes() for file in files], lambda row: names[row], (height, width), channels)
    bad = {names[row]: f"the image is unreadable ({reason})" for row, reason in decoded.bad.items()}
    return Inputs([names[row] for row in decoded.kept], decoded.x, bad)


def _image_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES and file.is_file())
    if not files:
        raise ValueError(f"folder {str(path)!r} holds no images")
    return files


# -- tables ------------------------------------------------------------------------------------------------


def _tables(paths: Sequence[Path], data: Data) -> Inputs:
    names: list[str] = []
    parts: list[Tensor] = []
    bad: dict[str, str] = {}
    unknown = 0
    for path in paths:
        source = open_source(path)
        x, reasons, strange = _features(source, data.columns)
        own = [f"{path} row {row}" if len(paths) > 1 else str(row) for row in range(len(source))]
        usable = torch.tensor([row not in reasons for row in range(len(source))])
        parts.append(x[usable])
        names += [name for row, name in enumerate(own) if row not in reasons]
        bad |= {f"{source.where(row)}": reason for row, reason in sorted(reasons.items())}
        unknown += int((strange & usable).sum())
    return Inputs(names, torch.cat(parts), bad, unknown)


def _features(source: Source, names: Sequence[str]) -> tuple[Tensor, dict[int, str], Tensor]:
    """The features of all rows, `[N, F]`, why rows cannot be used, and which have a category that is not known."""
    columns, known = _known(source, names)
    bad = dict(source.broken)
    for name, column in columns.items():
        for row in column.missing():
            bad.setdefault(row, f"{name!r} is missing" + (" or no finite number" if column.kind == "number" else ""))
    features, strange = [], torch.zeros(len(source), dtype=torch.bool)
    for name, categories in known.items():
        values = columns[name].values
        if not categories:
            features.append(values.float().nan_to_num())
            continue
        ones = [torch.tensor([value == category for value in values]) for category in categories]
        strange |= ~torch.stack(ones).any(0)
        features += [one.float() for one in ones]
    return torch.stack(features, 1), bad, strange


def _known(source: Source, names: Sequence[str]) -> tuple[dict[str, Column], dict[str, list[str]]]:
    """The columns that features are made of, and the categories of each, in the order of the features."""
    known: dict[str, list[str]] = {}
    for name in names:
        if name in source.columns:
            known[name] = []
            continue
        owners = [column for column in source.columns if name.startswith(f"{column}=")]
        if not owners:
            has = ", ".join(source.columns)
            raise ValueError(f"{source.name} must have the column {name.partition('=')[0]!r}; it has {has}")
        owner = max(owners, key=len)
        known.setdefault(owner, []).append(name.removeprefix(f"{owner}="))
    columns = {name: source.columns[name] for name in known}
    for name, categories in known.items():
        kind = "text" if categories else "number"
        if columns[name].kind != kind:
            raise ValueError(f"column {name!r} of {source.name} must hold {kind}s, as in training")
    return columns, known


# -- with targets ------------------------------------------------------------------------------------------


def labelled(
    source: str, data: Data, target: str | None = None, image: str | None = None, skip_bad: bool = False
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Inputs like those of `data` and what is right for them, of a source's test part, or of all where it has none.

    The last is how many bad rows were left out, by reason.
    """
    if source == "digits" or source.lower().endswith(".mtdata"):
        return _prepared(datasets.load(source), data)
    opened = open_source(source)
    column = find_image(opened, image)
    if (column is None) != (data.kind == "table"):
        kind = "a table" if data.kind == "table" else "images"
        raise ValueError(f"{opened.name} must hold {kind}, like the data of the training")
    name = find_target(opened, target, column)
    bad = dict(opened.broken)
    for row in opened.columns[name].missing():
        bad.setdefault(row, f"{name!r} is missing")
    if column is None:
        x, own, _ = _features(opened, data.columns)
    else:
        x, own = _pixels(opened, column, data)
    bad |= own
    if bad and not skip_bad:
        row, reason = min(bad.items())
        raise ValueError(f"{opened.name} has {len(bad)} bad rows, {opened.where(row)}: {reason}. --skip-bad goes on")
    every = torch.tensor([row for row in range(len(opened)) if row not in bad], dtype=torch.int64)
    y, classes = targets(name, opened.columns[name], every, data.task, column is not None)
    rows = opened.parts.get("test", torch.arange(len(opened)))
    rows = rows[torch.isin(rows, every)]
    if not len(rows):
        raise ValueError(f"{opened.name} has no row that can be used")
    return x[rows], _matched(y[rows], classes, data), _counts(bad)


def _pixels(source: Source, column: str, data: Data) -> tuple[Tensor, dict[int, str]]:
    channels, height, width = data.shape
    files = [b"" if file is None else file for file in source.columns[column].values]
    decoded = decode(files, source.where, (height, width), channels)
    x = torch.zeros(len(files), *data.shape, dtype=torch.uint8)
    x[decoded.kept] = decoded.x
    return x, {row: "the image is unreadable" for row in decoded.bad}


def _prepared(other: Data, data: Data) -> tuple[Tensor, Tensor, dict[str, int]]:
    if other.kind != data.kind or other.columns != data.columns or other.task != data.task:
        raise ValueError(f"the data must be like those of the training, {data!r}, got {other!r}")
    x = refit(other.test.x, data.shape) if data.kind == "image" else other.test.x
    return x, _matched(other.test.y, other.classes, data), {}


def _matched(y: Tensor, classes: Sequence[str], data: Data) -> Tensor:
    """Targets with the numbers of the training's classes, by their names."""
    if not data.classes:
        return y
    for number in y.unique().tolist():
        if classes[number] not in data.classes:
            known = ", ".join(data.classes[:20])
            raise ValueError(f"the data have the class {classes[number]!r}; the network knows {known}")
    numbers = [data.classes.index(name) if name in data.classes else -1 for name in classes]
    return torch.tensor(numbers)[y]


def _counts(bad: Mapping[int, str]) -> dict[str, int]:
    reasons = list(bad.values())
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
