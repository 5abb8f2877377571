"""The leaderboard, and quality against cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multitudes.metrics.declare import Better
from multitudes.report.chart import Axis, Series, View
from multitudes.report.results import Results
from multitudes.study.columns import COSTS, Column, column_of, first_columns, more_columns
from multitudes.study.leaderboard import Row, best, better, marks

__all__ = ["Cell", "Head", "cells_of", "cost", "score_axis", "standings"]


# -- the leaderboard ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The heading of a column, and which values come first when it is sorted: those that are better."""

    title: str
    order: str = "ascending"
    """ "ascending", "descending" or, for what is best at zero, "zero"."""
    sorted: bool = False
    """Whether the table is sorted by it when the page opens."""

    @classmethod
    def of(cls, column: Column, by: str = "") -> Head:
        """The heading of a column, with an arrow to what is better."""
        orders = {Better.HIGHER: "descending", Better.ZERO: "zero"}
        order = "ascending" if column.is_cost else orders.get(better(column.name), "ascending")
        arrow = f"\u00a0{column.arrow}" if column.arrow else ""
        return cls(column.heading + arrow, order, column.name == by)


@dataclass(frozen=True)
class Cell:
    """A number of a table: mean and deviation over seeds, decimal places, and whether it is the best of its column."""

    value: float
    spread: float = math.nan
    digits: int = 1
    best: bool = False


def standings(results: Results) -> dict[str, Any]:
    """Mean and deviation over seeds, and the best of each score; rows in the order of the leaderboard."""
    seeds = [len(row.seeds) for row in results.board]
    first, rest = (_board(results, columns(results.board)) for columns in (first_columns, more_columns))
    return {"first": first, "rest": rest, "fewest_seeds": min(seeds), "most_seeds": max(seeds)}


def _board(results: Results, columns: Sequence[Column]) -> dict[str, Any]:
    cells = [cells_of(results.board, column) for column in columns]
    numbers = [results.methods.index(row.name) for row in results.board]
    rows = [(number, [column[at] for column in cells]) for at, number in enumerate(numbers)]
    return {"head": [Head.of(column, results.by) for column in columns], "rows": rows}


def cells_of(board: Sequence[Row], column: Column) -> list[Cell]:
    """A column of a table: a cell for each row."""
    found = marks(board, column.name)
    cells = []
    for row in board:
        value = column.of(row)
        mean, spread = (math.nan, None) if value is None else (value.mean, value.spread)
        # The deviation of a ratio between seeds is noise of the clock, not of the method.
        shown = math.nan if spread is None or column.is_cost else spread
        cells.append(Cell(mean, shown, column.digits, found[row.name] == "best" and not column.is_cost))
    return cells


# -- cost --------------------------------------------------------------------------------------------------

TICKS = tuple(2.0**power for power in range(-4, 11))


def cost(results: Results) -> dict[str, Any]:
    """Scores against costs, and the line of the methods that no cheaper one beats."""
    names = list(dict.fromkeys([results.by, *("accuracy", "nll", "rmse", "log_density")]))
    views = [view for name in names for column in COSTS if (view := _view(results, name, column)) is not None]
    return {"views": views} if views else {}


def score_axis(name: str) -> Axis:
    """Of a score, with a word on which values are better."""
    column = column_of(name)
    hint = {Better.HIGHER: " (higher is better)", Better.LOWER: " (lower is better)"}.get(better(name), "")
    return Axis(column.title + hint, percent=column.unit == "%")


def _view(results: Results, score: str, price: Column) -> View | None:
    """None where fewer than two methods have both."""
    points: dict[str, tuple[float, float]] = {}
    series = []
    title = column_of(score)
    rows = [row for row in results.board if row.name in results.methods]
    front = _front(rows, score, price)
    for row in rows:
        value, paid = row.values.get(score), price.of(row)
        if (
            value is None
            or paid is None
            or not (math.isfinite(paid.mean) and paid.mean > 0 and math.isfinite(value.mean))
        ):
            continue
        points[row.name] = paid.mean, value.mean
        spread = math.nan if value.spread is None else value.spread
        tip = f"{title.title} {title.told(value.mean)}, {price.title} {price.text(paid.mean)} ×"
        at, label = results.methods.index(row.name), row.name if row.name in front else ""
        bars = {"low": [value.mean - spread], "high": [value.mean + spread]}
        series.append(Series([paid.mean], [value.mean], at, line=False, marks=True, tips=[tip], labels=[label], **bars))
    if len(points) < 2:
        return None
    line = [points[name] for name in front if name in points]
    frontier = Series([x for x, _ in line], [y for _, y in line])
    axis = Axis(f"{price.title}, single network = 1", log=True, ticks=TICKS)
    return View([frontier, *series], axis, score_axis(score), f"{title.title} against {price.title}")


def _front(rows: Sequence[Row], score: str, price: Column) -> list[str]:
    """The methods that nothing cheaper is better than, the cheapest first."""
    costs = {row.name: paid.mean for row in rows if (paid := price.of(row)) is not None and paid.mean > 0}
    known = sorted((row for row in rows if row.name in costs), key=lambda row: costs[row.name])
    return [
        row.name
        for row in known
        if best([other for other in known if costs[other.name] <= costs[row.name]], score) is row
    ]
