"""A column of a source (numbers, texts, dates or encoded images), read from CSV cells or Arrow, and encoded rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes.lab.data.tables.numbers_and_dates import ENOUGH, read_date, read_number

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""CSV cells, in lower case, that mean a missing value."""


@dataclass(frozen=True)
class Column:
    """N values of one kind.

    `kind="number"`: float64 `[N]`, NaN for missing or invalid; `whole` if all are integers.
    `kind="date"`: float64 `[N]`, days since 1970-01-01, NaN if missing.
    `kind="text"`, `kind="image"`: a list of `str` or `bytes`, None if missing. Any other kind is the name of an
    unsupported type. `names` are the classes in order, if the source defines them. `cells` are the original texts of
    parsed numbers (None if missing), and `mark` is their decimal mark.
    """

    kind: str
    values: Any
    whole: bool = False
    names: tuple[str, ...] = ()
    cells: Sequence[str | None] = ()
    mark: str = "."

    def __len__(self) -> int:
        return len(self.values)

    @property
    def numeric(self) -> bool:
        """True if the values are a tensor."""
        return self.kind in ("number", "date")

    def missing(self) -> list[int]:
        """Return the rows without a value or with a number that is not finite in float32."""
        if self.numeric:
            return (~self.values.float().isfinite()).nonzero().flatten().tolist()
        return [row for row, value in enumerate(self.values) if value is None]

    def take(self, rows: Tensor) -> Any:
        """Return the values of these rows."""
        return self.values[rows] if self.numeric else [self.values[row] for row in rows.tolist()]

    def empty(self) -> Tensor:
        """Return a mask `[N]` of empty rows; a word among numbers is not empty."""
        if self.numeric and not self.cells:
            return self.values.isnan()
        if isinstance(self.values, range):  # an unsupported type
            return torch.zeros(len(self), dtype=torch.bool)
        return torch.tensor([not text for text in self.cells or self.values], dtype=torch.bool)

    # -- conversions ---------------------------------------------------------------------------------------

    def texts(self) -> Sequence[str | None]:
        """Return the values as texts, as originally written if known."""
        if not self.numeric:
            return [text or None for text in self.values]
        return self.cells or [_to_text(value, self.names) for value in self.values.tolist()]

    def numbers(self, mark: str) -> Tensor:
        """Parse the values as numbers with this decimal mark; NaN for other texts."""
        if self.numeric and (not self.cells or mark == self.mark):
            return self.values
        return _read(self.texts(), lambda text: read_number(text, mark))

    def days(self, order: str) -> Tensor:
        """Parse the values as days since 1970 with this order of day, month and year; NaN for other texts."""
        if self.kind == "date":
            return self.values
        return _read(self.texts(), lambda text: read_date(text, order))


def _read(texts: Sequence[str | None], read: Callable[[str], float]) -> Tensor:
    """Parse texts into float64 `[N]`, each distinct one once; NaN for None."""
    found = {text: math.nan if text is None else read(text) for text in set(texts)}
    return torch.tensor([found[text] for text in texts], dtype=torch.float64)


def _to_text(value: float, names: tuple[str, ...]) -> str | None:
    if not math.isfinite(value):
        return None
    return names[int(value)] if names else str(int(value)) if value.is_integer() else str(value)


@dataclass(frozen=True)
class Encoded:
    """Rows of a source as inputs `[n, ...]`, with the indices of these rows and errors of the others.

    `bad` maps rows to "reason (details)". `files` are the encoded images or texts of `x`, if any. `unknown` counts rows
    with an unknown category, `filled` imputed values by column; `notes` are remarks by column.
    """

    x: Tensor
    kept: list[int]
    bad: Mapping[int, str] = field(default_factory=dict)
    files: tuple[bytes, ...] = ()
    unknown: int = 0
    filled: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def strip_cells(cells: Sequence[str]) -> list[str | None]:
    """Strip cells; missing values become None."""
    return [None if cell.strip().lower() in MISSING else cell.strip() for cell in cells]


def from_cells(texts: Sequence[str | None], mark: str = ".") -> Column:
    """Make a column from CSV cells. It is numeric if nine in ten of its values parse as numbers.

    >>> from_cells(["1", "2", None]).values
    tensor([1., 2., nan], dtype=torch.float64)
    >>> from_cells(["red", "1", None]).values
    ['red', '1', None]
    """
    numbers = _read(texts, lambda text: read_number(text, mark))
    count = sum(text is not None for text in texts)
    read = int((~numbers.isnan()).sum())
    if read < ENOUGH * count:
        return Column("text", texts)
    whole = read == count and all(text is None or text.lstrip("+-").isdigit() for text in texts)
    return Column("number", numbers, whole, cells=texts, mark=mark)


def from_arrow(table: Any, features: Mapping[str, Any]) -> dict[str, Column]:
    """Convert the columns of a `pyarrow.Table`, using Hugging Face's `features`."""
    return {name: _arrow_column(table[name], features.get(name) or {}) for name in table.column_names}


def _arrow_column(column: Any, feature: Any) -> Column:
    import pyarrow as pa

    feature = feature if isinstance(feature, Mapping) else {}
    kind, types, names = column.type, pa.types, feature.get("names")
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if feature.get("_type") == "ClassLabel" and named and types.is_integer(kind):
        names = tuple(names)
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
    if types.is_date(kind) or types.is_timestamp(kind):
        return Column("date", _numbers(column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())) / 86400e6)
    if types.is_time(kind) or types.is_duration(kind):  # as hours
        unit = pa.time64("us") if types.is_time(kind) else pa.duration("us")
        return Column("number", _numbers(column.cast(unit, safe=False).cast(pa.int64())) / 3600e6)
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
