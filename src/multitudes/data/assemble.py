"""Any source into `Data`: `load`; and `add_ood`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from multitudes.core.checks import check_choice, check_count, check_number, check_seed
from multitudes.data.columns import Column, Encoded
from multitudes.data.digits import digits
from multitudes.data.kinds import KINDS, Encoder, Kind, kind_of_source
from multitudes.data.prepared import read
from multitudes.data.preprocessing import NUMBERS
from multitudes.data.reading import ColumnReading
from multitudes.data.sources import SOURCES, Source, open_source, short_name
from multitudes.data.splits import split_rows, spread
from multitudes.data.tables import Choice, find_target, targets
from multitudes.data.types import Data, Part

TASKS = {"classification": True, "regression": False}
"""Whether targets are classes, by what `task=` says."""


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
    """Read data to train and to measure networks on.

    `source` is one of

    - `"digits"`, which come with scikit-learn (see `digits`), or a file that `save` prepared (`.mtdata`): as they are;
    - a Hugging Face dataset, `"owner/name"` or `"owner/name:configuration"`;
    - a Parquet or CSV file, or a folder of them, whose names may tell their part (`train-00.parquet`, `test.csv`);
    - a folder of images, one folder a class, with maybe `train` and `test` above;
    - a `.npz` file with arrays `X` and `y`, and maybe `train_idx`, `test_idx`, of which `fold` picks one split.

    Where there is a column of images, `image`, or else the only one, these are the inputs, and `target` is the label,
    which is found by its type or name; images are decoded, all of them in memory, 1 byte a value, and resized to
    `size` (a number, or height and width), if that is given. With a `tokenizer`, a Hugging Face folder or a name in the
    hub's local cache, the inputs are texts: those of the column `text`, or of the only one that holds texts, as the
    numbers of their tokens, `max_length` of them at most, by default 256. All else is a table: `target` must be said,
    and `columns` are the features, or else all other columns but those of `drop`. Texts, booleans and few whole numbers
    are predicted as classes, all other numbers by regression (see `targets`), unless `task` says otherwise.

    A column of a table is read as numbers, dates (year, month, day, weekday, hour, and a running number of days) or
    categories (a feature each; many, and rare ones, are one), whichever its values are, or as `read_as` says:
    `{"day": "date", "zip": "category"}`, or `"number"`, `"text"`, which is left out, and `"dmy"` and `"mdy"` for dates
    with the day or the month first. Ids and columns that do not vary are left out. A missing input is filled in by the
    median, with a feature that says so; a missing text is a category. `Data.reading` says how each column was read.

    Parts that the source has are used, or those which a column `split` tells. What is missing is drawn by `seed` from
    the training part, a share of `validation` and `test` of it, each class in proportion; by default 0.1 of images and
    0.15 of the rows of a table are for validation. `limit` keeps that many rows of each part, drawn alike. With
    `folds=K` the test part is that of number `fold` of a cross-validation: every row is in one of K test parts. The
    folds of a `.npz` file that has splits are these splits.

    `numbers` says how a network sees the numbers of a table: as normal scores, "quantile", or "standard", minus their
    mean, over their deviation; both from the training part. `pixels` are the mean and deviation of each channel of
    images, from 0 to 1, in place of those of the training part.

    `ood` are other sources, whose inputs (of their test part, if they have one) become out-of-distribution inputs:
    images converted to the shape of these, tables with the same columns.

    A row without its target or without any input, or with an image that cannot be read, is an error, which names the
    first of them; with `skip_bad=True` such rows are left out and counted in `Data.dropped`.

    >>> load("digits", limit=50)
    Data('digits': 50 + 50 + 50 images of [1, 8, 8], 10 classes, 50 photographs)
    """
    others = [ood] if isinstance(ood, str | Path) else list(ood)
    for given in (source, *others):
        if not isinstance(given, str | Path) or not str(given):
            raise ValueError(f"a source must be {SOURCES}, got {given!r}")
    if text is not None and tokenizer is None:
        raise ValueError(f"tokenizer= must say what makes tokens of the texts in {text!r}: a Hugging Face folder")
    choice = Choice(
        target, split, task, fold, folds, validation, test, seed, limit, skip_bad, image, _height_width(size), columns,
        drop, read_as or {}, text, tokenizer, max_length, pixels,
    )  # fmt: skip
    _check(choice)
    check_choice("numbers", numbers, NUMBERS)
    whole = _prepared(source)
    if whole is None:
        opened = open_source(source, split, fold if folds is None else 0)
        if folds is not None and opened.arrays and "test" in opened.parts:
            opened, choice = open_source(source, split, fold), replace(choice, folds=None)
        data = _from_source(opened, short_name(source), choice)
        data = replace(data, numbers=numbers) if data.kind.named else data
    elif useless := _given(choice, "target", "split", "task", "fold", "folds", *_options()):
        raise ValueError(f"{useless[0]}= does not change {str(source)!r}, which is prepared: leave it out")
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
    """Data with the inputs of other sources as out-of-distribution inputs; the arguments are those of `load`."""
    for source in sources:
        name = short_name(source)
        if name in data.ood:
            raise ValueError(f"ood {name!r} is the name of out-of-distribution inputs that {data.name} has already")
        whole = _prepared(source)
        if whole is None:
            opened = open_source(source)
            inputs = data.encoder.columns(opened, image)
            bad = BadRows(opened, skip_bad, data.kind, inputs)
            rows = bad.usable("test")
            rows = _fewer(rows, torch.zeros(len(rows)), limit, seed)
            x = bad.encode(data.encoder, inputs, rows).x
            counts = bad.counts()
        elif (whole.kind, whole.columns) != (data.kind, data.columns):
            raise ValueError(f"ood {str(source)!r} must hold inputs like those of {data.name}, got {whole!r}")
        else:
            rows = _fewer(torch.arange(len(whole.test)), torch.zeros(len(whole.test)), limit, seed)
            x, counts = data.kind.refit(whole.test.x[rows], data.shape), {}
        dropped = {f"{name}: {reason}": count for reason, count in counts.items()}
        data = replace(data, ood={**data.ood, name: x}, dropped={**data.dropped, **dropped})
    return data


def _given(choice: Choice, *names: str) -> list[str]:
    """Which of these arguments were given."""
    return [name for name in names if getattr(choice, name)]


def _options() -> list[str]:
    """The arguments of `load` that are for one kind of data."""
    return [option for kind in KINDS for option in kind.options]


def _from_source(source: Source, name: str, choice: Choice) -> Data:
    kind, found = kind_of_source(source, choice, choice.target or source.target)
    target = find_target(source, choice.target, found)
    for option in _given(choice, *_options()):
        if option == "tokenizer" and option not in kind.options:
            raise ValueError(f"tokenizer= is for texts, and {source.name} holds {kind.inputs}: leave it out")
        if option not in kind.options:
            raise ValueError(f"{option}= is not for {source.name}, which holds {kind.inputs}: leave it out")
    inputs = kind.choose(source, target, choice)
    bad = BadRows(source, choice.skip_bad, kind, inputs, target)
    y, classes = bad.targets(target, None if choice.task is None else TASKS[choice.task])
    groups = y if classes else torch.zeros(len(y))
    own = {part: bad.usable(part) for part in source.parts}
    try:
        validation = kind.validation if choice.validation is None else choice.validation
        fold = None if choice.folds is None else (choice.fold, choice.folds)
        rows = split_rows(own, groups, validation, choice.test, choice.seed, fold)
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error
    rows = {part: _fewer(chosen, groups[chosen], choice.limit, choice.seed) for part, chosen in rows.items()}
    if source.arrays and choice.columns is None:
        choice = replace(choice, columns=list(inputs))
    encoder = kind.fit(inputs, rows["train"], choice)
    order = torch.cat(list(rows.values()))
    encoded = bad.encode(encoder, inputs, order)  # all parts at once, since they must be alike
    train, held_out, test = _parts(source, rows, encoded, y[order])
    seen = _seen(train, test) if kind.written else ""
    noted = [
        replace(each, note="; ".join(filter(None, [each.note, encoded.notes.get(each.name), seen])))
        for each in encoder.reading
    ]
    reading = _whole_reading(source, target, classes, choice, noted)
    return Data(
        name, train, held_out, test, classes, encoder.names, dropped=bad.counts(), features=encoder.features,
        reading=reading,
    )  # fmt: skip


def _seen(train: Part, test: Part) -> str:
    """How many test inputs are in the training part as well, by their files; empty where none is."""
    known = set(train.files)
    count = sum(file in known for file in test.files)
    return f"{count} of {len(test)} test texts are in the training part too" if count else ""


def _whole_reading(
    source: Source, target: str, classes: Sequence[str], choice: Choice, reading: Sequence[ColumnReading]
) -> tuple[ColumnReading, ...]:
    """How all columns of a table were read, in their order, with the target and those that were not asked for."""
    if not reading:
        return ()
    found = {each.name: each for each in reading}
    column = source.columns[target]
    values = column.values[~column.values.isnan()].unique() if column.numeric else set(column.values) - {None}
    missing = len(column.missing())
    what = "classes" if classes else "a number"
    found[target] = ColumnReading(target, "target", len(values), missing, note=f"{what} to predict")
    for name in source.columns:
        reason = "it is to be dropped" if name in choice.drop else "it is not among the columns to read"
        found.setdefault(name, ColumnReading(name, "unread", 0, 0, reason))
    return tuple(found[name] for name in source.columns)


def _parts(source: Source, rows: Mapping[str, Tensor], encoded: Encoded, y: Tensor) -> Iterator[Part]:
    """Each part's stretch of all that was encoded; `y` `[N]` are the targets of the rows, one part after the other."""
    kept = torch.tensor(encoded.kept, dtype=torch.int64)
    ends = torch.tensor([len(chosen) for chosen in rows.values()]).cumsum(0)
    counts = [int((kept < end).sum()) for end in ends]
    for part, start, end in zip(rows, [0, *counts], counts, strict=False):
        if start == end:
            raise ValueError(f"{source.name} has no row in its {part} part that can be read")
        yield Part(encoded.x[start:end], y[kept[start:end]], encoded.files[start:end])


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
    ood = {name: x[_fewer(torch.arange(len(x)), torch.zeros(len(x)), limit, seed)] for name, x in data.ood.items()}
    train, validation, test = parts
    return replace(data, train=train, validation=validation, test=test, ood=ood)


