"""How the columns of a table were read, shown: those to look at first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from multitudes.cli.screen import console, say, table
from multitudes.core.checks import plural

if TYPE_CHECKING:
    from multitudes.data.reading import ColumnReading

__all__ = ["say_columns"]

SHOWN = 20
"""How many columns are shown that need no look."""


def say_columns(readings: Sequence[ColumnReading]) -> None:
    """A table of columns on stderr; of many, those without a remark are only counted, by what they were read as."""
    if not readings:
        return
    plain = [each for each in readings if not (each.dropped or each.note or each.missing)]
    counted = plain if len(readings) > SHOWN else []
    rows = [
        [each.name, each.read_as, f"{each.values}", f"{each.missing}", _remark(each)]
        for each in readings
        if each not in counted
    ]
    console(stderr=True).print(table(["column", "read as", "values", "missing", "remark"], rows, words=5))
    for kind, count in Counter(each.read_as for each in counted).items():
        say(f"and {plural(count, 'column')} more, read as {kind}, without a remark")
    texts = any(each.read_as == "text" and not each.dropped for each in readings)  # of which there is one column
    if any(each.dropped or each.note for each in readings) and not texts:
        say("--drop COLUMN leaves a column out, --as COLUMN=KIND reads it as you say")


def _remark(reading: ColumnReading) -> str:
    dropped = f"left out: {reading.dropped}" if reading.dropped else ""
    return "; ".join(filter(None, [dropped, reading.note]))
