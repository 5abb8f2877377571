"""Quality of the predictions: by number of members, by confidence, and on corrupted inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from multitudes.lab.report.board import score_axis
from multitudes.lab.report.chart import Axis, Series, View
from multitudes.lab.report.run_results import Results, mean_spread
from multitudes.lab.study.results.score_columns import column_of
from multitudes.metrics.selective import risk_coverage

POINTS = 120
"""Number of plotted points of a curve with one point per row."""


def size(results: Results) -> dict[str, Any]:
    """Plot scores against the number of members or draws."""
    views = []
    for measure in ("nll", "accuracy", "rmse"):
        series = []
        for at, method in enumerate(results.methods):
            tables = [own for each in results.of(method) if (own := each.metrics.get("by_size") or {}).get(measure)]
            if tables:
                by_size = zip_longest(tables[0]["sizes"], *(table[measure] for table in tables))
                known = {count: [float(each) for each in own if each is not None] for count, *own in by_size if count}
                series.append(_over_seeds(at, known, measure, "{} members or draws"))
        # A single network is the starting point of the others; alone it shows nothing.
        if any(len(each.x) > 1 for each in series):
            axis = Axis(
                "members or draws", log=True, ticks=tuple(sorted({float(x) for each in series for x in each.x}))
            )
            views.append(View(series, axis, score_axis(measure), column_of(measure).title))
    return {"views": views} if views else {}


def _over_seeds(at: int, values: Mapping[int, list[float]], measure: str, place: str) -> Series:
    """Plot a method's mean over seeds, with error bars of one standard deviation."""
    column, found = column_of(measure), [mean_spread(each) for each in values.values()]
    tips = [
        f"{place.format(where)}: {column.title} {column.with_unit(mean)}"
        + ("" if math.isnan(spread) else f" ± {column.with_unit(spread)}")
        for where, (mean, spread) in zip(values, found, strict=True)
    ]
    low, high = [mean - spread for mean, spread in found], [mean + spread for mean, spread in found]
    return Series(list(values), [mean for mean, _ in found], at, marks=True, low=low, high=high, tips=tips)


def selective_prediction(results: Results) -> dict[str, Any]:
    """Plot risk against coverage, averaged over seeds."""
    series = []
    for at, method in enumerate(results.methods):
        curves = [risk_coverage(probs, target) for probs, target in results.tensors(method, "probs", "target")]
        curves = [found for found in curves if len(found.risk) == len(curves[0].risk)]
        if curves:
            rows, coverage = len(curves[0].risk), curves[0].coverage
            chosen = torch.linspace(0, rows - 1, min(rows, POINTS)).round().long()
            chosen = chosen[coverage[chosen] >= 0.05]  # on a handful of rows, the risk is noise
            risk = torch.stack([found.risk for found in curves]).mean(0)[chosen].tolist()
            covered = coverage[chosen].tolist()
            both = zip(covered, risk, strict=True)
            tips = [f"{100 * y:.2f} % errors on {100 * x:.0f} % of the inputs" for x, y in both]
            series.append(Series(covered, risk, at, tips=tips))
    if not series:
        return {}
    # Skip the range where no method errs.
    most = max(max(each.y) for each in series)
    first = min(x for each in series for x, y in zip(each.x, each.y, strict=True) if y >= 0.02 * most)
    x = Axis("fraction of inputs predicted", percent=True, low=min(math.floor(10 * first) / 10, 0.9), high=1.0)
    return {"views": [View(series, x, Axis("error rate (lower is better)", percent=True, low=0))]}


def shift(results: Results) -> dict[str, Any]:
    """Plot scores against the severity of corruptions: their mean, and each of them."""
    names = [name.split("/") for name in results.score_names() if name.startswith("shift/")]
    found = [parts for parts in names if len(parts) == 4 and parts[2].isdigit()]
    corruptions = sorted({parts[1] for parts in found}, key=lambda name: (name != "mean", name))
    severities = sorted({int(parts[2]) for parts in found})
    axis = Axis("severity", ticks=tuple(map(float, (0, *severities))))
    plots = {}
    for measure in ("accuracy", "nll", "ece"):
        if any(parts[3] == measure for parts in found):
            plots[f"plot-shift-{measure}"] = [
                View(
                    _severity(results, name, severities, measure), axis, score_axis(measure),
                    "mean of all corruptions" if name == "mean" else name.replace("_", " "),
                )
                for name in corruptions
            ]  # fmt: skip
    return {"plots": plots} if plots else {}


def _severity(results: Results, corruption: str, severities: Sequence[int], measure: str) -> list[Series]:
    places = {0: measure} | {severity: f"shift/{corruption}/{severity}/{measure}" for severity in severities}
    series = []
    for at, method in enumerate(results.methods):
        known = {severity: each for severity, place in places.items() if (each := results.scores(method, place))}
        if len(known) > 1:
            line = _over_seeds(at, known, measure, "severity {}")
            # There may be many corruptions: only their mean gets symbols and bars.
            series.append(line if corruption == "mean" else replace(line, marks=False, low=(), high=()))
    return series
