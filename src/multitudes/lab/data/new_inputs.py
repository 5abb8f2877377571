"""New inputs for a trained network, from files, folders, tables and texts, with or without targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from multitudes.base.checks import plural
from multitudes.lab.data.assembly import BadRows, prepared
from multitudes.lab.data.kinds import kind_of_source
from multitudes.lab.data.parts import Data
from multitudes.lab.data.sources import Source, open_source
from multitudes.lab.data.tables.columns import Column
from multitudes.lab.data.tables.table import LoadOptions, find_target


@dataclass(frozen=True)
class Inputs:
    """Inputs `[N, ...]` like those of training, each with a name.

    `bad` counts unreadable inputs; `notes` are sentences on unknown, imputed or truncated values.
    """

    names: list[str]
    x: Tensor
    bad: int
    notes: Sequence[str]


def read_inputs(paths: Sequence[Path], data: Data, skip_bad: bool = False, texts: Sequence[str] = ()) -> Inputs:
    """Read image files and folders, or tables, depending on `data`; unreadable inputs raise or are skipped.

    `texts` are given directly as inputs, if `data` are texts.
    """
    sources = [("text", texts_source(texts, data))] if texts else []
    for path in paths:
        if not path.exists():
            raise ValueError(f"the file or folder {str(path)!r} does not exist")
        sources.append((str(path), data.kind.open(path)))
    return inputs_of(sources, data, skip_bad)


def inputs_of(sources: Sequence[tuple[str, Source]], data: Data, skip_bad: bool = False) -> Inputs:
    """Encode the rows of sources; their names are used if there are several."""
    names: list[str] = []
    filled: Counter[str] = Counter()
    parts, notes, bad, unknown = [], [], 0, 0
    for name, source in sources:
        columns = data.encoder.columns(source)
        faults = BadRows(source, skip_bad, data.kind, columns)
        rows = faults.usable()
        encoded = faults.encode(data.encoder, columns, rows)
        for row in rows[encoded.kept].tolist():
            place = source.place(row) if len(sources) == 1 else f"{name} {source.place(row)}"
            names.append(source.where(row) if source.files else place)
        parts.append(encoded.x)
        bad, unknown = bad + len(faults.rows), unknown + encoded.unknown
        filled.update(encoded.filled)
        notes += list(encoded.notes.values())
    if not names:
        raise ValueError(f"no input to predict in {', '.join(name for name, _ in sources)}")
    return Inputs(names, torch.cat(parts), bad, [*_remarks(unknown, filled), *notes])


def texts_source(texts: Sequence[str], data: Data) -> Source:
    """Wrap texts in a source; raise if `data` are not texts."""
    if not data.kind.is_text:
        raise ValueError(
            f"text={texts[0]!r} needs a network trained on texts; this one was trained on {data.kind.inputs}"
        )
    column = data.encoder.features[0].column
    columns = {column: Column("text", list(texts))}
    return Source("the texts", columns, {"train": torch.arange(len(texts))}, [(text, 1) for text in texts], files=True)


def _remarks(unknown: int, filled: Mapping[str, int]) -> list[str]:
    """Return sentences on unknown categories and missing values."""
    rows = "1 row has" if unknown == 1 else f"{unknown} rows have"
    sentences = [f"{rows} a category that does not occur in the training data"] if unknown else []
    return sentences + [
        f"{name!r} is missing in {plural(count, 'row')} and was imputed as in training"
        for name, count in filled.items()
    ]


def labelled(
    source: str, data: Data, target: str | None = None, image: str | None = None, skip_bad: bool = False
) -> tuple[Tensor, Tensor, list[str]]:
    """Read inputs like those of `data` and their targets, from a source's test part, or from all rows if it has none.

    Also return sentences on bad rows that were left out and on imputed values.
    """
    if (other := prepared(source)) is not None:
        if (other.kind, other.columns, other.task) != (data.kind, data.columns, data.task):
            raise ValueError(f"the data must match the training data, {data!r}, got {other!r}")
        return data.kind.refit(other.test.x, data.shape), _matched(other.test.y, other.classes, data), []
    opened = open_source(source)
    if data.kind.is_text:
        kind, found = data.kind, list(data.encoder.columns(opened))
    else:
        kind, found = kind_of_source(opened, LoadOptions(image=image), target)
    if kind is not data.kind:
        raise ValueError(f"{opened.name} must hold {data.kind.inputs}, like the training data")
    name = find_target(opened, target, found)
    columns = data.encoder.columns(opened, image)
    bad = BadRows(opened, skip_bad, kind, columns, name)
    y, classes = bad.targets(name, bool(data.classes))
    rows = bad.usable("test")
    encoded = bad.encode(data.encoder, columns, rows)
    if not encoded.kept:
        raise ValueError(f"{opened.name} has no usable row")
    left_out = [f"Left out {plural(count, 'bad row')}: {reason}" for reason, count in bad.counts().items()]
    notes = [*left_out, *_remarks(encoded.unknown, encoded.filled), *encoded.notes.values()]
    return encoded.x, _matched(y[rows[encoded.kept]], classes, data), notes


def _matched(y: Tensor, classes: Sequence[str], data: Data) -> Tensor:
    """Map targets to the class indices of training, by name."""
    if not data.classes:
        return y
    for number in y.unique().tolist():
        if classes[number] not in data.classes:
            known = ", ".join(data.classes[:20])
            raise ValueError(f"the data contain the class {classes[number]!r}; the network's classes are {known}")
    numbers = [data.classes.index(name) if name in data.classes else -1 for name in classes]
    return torch.tensor(numbers)[y]
