"""Any source into `Data`: `load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from multitudes.core.checks import check_count, check_number, check_seed
from multitudes.data.bad_rows import BadRows
from multitudes.data.columns import Column
from multitudes.data.digits import digits
from multitudes.data.images import decode, find_image, refit
from multitudes.data.prepared import read
from multitudes.data.sources import KINDS, Source, open_source, short_name
from multitudes.data.splits import split_rows, spread
from multitudes.data.tables import Encoder, choose_columns, find_target, targets
from multitudes.data.types import Data, Part

__all__ = ["load"]

TASKS = ("classification", "regression")


def load(
    source: str | Path,
    *,
    target: str | None = None,
    image: str | None = None,
    columns: Sequence[str] | None = None,
    split: str | None = None,
    task: str | None = None,
    fold: int = 0,
    size: int | tuple[int, int] | None = None,
    ood: str | Path | Sequence[str | Path] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    limit: int | None = None,
    skip_bad: bool = False,
) -> Data:
    """Read data to train and to measure networks on.

    `source` is one of

    - `"digits"`, which come with scikit-learn (see `digits`), or a file that `save` prepared (`.mtdata`): as they are;
    - a Hugging Face dataset, `"owner/name"` or `"owner/name:configuration"`;
    - a Parquet or CSV file, or a folder of them, whose names may tell their part (`train-00.parquet`, `test.csv`);
    - a folder of images, one folder a class, with maybe `train` and `test` above;
    - a `.npz` file with arrays `X` and `y`, and maybe `train_idx`, `test_idx`, of which `fold` picks one split.

    Where there is a column of images, `image`, or else the only one, these are the inputs, and `target` is the label,
    which is found by its type or name; images are decoded, all of them in memory, 1 byte a value, and resized to
    `size` (a number, or height and width), if that is given. All else is a table: `target` must be said, and `columns`
    are the features, or else all other columns. Texts become one feature a category of the training part, and are
    0 in all of them for a category that it has not (see `Encoder`). Texts, booleans and few whole numbers are predicted
    as classes, all other numbers by regression (see `targets`), unless `task` says otherwise.

    Parts that the source has are used, or those which a column `split` tells. What is missing is drawn by `seed` from
    the training part, a share of `validation` and `test` of it, each class in proportion. `limit` keeps that many rows
    of each part, drawn alike.

    `ood` are other sources, whose inputs (of their test part, if they have one) become foreign inputs: images
    converted to the shape of these, tables with the same columns.

    A row with a value missing, a number that is not finite or an image that cannot be read is an error, which names
    the first of them; with `skip_bad=True` such rows are left out and counted in `Data.dropped`.

    >>> load("digits", limit=50)
    Data('digits': 50 + 50 + 50 images of [1, 8, 8], 10 classes, 50 photographs)
    """
    others = [ood] if isinstance(ood, str | Path) else list(ood)
    for given in (source, *others):
        if not isinstance(given, str | Path) or not str(given):
            raise ValueError(f"a source must be {KINDS}, got {given!r}")
    names = [short_name(other) for other in others]
    wanted = _Wanted(target, image, columns, split, task, fold, _height_width(size), validation, test, seed, skip_bad)
    _check(wanted, limit, names)
    whole = _prepared(source)
    if whole is not None:
        if useless := wanted.given():
            raise ValueError(f"{useless[0]}= does not change {str(source)!r}, which is prepared: leave it out")
        data, encoder = whole if limit is None else _limited(whole, limit, seed), None
    else:
        data, encoder = _from_source(open_source(source, split, fold), short_name(source), wanted, limit)
    for name, other in zip(names, others, strict=True):
        if name in data.ood:
            raise ValueError(f"ood {name!r} is the name of foreign inputs that {data.name} has already")
        x, dropped = _foreign(other, data, encoder, wanted, limit)
        counts = {f"{name}: {reason}": count for reason, count in dropped.items()}
        data = replace(data, ood={**data.ood, name: x}, dropped={**data.dropped, **counts})
    return data


@dataclass(frozen=True)
class _Wanted:
    """The arguments of `load` that say how to read a source."""

    target: str | None
    image: str | None
    columns: Sequence[str] | None
    split: str | None
    task: str | None
    fold: int
    size: tuple[int, int] | None
    validation: float
    test: float
    seed: int
    skip_bad: bool

    def given(self) -> list[str]:
        """Which arguments were given that only a source that is not prepared can follow."""
        names = ("target", "image", "columns", "split", "task", "fold", "size")
        return [name for name in names if getattr(self, name)]


def _from_source(source: Source, name: str, wanted: _Wanted, limit: int | None) -> tuple[Data, Encoder | None]:
    image = find_image(source, wanted.image)
    target = find_target(source, wanted.target, image)
    inputs = _inputs(source, image, target, wanted)
    bad = BadRows(source, wanted.skip_bad)
    bad.check({**inputs, target: source.columns[target]})
    every = bad.without(torch.arange(len(source)))
    if not len(every):
        raise ValueError(f"{source.name} has no row without fault: {', '.join(bad.counts())}")
    y, classes = targets(target, source.columns[target], every, wanted.task, image is not None)
    groups = y if classes else torch.zeros(len(y))
    own = {part: bad.without(rows) for part, rows in source.parts.items()}
    try:
        rows = split_rows(own, groups, wanted.validation, wanted.test, wanted.seed)
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error
    rows = {part: _fewer(chosen, groups[chosen], limit, wanted.seed) for part, chosen in rows.items()}
    if image is None:
        encoder = Encoder.fitted(inputs, rows["train"])
        train, validation, test = (Part(encoder(inputs, chosen), y[chosen]) for chosen in rows.values())
        return Data(name, train, validation, test, classes, encoder.names, dropped=bad.counts()), encoder
    train, validation, test = _image_parts(source, image, rows, y, wanted.size, bad)
    return Data(name, train, validation, test, classes, dropped=bad.counts()), None


def _inputs(source: Source, image: str | None, target: str, wanted: _Wanted) -> dict[str, Column]:
    if image is None:
        if wanted.size is not None:
            raise ValueError(f"size= is for images, and {source.name} has none")
        return choose_columns(source, target, wanted.columns)
    if wanted.columns is not None:
        raise ValueError(f"columns= is for tables, and {source.name} has images in {image!r}")
    return {image: source.columns[image]}


def _image_parts(
    source: Source, image: str, rows: Mapping[str, Tensor], y: Tensor, size: tuple[int, int] | None, bad: BadRows
) -> list[Part]:
    """The images of all parts, decoded into one tensor, of which each part has a stretch."""
    order = torch.cat(list(rows.values()))
    files = source.columns[image].take(order)
    decoded = decode(files, lambda row: source.where(int(order[row])), size)
    bad.check_images(order, decoded)
    kept = torch.tensor(decoded.kept, dtype=torch.int64)
    ends = torch.tensor([len(chosen) for chosen in rows.values()]).cumsum(0)
    counts = [int((kept < end).sum()) for end in ends]
    parts = []
    for part, start, end in zip(rows, [0, *counts], counts, strict=False):
        if start == end:
            raise ValueError(f"{source.name} has no image in its {part} part that can be read")
        originals = () if decoded.resized else tuple(files[row] for row in decoded.kept[start:end])
        parts.append(Part(decoded.x[start:end], y[order[kept[start:end]]], originals))
    return parts


def _foreign(
    other: str | Path, data: Data, encoder: Encoder | None, wanted: _Wanted, limit: int | None
) -> tuple[Tensor, dict[str, int]]:
    """Inputs of another source, like those of `data`, and which rows were left out."""
    whole = _prepared(other)
    if whole is not None:
        if (whole.kind, data.kind) != ("image", "image") and whole.columns != data.columns:
            raise ValueError(f"ood {str(other)!r} must hold inputs like those of {data.name}, got {whole!r}")
        x = whole.test.x[_fewer(torch.arange(len(whole.test)), torch.zeros(len(whole.test)), limit, wanted.seed)]
        return (refit(x, data.shape) if data.kind == "image" else x), {}
    source = open_source(other)
    bad = BadRows(source, wanted.skip_bad)
    if data.kind == "table":
        if encoder is None:
            raise ValueError(f"ood {str(other)!r} cannot join the table {data.name}, which is prepared: add it before")
        inputs = {name: source.column("ood column", name) for name in encoder.categories}
        bad.check(inputs)
        return encoder(inputs, _foreign_rows(source, bad, wanted.seed, limit)), bad.counts()
    image = find_image(source, wanted.image if wanted.image in source.columns else None)
    if image is None:
        raise ValueError(f"ood {str(other)!r} must hold images, got the columns {', '.join(source.columns)}")
    bad.check({image: source.columns[image]})
    rows = _foreign_rows(source, bad, wanted.seed, limit)
    channels, height, width = data.shape
    files = source.columns[image].take(rows)
    decoded = decode(files, lambda row: source.where(int(rows[row])), (height, width), channels)
    bad.check_images(rows, decoded)
    return decoded.x, bad.counts()


def _foreign_rows(source: Source, bad: BadRows, seed: int, limit: int | None) -> Tensor:
    rows = bad.without(source.parts.get("test", torch.arange(len(source))))
    return _fewer(rows, torch.zeros(len(rows)), limit, seed)


def _prepared(source: str | Path) -> Data | None:
    """Data that are as they are; None where they are to be made of a source."""
    if source == "digits":
        return digits()
    return read(source) if Path(source).suffix.lower() == ".mtdata" else None


def _fewer(rows: Tensor, groups: Tensor, limit: int | None, seed: int) -> Tensor:
    return rows if limit is None or len(rows) <= limit else rows[spread(groups, limit, seed)]


def _limited(data: Data, limit: int, seed: int) -> Data:
    parts = []
    for part in data.parts.values():
        rows = _fewer(torch.arange(len(part)), part.y if data.classes else torch.zeros(len(part)), limit, seed)
        files = tuple(part.files[row] for row in rows.tolist()) if part.files else ()
        parts.append(Part(part.x[rows], part.y[rows], files))
    foreign = {name: x[_fewer(torch.arange(len(x)), torch.zeros(len(x)), limit, seed)] for name, x in data.ood.items()}
    train, validation, test = parts
    return replace(data, train=train, validation=validation, test=test, ood=foreign)


def _height_width(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    sides = (size, size) if isinstance(size, int) else size
    if sides is None:
        return None
    if not isinstance(sides, Sequence) or len(sides) != 2:
        raise ValueError(f"size must be a number of pixels, or height and width, got {size!r}")
    return check_count("size", sides[0]), check_count("size", sides[1])


def _check(wanted: _Wanted, limit: int | None, ood: Sequence[str]) -> None:
    check_number("validation", wanted.validation, 0, above=True, below=1)
    check_number("test", wanted.test, 0, above=True, below=1)
    if wanted.validation + wanted.test >= 1:
        raise ValueError(f"validation={wanted.validation} and test={wanted.test} must leave something to train on")
    check_seed(wanted.seed)
    if limit is not None:
        check_count("limit", limit)
    if wanted.task is not None and wanted.task not in TASKS:
        raise ValueError(f"task must be None, {' or '.join(TASKS)}, got {wanted.task!r}")
    if isinstance(wanted.columns, str):
        raise ValueError(f"columns must be a list of names, got {wanted.columns!r}")
    if isinstance(wanted.fold, bool) or not isinstance(wanted.fold, int) or wanted.fold < 0:
        raise ValueError(f"fold must be a whole number, 0 or more, got {wanted.fold!r}")
    if len(set(ood)) < len(ood):
        raise ValueError(f"ood must be sources of different names, got {', '.join(ood)}")
