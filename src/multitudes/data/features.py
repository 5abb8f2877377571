"""How one column of a table becomes features: a number, a date or a category.

Each class is a column as it was fitted to the training rows, in plain values: `plain` gives them, `feature_of` reads
them back. `raw` reads the column of any source into one tensor `[n]`, in which NaN, or a number behind those of the
categories, says that a value is missing; `features` makes the columns `[n, f]` of a network's inputs of that. It works
on tensors alone, so that an exported network can do it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from multitudes.data.columns import MISSING, Column

__all__ = ["PARTS", "Category", "Date", "Feature", "Number", "feature_of", "parts_of"]

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Feature:
    """A column of a table, fitted to the training rows."""

    kind: ClassVar[str]
    column: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features."""
        raise NotImplementedError

    def raw(self, column: Column) -> Tensor:
        """The values `[N]` of a column of a source; an error where it holds something else than in training."""
        raise NotImplementedError

    def missing(self, raw: Tensor) -> Tensor:
        """Which values are missing, `[n]`: NaN, and numbers that are not finite in float32."""
        return ~(raw.abs() <= LARGEST)

    def unknown(self, raw: Tensor) -> Tensor:
        """Which values the training rows have not, where that can be said, `[n]`."""
        return torch.zeros(len(raw), dtype=torch.bool)

    def features(self, raw: Tensor) -> Tensor:
        """The features `[n, f]`, float32."""
        raise NotImplementedError

    def restored(self, x: Tensor) -> Tensor:
        """Values `[n]` that have these features `[n, f]`."""
        raise NotImplementedError

    def plain(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"as": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Number(Feature):
    """A number, less `offset`. Where it is missing it is `fill`, and with `flag` a second feature says so.

    >>> Number("a", fill=2.0, flag=True).features(torch.tensor([1.0, torch.nan]))
    tensor([[1., 0.],
            [2., 1.]])
    """

    kind: ClassVar[str] = "number"
    fill: float = 0.0
    flag: bool = False
    mark: str = "."
    """The decimal mark, where numbers are read from texts."""
    offset: float = 0.0
    """What all values have in common, where float32 would blur them."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column, f"{self.column} missing") if self.flag else (self.column,)

    def raw(self, column: Column) -> Tensor:
        # A comma that its own file tells of is one, whatever the training file had.
        values = column.numbers("," if column.mark == "," else self.mark)
        _check_read(self, column, values)
        return values

    def features(self, raw: Tensor) -> Tensor:
        missing = self.missing(raw)
        values = _filled(raw, missing, self.fill)
        if self.offset:
            values = values - torch.tensor(self.offset, dtype=raw.dtype)
        return torch.stack([values.float(), missing.float()] if self.flag else [values.float()], 1)

    def restored(self, x: Tensor) -> Tensor:
        values = x[:, 0].double() + self.offset
        return torch.where(x[:, 1] > 0, torch.nan, values) if self.flag else values


PARTS = ("year", "month", "day", "weekday", "hour", "days")
"""Of a date: the weekday counts from 0, a Monday; the hour has a fraction; the days count from a first one."""


@dataclass(frozen=True)
class Date(Feature):
    """A date as some of its `PARTS`. Where it is missing it is `fill`, and with `flag` a last feature says so."""

    kind: ClassVar[str] = "date"
    parts: tuple[str, ...] = PARTS
    order: str = "ymd"
    """Of year, month and day, where dates are read from texts."""
    start: float = 0.0
    """The day from which days are counted, in days since 1970."""
    fill: float = 0.0
    flag: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.column} {part}" for part in (*self.parts, *(("missing",) if self.flag else ())))

    def raw(self, column: Column) -> Tensor:
        days = column.days(self.order)
        _check_read(self, column, days)
        return days

    def features(self, raw: Tensor) -> Tensor:
        missing = self.missing(raw)
        found = parts_of(_filled(raw, missing, self.fill), self.start)
        chosen = [found[part] for part in self.parts] + ([missing] if self.flag else [])
        return torch.stack([part.float() for part in chosen], 1)

    def restored(self, x: Tensor) -> Tensor:
        found = dict(zip(self.parts, x.double().unbind(1), strict=False))
        days = found["days"] + self.start
        if "hour" in found:  # float32 knows the days to seconds at best
            days = (days - found["hour"] / 24).round() + found["hour"] / 24
        return torch.where(x[:, -1] > 0, torch.nan, days) if self.flag else days


def parts_of(days: Tensor, start: float = 0.0) -> dict[str, Tensor]:
    """The `PARTS` of dates, given in days since the beginning of 1970, `[n]` in float64.

    >>> {part: value.item() for part, value in parts_of(torch.tensor([18321.75], dtype=torch.float64)).items()}
    {'year': 2020.0, 'month': 2.0, 'day': 29.0, 'weekday': 5.0, 'hour': 18.0, 'days': 18321.75}
    """
    seconds = (days * 86400).round()
    day = (seconds / 86400).floor()
    # The civil calendar, in years that begin in March, so that a leap day is the last of its year.
    shifted = day + 719468
    era = (shifted / 146097).floor()  # of 400 years
    of_era = shifted - era * 146097
    leaps = (of_era / 1460).floor() - (of_era / 36524).floor() + (of_era / 146096).floor()
    year_of_era = ((of_era - leaps) / 365).floor()
    of_year = of_era - (365 * year_of_era + (year_of_era / 4).floor() - (year_of_era / 100).floor())
    month = ((5 * of_year + 2) / 153).floor()  # 0 is March
    early = (month >= 10).to(days)
    return {
        "year": year_of_era + 400 * era + early,
        "month": month + 3 - 12 * early,
        "day": of_year - ((153 * month + 2) / 5).floor() + 1,
        "weekday": day + 3 - 7 * ((day + 3) / 7).floor(),
        "hour": (seconds - 86400 * day) / 3600,
        "days": days - start,
    }


@dataclass(frozen=True)
class Category(Feature):
    """A text: one feature for each that is `known`, 1 where it is that and 0 elsewhere.

    With `other` a feature more has all other texts, with `flag` one has what is missing; without them these are 0
    everywhere. As a tensor a text is its number among those that are known, or the number behind them, and what is
    missing the next.

    >>> colour = Category("colour", known=("blue", "red"), other=True)
    >>> colour.names, colour.raw(Column("text", ["red", "green"])), colour.features(torch.tensor([1, 2]))
    (('colour=blue', 'colour=red', 'colour other'), tensor([1, 2]), tensor([[0., 1., 0.],
            [0., 0., 1.]]))
    """

    kind: ClassVar[str] = "category"
    known: tuple[str, ...] = ()
    other: bool = False
    flag: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        more = [f"{self.column} {what}" for what, has in (("other", self.other), ("missing", self.flag)) if has]
        return (*(f"{self.column}={value}" for value in self.known), *more)

    def raw(self, column: Column) -> Tensor:
        number: dict[str | None, int] = {category: index for index, category in enumerate(self.known)}
        number[None] = len(self.known) + 1
        return torch.tensor([number.get(text, len(self.known)) for text in column.texts()], dtype=torch.int64)

    def missing(self, raw: Tensor) -> Tensor:
        return raw == len(self.known) + 1

    def unknown(self, raw: Tensor) -> Tensor:
        return (raw == len(self.known)) & (not self.other)

    @property
    def _kept(self) -> list[int]:
        """The numbers that have a feature."""
        return [*range(len(self.known)), *([len(self.known)] * self.other), *([len(self.known) + 1] * self.flag)]

    def features(self, raw: Tensor) -> Tensor:
        return (raw[:, None] == torch.tensor(self._kept, device=raw.device)).float()

    def restored(self, x: Tensor) -> Tensor:
        return torch.where(x.amax(1) > 0, torch.tensor(self._kept)[x.argmax(1)], len(self.known))

    def numbers(self) -> dict[str | None, int]:
        """The number of each text, under None that of texts that are not known; the empty text is a missing one."""
        known: dict[str | None, int] = {text: number for number, text in enumerate(self.known)}
        return {None: len(self.known), **dict.fromkeys(("", *_MISSING), len(self.known) + 1), **known}


_MISSING = [form(word) for word in sorted(MISSING - {""}) for form in (str.lower, str.upper, str.title)]


def _filled(raw: Tensor, missing: Tensor, fill: float) -> Tensor:
    # As a tensor: an exported network has a plain number in float32.
    return torch.where(missing, torch.tensor(fill, dtype=raw.dtype), raw)


def _check_read(feature: Feature, column: Column, values: Tensor) -> None:
    """Half of what is written must read as in training."""
    written = int((~column.empty()).sum())
    read = int((~values.isnan()).sum())
    if 2 * read < written:
        index = int(((~column.empty()) & values.isnan()).nonzero()[0])
        raise ValueError(f"must hold {feature.kind}s, as in training, got {column.texts()[index]!r}")


_KINDS: dict[str, type[Feature]] = {kind.kind: kind for kind in (Number, Date, Category)}


def feature_of(plain: Mapping[str, Any]) -> Feature:
    """The feature that `plain` gave."""
    own: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items() if name != "as"
    }
    return _KINDS[plain["as"]](**own)
