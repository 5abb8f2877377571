"""Calibration: confidence against accuracy, and prediction intervals against what they contain; before and after it.

Arrays and scores whose names begin with `raw/` are those of the network before it was calibrated.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from multitudes.metrics.calibration_error import Reliability, reliability
from multitudes.report.board import Head, table_of
from multitudes.report.chart import Axis, Series, View
from multitudes.report.results import Results, mean_spread
from multitudes.study.columns import Column, column_of
from multitudes.study.measuring import LEVELS

__all__ = ["calibration", "intervals"]

BINS = 10
QUANTILES = [0.05 * step for step in range(1, 20)]
"""Whose calibration is shown."""


# -- classes -----------------------------------------------------------------------------------------------


def calibration(results: Results) -> dict[str, Any]:
    """Reliability diagrams: number, accuracy, confidence and rows of each bin, over the test rows of all seeds."""
    panels = []
    for at, method in enumerate(results.methods):
        found = _reliability(results, method, "probs")
        if found is None:
            continue
        columns = (found.accuracy.tolist(), found.confidence.tolist(), found.count.tolist())
        bins = [each for each in zip(range(BINS), *columns, strict=True) if each[3]]
        raw = _reliability(results, method, "raw/probs")
        before = [] if raw is None else _filled(raw)
        errors = [mean_spread(results.scores(method, name))[0] for name in ("ece", "raw/ece")]
        panels.append({"method": at, "bins": bins, "before": before, "ece": errors[0], "ece_before": errors[1]})
    table = _before_after(results, ("nll", "ece", "brier"))
    return {"panels": panels, "bins": BINS, "table": table} if panels else {}


def _reliability(results: Results, method: str, probs: str) -> Reliability | None:
    pairs = results.tensors(method, probs, "target")
    if not pairs:
        return None
    stacked, target = (torch.cat(each) for each in zip(*pairs, strict=True))
    return reliability(stacked, target, bins=BINS)


def _filled(found: Reliability) -> list[tuple[float, float]]:
    """Confidence and accuracy of the bins that have rows."""
    columns = (found.confidence.tolist(), found.accuracy.tolist(), found.count.tolist())
    return [(confidence, accuracy) for confidence, accuracy, rows in zip(*columns, strict=True) if rows]


def _before_after(results: Results, names: tuple[str, ...]) -> dict[str, Any]:
    """Scores of each method before and after calibration; no columns where nothing was calibrated."""
    heads: list[Head] = []
    columns: list[Column] = []
    for name in names:
        if any(f"raw/{name}" in row.values for row in results.board):
            column = column_of(name)
            for place, when in ((f"raw/{name}", "before"), (name, "after")):
                ranked = when == "after" and name == results.by
                heads.append(Head(f"{column.heading} {when}", Head.of(column).order, ranked))
                columns.append(replace(column, name=place))
    found = table_of(results, columns, heads)
    return {**found, "rows": [line for line in found["rows"] if line.method is not None]}


# -- numbers -----------------------------------------------------------------------------------------------


def intervals(results: Results) -> dict[str, Any]:
    """Regression: coverage and mean width of the central intervals against their level, mean over seeds; and how often
    values are below each predicted quantile."""
    views = {"after calibration": _views(results, ""), "before calibration": _views(results, "raw/")}
    shown = {label: pair for label, pair in views.items() if pair is not None}
    if not shown:
        return {}
    only = len(shown) == 1
    below = Axis("values below it", percent=True, low=0, high=1)
    coverage, width = ([View(*pair[which], "" if only else label) for label, pair in shown.items()] for which in (0, 1))
    table = _before_after(results, ("log_density", "crps", "coverage_90", "width_90"))
    quantiles = [
        View(series, Axis("predicted quantile", percent=True, low=0, high=1), below, "" if only else label)
        for label, prefix in (("after calibration", ""), ("before calibration", "raw/"))
        if label in shown and len(series := _quantiles(results, prefix)) > 1
    ]
    return {"coverage": coverage, "width": width, "quantiles": quantiles, "table": table}


def _views(results: Results, prefix: str) -> tuple[tuple[list[Series], Axis, Axis], ...] | None:
    """Series and axes of coverage and of width."""
    coverage, width = [], []
    for at, method in enumerate(results.methods):
        arrays = results.tensors(method, f"{prefix}mean", f"{prefix}std", "target")
        if arrays:
            reaches = results.tensors(method, f"{prefix}reach") or [(_normal_reach(),)] * len(arrays)
            pairs = zip(arrays, reaches, strict=True)
            inside, wide = torch.stack([_coverage_width(*each, *reach) for each, reach in pairs]).mean(0).tolist()
            found = zip(LEVELS, inside, wide, strict=True)
            tips = [f"intervals of {level:.0%} contain {part:.1%}, width {each:.4g}" for level, part, each in found]
            coverage.append(Series(LEVELS, inside, at, tips=tips))
            width.append(Series(LEVELS, wide, at, tips=tips))
    if not coverage:
        return None
    level = Axis("level of the intervals", percent=True, low=0, high=1)
    ideal = Series([0, 1], [0, 1])
    return (
        ([ideal, *coverage], level, Axis("values inside", percent=True, low=0, high=1)),
        (width, level, Axis("mean width of the intervals", low=0)),
    )


def _normal_reach() -> Tensor:
    """How many deviations the intervals of a Gaussian reach to either side, for all levels: `[L]`."""
    return torch.tensor([NormalDist().inv_cdf((1 + level) / 2) for level in LEVELS], dtype=torch.float64)


def _quantiles(results: Results, prefix: str) -> list[Series]:
    """The share of values below each predicted quantile, of each method; the diagonal first."""
    series = [Series([0, 1], [0, 1])]
    for at, method in enumerate(results.methods):
        if found := results.tensors(method, f"{prefix}cdf"):
            levels = torch.tensor(QUANTILES)[:, None]
            shares = torch.stack([(cdf <= levels).double().mean(1) for (cdf,) in found]).mean(0).tolist()
            tips = [
                f"{share:.1%} of values are below the quantile {level:.0%}"
                for level, share in zip(QUANTILES, shares, strict=True)
            ]
            series.append(Series(QUANTILES, shares, at, tips=tips))
    return series


def _coverage_width(mean: Tensor, std: Tensor, target: Tensor, reach: Tensor) -> Tensor:
    """Of intervals that reach so many `[L]` of the predicted deviations `[N]` from the mean `[N]`: `[2, L]`."""
    inside = ((target - mean).abs().double() <= reach[:, None] * std.double()).double().mean(1)
    return torch.stack([inside, 2 * reach * std.double().mean()])
