"""How good the predictions are: with more members, of the most confident ones, on corrupted inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from multitudes.metrics.selective import risk_coverage
from multitudes.report.board import score_axis
from multitudes.report.chart import Axis, Series, View
from multitudes.report.results import Results, mean_spread
from multitudes.study.columns import column_of

__all__ = ["selective_prediction", "shift", "size"]

POINTS = 120
"""Of a curve that has one for each row."""


def size(results: Results) -> dict[str, Any]:
    """Scores against the number of members or draws."""
    views = []
    for measure in ("nll", "accuracy", "rmse"):
        series = []
        for at, method in enumerate(results.methods):
            tables = [outcome.metrics.get("by_size") or {} for outcome in results.of(method)]
            tables = [table for table in tables if table.get(measure)]
            if tables:
                sizes = tables[0]["sizes"]
                values = [_column(tables, measure, index) for index in range(len(sizes))]
                series.append(_over_seeds(at, sizes, values, measure, "{} members or draws"))
        # A single network is a point, from which the others start; alone it shows nothing.
        if any(len(each.x) > 1 for each in series):
            ticks = tuple(sorted({float(place) for each in series for place in each.x}))
            views.append(
                View(
                    series,
                    Axis("members or draws", log=True, ticks=ticks),
                    score_axis(measure),
                    column_of(measure).title,
                )
            )
    return {"views": views} if views else {}


def _over_seeds(at: int, x: Sequence[float], values: Sequence[list[float]], measure: str, place: str) -> Series:
    """The line of a method through the means over seeds, with bars for the deviation between them."""
    column, found = column_of(measure), [mean_spread(each) for each in values]
    tips = [
        f"{place.format(where)}: {column.title} {column.told(mean)}"
        + ("" if math.isnan(spread) else f" ± {column.told(spread)}")
        for where, (mean, spread) in zip(x, found, strict=True)
    ]
    means = [mean for mean, _ in found]
    low, high = [mean - spread for mean, spread in found], [mean + spread for mean, spread in found]
    return Series(x, means, at, marks=True, low=low, high=high, tips=tips)


def _column(tables: list[dict[str, Any]], measure: str, index: int) -> list[float]:
    """The scores of one size, for the seeds that have it."""
    values = [table[measure][index] for table in tables if index < len(table[measure])]
    return [float(value) for value in values if value is not None]


def selective_prediction(results: Results) -> dict[str, Any]:
    """Risk against coverage, mean over seeds."""
    series = []
    for at, method in enumerate(results.methods):
        curves = [risk_coverage(probs, target) for probs, target in results.tensors(method, "probs", "target")]
        curves = [found for found in curves if len(found.risk) == len(curves[0].risk)]
        if curves:
            rows, coverage = len(curves[0].risk), curves[0].coverage
            chosen = torch.linspace(0, rows - 1, min(rows, POINTS)).round().long()
            chosen = chosen[coverage[chosen] >= 0.05]  # of a handful of rows, the risk is noise
            risk = torch.stack([found.risk for found in curves]).mean(0)[chosen].tolist()
            covered = coverage[chosen].tolist()
            tips = [
                f"{100 * y:.2f} % errors on {100 * x:.0f} % of the inputs" for x, y in zip(covered, risk, strict=True)
            ]
            series.append(Series(covered, risk, at, tips=tips))
    if not series:
        return {}
    # Where no method errs there is nothing to see.
    most = max(max(each.y) for each in series)
    first = min(x for each in series for x, y in zip(each.x, each.y, strict=True) if y >= 0.02 * most)
    x = Axis("inputs that are predicted", percent=True, low=min(math.floor(10 * first) / 10, 0.9), high=1.0)
    return {"views": [View(series, x, Axis("errors among them (lower is better)", percent=True, low=0))]}


def shift(results: Results) -> dict[str, Any]:
    """Scores against the severity of corruptions: their mean, and each of them."""
    names = [name.split("/") for name in results.score_names() if name.startswith("shift/")]
    found = [parts for parts in names if len(parts) == 4 and parts[2].isdigit()]
    corruptions = sorted({parts[1] for parts in found}, key=lambda name: (name != "mean", name))
    severities = sorted({int(parts[2]) for parts in found})
    ticks = tuple(float(severity) for severity in (0, *severities))
    plots = {}
    for measure in ("accuracy", "nll", "ece"):
        if any(parts[3] == measure for parts in found):
            labels = ["mean of all corruptions" if name == "mean" else name.replace("_", " ") for name in corruptions]
            plots[f"plot-shift-{measure}"] = [
                View(
                    _severity(results, corruption, severities, measure),
                    Axis("severity", ticks=ticks),
                    score_axis(measure),
                    label,
                )
                for corruption, label in zip(corruptions, labels, strict=True)
            ]
    return {"plots": plots} if plots else {}


def _severity(results: Results, corruption: str, severities: Sequence[int], measure: str) -> list[Series]:
    places = {0: measure} | {severity: f"shift/{corruption}/{severity}/{measure}" for severity in severities}
    series = []
    for at, method in enumerate(results.methods):
        values = {severity: results.scores(method, place) for severity, place in places.items()}
        known = {severity: each for severity, each in values.items() if each}
        if len(known) > 1:
            line = _over_seeds(at, list(known), list(known.values()), measure, "severity {}")
            # There may be many corruptions: only their mean has symbols and bars.
            series.append(line if corruption == "mean" else replace(line, marks=False, low=(), high=()))
    return series
