"""Parse texts into numbers and dates: with decimal points or commas, and with day, month and year in any order."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Sequence

READ_AS = ("number", "date", "category", "text", "dmy", "mdy")
"""Kinds a column can be read as: `text` is left out; `dmy` and `mdy` are dates with the day or the month first."""

ORDERS = ("ymd", "dmy", "mdy")
"""Orders of day, month and year; dates with the year first or with month names need none."""

AMBIGUOUS = "ambiguous"
"""Order of dates whose day and month cannot be distinguished."""

ENOUGH = 0.9
"""Share of values that must parse as numbers or dates for a column to be numeric or dates."""

Texts = Sequence[str | None]

# -- numbers -----------------------------------------------------------------------------------------------

UNITS = "$€£¥% \u00a0\u202f"
"""Characters allowed before or after a number."""

_SIGN, _EXPONENT = r"[+-]?", r"(?:[eE][+-]?\d+)?"
_GROUPS = {".": ", \u00a0\u202f'", ",": ". \u00a0\u202f'"}
"""Separators allowed between groups of three digits, by decimal mark."""
_NUMBER = {
    mark: re.compile(rf"{_SIGN}(?:\d{{1,3}}(?:([{groups}])\d{{3}})(?:\1\d{{3}})*|\d*)(?:[{mark}]\d*)?{_EXPONENT}")
    for mark, groups in _GROUPS.items()
}
_DECIMAL_COMMA = re.compile(rf"{_SIGN}\d*,(?:\d{{1,2}}|\d{{4,}}){_EXPONENT}|{_SIGN}0,\d+|{_SIGN}\d[\d. ']*\d{{3}},\d+")
_THOUSANDS_COMMA = re.compile(rf"{_SIGN}\d{{1,3}}(?:,\d{{3}}){{2,}}|{_SIGN}\d{{1,3}}(?:,\d{{3}})+\.\d*")
_DECIMAL_POINT = re.compile(rf"{_SIGN}\d*\.(?:\d{{0,2}}|\d{{4,}}){_EXPONENT}|{_SIGN}0?\.\d+|{_SIGN}\d{{4,}}\.\d*")
_COMMA, _POINT = re.compile(rf"{_SIGN}\d+,\d{{3}}"), re.compile(rf"{_SIGN}\d+\.\d{{3}}")


def read_number(text: str, mark: str = ".") -> float:
    """Parse a number with this decimal mark; NaN if invalid. Currency and percent signs are ignored.

    >>> read_number("1,234.5"), read_number("1.234,5 €", ","), read_number("2.5", ","), read_number("1,2")
    (1234.5, 1234.5, 2.5, nan)
    """
    if mark == ".":
        number = _float(text)
        if not math.isnan(number):
            return number
    text = text.strip(UNITS)
    if _NUMBER[mark].fullmatch(text):
        for group in _GROUPS[mark]:
            text = text.replace(group, "")
        text = text.replace(",", ".")
    return _float(text)


def _float(text: str) -> float:
    try:
        return math.nan if "_" in text else float(text)  # Python accepts 1_000
    except ValueError:
        return math.nan


def decimal_marks(columns: Sequence[Texts], separator: str = ",") -> list[str]:
    """Return the decimal mark of each column of a file.

    Ambiguous cells, such as "1,234", follow other columns with decimal commas, or semicolons between cells.

    >>> (
    ...     decimal_marks([["1,5", "2"], ["1.234", "5"]]),
    ...     decimal_marks([["1,234", "2.5"]]),
    ...     decimal_marks([["1,234"]], ";"),
    ... )
    ([',', ','], ['.'], [','])
    """
    marked = [[text.strip(UNITS) for text in set(texts) if text and ("," in text or "." in text)] for texts in columns]
    sure = [_sure_mark(texts) for texts in marked]
    likely = "," if "," in sure else "."
    either = "," if separator == ";" else likely
    return [
        mark or (either if _any(_COMMA, texts) else likely if _any(_POINT, texts) else ".")
        for mark, texts in zip(sure, marked, strict=True)
    ]


def _sure_mark(texts: Sequence[str]) -> str | None:
    """Return the unambiguous decimal mark; None if the cells are ambiguous."""
    if _any(_THOUSANDS_COMMA, texts) or _any(_DECIMAL_POINT, texts):
        return "."
    commas = [text for text in texts if "," in text]
    numbers = _mostly(commas, lambda text: _NUMBER[","].fullmatch(text) is not None)  # not words with commas
    return "," if numbers and _any(_DECIMAL_COMMA, texts) else None


def _any(pattern: re.Pattern[str], texts: Sequence[str]) -> bool:
    return any(pattern.fullmatch(text) for text in texts)


# -- dates -------------------------------------------------------------------------------------------------

_CLOCK = (
    r"(?:(?:[T ]+)(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?P<rest>[.,]\d+)?)?"
    r" ?(?P<half>[AaPp][Mm])? ?(?P<zone>Z|UTC|[+-]\d{2}(?::?\d{2})?)?)?"
)
_YEAR_FIRST = re.compile(rf"(?P<year>\d{{4}})([-/.])(?P<month>\d{{1,2}})\2(?P<day>\d{{1,2}}){_CLOCK}")
_MONTH = re.compile(r"(?P<year>\d{4})-(?P<month>\d{2})")
_DIGITS = re.compile(r"(?P<year>\d{4})(?P<month>\d{2})(?P<day>\d{2})")
_SECONDS = re.compile(r"(\d{9,10})(\d{3})?")
_YEAR_LAST = re.compile(
    rf"(?P<first>\d{{1,2}})(?P<mark>[-/.])(?P<next>\d{{1,2}})(?P=mark)(?P<year>\d{{4}}|(?<!\.)\d{{2}}){_CLOCK}"
)
_NAMED = re.compile(
    rf"(?:(?P<day>\d{{1,2}})(?:st|nd|rd|th)?[ .-]+(?P<name>[A-Za-z]{{3,9}})[ .,-]+"
    rf"|(?P<name_>[A-Za-z]{{3,9}})[ .]+(?P<day_>\d{{1,2}})(?:st|nd|rd|th)?[ ,]+)(?P<year>\d{{4}}){_CLOCK}"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_EPOCH = datetime.date(1970, 1, 1).toordinal()


def read_date(text: str, order: str = "ymd") -> float:
    """Return the days from 1970-01-01 to a date, with the time as a fraction; NaN if invalid.

    A month means its first day; nine or more digits are seconds since 1970, or milliseconds.

    >>> (
    ...     read_date("1970-01-03"),
    ...     read_date("3.1.1970 12:00", "dmy"),
    ...     read_date("Jan 3, 1970"),
    ...     read_date("30.2.1970", "dmy"),
    ... )
    (2.0, 2.5, 2.0, nan)
    """
    if found := _YEAR_FIRST.fullmatch(text) or _DIGITS.fullmatch(text):
        return _days(found.groupdict(), found["year"], found["month"], found["day"])
    if found := _MONTH.fullmatch(text):
        return _days({}, found["year"], found["month"], "1")
    if found := _SECONDS.fullmatch(text):  # since 1970, or milliseconds
        return (int(found[1]) + int(found[2] or 0) / 1000) / 86400
    if found := _NAMED.fullmatch(text):
        name = (found["name"] or found["name_"]).lower()[:3]
        month = str(_MONTHS.index(name) + 1) if name in _MONTHS else "0"
        return _days(found.groupdict(), found["year"], month, found["day"] or found["day_"])
    if order != "ymd" and (found := _YEAR_LAST.fullmatch(text)):
        first, second, year = _year_last(found)
        day, month = (first, second) if order == "dmy" else (second, first)
        return _days(found.groupdict(), year, month, day)
    return math.nan


def _year_last(found: re.Match[str]) -> tuple[str, str, str]:
    year = found["year"]
    if len(year) == 2:
        year = f"{'19' if int(year) > 68 else '20'}{year}"  # same rule as strptime
    return found["first"], found["next"], year


def _days(clock: dict[str, str | None], year: str, month: str, day: str) -> float:
    try:
        days = datetime.date(int(year), int(month), int(day)).toordinal() - _EPOCH
    except ValueError:
        return math.nan
    if clock.get("hour") is None:
        return float(days)
    hour, minute, second = (int(clock[name] or 0) for name in ("hour", "minute", "second"))
    if clock["half"]:
        hour = hour % 12 + 12 * (clock["half"].lower() == "pm")
    if hour > 24 or minute > 59 or second > 60:
        return math.nan
    seconds = 3600 * hour + 60 * minute + second + float((clock["rest"] or "0").replace(",", "."))
    return days + (seconds - _zone(clock["zone"])) / 86400


def _zone(zone: str | None) -> int:
    """Return the offset from UTC in seconds."""
    if zone in (None, "Z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    return (-1 if zone[0] == "-" else 1) * (3600 * int(digits[:2]) + 60 * int(digits[2:]))


def date_order(texts: Texts) -> str | None:
    """Return the order in which a column's dates are written, or `AMBIGUOUS`; None if it does not hold dates.

    >>> date_order(["2020-05-01", None]), date_order(["31/1/2020", "1/2/2020"]), date_order(["1/2/2020"])
    ('ymd', 'dmy', 'ambiguous')
    """
    given = [text for text in texts if text is not None]
    if not _mostly(given[:200], lambda text: _dated(text) is not None):  # a quick check first
        return None
    found = {text: _dated(text) for text in set(given)}
    if not _mostly(given, lambda text: found[text] is not None):
        return None
    numbers = [match for match in found.values() if match is not None and match.re is _YEAR_LAST]
    first, second = (any(int(match[place]) > 12 for match in numbers) for place in ("first", "next"))
    points = any(match["mark"] == "." for match in numbers)
    if first and second:
        return None
    return "ymd" if not numbers else "mdy" if second else "dmy" if first or points else AMBIGUOUS


def digits_as_dates(texts: Texts) -> bool:
    """Return whether integers look like dates: 20201231, or seconds since 1970, all from 1900 to 2099.

    >>> digits_as_dates(["20201231", "20210101"]), digits_as_dates(["20201331"]), digits_as_dates(["1600000000"])
    (True, False, True)
    """
    given = {text for text in texts if text is not None}
    dates = (read_date(text) for text in given if _DIGITS.fullmatch(text) or _SECONDS.fullmatch(text))
    likely = sum(-25567 <= days <= 47482 for days in dates)  # from 1900 to 2099
    return bool(given) and likely == len(given)


def _dated(text: str) -> re.Match[str] | None:
    """Return the match of a text that is a date in some order."""
    if found := _YEAR_FIRST.fullmatch(text) or _MONTH.fullmatch(text) or _NAMED.fullmatch(text):
        return None if math.isnan(read_date(text)) else found
    found = _YEAR_LAST.fullmatch(text)
    return found if found and any(not math.isnan(read_date(text, order)) for order in ("dmy", "mdy")) else None


def _mostly(texts: Sequence[str], holds: Callable[[str], bool]) -> bool:
    return bool(texts) and sum(map(holds, texts)) >= ENOUGH * len(texts)
