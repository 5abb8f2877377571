"""Columns of a table into numbers: features, and what is to be predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multitudes.data.columns import Column
from multitudes.data.sources import Source

__all__ = ["Encoder", "choose_columns", "find_target", "targets"]

CATEGORIES = 256
"""The most categories that a column may have: with more it is no category, but a name or a text."""

CLASSES = 20
"""Whole numbers of a table are classes where there are at most this many, each ten times or more on average."""


@dataclass(frozen=True)
class Encoder:
    """Features of a table: numbers as they are, and of each column of texts one feature for every category, 1 where
    the row is of it and 0 elsewhere. A category that the training rows do not have is 0 everywhere.

    >>> columns = {"size": Column("number", torch.tensor([1.0, 2.0, 3.0])), "colour": Column("text", ["b", "a", "c"])}
    >>> encoder = Encoder.fitted(columns, torch.tensor([0, 1]))
    >>> encoder.names
    ('size', 'colour=a', 'colour=b')
    >>> encoder(columns, torch.tensor([0, 2]))
    tensor([[1., 0., 1.],
            [3., 0., 0.]])
    """

    categories: Mapping[str, tuple[str, ...]]

    @classmethod
    def fitted(cls, columns: Mapping[str, Column], rows: Tensor) -> Encoder:
        """The encoder for these columns, with the categories that occur in these rows."""
        found = {}
        for name, column in columns.items():
            if column.kind == "number":
                _check_spread(f"column {name!r}", column.take(rows))
            values = sorted(set(column.take(rows))) if column.kind == "text" else []
            if len(values) > CATEGORIES:
                raise ValueError(
                    f"column {name!r} has {len(values)} different texts, more than the {CATEGORIES} that can be "
                    f"categories: leave it out by columns="
                )
            found[name] = tuple(values)
        return cls(found)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features."""
        found: list[str] = []
        for name, values in self.categories.items():
            found += [f"{name}={value}" for value in values] or [name]
        return tuple(found)

    def __call__(self, columns: Mapping[str, Column], rows: Tensor) -> Tensor:
        """The features of these rows, float32 `[N, F]`."""
        features = []
        for name, known in self.categories.items():
            kind = "text" if known else "number"
            if columns[name].kind != kind:
                raise ValueError(f"column {name!r} must be of kind {kind}, as in training, got {columns[name].kind}")
            values = columns[name].take(rows)
            features += [torch.tensor([value == category for value in values]) for category in known] or [values]
        return torch.stack([feature.float() for feature in features], dim=1)


def _check_spread(what: str, values: Tensor) -> None:
    """Numbers must not be so close to each other that float32 would blur them."""
    spread = values.max() - values.min()
    if 0 < spread < 1e-5 * values.abs().max():
        raise ValueError(
            f"{what} varies by {spread.item():g} around {values[0].item():g}, too little for float32: "
            f"subtract what its values have in common"
        )


def choose_columns(source: Source, target: str, columns: Sequence[str] | None) -> dict[str, Column]:
    """The feature columns: the given ones, or all but the target. They must hold numbers or texts."""
    names = [name for name in source.columns if name != target] if columns is None else list(columns)
    if target in names or not names:
        raise ValueError(f"columns must name at least one feature and not the target {target!r}, got {names}")
    if columns is None and "" in names:
        raise ValueError(f"{source.name} has a column without a name, maybe row numbers: say the features by columns=")
    chosen = {name: source.column("columns", name) for name in names}
    for name, column in chosen.items():
        if column.kind not in ("number", "text"):
            raise ValueError(
                f"column {name!r} is of kind {column.kind}, and features are numbers or texts: leave it out by columns="
            )
    return chosen


def find_target(source: Source, target: str | None, image: str | None) -> str:
    """The column to predict: the given one; the source's own; with images, one of labels by its name or type."""
    target = target or source.target
    if target is not None:
        source.column("target", target)
        return target
    others = [name for name in source.columns if name != image]
    if image is not None:
        named = [name for name in ("label", "labels", "class", "target") if name in others]
        typed = [name for name in others if source.columns[name].names]
        if named or len(typed) == 1:
            return (named or typed)[0]
    raise ValueError(f"target= must say which column of {source.name} to predict: {', '.join(others)}")


def targets(name: str, column: Column, rows: Tensor, task: str | None, image: bool) -> tuple[Tensor, tuple[str, ...]]:
    """What to predict of all rows, `[N]`, and the names of the classes, none for regression.

    `rows` are those that have a target. Texts, booleans and named labels are classes; whole numbers are for images, and
    in a table where there are few of them (`CLASSES`); all else is regression. `task` overrides this.
    """
    if column.kind not in ("number", "text"):
        raise ValueError(f"target={name!r} must hold numbers or texts, got {column.kind}")
    values = column.take(rows)
    if column.kind == "text":
        if task == "regression":
            raise ValueError(f"task='regression' needs numbers to predict, but {name!r} holds texts like {values[0]!r}")
        classes = column.names or tuple(sorted(set(values)))
        number = {label: index for index, label in enumerate(classes)}
        y = torch.tensor([number.get(value, -1) for value in column.values])
    else:
        known = values.unique()
        few = len(known) <= CLASSES and 10 * len(known) <= len(values)
        named = bool(column.names) or (column.whole and (image or few))
        if task == "regression" or (task is None and not named):
            _check_spread(f"target {name!r}", values)
            return column.values.float(), ()
        classes = column.names or tuple(str(int(v)) if v.is_integer() else str(v) for v in known.tolist())
        known = torch.arange(len(classes)).double() if column.names else known
        y = torch.searchsorted(known, column.values.nan_to_num()).clamp(max=len(known) - 1)
    if len(classes) < 2:
        raise ValueError(f"target={name!r} must hold 2 or more classes, got only {', '.join(classes)}")
    return y, classes
