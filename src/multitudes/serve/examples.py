"""Test inputs that a network is sure and unsure of, as a page sends them back, and the columns of a table."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from multitudes.data.features import Category, Date, Feature, parts_of
from multitudes.data.types import Data
from multitudes.report.chart import png
from multitudes.serve.held_out import HeldOut

__all__ = ["columns_of", "examples"]

EXAMPLES = 6
"""Of each sort."""


def examples(data: Data, held_out: HeldOut) -> dict[str, list[dict[str, Any]]]:
    """`{"sure": [...], "unsure": [...]}`: each the input, under `image`, `row` or `text`, and its `truth`."""
    order = held_out.uncertainty.argsort(stable=True)
    rows = held_out.rows[order]
    count = min(EXAMPLES, len(rows) // 2)
    sure = _varied(rows, data, count)
    unsure = rows.flip(0)[:count]
    return {"sure": _shown(data, sure), "unsure": _shown(data, unsure)}


def _varied(rows: Tensor, data: Data, count: int) -> Tensor:
    """The first rows, of classes one of each before any second."""
    if not data.classes:
        return rows[:count]
    first: dict[int, int] = {}
    for row, label in zip(rows.tolist(), data.test.y[rows].tolist(), strict=True):
        first.setdefault(label, row)
    chosen = list(first.values())[:count]
    rest = [row for row in rows.tolist()[:count] if row not in chosen]
    return torch.tensor([*chosen, *rest][:count], dtype=torch.int64)


def _shown(data: Data, rows: Tensor) -> list[dict[str, Any]]:
    inputs = _inputs(data, rows)
    truths = data.test.y[rows].tolist()
    named = [data.classes[truth] if data.classes else float(f"{truth:.6g}") for truth in truths]
    return [{**given, "truth": truth} for given, truth in zip(inputs, named, strict=True)] if inputs else []


def _inputs(data: Data, rows: Tensor) -> list[dict[str, Any]]:
    """Inputs of the test part; none where a page cannot show them."""
    if data.kind.pictured(data.shape):
        return [{"image": png(data.test.x[row].numpy(), max(data.shape))} for row in rows.tolist()]
    if data.kind.written and len(data.test.files) == len(data.test):
        return [{"text": data.test.files[row].decode(errors="replace")} for row in rows.tolist()]
    if data.kind.named:
        return [{"row": row} for row in _table_rows(data, data.test.x[rows])]
    return []


def _table_rows(data: Data, x: Tensor) -> list[dict[str, Any]]:
    """Rows by column, in their own units, from their features `[n, F]`."""
    features = data.encoder.features
    parts = x.split([len(feature.names) for feature in features], 1)
    columns = {each.column: _cells(each, part) for each, part in zip(features, parts, strict=True)}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cells(feature: Feature, x: Tensor) -> list[Any]:
    values = feature.restored(x)
    if isinstance(feature, Category):
        words = [*feature.known, "other", None]
        return [words[index] for index in values.tolist()]
    if isinstance(feature, Date):
        return [_date(value) for value in values.double()]
    return [None if math.isnan(value) else float(f"{value:.7g}") for value in values.tolist()]


def _date(days: Tensor) -> str | None:
    if not bool(days.isfinite()):
        return None
    found = {part: float(value) for part, value in parts_of(days[None]).items()}
    minutes = round(60 * found["hour"])
    clock = f" {minutes // 60:02}:{minutes % 60:02}" if minutes else ""
    return f"{found['year']:04.0f}-{found['month']:02.0f}-{found['day']:02.0f}{clock}"


def columns_of(data: Data) -> list[dict[str, Any]]:
    """The columns of a table: name, kind, and what a category may be; none where the inputs have no columns."""
    if not data.kind.named:
        return []
    return [
        {"name": each.column, "kind": each.kind, "known": list(each.known) if isinstance(each, Category) else []}
        for each in data.encoder.features
    ]
