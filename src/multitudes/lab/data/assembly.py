"""Turn any source into `Data`: `load` and `add_ood`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from multitudes.base.checks import check_choice, check_count, check_number, check_seed
from multitudes.lab.data.digits import digits
from multitudes.lab.data.kinds import KINDS, Encoder, Kind, kind_of_source
from multitudes.lab.data.parts import Data, Part
from multitudes.lab.data.prepared_file import read
from multitudes.lab.data.preprocessing import NUMBERS
from multitudes.lab.data.sources import SOURCES, Source, open_source, short_name
from multitudes.lab.data.splits import split_rows, spread
from multitudes.lab.data.tables.column_types import ColumnReading
from multitudes.lab.data.tables.columns import Column, Encoded
from multitudes.lab.data.tables.table import LoadOptions, find_target, targets

TASKS = {"classification": True, "regression": False}
"""Values of `task=`, and whether their targets are classes."""


def load(
    source: str | Path,
    *,
    target: str | None = None,
    image: str | None = None,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    read_as: Mapping[str, str] | None = None,
    split: str | None = None,
    task: str | None = None,
    fold: int = 0,
    folds: int | None = None,
    size: int | tuple[int, int] | None = None,
    ood: str | Path | Sequence[str | Path] = (),
    validation: float | None = None,
    test: float = 0.2,
    seed: int = 0,
    limit: int | None = None,
    skip_bad: bool = False,
    numbers: str = NUMBERS[0],
    text: str | None = None,
    tokenizer: str | None = None,
    max_length: int | None = None,
    pixels: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Data:
    """Read data to train and evaluate networks on.

    Images are decoded into memory, 1 byte per value. A column of a table becomes numbers, dates (year, month, day,
    weekday, hour, and a running number of days) or categories (one feature each; rare ones share one). Ids and constant
    columns are left out. Missing numbers and dates are filled with the median and flagged by an extra feature; a
    missing text is a category. `Data.reading` describes how each column was read.

    Parts that the source has are kept; missing ones are drawn from its training part, stratified by class.

    Args:
        source: One of

            - `"digits"`, from scikit-learn (see `digits`);
            - a file that `save` wrote (`.mtdata`);
            - a Hugging Face dataset, `"owner/name"` or `"owner/name:configuration"`;
            - a Parquet or CSV file, or a folder of them; file names may contain the part (`train-00.parquet`);
            - a folder of images, one folder per class, optionally inside `train` and `test`;
            - a `.npz` file with arrays `X` and `y`, and optionally `train_idx` and `test_idx` for its own splits.
        target: Column to predict, required for tables; otherwise, the label is found by its type or name. Texts,
            booleans and integers with few values are classes, other numbers regression (see `targets`).
        image: Column of images; needed if there are several. Images take precedence over a table.
        columns: Features of a table; default: all columns except the target and `drop`.
        drop: Columns of a table to leave out.
        read_as: Types of columns, such as `{"day": "date", "zip": "category"}`; also `"number"`, `"text"` (left out),
            and `"dmy"` or `"mdy"` for dates with the day or the month first.
        split: Column with the part of each row.
        task: "classification" or "regression", to override the type of the target.
        fold: With `folds`, the fold used as test part; otherwise the split of a `.npz` file.
        folds: Number of folds of a cross-validation.
        size: Size to which images are resized: a number, or height and width.
        ood: Other sources of out-of-distribution inputs (their test part, if any): images converted to the shape of
            the data, or tables with the same columns.
        validation: Share of the training part for validation; default: 0.15 for tables, otherwise 0.1.
        test: Share of the training part for testing.
        seed: Seed of the drawn parts.
        limit: Maximum number of rows per part.
        skip_bad: Leave out rows without target, without any input, or with an unreadable image, and count them in
            `Data.dropped`. By default, they raise an error that names the first ones.
        numbers: Preprocessing of a table's numbers: "quantile" for normal scores, or "standard" for zero mean and unit
            standard deviation, fitted to the training part.
        text: Column of texts; needed if there are several.
        tokenizer: Hugging Face folder, or name in the hub's local cache. With it, the inputs are texts as token ids.
        max_length: Maximum number of tokens per text; default: 256.
        pixels: Mean and standard deviation of each image channel, for pixels in 0 to 1; default: those of the training
            part.

    Example:
        >>> load("digits", limit=50)
        Data('digits': 50 + 50 + 50 images of [1, 8, 8], 10 classes, 50 photographs)
    """
    others = [ood] if isinstance(ood, str | Path) else list(ood)
    for given in (source, *others):
        if not isinstance(given, str | Path) or not str(given):
            raise ValueError(f"a source must be {SOURCES}, got {given!r}")
    if text is not None and tokenizer is None:
        raise ValueError(f"tokenizer= must name the tokenizer for the texts in {text!r}: a Hugging Face folder")
    options = LoadOptions(
        target, split, task, fold, folds, validation, test, seed, limit, skip_bad, image, _height_width(size), columns,
        drop, read_as or {}, text, tokenizer, max_length, pixels,
    )  # fmt: skip
    _check(options)
    check_choice("numbers", numbers, NUMBERS)
    whole = prepared(source)
    if whole is None:
        opened = open_source(source, split, fold if folds is None else 0)
        if folds is not None and opened.arrays and "test" in opened.parts:
            opened, options = open_source(source, split, fold), replace(options, folds=None)
        data = _from_source(opened, short_name(source), options)
        data = replace(data, numbers=numbers) if data.kind.has_columns else data
    elif useless := _given(options, "target", "split", "task", "fold", "folds", *_options()):
        raise ValueError(f"{useless[0]}= has no effect on {str(source)!r}, which is prepared: leave it out")
    else:
        data = whole if limit is None else _limited(whole, limit, seed)
    return add_ood(data, others, image=image, skip_bad=skip_bad, seed=seed, limit=limit)


def add_ood(
    data: Data,
    sources: Sequence[str | Path],
    *,
    image: str | None = None,
    skip_bad: bool = False,
    seed: int = 0,
    limit: int | None = None,
) -> Data:
    """Add the inputs of other sources as out-of-distribution inputs; for the arguments, see `load`."""
    for source in sources:
        name = short_name(source)
        if name in data.ood:
            raise ValueError(f"{data.name} already has out-of-distribution inputs with the name {name!r}")
        whole = prepared(source)
        if whole is None:
            opened = open_source(source)
            inputs = data.encoder.columns(opened, image)
            bad = BadRows(opened, skip_bad, data.kind, inputs)
            rows = bad.usable("test")
            rows = rows[_sample(torch.zeros(len(rows)), limit, seed)]
            x = bad.encode(data.encoder, inputs, rows).x
            counts = bad.counts()
        elif (whole.kind, whole.columns) != (data.kind, data.columns):
            raise ValueError(f"ood {str(source)!r} must hold inputs like those of {data.name}, got {whole!r}")
        else:
            rows = _sample(torch.zeros(len(whole.test)), limit, seed)
            x, counts = data.kind.refit(whole.test.x[rows], data.shape), {}
        dropped = {f"{name}: {reason}": count for reason, count in counts.items()}
        data = replace(data, ood={**data.ood, name: x}, dropped={**data.dropped, **dropped})
    return data


def _given(options: LoadOptions, *names: str) -> list[str]:
    return [name for name in names if getattr(options, name)]


def _options() -> list[str]:
    return [option for kind in KINDS for option in kind.options]


def _from_source(source: Source, name: str, options: LoadOptions) -> Data:
    kind, found = kind_of_source(source, options, options.target or source.target)
    target = find_target(source, options.target, found)
    if useless := [option for option in _given(options, *_options()) if option not in kind.options]:
        raise ValueError(f"{useless[0]}= does not apply to {source.name}, which holds {kind.inputs}: leave it out")
    inputs = kind.choose(source, target, options)
    bad = BadRows(source, options.skip_bad, kind, inputs, target)
    y, classes = bad.targets(target, None if options.task is None else TASKS[options.task])
    groups = y if classes else torch.zeros(len(y))
    own = {part: bad.usable(part) for part in source.parts}
    try:
        validation = kind.validation if options.validation is None else options.validation
        fold = None if options.folds is None else (options.fold, options.folds)
        rows = split_rows(own, groups, validation, options.test, options.seed, fold)
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error
    rows = {part: each[_sample(groups[each], options.limit, options.seed)] for part, each in rows.items()}
    if source.arrays and options.columns is None:
        options = replace(options, columns=list(inputs))
    encoder = kind.fit(inputs, rows["train"], options)
    order = torch.cat(list(rows.values()))
    encoded = bad.encode(encoder, inputs, order)  # all parts at once, for a common shape
    train, held_out, test = _parts(source, rows, encoded, y[order])
    seen = _note_duplicates(train, test) if kind.is_text else ""
    noted = [
        replace(each, note="; ".join(filter(None, [each.note, encoded.notes.get(each.name), seen])))
        for each in encoder.reading
    ]
    reading = _whole_reading(source, target, classes, options, noted)
    return Data(
        name, train, held_out, test, classes, encoder.names, dropped=bad.counts(), features=encoder.features,
        reading=reading,
    )  # fmt: skip


def _note_duplicates(train: Part, test: Part) -> str:
    """Report the number of test inputs that also occur in the training part; empty if there are none."""
    known = set(train.files)
    count = sum(file in known for file in test.files)
    return f"{count} of {len(test)} test texts also occur in the training part" if count else ""


def _whole_reading(
    source: Source, target: str, classes: Sequence[str], options: LoadOptions, reading: Sequence[ColumnReading]
) -> tuple[ColumnReading, ...]:
    """Describe all columns of a table in order, including the target and unread columns."""
    if not reading:
        return ()
    found = {each.name: each for each in reading}
    column = source.columns[target]
    values = column.values[~column.values.isnan()].unique() if column.numeric else set(column.values) - {None}
    missing = len(column.missing())
    note = "predicted as a class" if classes else "predicted as a number"
    found[target] = ColumnReading(target, "target", len(values), missing, note=note)
    for name in source.columns:
        reason = "excluded by the user" if name in options.drop else "not among the selected columns"
        found.setdefault(name, ColumnReading(name, "unread", 0, 0, reason))
    return tuple(found[name] for name in source.columns)


def _parts(source: Source, rows: Mapping[str, Tensor], encoded: Encoded, y: Tensor) -> Iterator[Part]:
    """Yield each part as a slice of the encoded rows; `y` `[N]` are their targets, part after part."""
    kept = torch.tensor(encoded.kept, dtype=torch.int64)
    ends = torch.tensor([len(chosen) for chosen in rows.values()]).cumsum(0)
    counts = [int((kept < end).sum()) for end in ends]
    for part, start, end in zip(rows, [0, *counts], counts, strict=False):
        if start == end:
            raise ValueError(f"{source.name} has no readable row in its {part} part")
        yield Part(encoded.x[start:end], y[kept[start:end]], encoded.files[start:end])


def prepared(source: str | Path) -> Data | None:
    """Return data that need no assembling; None for other sources."""
    if source == "digits":
        return digits()
    return read(source) if Path(source).suffix.lower() == ".mtdata" else None


def _sample(groups: Tensor, limit: int | None, seed: int) -> Tensor:
    """Return the positions of at most `limit` of the N rows of `groups`."""
    return torch.arange(len(groups)) if limit is None or len(groups) <= limit else spread(groups, limit, seed)


def _limited(data: Data, limit: int, seed: int) -> Data:
    parts = []
    for part in data.parts.values():
        rows = _sample(part.y if data.classes else torch.zeros(len(part)), limit, seed)
        files = tuple(part.files[row] for row in rows.tolist()) if part.files else ()
        parts.append(Part(part.x[rows], part.y[rows], files))
    ood = {name: x[_sample(torch.zeros(len(x)), limit, seed)] for name, x in data.ood.items()}
    train, validation, test = parts
    return replace(data, train=train, validation=validation, test=test, ood=ood)


def _height_width(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    sides = (size, size) if isinstance(size, int) else size
    if sides is None:
        return None
    if not isinstance(sides, Sequence) or len(sides) != 2:
        raise ValueError(f"size must be a number of pixels, or height and width, got {size!r}")
    return check_count("size", sides[0]), check_count("size", sides[1])


def _check(options: LoadOptions) -> None:
    validation = 0.0 if options.validation is None else options.validation
    if options.validation is not None:
        check_number("validation", validation, 0, above=True, below=1)
    check_number("test", options.test, 0, above=True, below=1)
    if validation + options.test >= 1:
        raise ValueError(f"validation={options.validation} and test={options.test} must sum to less than 1")
    check_seed(options.seed)
    if options.limit is not None:
        check_count("limit", options.limit)
    if options.task is not None and options.task not in TASKS:
        raise ValueError(f"task must be None, {' or '.join(TASKS)}, got {options.task!r}")
    for name in ("columns", "drop"):
        if isinstance(value := getattr(options, name), str):
            raise ValueError(f"{name} must be a list of names, got {value!r}")
    if not isinstance(options.read_as, Mapping):
        raise ValueError(f"read_as must be a mapping from names of columns, got {options.read_as!r}")
    check_count("fold", options.fold, 0)
    if options.folds is not None:
        check_count("folds", options.folds, 2)
        if options.fold >= options.folds:
            raise ValueError(f"fold must be below folds={options.folds}, got {options.fold}")


# -- bad rows ----------------------------------------------------------------------------------------------


class BadRows:
    """Unusable rows of a source, by reason. By default they raise an error; with `skip`, they are left out and counted.

    A row needs all values of the columns `needed` and all inputs; tables, which impute values, need only one input.
    """

    def __init__(self, source: Source, skip: bool, kind: Kind, inputs: Mapping[str, Column], *needed: str) -> None:
        self.source, self.skip, self.kind = source, skip, kind
        self.rows: dict[int, str] = dict(source.broken)  # row to reason
        self.details: dict[int, str] = {}
        whole = {name: source.columns[name] for name in needed} | ({} if kind.has_columns else dict(inputs))
        for name, column in whole.items():
            lacks = "is missing or not finite" if column.kind == "number" else "is missing"
            for row in column.missing():
                self.rows.setdefault(row, f"{name!r} {lacks}")
        if kind.has_columns:
            empty = torch.stack([column.empty() for column in inputs.values()]).all(0)
            for row in empty.nonzero().flatten().tolist():
                self.rows.setdefault(row, "all inputs are missing")
        self._check()

    def encode(self, encoder: Encoder, columns: Mapping[str, Column], rows: Tensor) -> Encoded:
        """Encode the inputs of these rows, and record rows that cannot be encoded."""
        encoded = encoder(columns, rows, self.source.where)
        for index, error in encoded.bad.items():
            reason, bracket, detail = error.partition(" (")
            self.rows[int(rows[index])], self.details[int(rows[index])] = reason, bracket + detail
        self._check()
        return encoded

    def _check(self) -> None:
        if not self.rows or self.skip:
            return
        named = sorted(self.rows)[:3]
        first = [f"{self.source.where(row)}: {self.rows[row]}{self.details.get(row, '')}" for row in named]
        more = [f"and {len(self.rows) - 3} more"] if len(self.rows) > 3 else []
        count = "1 bad row" if len(self.rows) == 1 else f"{len(self.rows)} bad rows"
        raise ValueError(f"{self.source.name} has {count}: {'; '.join(first + more)}. skip_bad=True leaves them out")

    def targets(self, name: str, as_classes: bool | None) -> tuple[Tensor, tuple[str, ...]]:
        """Return the targets of all rows and the class names, which depend on the usable rows only."""
        rows = self.usable()
        if not len(rows):
            raise ValueError(f"{self.source.name} has no usable row: {', '.join(self.counts())}")
        return targets(name, self.source.columns[name], rows, as_classes, self.kind.feature_maps)

    def usable(self, part: str = "") -> Tensor:
        """Return the usable rows of a part, or of all parts if the source has no such part."""
        rows = self.source.parts.get(part, torch.arange(len(self.source)))
        return rows[~torch.isin(rows, torch.tensor(list(self.rows), dtype=torch.int64))]

    def counts(self) -> dict[str, int]:
        """Count the unusable rows by reason."""
        return dict(Counter(self.rows.values()))
