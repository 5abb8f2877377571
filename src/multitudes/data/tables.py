"""Columns of a table into numbers: features, and what is to be predicted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multitudes.data.columns import Column, Encoded
from multitudes.data.sources import Source

__all__ = ["TableEncoder", "choose_columns", "find_target", "targets"]

CATEGORIES = 256
"""The most categories that a column may have: with more it is no category, but a name or a text."""

CLASSES = 20
"""Whole numbers of a table are classes where there are at most this many, each ten times or more on average."""


@dataclass(frozen=True)
class TableEncoder:
    """Features of a table: numbers as they are, and of each column of texts one feature for every category, 1 where
    the row is of it and 0 elsewhere. A category that the training rows do not have is 0 everywhere.

    >>> columns = {"size": Column("number", torch.tensor([1.0, 2.0, 3.0])), "colour": Column("text", ["b", "a", "c"])}
    >>> encoder = TableEncoder.fitted(columns, torch.tensor([0, 1]))
    >>> encoder.names
    ('size', 'colour=a', 'colour=b')
    >>> encoder(columns, torch.tensor([0, 2])).x
    tensor([[1., 0., 1.],
            [3., 0., 0.]])
    """

    categories: Mapping[str, Sequence[str]]
    """Of each column, none for one of numbers."""

    @classmethod
    def fitted(cls, columns: Mapping[str, Column], rows: Tensor) -> TableEncoder:
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
            found[name] = values
        return cls(found)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features."""
        found: list[str] = []
        for name, values in self.categories.items():
            found += [f"{name}={value}" for value in values] or [name]
        return tuple(found)

    def columns(self, source: Source, image: str | None = None) -> dict[str, Column]:
        """The columns of a source that features are made of."""
        for name, known in self.categories.items():
            if name not in source.columns:
                has = ", ".join(source.columns)
                raise ValueError(f"{source.name} must have the column {name!r}, as in training; it has {has}")
            kind, found = "text" if known else "number", source.columns[name].kind
            if found != kind:
                raise ValueError(f"column {name!r} of {source.name} must hold {kind}s, as in training, got {found}s")
        return {name: source.columns[name] for name in self.categories}

    def __call__(
        self, columns: Mapping[str, Column], rows: Tensor, where: Callable[[int], str] | None = None
    ) -> Encoded:
        """The features of these rows, float32 `[N, F]`."""
        features, unknown = [], torch.zeros(len(rows), dtype=torch.bool)
        for name, known in self.categories.items():
            values = columns[name].take(rows)
            if not known:
                features.append(values.float()[:, None])
                continue
            number = {category: index for index, category in enumerate(known)}
            index = torch.tensor([number.get(value, -1) for value in values], dtype=torch.int64)
            features.append((index[:, None] == torch.arange(len(known))).float())
            unknown |= index < 0
        return Encoded(torch.cat(features, 1), list(range(len(rows))), unknown=int(unknown.sum()))


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


def find_target(source: Source, target: str | None, inputs: Collection[str]) -> str:
    """The column to predict: the given one; the source's own; where the inputs are known, one of labels by its name or
    type."""
    target = target or source.target
    if target is not None:
        source.column("target", target)
        return target
    others = [name for name in source.columns if name not in inputs]
    if inputs:
        named = [name for name in ("label", "labels", "class", "target") if name in others]
        typed = [name for name in others if source.columns[name].names]
        if named or len(typed) == 1:
            return (named or typed)[0]
    raise ValueError(f"target= must say which column of {source.name} to predict: {', '.join(others)}")


def targets(
    name: str, column: Column, rows: Tensor, task: str | None, labelled: bool
) -> tuple[Tensor, tuple[str, ...]]:
    """What to predict of all rows, `[N]`, and the names of the classes, none for regression.

    `rows` are those that have a target. Texts, booleans and named labels are classes; whole numbers are where the data
    are `labelled`, or where there are few of them (`CLASSES`); all else is regression. `task` overrides this.
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
        named = bool(column.names) or (column.whole and (labelled or few))
        if task == "regression" or (task is None and not named):
            _check_spread(f"target {name!r}", values)
            return column.values.float(), ()
        classes = column.names or tuple(str(int(v)) if v.is_integer() else str(v) for v in known.tolist())
        known = torch.arange(len(classes)).double() if column.names else known
        y = torch.searchsorted(known, column.values.nan_to_num()).clamp(max=len(known) - 1)
    if len(classes) < 2:
        raise ValueError(f"target={name!r} must hold 2 or more classes, got only {', '.join(classes)}")
    return y, classes