def _height_width(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    sides = (size, size) if isinstance(size, int) else size
    if sides is None:
        return None
    if not isinstance(sides, Sequence) or len(sides) != 2:
        raise ValueError(f"size must be a number of pixels, or height and width, got {size!r}")
    return check_count("size", sides[0]), check_count("size", sides[1])


def _check(choice: Choice) -> None:
    validation = 0.0 if choice.validation is None else choice.validation
    if choice.validation is not None:
        check_number("validation", validation, 0, above=True, below=1)
    check_number("test", choice.test, 0, above=True, below=1)
    if validation + choice.test >= 1:
        raise ValueError(f"validation={choice.validation} and test={choice.test} must leave something to train on")
    check_seed(choice.seed)
    if choice.limit is not None:
        check_count("limit", choice.limit)
    if choice.task is not None and choice.task not in TASKS:
        raise ValueError(f"task must be None, {' or '.join(TASKS)}, got {choice.task!r}")
    for name in ("columns", "drop"):
        if isinstance(value := getattr(choice, name), str):
            raise ValueError(f"{name} must be a list of names, got {value!r}")
    if not isinstance(choice.read_as, Mapping):
        raise ValueError(f"read_as must be a mapping from names of columns, got {choice.read_as!r}")
    check_count("fold", choice.fold, 0)
    if choice.folds is not None:
        if isinstance(choice.folds, bool) or not isinstance(choice.folds, int) or choice.folds < 2:
            raise ValueError(f"folds must be None or a whole number, 2 or more, got {choice.folds!r}")
        if choice.fold >= choice.folds:
            raise ValueError(f"fold must be one of the {choice.folds} folds, counted from 0, got {choice.fold}")


# -- rows that cannot be used --------------------------------------------------------------------------------


class BadRows:
    """The rows of a source that cannot be used, and why: an error, or with `skip` to be left out and counted.

    Rows must have all `needed` values, and all inputs; or one of these, where the kind of data fills in the others.
    """

    def __init__(self, source: Source, skip: bool, kind: Kind, inputs: Mapping[str, Column], *needed: str) -> None:
        self.source, self.skip, self.kind = source, skip, kind
        self.rows: dict[int, str] = dict(source.broken)  # the reason
        self.details: dict[int, str] = {}
        whole = {name: source.columns[name] for name in needed} | ({} if kind.named else dict(inputs))
        for name, column in whole.items():
            lacks = "is missing or no finite number" if column.kind == "number" else "is missing"
            for row in column.missing():
                self.rows.setdefault(row, f"{name!r} {lacks}")
        if kind.named:
            empty = torch.stack([column.empty() for column in inputs.values()]).all(0)
            for row in empty.nonzero().flatten().tolist():
                self.rows.setdefault(row, "all inputs are missing")
        self._settle()

    def encode(self, encoder: Encoder, columns: Mapping[str, Column], rows: Tensor) -> Encoded:
        """The inputs of these rows, as far as they can be encoded."""
        encoded = encoder(columns, rows, self.source.where)
        for index, error in encoded.bad.items():
            reason, bracket, detail = error.partition(" (")
            self.rows[int(rows[index])], self.details[int(rows[index])] = reason, bracket + detail
        self._settle()
        return encoded

    def _settle(self) -> None:
        if not self.rows or self.skip:
            return
        named = sorted(self.rows)[:3]
        first = [f"{self.source.where(row)}: {self.rows[row]}{self.details.get(row, '')}" for row in named]
        more = [f"and {len(self.rows) - 3} more"] if len(self.rows) > 3 else []
        count = "1 bad row" if len(self.rows) == 1 else f"{len(self.rows)} bad rows"
        raise ValueError(f"{self.source.name} has {count}: {'; '.join(first + more)}. skip_bad=True leaves them out")

    def targets(self, name: str, as_classes: bool | None) -> tuple[Tensor, tuple[str, ...]]:
        """The targets of all rows and the names of the classes, as `tables.targets` finds them in the usable rows."""
        rows = self.usable()
        if not len(rows):
            raise ValueError(f"{self.source.name} has no row without fault: {', '.join(self.counts())}")
        return targets(name, self.source.columns[name], rows, as_classes, self.kind.feature_maps)

    def usable(self, part: str = "") -> Tensor:
        """The rows of a part that can be used; of all parts, where the source has none of this name."""
        rows = self.source.parts.get(part, torch.arange(len(self.source)))
        return rows[~torch.isin(rows, torch.tensor(list(self.rows), dtype=torch.int64))]

    def counts(self) -> dict[str, int]:
        """How many rows cannot be used, by reason."""
        return dict(Counter(self.rows.values()))
