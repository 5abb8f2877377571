"""Turn table columns into features and targets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multitudes.lab.data.sources import Source
from multitudes.lab.data.tables.column_types import ColumnReading, check_read_as, read_columns
from multitudes.lab.data.tables.columns import Column, Encoded
from multitudes.lab.data.tables.features import Feature, Number, features_of

LABELS = ("label", "labels", "class", "target")
"""Default names of the column to predict."""
CLASSES = 20
"""Maximum number of values for integers of a table to be classes; each must occur ten times on average."""


@dataclass(frozen=True)
class LoadOptions:
    """Options for reading a source: the arguments of `load` with these names."""

    target: str | None = None
    split: str | None = None
    task: str | None = None
    fold: int = 0
    folds: int | None = None
    validation: float | None = None
    test: float = 0.2
    seed: int = 0
    limit: int | None = None
    skip_bad: bool = False
    image: str | None = None
    size: tuple[int, int] | None = None
    columns: Sequence[str] | None = None
    drop: Sequence[str] = ()
    read_as: Mapping[str, str] = field(default_factory=dict)
    text: str | None = None
    tokenizer: str | None = None
    max_length: int | None = None
    pixels: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class TableEncoder:
    """Encode rows of a table as features: each column by its own `Feature`, fitted to the training rows.

    >>> columns = {"size": Column("number", torch.tensor([1.0, 2.0, 3.0])), "colour": Column("text", ["b", "a", "c"])}
    >>> encoder = TableEncoder.fitted(columns, torch.tensor([0, 1]))
    >>> encoder.names
    ('size', 'colour=a', 'colour=b')
    >>> encoder(columns, torch.tensor([0, 2])).x
    tensor([[1., 0., 1.],
            [3., 0., 0.]])
    """

    features: Sequence[Feature]
    reading: Sequence[ColumnReading] = ()
    """Description of how all columns were read, including those left out; set when the encoder is fitted."""

    @classmethod
    def fitted(cls, columns: Mapping[str, Column], rows: Tensor, options: LoadOptions | None = None) -> TableEncoder:
        """Fit an encoder for these columns to these rows."""
        options = options or LoadOptions()
        features, reading = read_columns(columns, rows, options.read_as, options.columns is not None)
        if not features:
            left_out = "; ".join(f"{each.name!r}: {each.dropped}" for each in reading)
            raise ValueError(f"columns= must name the features, since all columns were left out ({left_out})")
        return cls(tuple(features), tuple(reading))

    @classmethod
    def of_numbers(cls, names: Sequence[str]) -> TableEncoder:
        """Make an encoder for columns of numbers without missing values."""
        return cls(tuple(Number(name) for name in names))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(name for feature in self.features for name in feature.names)

    def columns(self, source: Source, image: str | None = None) -> dict[str, Column]:
        """Return the columns of a source that the features need."""
        found = {feature.column: source.trained_column(feature.column) for feature in self.features}
        for feature in self.features:
            try:
                feature.raw(found[feature.column])
            except ValueError as error:
                raise ValueError(f"column {feature.column!r} of {source.name} {error}") from error
        return found

    def __call__(
        self, columns: Mapping[str, Column], rows: Tensor, where: Callable[[int], str] | None = None
    ) -> Encoded:
        """Encode these rows as features, float32 `[N, F]`."""
        unknown, filled = torch.zeros(len(rows), dtype=torch.bool), {}
        raw = [feature.raw(columns[feature.column])[rows] for feature in self.features]
        for feature, own in zip(self.features, raw, strict=True):
            unknown |= feature.unknown(own)
            if missing := int(feature.missing(own).sum()):
                filled[feature.column] = missing
        x = features_of(self.features, raw)
        return Encoded(x, list(range(len(rows))), unknown=int(unknown.sum()), filled=filled)


def choose_columns(source: Source, target: str, options: LoadOptions) -> dict[str, Column]:
    """Return the candidate feature columns: the given ones, or all except the target and `drop`."""
    for name in options.drop:
        source.column("drop", name)
    check_read_as(options.read_as, source.columns, source.name)
    if twice := [name for name in options.read_as if name in options.drop]:
        raise ValueError(f"read_as of {twice[0]!r} must be left out, since drop= leaves this column out")
    names = [name for name in source.columns if name != target] if options.columns is None else list(options.columns)
    for argument, own in (("columns", names), ("drop", options.drop), ("read_as", options.read_as)):
        if target in own:
            raise ValueError(f"{argument} must not name the target {target!r}, got {list(own)}")
    chosen = {name: source.column("columns", name) for name in names if name not in options.drop}
    if not chosen:
        raise ValueError(f"columns must leave a feature beside the target {target!r} in {source.name}, got none")
    return chosen


def find_target(source: Source, target: str | None, inputs: Collection[str]) -> str:
    """Return the column to predict: the given one, the source's own, or, if the inputs are known, a label by name or
    type."""
    target = target or source.target
    if target is not None:
        source.column("target", target)
        return target
    others = [name for name in source.columns if name not in inputs]
    if inputs:
        named = [name for name in LABELS if name in others]
        typed = [name for name in others if source.columns[name].names]
        if named or len(typed) == 1:
            return (named or typed)[0]
    raise ValueError(f"target= must name the column of {source.name} to predict, one of {', '.join(others)}")


def targets(
    name: str, column: Column, rows: Tensor, as_classes: bool | None, labelled: bool
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the targets of all rows, `[N]`, and the class names (empty for regression).

    `rows` are those that have a target. Texts, booleans and named labels are classes; integers are if the data are
    `labelled`, or if they have few values (`CLASSES`); everything else is regression. `as_classes` overrides this.
    """
    if column.kind not in ("number", "text"):
        raise ValueError(f"target={name!r} must hold numbers or texts, got {column.kind}")
    values = column.take(rows)
    if column.kind == "text":
        if as_classes is False:
            raise ValueError(f"task='regression' needs numbers to predict, but {name!r} holds texts like {values[0]!r}")
        classes = column.names or tuple(sorted(set(values)))
        if 2 * len(classes) > len(values) > CLASSES and not column.names:
            raise ValueError(
                f"target={name!r} must hold classes, got {len(classes)} different texts in {len(values)} rows"
            )
        number = {label: index for index, label in enumerate(classes)}
        y = torch.tensor([number.get(value, -1) for value in column.values])
    else:
        known = values.unique()
        few = len(known) <= CLASSES and 10 * len(known) <= len(values)
        named = bool(column.names) or (column.whole and (labelled or few))
        if not (named if as_classes is None else as_classes):
            spread = values.max() - values.min()
            if 0 < spread < 1e-5 * values.abs().max():
                raise ValueError(
                    f"target {name!r} varies by {spread.item():g} around {values[0].item():g}, too little for float32: "
                    f"subtract a constant first"
                )
            return column.values.float(), ()
        classes = column.names or tuple(str(int(v)) if v.is_integer() else str(v) for v in known.tolist())
        known = torch.arange(len(classes)).double() if column.names else known
        y = torch.searchsorted(known, column.values.nan_to_num()).clamp(max=len(known) - 1)
    if len(classes) < 2:
        raise ValueError(f"target={name!r} must hold 2 or more classes, got only {', '.join(classes)}")
    return y, classes
