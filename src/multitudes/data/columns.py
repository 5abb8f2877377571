"""A column of a source: numbers, texts or encoded images, read from CSV cells or from Arrow; rows of it, `Encoded`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Column", "Encoded", "from_arrow", "from_cells"]

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""The cells of a CSV file, in small letters, that say that there is no value."""


@dataclass(frozen=True)
class Column:
    """N values of one kind.

    `kind="number"`: float64 `[N]`, with NaN for what is missing or no number; `whole` where all are integers.
    `kind="text"`, `kind="image"`: a list of `str` or `bytes`, with None for what is missing. Any other kind is the name
    of a type that is not understood. `names` are the classes in their order, where the source says them.
    """

    kind: str
    values: Any
    whole: bool = False
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def missing(self) -> list[int]:
        """The rows without a value, or with a number that is not finite in float32."""
        if self.kind == "number":
            return (~self.values.float().isfinite()).nonzero().flatten().tolist()
        return [row for row, value in enumerate(self.values) if value is None]

    def take(self, rows: Tensor) -> Any:
        """The values of these rows."""
        return self.values[rows] if self.kind == "number" else [self.values[row] for row in rows.tolist()]


@dataclass(frozen=True)
class Encoded:
    """Rows of a source as inputs, `[n, ...]`: which of the rows they are, and why the others cannot be used.

    `bad` says "what is wrong (how it was found)"; `files` are the encoded images that `x` is the pixels of, if any;
    `unknown` is how many rows have a category that the training part has not.
    """

    x: Tensor
    kept: list[int]
    bad: Mapping[int, str] = field(default_factory=dict)
    files: tuple[bytes, ...] = ()
    unknown: int = 0


def from_cells(cells: Sequence[str]) -> Column:
    """A column of a CSV file. Where nine in ten of its values read as numbers, it is one of numbers.

    >>> from_cells(["1", "2", ""]).values
    tensor([1., 2., nan], dtype=torch.float64)
    >>> from_cells(["red", "1", "NA"]).values
    ['red', '1', None]
    """
    texts = [None if cell.strip().lower() in MISSING else cell.strip() for cell in cells]
    numbers = [math.nan if text is None else _number(text) for text in texts]
    given = sum(text is not None for text in texts)
    read = sum(not math.isnan(number) for number in numbers)
    if 10 * read < 9 * given:
        return Column("text", texts)
    whole = read == given and all(text is None or text.lstrip("+-").isdigit() for text in texts)
    return Column("number", torch.tensor(numbers, dtype=torch.float64), whole)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def from_arrow(table: Any, features: Mapping[str, Any]) -> dict[str, Column]:
    """The columns of a `pyarrow.Table`, with what Hugging Face's `features` say about them."""
    return {name: _arrow_column(table[name], features.get(name) or {}) for name in table.column_names}


def _arrow_column(column: Any, feature: Any) -> Column:
    import pyarrow as pa

    known = feature.get("_type") if isinstance(feature, Mapping) else None
    kind, types = column.type, pa.types
    if known == "ClassLabel":
        names = tuple(feature["names"])
        return Column("text", [_named(names, label) for label in column.to_pylist()], names=names)
    if types.is_struct(kind) and "bytes" in {field.name for field in kind}:
        return Column("image", [_file(item) for item in column.to_pylist()])
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Column("image", column.to_pylist())
    if types.is_dictionary(kind):
        return _arrow_column(column.cast(kind.value_type), feature)
    if types.is_string(kind) or types.is_large_string(kind):
        return Column("text", column.to_pylist())
    if types.is_boolean(kind):
        return Column("number", _numbers(column.cast(pa.int8())), whole=True, names=("False", "True"))
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind):
        return Column("number", _numbers(column), whole=types.is_integer(kind))
    return Column(str(kind), range(len(column)))


def _numbers(column: Any) -> Tensor:
    import pyarrow as pa

    return torch.from_numpy(column.cast(pa.float64()).to_numpy().copy())


def _named(names: tuple[str, ...], label: int | None) -> str | None:
    # Hugging Face marks unlabelled rows by -1.
    return names[label] if label is not None and 0 <= label < len(names) else None


def _file(item: Mapping[str, Any] | None) -> bytes | None:
    if item is None:
        return None
    try:
        content: bytes = Path(item["path"]).read_bytes() if item["bytes"] is None else item["bytes"]
    except (KeyError, TypeError, OSError):
        return None
    return content
