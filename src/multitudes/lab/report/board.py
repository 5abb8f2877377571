"""The leaderboard, and quality against cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multitudes.lab.report.chart import Axis, Series, View
from multitudes.lab.report.run_results import Results
from multitudes.lab.study.results.leaderboard import best, better
from multitudes.lab.study.results.result_rows import Row
from multitudes.lab.study.results.score_columns import (
    MORE_COSTS,
    Column,
    caption,
    column_of,
    costs,
    display_name,
    first_columns,
    fixed,
    more_columns,
    remark,
)
from multitudes.metrics.declare import Better

# -- the leaderboard ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The heading of a column, and its sort order, best values first."""

    title: str
    order: str = "ascending"
    """Sort order: "ascending", "descending", or "zero" if zero is best."""
    sorted: bool = False
    """True if the table is initially sorted by this column."""

    @classmethod
    def of(cls, column: Column, by: str = "") -> Head:
        """Return the heading of a column, with an arrow towards better values."""
        orders = {Better.HIGHER: "descending", Better.ZERO: "zero"}
        order = "ascending" if column.is_cost else orders.get(better(column.name), "ascending")
        arrow = f"\u00a0{column.arrow}" if column.arrow else ""
        return cls(column.heading + arrow, order, column.name == by)


@dataclass(frozen=True)
class Cell:
    """A number of a table, its text, its standard deviation over seeds, and whether it is the column's best."""

    value: float
    text: str
    spread: str = ""
    best: bool = False


@dataclass(frozen=True)
class Line:
    """A row of a table: the index of its method (None for baselines), its name, its cells and a remark."""

    method: int | None
    name: str
    cells: Sequence[Cell]
    remark: str = ""


def standings(results: Results) -> dict[str, Any]:
    """Return the leaderboard: mean and deviation over seeds, and the best of each score."""
    unbalanced = bool(results.imbalance)
    first = first_columns(results.board, results.by, results.tiny, unbalanced)
    rest = more_columns(results.board, results.by, unbalanced)
    return {
        "first": table_of(results, first, [Head.of(column, results.by) for column in first]),
        "rest": table_of(results, rest, list(map(Head.of, rest))),
        "caption": caption(results.board, results.tiny),
    }


def table_of(results: Results, columns: Sequence[Column], heads: Sequence[Head]) -> dict[str, Any]:
    """Make a table of the rows that have a value in some column."""
    board = [row for row in results.board if any(column.name in row.values for column in columns)]
    cells = [cells_of(board, column) for column in columns]
    lines = [
        Line(
            None if row.baseline else results.methods.index(row.name),
            display_name(row),
            [column[at] for column in cells],
            remark(row, results.board, results.by),
        )
        for at, row in enumerate(board)
    ]
    return {"head": list(heads), "rows": lines}


def cells_of(board: Sequence[Row], column: Column) -> list[Cell]:
    """Return the cells of a column; a dash and NaN if a row has no value."""
    top = column.best(board)
    cells = []
    for row in board:
        value = column.of(row)
        if value is None:
            cells.append(Cell(math.nan, "–"))
            continue
        # The deviation of a ratio between seeds is timing noise.
        known = value.spread is not None and math.isfinite(value.spread) and not column.is_cost
        spread = column.text(value.spread or 0.0, beside=value.mean) if known else ""
        cells.append(Cell(value.mean, column.cell(value), spread, row is top))
    return cells


# -- cost --------------------------------------------------------------------------------------------------

TICKS = tuple(2.0**power for power in range(-4, 11))


def answer_figure(results: Results) -> View | None:
    """Return the recommendation's figure: score against price, with the Pareto frontier.

    Error bars show the interval of the difference from the single network. None for fewer than two methods.
    """
    found = results.recommendation
    if len(found.points) < 2:
        return None
    column = column_of(found.by)
    sign = 1 if better(found.by) is Better.HIGHER else -1
    singles = {row.name: row[found.by] for row in results.board if row.method == "single"}
    alone = next(iter(singles.values()), math.nan)
    named = {*found.methods, *singles}
    marks = []
    for point in found.points:
        bars = [] if point.low == point.high else sorted(alone + sign * gain for gain in (point.low, point.high))
        tip = (
            f"{column.title} {column.with_unit(point.score)}, {fixed(point.cost, 2)} × the price of the single network"
        )
        label = point.method if point.method in named or point.on_frontier else ""
        marks.append(_mark(results, point.method, point.cost, point.score, bars, tip, label))
    front = [(point.cost, point.score) for point in found.points if point.on_frontier]
    return _against_price(front, marks, found.cost, found.by)


def cost(results: Results) -> dict[str, Any]:
    """Plot scores against costs, with the Pareto frontier."""
    names = dict.fromkeys([results.by, "accuracy", "nll", "rmse", "log_density"])
    columns = [*costs(results.tiny), *MORE_COSTS]
    views = [view for name in names for column in columns if (view := _view(results, name, column)) is not None]
    return {"views": views} if views else {}


def score_axis(name: str) -> Axis:
    """Return the axis of a score, labelled with the better direction."""
    column = column_of(name)
    hint = {Better.HIGHER: " (higher is better)", Better.LOWER: " (lower is better)"}.get(better(name), "")
    return Axis(column.title + hint, percent=column.unit == "%")


def _view(results: Results, score: str, price: Column) -> View | None:
    """Plot a score against a cost; None if fewer than two methods have both."""
    known = [row for row in results.board if math.isfinite(row[score]) and row[price.name] > 0]
    if len(known) < 2:
        return None
    ordered = sorted(known, key=lambda row: row[price.name])
    front = [
        row for row in ordered if best([one for one in ordered if one[price.name] <= row[price.name]], score) is row
    ]
    column, marks = column_of(score), []
    for row in known:
        spread = row.values[score].spread
        bars = [] if spread is None else [row[score] - spread, row[score] + spread]
        paid = price.cell(row.values[price.name])
        tip = f"{column.title} {column.with_unit(row[score])}, {price.title} {paid} ×"
        marks.append(_mark(results, row.name, row[price.name], row[score], bars, tip, row.name if row in front else ""))
    places = [(row[price.name], row[score]) for row in front]
    title = f"{price.title}, × the single network's"
    return _against_price(places, marks, title, score, f"{column.title} against {price.title}")


def _against_price(
    front: Sequence[tuple[float, float]], marks: Sequence[Series], title: str, score: str, label: str = ""
) -> View:
    """Plot methods by price and score, with a line along the frontier."""
    line = Series([x for x, _ in front], [y for _, y in front])
    return View([line, *marks], Axis(title, log=True, ticks=TICKS), score_axis(score), label)


def _mark(results: Results, method: str, x: float, y: float, bars: Sequence[float], tip: str, label: str) -> Series:
    """Plot a method as one point; `bars` are the ends of its error bar, or empty."""
    at = results.methods.index(method)
    return Series([x], [y], at, line=False, marks=True, low=bars[:1], high=bars[1:], tips=[tip], labels=[label])
