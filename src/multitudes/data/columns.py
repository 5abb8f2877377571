"""A column of a source: numbers, texts, dates or encoded images, read from CSV cells or from Arrow; rows of it,
`Encoded`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes.data.parsing import ENOUGH, read_date, read_number

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""The cells of a CSV file, in small letters, that say that there is no value."""


@dataclass(frozen=True)
class Column:
    """N values of one kind.

    `kind="number"`: float64 `[N]`, with NaN for what is missing or no number; `whole` where all are integers.
    `kind="date"`: float64 `[N]`, the days since the beginning of 1970, with NaN for what is missing.
    `kind="text"`, `kind="image"`: a list of `str` or `bytes`, with None for what is missing. Any other kind is the name
    of a type that is not understood. `names` are the classes in their order, where the source says them; `cells` what
    was written, with None for what is missing, where numbers were read from texts, with the decimal mark `mark`.
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
        """Whether the values are a tensor."""
        return self.kind in ("number", "date")

    def missing(self) -> list[int]:
        """The rows without a value, or with a number that is not finite in float32."""
        if self.numeric:
            return (~self.values.float().isfinite()).nonzero().flatten().tolist()
        return [row for row, value in enumerate(self.values) if value is None]

    def take(self, rows: Tensor) -> Any:
        """The values of these rows."""
        return self.values[rows] if self.numeric else [self.values[row] for row in rows.tolist()]

    def empty(self) -> Tensor:
        """Which rows have nothing at all, `[N]`; a word among numbers is something."""
        if self.numeric and not self.cells:
            return self.values.isnan()
        if isinstance(self.values, range):  # of a type that is not understood
            return torch.zeros(len(self), dtype=torch.bool)
        return torch.tensor([not text for text in self.cells or self.values], dtype=torch.bool)

    # -- the values as something else ----------------------------------------------------------------------

    def texts(self) -> Sequence[str | None]:
        """The values as texts: as they were written, where that is known."""
        if not self.numeric:
            return [text or None for text in self.values]
        return self.cells or [_written(value, self.names) for value in self.values.tolist()]

    def numbers(self, mark: str) -> Tensor:
        """The values as numbers, with this decimal mark; NaN for what is none."""
        if self.numeric and (not self.cells or mark == self.mark):
            return self.values
        return _read(self.texts(), lambda text: read_number(text, mark))

    def days(self, order: str) -> Tensor:
        """The values as dates in this order of day, month and year, in days since 1970; NaN for what is none."""
        if self.kind == "date":
            return self.values
        return _read(self.texts(), lambda text: read_date(text, order))


def _read(texts: Sequence[str | None], read: Callable[[str], float]) -> Tensor:
    """What texts read as, float64 `[N]`, each different one read once; NaN for None."""
    found = {text: math.nan if text is None else read(text) for text in set(texts)}
    return torch.tensor([found[text] for text in texts], dtype=torch.float64)


def _written(value: float, names: tuple[str, ...]) -> str | None:
    if not math.isfinite(value):
        return None
    return names[int(value)] if names else str(int(value)) if value.is_integer() else str(value)


@dataclass(frozen=True)
class Encoded:
    """Rows of a source as inputs, `[n, ...]`: which of the rows they are, and why the others cannot be used.

    `bad` says "what is wrong (how it was found)"; `files` are the encoded images or texts that `x` is made of, if any;
    `unknown` is how many rows have a category that the training part has not; `filled` how many values were missing and
    filled in, by column; `notes` what else to look at, by column.
    """

    x: Tensor
    kept: list[int]
    bad: Mapping[int, str] = field(default_factory=dict)
    files: tuple[bytes, ...] = ()
    unknown: int = 0
    filled: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def given(cells: Sequence[str]) -> list[str | None]:
    """What is written in cells, None where that says that there is no value."""
    return [None if cell.strip().lower() in MISSING else cell.strip() for cell in cells]


def from_cells(texts: Sequence[str | None], mark: str = ".") -> Column:
    """A column of a CSV file. Where nine in ten of its values read as numbers, it is one of numbers.

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
    """The columns of a `pyarrow.Table`, with what Hugging Face's `features` say about them."""
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
