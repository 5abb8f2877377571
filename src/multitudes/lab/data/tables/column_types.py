"""Decide how the columns of a table are read: as numbers, dates, categories, or not at all, and why.

`read_columns` decides for all columns. A column's kind depends on all rows; fitted values use the training rows only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from multitudes.lab.data.tables.columns import Column
from multitudes.lab.data.tables.features import DATE_PARTS, Category, Date, Feature, Number, date_parts
from multitudes.lab.data.tables.numbers_and_dates import (
    AMBIGUOUS,
    ORDERS,
    READ_AS,
    date_order,
    decimal_marks,
    digits_as_dates,
)

FEW, RARE, MOST = 20, 10, 50
"""A column of more than `FEW` categories keeps those with at least `RARE` training rows, and at most `MOST`; the
others are merged. In fewer than `FEW` rows, distinct values do not indicate an id."""

NEARLY, NEARLY_ALL = 0.99, 0.9
"""Minimum share of the most common value of a nearly constant column, and of distinct values of an id."""


@dataclass(frozen=True)
class ColumnReading:
    """How a column was read, for display.

    `read_as` is number, date, category, id, text or target; `values` counts distinct values; `missing` counts rows
    without a readable value; `dropped` is the reason for leaving it out; `note` is a remark.
    """

    name: str
    read_as: str
    values: int
    missing: int
    dropped: str = ""
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return asdict(self)


class _Dropped(Exception):
    """Exception that leaves a column out, with its kind and the reason."""

    def __init__(self, read_as: str, reason: str) -> None:
        self.read_as, self.reason = read_as, reason


def check_read_as(read_as: Mapping[str, str], names: Collection[str], source: str) -> None:
    """Raise unless each key is a column of the source and each value a valid kind."""
    for name, kind in read_as.items():
        if name not in names:
            raise ValueError(f"read_as={name!r} is not a column of {source}, which has {', '.join(names)}")
        if kind not in READ_AS:
            raise ValueError(f"read_as of {name!r} must be {', '.join(READ_AS[:-1])} or {READ_AS[-1]}, got {kind!r}")


def read_columns(
    columns: Mapping[str, Column], rows: Tensor, read_as: Mapping[str, str] | None = None, sure: bool = False
) -> tuple[list[Feature], list[ColumnReading]]:
    """Fit the features of columns to the training rows, and describe how all columns were read.

    `read_as` sets the kind of some columns. `sure` means that columns were chosen by name: none is dropped as an id or
    constant.

    >>> import torch
    >>> columns = {"size": Column("number", torch.tensor([1.0, 2.0])), "day": Column("text", ["1.5.2020", "2.5.2020"])}
    >>> features, readings = read_columns(columns, torch.tensor([0, 1]))
    >>> [feature.names for feature in features], [reading.read_as for reading in readings]
    ([('size',), ('day day', 'day weekday', 'day days')], ['number', 'date'])
    """
    asked = read_as or {}
    features, readings = _read_all(columns, rows, asked, columns if sure else asked)
    if not features:  # fall back to row numbers if nothing else is left
        numbers = [each.name for each in readings if each.read_as == "id" and columns[each.name].kind == "number"]
        features, readings = _read_all(columns, rows, asked, [*asked, *numbers])
    return features, readings


def _read_all(
    columns: Mapping[str, Column], rows: Tensor, asked: Mapping[str, str], sure: Collection[str]
) -> tuple[list[Feature], list[ColumnReading]]:
    features: list[Feature] = []
    readings: list[ColumnReading] = []
    for name, column in columns.items():
        reader = _Reader(name, column, rows, asked.get(name), name in sure)
        try:
            features.append(reader.feature())
            readings.append(reader.reading(features[-1].kind))
        except _Dropped as dropped:
            readings.append(reader.reading(dropped.read_as, dropped.reason))
    return features, readings


class _Reader:
    """Decide how one column is read."""

    def __init__(self, name: str, column: Column, rows: Tensor, asked: str | None, sure: bool) -> None:
        self.name, self.column, self.rows, self.asked, self.sure = name, column, rows, asked, sure
        self.notes: list[str] = []
        self.values: list[str] = []
        """Known texts."""
        self.known = self.differ = 0  # number of known values, and of distinct ones
        self.count = len(column)

    def reading(self, read_as: str, dropped: str = "") -> ColumnReading:
        missing = self.count - self.known
        return ColumnReading(self.name, read_as, self.differ, missing, dropped, "; ".join(self.notes))

    def feature(self) -> Feature:
        """Fit the column's feature; raise `_Dropped` to leave it out."""
        kind = self.asked or self._kind()
        if kind == "text":
            self._count_texts()
            raise _Dropped("text", "free text cannot be a feature")
        if kind not in READ_AS:
            if self.sure:
                raise ValueError(f"column {self.name!r} is of kind {kind}, which cannot be a feature")
            self.count = 0
            raise _Dropped(kind, "unsupported type")
        if not self.name and not self.sure:
            self._count_texts()
            raise _Dropped("id", "no name, probably row numbers")
        return {"number": self._number, "category": self._category}.get(kind, self._date)()

    def _kind(self) -> str:
        column = self.column
        if column.kind != "text":
            return column.kind
        order = date_order(column.texts())
        if order != AMBIGUOUS:
            return "date" if order else "category"
        self._count_texts()
        like = next(text for text in column.texts() if text)
        raise _Dropped("date", f"the order of day and month is ambiguous in {like!r}: read it as dmy or mdy")

    # -- numbers -------------------------------------------------------------------------------------------

    def _number(self) -> Number:
        column = self.column
        mark = column.mark if column.numeric else decimal_marks([column.texts()])[0]
        values = column.numbers(mark)
        if mark == ",":
            self.notes.append("decimal commas")
        known, distinct, counts, _ = self._measured(values)
        self._check_number_id(known)
        self._note_constant(distinct[counts.argmax()].item(), int(counts.max()))
        self._note_codes()
        return number_of(self.name, values[self.rows], mark)

    def _check_number_id(self, known: Tensor) -> None:
        """Raise or note if distinct integers are an id, by their name or because they count rows."""
        differ = self.differ
        if not self.column.whole or len(known) < FEW or differ < NEARLY_ALL * len(known):
            return
        numbered = bool((known[1:] - known[:-1] == 1).all())
        if not self.sure:
            if numbered:
                raise _Dropped("id", "consecutive integers, probably row numbers")
            if _named_id(self.name):
                raise _Dropped("id", f"{_all(differ, known)} values are distinct, and the name suggests an id")
        self.notes.append("row numbers" if numbered else f"{_all(differ, known)} values are distinct: maybe an id")

    # -- categories ----------------------------------------------------------------------------------------

    def _category(self) -> Category:
        texts = self.column.texts()
        self._count_texts()
        train = [texts[row] for row in self.rows.tolist()]
        counts = Counter(text for text in train if text is not None)
        self._check_varied(list(counts), None in train)
        self._note_numbers()
        differ = self.differ
        if len(self.values) >= FEW and differ > NEARLY_ALL * len(self.values) and not self.sure:
            raise _Dropped("id", f"{_all(differ, self.values)} values are distinct")
        kept = sorted(counts)
        if len(counts) > FEW:
            frequent = sorted(kept, key=lambda text: -counts[text])[:MOST]
            kept = sorted(text for text in frequent if counts[text] >= RARE)
            if not kept and not self.sure:
                raise _Dropped("text", f"{differ} distinct texts, none in at least {RARE} training rows")
            kept = kept or sorted(frequent[:FEW])
            self.notes.append(f"many categories: the {len(kept)} most frequent are kept, the others are merged")
        self._note_constant(*Counter(self.values).most_common(1)[0])
        return Category(self.name, tuple(kept), len(kept) < len(counts), None in train)

    # -- dates ---------------------------------------------------------------------------------------------

    def _date(self) -> Date:
        column = self.column
        order = self.asked if self.asked in ORDERS else None
        if order is None:
            found = "ymd" if column.kind == "date" else date_order(column.texts()) or "ymd"
            if found == AMBIGUOUS:
                raise ValueError(
                    f"read_as of {self.name!r} must be dmy or mdy, got 'date': the order of day and month is ambiguous"
                )
            order = found
        *_, train = self._measured(column.days(order))
        missing = len(train) < len(self.rows)
        start = train.min().floor().item()
        found_parts = date_parts(train, start)
        parts = tuple(part for part in DATE_PARTS if len(found_parts[part].unique()) > 1)
        if order != "ymd":
            self.notes.append("day first" if order == "dmy" else "month first")
        return Date(self.name, parts or ("days",), order, start, _median(train), missing)

    # -- checks of all columns ---------------------------------------------------------------------------------

    def _measured(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the known values, the distinct ones with their counts, and the known training values."""
        self._check_asked(values)
        self._note_strays(values)
        known = values[values.float().isfinite()]
        distinct, counts = known.unique(return_counts=True)
        self.known, self.differ = len(known), len(distinct)
        train = values[self.rows]
        train = train[train.float().isfinite()]
        self._check_varied(train.unique(), len(train) < len(self.rows))
        return known, distinct, counts, train

    def _count_texts(self) -> None:
        self.values = [text for text in self.column.texts() if text is not None]
        self.known, self.differ = len(self.values), len(set(self.values))

    def _check_asked(self, values: Tensor) -> None:
        """Raise unless at least half of the values parse as the requested kind."""
        empty = self.column.empty()
        wrong = ~empty & values.isnan()
        if self.asked and 2 * int(wrong.sum()) > int((~empty).sum()):
            like = self.column.texts()[int(wrong.nonzero()[0])]
            raise ValueError(f"read_as of {self.name!r} cannot be {self.asked}: its values look like {like!r}")

    def _check_varied(self, distinct: Sequence[Any] | Tensor, missing: bool) -> None:
        if not len(distinct):
            raise _Dropped("empty", "no value in the training rows")
        if len(distinct) == 1 and not missing and not self.sure:
            raise _Dropped("constant", "constant in the training rows")

    def _note_strays(self, values: Tensor) -> None:
        wrong = ~self.column.empty() & ~values.float().isfinite()
        if count := int(wrong.sum()):
            texts = self.column.texts()
            shown = list(dict.fromkeys(str(texts[row]) for row in wrong.nonzero().flatten().tolist()))
            more = ", ..." if len(shown) > 3 else ""
            self.notes.append(f"{count} read as missing: {', '.join(map(repr, shown[:3]))}{more}")

    def _note_constant(self, most: Any, count: int) -> None:
        """Note a nearly constant column; `most` is the most common value, with `count` rows."""
        if self.differ > 1 and count >= NEARLY * self.known:
            self.notes.append(f"nearly constant: {_short(most)!r} in {count / self.known:.1%} of the rows")

    def _note_codes(self) -> None:
        """Note integers that may be dates or codes."""
        if not self.column.whole or self.asked:
            return
        texts = self.column.texts()
        if digits_as_dates(texts):
            self.notes.append("maybe dates, to be read as date")
        if any(text is not None and re.fullmatch(r"0\d+", text) for text in texts):
            self.notes.append("leading zeros: maybe codes, to be read as category")

    def _note_numbers(self) -> None:
        """Note texts of which at least half are numbers."""
        different = list(set(self.values))
        column = Column("text", different)
        numbers = int((~column.numbers(decimal_marks([different])[0]).isnan()).sum())
        if 2 * numbers >= len(different) > 0 and self.asked is None:
            share = "all" if numbers == len(different) else f"{numbers} of {len(different)}"
            self.notes.append(f"{share} distinct values are numbers: maybe to be read as number")


def number_of(name: str, train: Tensor, mark: str = ".") -> Number:
    """Fit a number to training values `[n]`, of which at least one is known.

    >>> import torch
    >>> number_of("a", torch.tensor([1.0, torch.nan, 5.0], dtype=torch.float64))
    Number(column='a', fill=3.0, flag=True, mark='.', offset=0.0)
    """
    known = train[train.float().isfinite()]
    spread, size = (known.max() - known.min()).item(), known.abs().max().item()
    offset = known.min().floor().item() if 0 < spread < 1e-5 * size else 0.0
    return Number(name, _median(known), len(known) < len(train), mark, offset)


def _all(differ: int, values: Sequence[Any] | Tensor) -> str:
    return "all" if differ == len(values) else "nearly all"


def _median(values: Tensor) -> float:
    ordered = values.sort().values
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _short(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _named_id(name: str) -> bool:
    """Return whether a name is that of an id.

    >>> [_named_id(name) for name in ("id", "customer_id", "PassengerId", "Unnamed: 0", "humid", "paid")]
    [True, True, True, True, False, False]
    """
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return any(word.lower() in {"id", "ids", "uuid", "guid", "index", "unnamed", "rownum", "key"} for word in words)
