"""Which columns of a table matter, and the test rows that the best method is least sure of."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from multitudes.data.features import Category, Date, Feature, parts_of
from multitudes.report.results import Results

__all__ = ["important_columns", "unsure_rows"]

MOST_COLUMNS = 20
"""Of the bars."""
ROWS, SHOWN = 10, 8
"""Test rows of the table, and columns of them."""
WORDS = {"accuracy": "accuracy lost", "rmse": "RMSE added", "entropy": "change of entropy", "std": "change of std"}
"""What shuffling a column does, as a heading."""
KINDS = ("score", "uncertainty")


def important_columns(results: Results) -> dict[str, Any]:
    """For each measured method a table of columns, with what shuffling each changes, and the length of a bar for it."""
    table = results.importance
    if not table.get("methods"):
        return {}
    panels = []
    for label, own in table["methods"].items():
        means = {
            name: [statistics.fmean(each["score"]), statistics.fmean(each["uncertainty"])]
            for name, each in own["columns"].items()
        }
        most = [max((abs(pair[at]) for pair in means.values()), default=0.0) or 1.0 for at in (0, 1)]
        lines = [
            (name, [(_told(table[kind], pair[at]), pair[at] / most[at]) for at, kind in enumerate(KINDS)])
            for name, pair in list(means.items())[:MOST_COLUMNS]
        ]
        panels.append({"method": label, "rows": own["rows"], "lines": lines, "left": max(0, len(means) - MOST_COLUMNS)})
    return {"panels": panels, "heads": [WORDS[table[kind]] for kind in KINDS]}


def _told(score: str, value: float) -> str:
    """A change, with its sign."""
    sign = "+" if value > 0 else ""
    if score == "accuracy":
        return f"{sign}{100 * value:.1f} points".replace("-", "−")
    return f"{sign}{value:.3g}".replace("-", "−")


# -- rows --------------------------------------------------------------------------------------------------


def unsure_rows(results: Results) -> dict[str, Any]:
    """The test rows of the largest uncertainty of the best method: what they hold, what it predicts, and the truth."""
    data = results.table
    best = next((row.name for row in results.board if not row.baseline), None)
    outcomes = results.alike(best) if data is not None and best is not None else []
    if not outcomes:
        return {}
    outcome = outcomes[0]
    arrays = ("probs", "target") if data.classes else ("std", "mean", "low", "high", "target")
    found = outcome.tensors(*arrays)
    if found is None or len(found[0]) != len(data.test):
        return {}
    unsure = torch.special.entr(found[0]).sum(1) if data.classes else found[0]
    chosen = unsure.argsort(descending=True, stable=True)[:ROWS]
    names, columns = _values(results, data.test.x[chosen])
    cells = _of_classes(data.classes, chosen, *found) if data.classes else _of_numbers(chosen, *found)
    heads = ["class", "confidence", "truth"] if data.classes else ["mean", "interval of 90 %", "truth"]
    rows = list(zip(chosen.tolist(), zip(*columns, strict=True), cells, strict=True))
    hidden = len(data.encoder.features) - len(names)
    return {"method": best, "columns": names, "heads": heads, "rows": rows, "hidden": hidden}


def _of_classes(names: tuple[str, ...], chosen: Tensor, probs: Tensor, target: Tensor) -> list[tuple[list[str], bool]]:
    sure, label = probs[chosen].max(1)
    found = zip(sure.tolist(), label.tolist(), target[chosen].tolist(), strict=True)
    return [([names[each], f"{100 * sure:.0f} %", names[truth]], each == truth) for sure, each, truth in found]


def _of_numbers(
    chosen: Tensor, std: Tensor, mean: Tensor, low: Tensor, high: Tensor, target: Tensor
) -> list[tuple[list[str], bool]]:
    found = zip(*(each[chosen].tolist() for each in (mean, low, high, target)), strict=True)
    return [
        ([_number(mean), f"{_number(low)} to {_number(high)}", _number(truth)], low <= truth <= high)
        for mean, low, high, truth in found
    ]


def _values(results: Results, x: Tensor) -> tuple[list[str], list[list[str]]]:
    """The columns that matter most, or else the first ones, and what rows `[n, F]` hold in them, in their own units."""
    features = list(results.table.encoder.features)
    ranked = [list(own["columns"]) for own in (results.importance.get("methods") or {}).values()][:1]
    order = ranked[0] if ranked else []
    starts, start = {}, 0
    for feature in features:
        starts[feature.column], start = start, start + len(feature.names)
    features.sort(key=lambda each: order.index(each.column) if each.column in order else math.inf)
    shown = features[:SHOWN]
    values = [_restored(each, x[:, starts[each.column] : starts[each.column] + len(each.names)]) for each in shown]
    return [each.column for each in shown], values


def _restored(feature: Feature, x: Tensor) -> list[str]:
    values = feature.restored(x)
    if isinstance(feature, Category):
        words = [*feature.known, "other", "missing"]
        return [words[index] for index in values.tolist()]
    if isinstance(feature, Date):
        return [_date(value) for value in values.double()]
    return [_number(value) for value in values.tolist()]


def _date(days: Tensor) -> str:
    if not bool(days.isfinite()):
        return "missing"
    found = {part: float(value) for part, value in parts_of(days[None]).items()}
    return f"{found['year']:04.0f}-{found['month']:02.0f}-{found['day']:02.0f}"


def _number(value: float) -> str:
    """A few digits.

    >>> _number(3.14159), _number(1234567.0), _number(float("nan")), _number(-0.5)
    ('3.142', '1,234,567', 'missing', '−0.5')
    """
    if math.isnan(value):
        return "missing"
    text = f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"
    return text.replace("-", "−").replace("inf", "∞")
