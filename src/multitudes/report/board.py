"""The leaderboard, and quality against cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multitudes.report.results import Results, mean_spread
from multitudes.report.style import MEASURES, REFERENCE, Style, Trace, View, axes, plotly_text
from multitudes.study.leaderboard import best, better, marks
from multitudes.study.rows import Row

__all__ = ["Cell", "cost", "standings"]


@dataclass(frozen=True)
class Column:
    """A column of the leaderboard: its heading, the score or cost that it shows, and in which unit."""

    title: str
    name: str
    unit: str = ""
    """ "%" of fractions, "×" of ratios."""
    inverse: bool = False
    """Whether a speed is shown as a time."""

    @property
    def heading(self) -> str:
        """With its unit, and an arrow to what is better."""
        arrow = "" if self in COSTS else better(self.name).value
        return f"{self.title} {self.unit}".strip() + (f"\u00a0{arrow}" if arrow else "")

    def values(self, results: Results, method: str) -> list[float]:
        """For each seed, as they are shown."""
        found, scale = results.scores(method, self.name), 100 if self.unit == "%" else 1
        return [scale / value if self.inverse else scale * value for value in found if value or not self.inverse]


SCORES = (
    Column("accuracy", "accuracy", "%"),
    Column("NLL", "nll"),
    Column("ECE", "ece", "%"),
    Column("RMSE", "rmse"),
    Column("log density", "log_density"),
    Column("CRPS", "crps"),
    Column("95 % coverage", "coverage_95", "%"),
    Column("95 % width", "width_95"),
    Column("shifted accuracy", "shift/mean/accuracy", "%"),
)
COSTS = (
    Column("inference time", "costs/inference_time_ratio", "×"),
    Column("training time", "costs/training_time_ratio", "×"),
    Column("parameters", "costs/parameters_ratio", "×"),
    Column("multiply-adds", "costs/multiply_adds_ratio", "×"),
    Column("peak memory", "costs/peak_memory_bytes_ratio", "×"),
)
PARAMETERS = COSTS[2]


# -- the leaderboard ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A number of a table: mean and deviation over seeds, decimal places, and "best" or "noise" of a marked one."""

    value: float
    spread: float = math.nan
    digits: int = 1
    mark: str = ""


def standings(results: Results) -> dict[str, Any]:
    """Mean and deviation over seeds, the best of each score, and what is within noise of it."""
    names = results.score_names()
    ood = [name.removesuffix("/entropy/auroc")[4:] for name in names if _is_auroc(name)]
    first = [*SCORES, *(Column(f"AUROC {each}", f"ood/{each}/entropy/auroc", "%") for each in ood), *COSTS[:3]]
    shown = {column.name for column in first}
    rest = [Column(name.replace("_", " "), name) for name in names if "/" not in name and name not in shown]
    seeds = [len(row.seeds) for row in results.board]
    tables = {"first": _board(results, first), "rest": _board(results, [*rest, *COSTS[3:]])}
    return {**tables, "fewest_seeds": min(seeds), "most_seeds": max(seeds)}


def _is_auroc(name: str) -> bool:
    return name.startswith("ood/") and name.endswith("/entropy/auroc")


def _board(results: Results, columns: list[Column]) -> dict[str, Any]:
    """The columns that some method has a value of; rows in the order of the leaderboard."""
    values = {column: {method: column.values(results, method) for method in results.methods} for column in columns}
    shown = [column for column in columns if any(values[column].values())]
    # A cost has its cheapest, but that is always the single network.
    found = {column: {} if column in COSTS else marks(results.board, column.name) for column in shown}
    rows = []
    for row in results.board:
        cells = [_cell(column, values[column][row.name], found[column].get(row.name, "")) for column in shown]
        rows.append((results.methods.index(row.name), cells))
    return {"head": [column.heading for column in shown], "rows": rows}


def _cell(column: Column, values: list[float], mark: str) -> Cell:
    mean, spread = mean_spread(values)
    # The deviation of a ratio between seeds is noise of the clock, not of the method.
    return Cell(mean, math.nan if column in COSTS else spread, 1 if column.unit else 3, mark)


# -- cost --------------------------------------------------------------------------------------------------


def cost(results: Results) -> dict[str, Any]:
    """Quality against cost, circles sized by parameters, and the line of the methods that no cheaper one beats."""
    scores = [name for name in ("accuracy", "nll", "rmse") if name in results.score_names()]
    costs = [column for column in COSTS if column is not PARAMETERS]
    views = [view for name in scores for column in costs if (view := _view(results, name, column)) is not None]
    return {"views": views, "title": MEASURES[scores[0]][0]} if views else {}


def _view(results: Results, score: str, column: Column) -> View | None:
    title, form = MEASURES[score]
    points: dict[str, tuple[float, float]] = {}
    traces: list[Trace] = []
    sizes = [mean_spread(PARAMETERS.values(results, method))[0] for method in results.methods]
    for at, (method, size) in enumerate(zip(results.methods, sizes, strict=True)):
        price, _ = mean_spread(column.values(results, method))
        mean, spread = mean_spread(results.scores(method, score))
        if not (math.isfinite(price) and price > 0 and math.isfinite(mean)):
            continue
        points[method] = (price, mean)
        style = Style(at)
        same = {"type": "scatter", "mode": "markers", "meta": at, "x": [price], "y": [mean]}
        circle = {"size": [size], "sizemode": "area", "sizeref": 2 * max(sizes) / 54**2, "sizemin": 5}
        circle |= {"color": style.colour, "symbol": "circle", "opacity": 0.22, "line": {"width": 0}}
        hover = f"<b>%{{text}}</b><br>{title} %{{y:{form}}}<br>{column.title} × %{{x:.2f}}<br>"
        hover += f"parameters × {size:.2f}<extra></extra>"
        if not math.isnan(size):
            traces.append({**same, "marker": circle, "hoverinfo": "skip"})
        point = {"marker": style.marker(9), "error_y": style.bars([spread]), "text": [plotly_text(method)]}
        traces.append({**same, **point, "hovertemplate": hover})
    if len(points) < 2:
        return None
    prices = [price for price, _ in points.values()]
    ticks = [2.0**power for power in range(-4, 11)]
    xaxis = {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    xaxis["range"] = [math.log10(min(prices) / 2), math.log10(max(prices) * 1.4)]
    layout = axes(f"{column.title}, single network = 1", title, xaxis=xaxis, yaxis={"tickformat": form})
    return View([*traces, *_front(points, results.board, score)], layout, f"{title} against {column.title}")


def _front(points: dict[str, tuple[float, float]], board: Sequence[Row], score: str) -> list[Trace]:
    """The line of the methods that nothing cheaper is better than, with their names; none where none is known."""
    rows = sorted((row for row in board if row.name in points), key=lambda row: points[row.name][0])
    front = []
    for row in rows:
        no_dearer = [other for other in rows if points[other.name][0] <= points[row.name][0]]
        if best(no_dearer, score) is row:
            front.append((row.name, *points[row.name]))
    if not front:
        return []
    names, x, y = zip(*front, strict=True)
    line = {
        "type": "scatter", "mode": "lines+markers+text", "x": list(x), "y": list(y), "hoverinfo": "skip",
        "text": [plotly_text(name) for name in names], "cliponaxis": False,
        "textposition": "top left" if y[-1] >= y[0] else "bottom left",
        "marker": {"size": 12, "opacity": 0},  # unseen, it keeps the names off the symbols
        "line": REFERENCE,
    }  # fmt: skip
    return [line]
