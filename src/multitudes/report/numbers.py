"""Regression: how often intervals hold the truth, for the width that they have."""

from __future__ import annotations

from statistics import NormalDist

import torch

from multitudes.report.html import Section, section
from multitudes.report.quality import axes, curve
from multitudes.report.results import Outcome, Results
from multitudes.report.style import View, legend, plot

__all__ = ["intervals"]

LEVELS = [0.05 * step for step in range(1, 20)] + [0.99]


def intervals(results: Results) -> Section | None:
    """Coverage and mean width of the central intervals, against their level, mean over seeds."""
    coverage, width = [], []
    for at, method in enumerate(results.methods):
        found = [both for outcome in results.of(method) if (both := _coverage_width(outcome)) is not None]
        if not found:
            continue
        mean = torch.stack(found).mean(0)
        coverage.append(curve(at, method, LEVELS, mean[0].tolist(), "intervals of %{x:.0%} hold %{y:.1%}"))
        width.append(curve(at, method, LEVELS, mean[1].tolist(), "intervals of %{x:.0%}: width %{y:.4g}"))
    if not coverage:
        return None
    ideal = {
        "type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "hoverinfo": "skip",
        "line": {"color": "var(--quiet)", "dash": "dot", "width": 1.5},
    }  # fmt: skip
    share = {"tickformat": ".0%", "range": [0, 1.02]}
    plots = [
        plot(
            "plot-coverage", "Share of values within the intervals of each method against their level",
            View([ideal, *coverage], axes("level", "share of values inside", xaxis=share, yaxis=share)),
        ),
        plot(
            "plot-width", "Mean width of the intervals of each method against their level",
            View(width, axes("level", "mean width", xaxis=share, yaxis={"rangemode": "tozero"})),
        ),
    ]  # fmt: skip
    return section(
        "intervals",
        "Can its intervals be trusted?",
        "<p>An interval of 90 % should hold 90 % of the values: on the dotted diagonal it does, below it intervals are "
        "too narrow. Of methods that keep to the diagonal, the one with the narrower intervals knows more.</p>",
        f'<div class="row">{"".join(plots)}</div>',
        legend(results.methods, results.methods),
    )


def _coverage_width(outcome: Outcome) -> torch.Tensor | None:
    """Of the Gaussian intervals with the predicted mean and deviation, for all levels: `[2, L]`."""
    mean, std, target = (outcome.array(name) for name in ("mean", "std", "target"))
    if mean is None or std is None or target is None:
        return None
    error = torch.from_numpy(abs(target - mean)).double()
    deviation = torch.from_numpy(std).double()
    reach = torch.tensor([NormalDist().inv_cdf((1 + level) / 2) for level in LEVELS], dtype=torch.float64)
    inside = (error <= reach[:, None] * deviation).double().mean(1)
    return torch.stack([inside, 2 * reach * deviation.mean()])
