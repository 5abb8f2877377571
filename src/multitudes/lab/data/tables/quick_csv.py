"""Read large CSV files by column with Arrow: numbers never become Python strings.

The result equals that of `sources.py`, which reads cell by cell and handles all other files (other separators, rows of
varying length, newlines in cells, decimal commas).
"""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import torch

from multitudes.lab.data.tables.columns import MISSING, Column, from_cells
from multitudes.lab.data.tables.numbers_and_dates import decimal_marks

LARGE = 4 << 20
"""Size in bytes from which this reader is used; smaller files are fast either way."""
PLAIN = r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"
"""Number with an unambiguous format."""
CODE = r"^[+-]?0\d"
"""Digits with leading zeros, which may be codes and are kept as texts."""


def quick_columns(path: Path) -> dict[str, Column] | None:
    """Return the columns of a large, plain CSV file; None for any other."""
    if path.stat().st_size < LARGE or importlib.util.find_spec("pyarrow") is None:
        return None
    import pyarrow as pa

    try:
        table = _table(path)
        return None if table is None else _columns(table)
    except (pa.ArrowException, UnicodeDecodeError, csv.Error, OSError):
        return None  # the cell-by-cell reader reports the fault


def _table(path: Path) -> Any:
    """Read all cells as texts; None if columns lack distinct names or commas, or a row is not one line."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    with path.open("rb") as file:
        header, count = file.readline().decode("utf-8-sig"), sum(1 for _ in file)
    names = [name.strip() for name in next(csv.reader([header]))]
    if '"' in header or max(",;\t", key=header.count) != "," or len(set(names)) < len(names):
        return None
    table = arrow_csv.read_csv(
        path,
        read_options=arrow_csv.ReadOptions(column_names=names, skip_rows=1, block_size=1 << 24),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )
    return table if table.num_rows == count else None


def _columns(table: Any) -> dict[str, Column] | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    found: dict[str, Column | None] = {}
    texts: dict[str, list[str | None]] = {}
    missing = pa.array(sorted(MISSING))
    for name in table.column_names:
        cells = pc.utf8_trim_whitespace(table[name])
        cells = pc.if_else(pc.is_in(pc.utf8_lower(cells), value_set=missing), None, cells)
        found[name] = _number(cells)
        if found[name] is None:
            texts[name] = cells.to_pylist()
        table = table.drop_columns([name])  # free the memory
    marks = decimal_marks(list(texts.values()))
    if "," in marks:
        return None  # points are ambiguous as well
    found |= {name: from_cells(own, mark) for (name, own), mark in zip(texts.items(), marks, strict=True)}
    return {name: column for name, column in found.items() if column is not None}


def _number(cells: Any) -> Column | None:
    """Return a column of plain numbers; None if any cell is not one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def every(pattern: str) -> bool:
        return bool(pc.all(pc.match_substring_regex(cells, pattern), min_count=0).as_py())

    if cells.null_count == len(cells) or not every(PLAIN):
        return None
    if bool(pc.any(pc.match_substring_regex(cells, CODE), min_count=0).as_py()):
        return None
    whole = every(r"^[+-]?\d+$")
    values = pc.cast(pc.replace_substring_regex(cells, r"^\+", ""), pa.float64())
    return Column("number", torch.from_numpy(values.to_numpy().copy()), whole)
