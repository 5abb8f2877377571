"""Calibration: confidence against accuracy, and interval level against coverage, before and after calibration.

Arrays and scores named `raw/...` are those before calibration.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from multitudes.lab.report.board import Head, table_of
from multitudes.lab.report.chart import Axis, Series, View
from multitudes.lab.report.run_results import Results, mean_spread
from multitudes.lab.study.results.score_columns import Column, column_of
from multitudes.lab.study.run.measurement import LEVELS
from multitudes.metrics.calibration_error import reliability

BINS = 10
QUANTILES = [0.05 * step for step in range(1, 20)]
"""Quantile levels of the calibration plot."""
NORMAL_REACH = torch.tensor([NormalDist().inv_cdf((1 + level) / 2) for level in LEVELS], dtype=torch.float64)
"""Half-width of a Gaussian's intervals in standard deviations, for all levels, `[L]`."""


# -- classes -----------------------------------------------------------------------------------------------


def calibration(results: Results) -> dict[str, Any]:
    """Return reliability diagrams: index, accuracy, confidence and size of each bin, over all seeds."""
    panels = []
    for at, method in enumerate(results.methods):
        if bins := _bins(results, method, "probs"):
            before = [(confidence, accuracy) for _, accuracy, confidence, _ in _bins(results, method, "raw/probs")]
            after, raw = (mean_spread(results.scores(method, name))[0] for name in ("ece", "raw/ece"))
            panels.append({"method": at, "bins": bins, "before": before, "ece": after, "ece_before": raw})
    return {"panels": panels, "bins": BINS, "table": _before_after(results, "nll", "ece", "brier")} if panels else {}


def _bins(results: Results, method: str, probs: str) -> list[tuple[int, float, float, int]]:
    """Return index, accuracy, confidence and size of the non-empty bins; empty without predictions."""
    pairs = results.tensors(method, probs, "target")
    if not pairs:
        return []
    stacked, target = map(torch.cat, zip(*pairs, strict=True))
    found = reliability(stacked, target, bins=BINS)
    columns = (found.accuracy.tolist(), found.confidence.tolist(), found.count.tolist())
    return [each for each in zip(range(BINS), *columns, strict=True) if each[3]]


def _before_after(results: Results, *names: str) -> dict[str, Any]:
    """Return the scores of each method before and after calibration; no columns if nothing was calibrated."""
    heads: list[Head] = []
    columns: list[Column] = []
    for column in map(column_of, names):
        if any(f"raw/{column.name}" in row.values for row in results.board):
            order = Head.of(column).order
            heads.append(Head(f"{column.heading} before", order))
            heads.append(Head(f"{column.heading} after", order, column.name == results.by))
            columns += [replace(column, name=f"raw/{column.name}"), column]
    found = table_of(results, columns, heads)
    return {**found, "rows": [line for line in found["rows"] if line.method is not None]}


# -- numbers -----------------------------------------------------------------------------------------------


def intervals(results: Results) -> dict[str, Any]:
    """Plot coverage and mean width of central intervals against their level, averaged over seeds, and the share of
    values below each predicted quantile."""
    stages = {"after calibration": _curves(results, ""), "before calibration": _curves(results, "raw/")}
    shown = {label: curves for label, curves in stages.items() if curves["coverage"]}
    if not shown:
        return {}
    titles = ("level of the intervals", "values inside", "predicted quantile", "values below it")
    level, inside, quantile, below = (Axis(title, percent=True, low=0, high=1) for title in titles)
    width = Axis("mean width of the intervals", low=0)
    axes = {"coverage": (level, inside), "width": (level, width), "quantiles": (quantile, below)}
    views = {
        name: [
            View(curves[name], *own, label if len(shown) > 1 else "") for label, curves in shown.items() if curves[name]
        ]
        for name, own in axes.items()
    }
    return {**views, "table": _before_after(results, "log_density", "crps", "coverage_90", "width_90")}


def _curves(results: Results, prefix: str) -> dict[str, list[Series]]:
    """Return coverage and width of intervals by level, and shares of values below quantiles, with a diagonal."""
    found: dict[str, list[Series]] = {"coverage": [], "width": [], "quantiles": []}
    for at, method in enumerate(results.methods):
        if arrays := results.tensors(method, f"{prefix}mean", f"{prefix}std", "target"):
            reaches = results.tensors(method, f"{prefix}reach") or [(NORMAL_REACH,)] * len(arrays)
            pairs = zip(arrays, reaches, strict=True)
            inside, wide = torch.stack([_coverage_width(*each, *reach) for each, reach in pairs]).mean(0).tolist()
            rows = zip(LEVELS, inside, wide, strict=True)
            tips = [f"intervals of {level:.0%} contain {part:.1%}, width {each:.4g}" for level, part, each in rows]
            found["coverage"].append(Series(LEVELS, inside, at, tips=tips))
            found["width"].append(Series(LEVELS, wide, at, tips=tips))
        if tables := results.tensors(method, f"{prefix}cdf"):
            levels = torch.tensor(QUANTILES)[:, None]
            shares = torch.stack([(cdf <= levels).double().mean(1) for (cdf,) in tables]).mean(0).tolist()
            both = zip(QUANTILES, shares, strict=True)
            tips = [f"{share:.1%} of values are below the quantile {level:.0%}" for level, share in both]
            found["quantiles"].append(Series(QUANTILES, shares, at, tips=tips))
    diagonal = [Series([0, 1], [0, 1])]
    return {name: diagonal + own if own and name != "width" else own for name, own in found.items()}


def _coverage_width(mean: Tensor, std: Tensor, target: Tensor, reach: Tensor) -> Tensor:
    """Return coverage and width of intervals that reach `[L]` deviations `[N]` from the mean `[N]`, as `[2, L]`."""
    inside = ((target - mean).abs().double() <= reach[:, None] * std.double()).double().mean(1)
    return torch.stack([inside, 2 * reach * std.double().mean()])
