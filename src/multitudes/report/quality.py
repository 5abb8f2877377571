"""How good the predictions are: calibration, intervals, number of members, selective prediction, shift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from multitudes.metrics.calibration_error import reliability
from multitudes.metrics.selective import risk_coverage
from multitudes.report.results import Results, mean_spread
from multitudes.report.style import MEASURES, REFERENCE, Trace, View, axes, curve, curve_with_spread

__all__ = ["calibration", "intervals", "selective_prediction", "shift", "size"]

BINS = 10
POINTS = 120
"""Of a curve that has one for each row."""
LEVELS = [0.05 * step for step in range(1, 20)] + [0.99]
"""Of prediction intervals."""


def calibration(results: Results) -> dict[str, Any]:
    """Reliability diagrams: number, accuracy, confidence and rows of each bin, over the test rows of all seeds."""
    panels = []
    for at, method in enumerate(results.methods):
        pairs = results.tensors(method, "probs", "target")
        if pairs:
            probs, target = (torch.cat(each) for each in zip(*pairs, strict=True))
            found = reliability(probs, target, bins=BINS)
            columns = (found.accuracy.tolist(), found.confidence.tolist(), found.count.tolist())
            bins = [each for each in zip(range(BINS), *columns, strict=True) if each[3]]
            panels.append({"method": at, "bins": bins, "ece": mean_spread(results.scores(method, "ece"))[0]})
    return {"panels": panels, "bins": BINS} if panels else {}


def intervals(results: Results) -> dict[str, Any]:
    """Regression: coverage and mean width of the central intervals against their level, mean over seeds."""
    coverage, width = [], []
    for at, method in enumerate(results.methods):
        found = [_coverage_width(*each) for each in results.tensors(method, "mean", "std", "target")]
        if found:
            inside, wide = torch.stack(found).mean(0).tolist()
            coverage.append(curve(at, method, LEVELS, inside, "intervals of %{x:.0%} contain %{y:.1%}"))
            width.append(curve(at, method, LEVELS, wide, "intervals of %{x:.0%}: width %{y:.4g}"))
    if not coverage:
        return {}
    ideal = {"type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "hoverinfo": "skip", "line": REFERENCE}
    fraction = {"tickformat": ".0%", "range": [0, 1.02]}
    return {
        "coverage": [View([ideal, *coverage], axes("level", "fraction inside", xaxis=fraction, yaxis=fraction))],
        "width": [View(width, axes("level", "mean width", xaxis=fraction, yaxis={"rangemode": "tozero"}))],
    }


def _coverage_width(mean: Tensor, std: Tensor, target: Tensor) -> Tensor:
    """Of the Gaussian intervals with the predicted mean and deviation `[N]`, for all levels: `[2, L]`."""
    reach = torch.tensor([NormalDist().inv_cdf((1 + level) / 2) for level in LEVELS], dtype=torch.float64)
    inside = ((target - mean).abs().double() <= reach[:, None] * std.double()).double().mean(1)
    return torch.stack([inside, 2 * reach * std.double().mean()])


def size(results: Results) -> dict[str, Any]:
    """Scores against the number of members or draws."""
    views = []
    for measure in ("nll", "accuracy", "rmse"):
        title, form = MEASURES[measure]
        traces = []
        for at, method in enumerate(results.methods):
            tables = [outcome.metrics.get("by_size") or {} for outcome in results.of(method)]
            tables = [table for table in tables if table.get(measure)]
            if tables:
                sizes = tables[0]["sizes"]
                columns = [_column(tables, measure, index) for index in range(len(sizes))]
                traces.append(curve_with_spread(at, method, sizes, columns, f"%{{x}} members: {title} %{{y:{form}}}"))
        # A single network is a point, from which the others start; alone it shows nothing.
        if any(len(trace["x"]) > 1 for trace in traces):
            ticks = sorted({each for trace in traces for each in trace["x"]})
            exact = {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
            views.append(View(traces, axes("members or draws", title, xaxis=exact), title))
    return {"views": views} if views else {}


def _column(tables: list[dict[str, Any]], measure: str, index: int) -> list[float]:
    """The scores of one size, for the seeds that have it."""
    values = [table[measure][index] for table in tables if index < len(table[measure])]
    return [float(value) for value in values if value is not None]


def selective_prediction(results: Results) -> dict[str, Any]:
    """Risk against coverage, mean over seeds."""
    traces = []
    for at, method in enumerate(results.methods):
        curves = [risk_coverage(probs, target) for probs, target in results.tensors(method, "probs", "target")]
        curves = [found for found in curves if len(found.risk) == len(curves[0].risk)]
        if curves:
            rows, coverage = len(curves[0].risk), curves[0].coverage
            chosen = torch.linspace(0, rows - 1, min(rows, POINTS)).round().long()
            chosen = chosen[coverage[chosen] >= 0.05]  # of a handful of rows, the risk is noise
            risk = torch.stack([found.risk for found in curves]).mean(0)
            hover = "%{y:.2%} errors on %{x:.0%} of the inputs"
            traces.append(curve(at, method, coverage[chosen].tolist(), risk[chosen].tolist(), hover))
    if not traces:
        return {}
    # Where no method errs there is nothing to see.
    most = max(max(trace["y"]) for trace in traces)
    first = min(x for trace in traces for x, y in zip(trace["x"], trace["y"], strict=True) if y >= 0.02 * most)
    xaxis = {"tickformat": ".0%", "range": [math.floor(10 * first) / 10, 1.005], "dtick": 0.1}
    yaxis = {"tickformat": ".2~%", "rangemode": "tozero"}
    return {"views": [View(traces, axes("coverage: fraction predicted", "risk: error rate", xaxis=xaxis, yaxis=yaxis))]}


def shift(results: Results) -> dict[str, Any]:
    """Scores against the severity of corruptions: their mean, and each of them."""
    names = [name.split("/") for name in results.score_names() if name.startswith("shift/")]
    found = [parts for parts in names if len(parts) == 4 and parts[2].isdigit()]
    corruptions = sorted({parts[1] for parts in found}, key=lambda name: (name != "mean", name))
    severities = sorted({int(parts[2]) for parts in found})
    plots = {}
    for measure, (title, form) in MEASURES.items():
        if any(parts[3] == measure for parts in found):
            layout = axes("severity", title, xaxis={"dtick": 1}, yaxis={"tickformat": form})
            labels = ["mean of all corruptions" if name == "mean" else name.replace("_", " ") for name in corruptions]
            plots[f"plot-shift-{measure}"] = [
                View(_severity(results, corruption, severities, measure), layout, label)
                for corruption, label in zip(corruptions, labels, strict=True)
            ]
    return {"plots": plots} if plots else {}


def _severity(results: Results, corruption: str, severities: Sequence[int], measure: str) -> list[Trace]:
    places = {0: measure} | {severity: f"shift/{corruption}/{severity}/{measure}" for severity in severities}
    traces = []
    for at, method in enumerate(results.methods):
        values = {severity: results.scores(method, place) for severity, place in places.items()}
        known = {severity: each for severity, each in values.items() if each}
        if len(known) > 1:
            hover = f"severity %{{x}}: %{{y:{MEASURES[measure][1]}}}"
            traces.append(curve_with_spread(at, method, list(known), list(known.values()), hover))
    return traces
