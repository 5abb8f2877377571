"""Features made from table columns (numbers, dates, categories), and what is stored for texts and images.

Each class is a column fitted to the training rows, as plain values: `plain` returns them and `feature_of` reads them
back. `raw` reads a column of any source into one tensor `[n]`; missing values are NaN, or an index after the
categories. `features_of` turns these tensors into network inputs `[n, F]`. It uses tensor operations only, so that it
can be exported with the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from multitudes.lab.data.tables.columns import MISSING, Column

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Feature:
    """A column of a table, fitted to the training rows."""

    kind: ClassVar[str]
    column: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features."""
        raise NotImplementedError

    @property
    def numeric(self) -> tuple[bool, ...]:
        """True for each feature that is a number; the others are zeros and ones."""
        raise NotImplementedError

    def raw(self, column: Column) -> Tensor:
        """Return the values `[N]` of a source's column; raise if they are not of the type in training."""
        raise NotImplementedError

    def missing(self, raw: Tensor) -> Tensor:
        """Return a mask `[n]` of missing values: NaN, and numbers that are not finite in float32."""
        return ~(raw.abs() <= LARGEST)

    def unknown(self, raw: Tensor) -> Tensor:
        """Return a mask `[n]` of categories that do not occur in the training rows."""
        return torch.zeros(len(raw), dtype=torch.bool)

    @classmethod
    def joint(cls, features: Sequence[Any], raw: Tensor) -> Tensor:
        """Return the features of several columns `[n, k]` of this kind, concatenated, float32 `[n, f]`."""
        raise NotImplementedError

    def restored(self, x: Tensor) -> Tensor:
        """Invert the features `[n, f]` into values `[n]`."""
        raise NotImplementedError

    def plain(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return {"as": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Number(Feature):
    """A number minus `offset`. Missing values become `fill`; with `flag`, a second feature marks them.

    >>> features_of([Number("a", fill=2.0, flag=True)], [torch.tensor([1.0, torch.nan])])
    tensor([[1., 0.],
            [2., 1.]])
    """

    kind: ClassVar[str] = "number"
    fill: float = 0.0
    flag: bool = False
    mark: str = "."
    """Decimal mark of numbers read from texts."""
    offset: float = 0.0
    """Common part of all values, subtracted where float32 would lose precision."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column, f"{self.column} missing") if self.flag else (self.column,)

    @property
    def numeric(self) -> tuple[bool, ...]:
        return (True, False) if self.flag else (True,)

    def raw(self, column: Column) -> Tensor:
        # A file may have decimal commas even if the training file had points.
        values = column.numbers("," if column.mark == "," else self.mark)
        _check_read(self, column, values)
        return values

    @classmethod
    def joint(cls, features: Sequence[Number], raw: Tensor) -> Tensor:
        values, missing = _filled(raw, [each.fill for each in features])
        values = values - _row([each.offset for each in features], raw)
        places = [[at, len(features) + at] if each.flag else [at] for at, each in enumerate(features)]
        return _chosen([values.float(), missing.float()], places)

    def restored(self, x: Tensor) -> Tensor:
        values = x[:, 0].double() + self.offset
        return torch.where(x[:, 1] > 0, torch.nan, values) if self.flag else values


DATE_PARTS = ("year", "month", "day", "weekday", "hour", "days")
"""Parts of a date: the weekday counts from Monday as 0, hours have a fraction, and days count from a start day."""


@dataclass(frozen=True)
class Date(Feature):
    """A date as some of its `DATE_PARTS`. Missing values become `fill`; with `flag`, a last feature marks them."""

    kind: ClassVar[str] = "date"
    parts: tuple[str, ...] = DATE_PARTS
    order: str = "ymd"
    """Order of year, month and day for dates read from texts."""
    start: float = 0.0
    """Start of the day count, in days since 1970."""
    fill: float = 0.0
    flag: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.column} {part}" for part in (*self.parts, *(("missing",) if self.flag else ())))

    @property
    def numeric(self) -> tuple[bool, ...]:
        return (True,) * len(self.parts) + (False,) * self.flag

    def raw(self, column: Column) -> Tensor:
        days = column.days(self.order)
        _check_read(self, column, days)
        return days

    @classmethod
    def joint(cls, features: Sequence[Date], raw: Tensor) -> Tensor:
        days, missing = _filled(raw, [each.fill for each in features])
        found = date_parts(days, _row([each.start for each in features], raw))
        names = (*DATE_PARTS, "missing")
        own = [(*each.parts, "missing") if each.flag else each.parts for each in features]
        places = [[len(features) * names.index(part) + at for part in parts] for at, parts in enumerate(own)]
        return _chosen([*(found[part].float() for part in DATE_PARTS), missing.float()], places)

    def restored(self, x: Tensor) -> Tensor:
        found = dict(zip(self.parts, x.double().unbind(1), strict=False))
        days = found["days"] + self.start
        if "hour" in found:  # float32 resolves days to seconds at best
            days = (days - found["hour"] / 24).round() + found["hour"] / 24
        return torch.where(x[:, -1] > 0, torch.nan, days) if self.flag else days


def date_parts(days: Tensor, start: Tensor | float = 0.0) -> dict[str, Tensor]:
    """Return the `DATE_PARTS` of dates, given in float64 as days since 1970-01-01, each in the shape of `days`.

    >>> {part: value.item() for part, value in date_parts(torch.tensor([18321.75], dtype=torch.float64)).items()}
    {'year': 2020.0, 'month': 2.0, 'day': 29.0, 'weekday': 5.0, 'hour': 18.0, 'days': 18321.75}
    """
    seconds = (days * 86400).round()
    day = (seconds / 86400).floor()
    # The civil calendar, with years starting in March, so that a leap day is the last of its year.
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
    """A text as one-hot features, one per `known` category.

    `other` adds a feature for all other texts, `flag` one for missing values; without them, such rows are all zeros. As
    a tensor, a text is its index in `known`; unknown texts have the next index, and missing values the one after.

    >>> colour = Category("colour", known=("blue", "red"), other=True)
    >>> colour.names, colour.raw(Column("text", ["red", "green"]))
    (('colour=blue', 'colour=red', 'colour other'), tensor([1, 2]))
    >>> features_of([colour], [torch.tensor([1, 2])])
    tensor([[0., 1., 0.],
            [0., 0., 1.]])
    """

    kind: ClassVar[str] = "category"
    known: tuple[str, ...] = ()
    other: bool = False
    flag: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        more = [f"{self.column} {what}" for what, has in (("other", self.other), ("missing", self.flag)) if has]
        return (*(f"{self.column}={value}" for value in self.known), *more)

    @property
    def numeric(self) -> tuple[bool, ...]:
        return (False,) * len(self.names)

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
        """Indices that have a feature."""
        return [*range(len(self.known)), *([len(self.known)] * self.other), *([len(self.known) + 1] * self.flag)]

    @classmethod
    def joint(cls, features: Sequence[Category], raw: Tensor) -> Tensor:
        own = [(at, number) for at, each in enumerate(features) for number in each._kept]
        at, numbers = torch.tensor(own).unbind(1)
        return (raw.index_select(1, at) == numbers).float()

    def restored(self, x: Tensor) -> Tensor:
        return torch.where(x.amax(1) > 0, torch.tensor(self._kept)[x.argmax(1)], len(self.known))

    def numbers(self) -> dict[str | None, int]:
        """Return the index of each text, with unknown texts under None; the empty text is a missing value."""
        known: dict[str | None, int] = {text: number for number, text in enumerate(self.known)}
        return {None: len(self.known), **dict.fromkeys(("", *_MISSING), len(self.known) + 1), **known}


_MISSING = [form(word) for word in sorted(MISSING - {""}) for form in (str.lower, str.upper, str.title)]


@dataclass(frozen=True)
class Text(Feature):
    """A column of texts, tokenized into ids (see `texts.TextEncoder`)."""

    kind: ClassVar[str] = "text"
    tokenizer: str = ""
    """The tokenizer, serialised by the `tokenizers` library."""
    longest: int = 1
    """Maximum number of tokens per text; longer texts are cut."""
    empty: int = 0
    """Token for texts without tokens."""


@dataclass(frozen=True)
class Pixels(Feature):
    """A column of images normalised by the channel statistics of a pretrained network."""

    kind: ClassVar[str] = "pixels"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def features_of(features: Sequence[Feature], raw: Sequence[Tensor]) -> Tensor:
    """Return all features `[n, F]` of columns `[n]`, in order; each kind is computed in one batch."""
    found: dict[int, Tensor] = {}
    kinds: list[type[Feature]] = [type(feature) for feature in features]
    for kind in dict.fromkeys(kinds):
        own = [at for at, each in enumerate(kinds) if each is kind]
        x = kind.joint([features[at] for at in own], torch.stack([raw[at] for at in own], 1))
        found |= zip(own, x.split([len(features[at].names) for at in own], 1), strict=True)
    return torch.cat([found[at] for at in range(len(features))], 1)


def _chosen(parts: Sequence[Tensor], places: Sequence[Sequence[int]]) -> Tensor:
    """Select these columns of the concatenated parts `[n, f]`."""
    every = [place for own in places for place in own]
    whole = torch.cat(list(parts), 1)
    return whole if every == list(range(whole.shape[1])) else whole.index_select(1, torch.tensor(every))


def _filled(raw: Tensor, fills: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return columns `[n, k]` with missing values filled in, and the mask of missing values."""
    missing = ~(raw.abs() <= LARGEST)
    return torch.where(missing, _row(fills, raw), raw), missing


def _row(values: Sequence[float], like: Tensor) -> Tensor:
    # as a tensor: an exported network stores a Python number in float32
    return torch.tensor(values, dtype=like.dtype)


def _check_read(feature: Feature, column: Column, values: Tensor) -> None:
    """Raise unless at least half of the values parse as in training."""
    written = int((~column.empty()).sum())
    read = int((~values.isnan()).sum())
    if 2 * read < written:
        index = int(((~column.empty()) & values.isnan()).nonzero()[0])
        raise ValueError(f"must hold {feature.kind}s, as in training, got {column.texts()[index]!r}")


_KINDS: dict[str, type[Feature]] = {kind.kind: kind for kind in (Number, Date, Category, Text, Pixels)}


def feature_of(plain: Mapping[str, Any]) -> Feature:
    """Rebuild a feature from `plain`; raise ValueError if a value has another type."""
    kind = _KINDS.get(plain["as"]) if isinstance(plain, Mapping) else None
    if kind is None:
        raise ValueError(f"a feature must be one of {', '.join(_KINDS)}, got {plain!r}")
    own: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items() if name != "as"
    }
    feature = kind(**own)
    for each in fields(feature):
        value, like = getattr(feature, each.name), "" if each.default is MISSING_DEFAULT else each.default
        inside = float if kind is Pixels else str
        texts = not isinstance(value, tuple) or all(type(each) is inside for each in value)
        if type(value) is not type(like) or not texts:
            raise ValueError(f"{each.name} of a {kind.kind} must be {type(like).__name__}, got {value!r}")
    return feature
