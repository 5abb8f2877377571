"""How good the predictions are: calibration, size, refusal and shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multitudes.metrics.calibration_error import reliability
from multitudes.metrics.selective import risk_coverage
from multitudes.report.html import Section, number, plotted, section
from multitudes.report.panels import panel, panels, reliability_bars
from multitudes.report.results import Outcome, Results, mean_spread
from multitudes.report.style import Style, View, chooser, legend, plot

__all__ = ["calibration", "refusal", "shift", "size"]

BINS = 10
POINTS = 120
"""Of a curve that has one for each row."""
Trace = dict[str, Any]


def curve(at: int, method: str, x: Sequence[float], y: Sequence[float], hover: str, **more: Any) -> Trace:
    """The line of a method; `hover` is what Plotly says after its name."""
    style = Style(at)
    return {
        "type": "scatter", "mode": "lines", "meta": at, "x": list(x), "y": list(y), "line": style.line,
        "text": plotted(method), "hovertemplate": f"<b>%{{text}}</b><br>{hover}<extra></extra>", **more,
    }  # fmt: skip


def with_spread(at: int, method: str, x: Sequence[float], values: Sequence[list[float]], hover: str) -> Trace:
    """The line of a method through the means over seeds, with bars for the deviation between them."""
    both = [mean_spread(each) for each in values]
    bars = {
        "type": "data",
        "array": [spread for _, spread in both],
        "thickness": 1,
        "width": 3,
        "color": Style(at).colour,
    }
    marked = {"mode": "lines+markers", "marker": Style(at).marker(), "error_y": bars}
    return curve(at, method, x, [mean for mean, _ in both], hover, **marked)


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with the titles of both axes; further settings of an axis by `xaxis` and `yaxis`."""
    named = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for axis in ("xaxis", "yaxis"):
        named[axis] |= more.pop(axis, {})
    return {**named, **more}


def probabilities(outcome: Outcome) -> tuple[Tensor, Tensor] | None:
    """The mean prediction `[N, C]` and the classes `[N]`; None where they were not kept."""
    probs, target = outcome.array("probs"), outcome.array("target")
    if probs is None or target is None:
        return None
    return torch.from_numpy(probs).float(), torch.from_numpy(target).long()


def _pairs(results: Results, method: str) -> list[tuple[Tensor, Tensor]]:
    found = (probabilities(outcome) for outcome in results.of(method))
    return [pair for pair in found if pair is not None]


# -- sections ----------------------------------------------------------------------------------------------


def calibration(results: Results) -> Section | None:
    """Reliability diagrams, one a method, over the test rows of all its seeds."""
    pictures = []
    for at, method in enumerate(results.methods):
        pairs = _pairs(results, method)
        if not pairs:
            continue
        found = reliability(torch.cat([p for p, _ in pairs]), torch.cat([y for _, y in pairs]), bins=BINS)
        error, _ = mean_spread(results.scores(method, "ece"))
        bars = reliability_bars(at, found.accuracy.tolist(), found.confidence.tolist(), found.count.tolist())
        note = f"ECE {number(100 * error)} %"
        pictures.append(panel(at, method, note, bars, f"Reliability diagram of {method}, {note}", ("0", "1")))
    if not pictures:
        return None
    return section(
        "calibration",
        "Can its confidence be trusted?",
        "<p>Rows are sorted by confidence, left to right; a bar is the share of them that was right, the stronger the "
        "more rows there are. On the dashed diagonal confidence is as large as accuracy. The outlined gap is the "
        "error: below the diagonal a method is overconfident.</p>",
        panels(pictures),
    )


def size(results: Results) -> Section | None:
    """NLL against the number of members or draws."""
    measures = {"nll": "negative log-likelihood", "accuracy": "accuracy", "rmse": "RMSE"}
    views = []
    for measure, title in measures.items():
        traces = []
        for at, method in enumerate(results.methods):
            tables = [outcome.metrics.get("by_size") or {} for outcome in results.of(method)]
            tables = [table for table in tables if table.get(measure)]
            if not tables:
                continue
            sizes = tables[0]["sizes"]
            columns = [[float(t[measure][i]) for t in tables if _has(t, measure, i)] for i in range(len(sizes))]
            traces.append(with_spread(at, method, sizes, columns, f"%{{x}} members: {title} %{{y:.4f}}"))
        # A single network is a point, from which the others start; alone it says nothing.
        if any(len(trace["x"]) > 1 for trace in traces):
            ticks = sorted({each for trace in traces for each in trace["x"]})
            exact = {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
            views.append(View(traces, axes("members or draws", title, xaxis=exact), title))
    if not views:
        return None
    return section(
        "size",
        "How many members does it take?",
        chooser(views, "plot-size"),
        plot(
            "plot-size", f"{views[0].label} of each method against the number of its members or draws",
            *views, below=legend(results.methods, results.methods),
            caption="Where a line is flat, more members or draws only cost. Bars are the deviation between seeds.",
        ),
    )  # fmt: skip


def _has(table: dict[str, Any], measure: str, at: int) -> bool:
    return at < len(table[measure]) and table[measure][at] is not None


def refusal(results: Results) -> Section | None:
    """Risk against coverage, mean over seeds."""
    traces = []
    for at, method in enumerate(results.methods):
        curves = [risk_coverage(probs, target) for probs, target in _pairs(results, method)]
        curves = [found for found in curves if len(found.risk) == len(curves[0].risk)]
        if not curves:
            continue
        rows = len(curves[0].risk)
        chosen = torch.linspace(0, rows - 1, min(rows, POINTS)).round().long()
        chosen = chosen[curves[0].coverage[chosen] >= 0.05]  # of a handful of rows, the risk is noise
        risk = torch.stack([found.risk for found in curves]).mean(0)
        x, y = curves[0].coverage[chosen].tolist(), risk[chosen].tolist()
        traces.append(curve(at, method, x, y, "answers %{x:.0%}: %{y:.2%} of them wrong"))
    if not traces:
        return None
    # Where no method errs there is nothing to see.
    most = max(max(trace["y"]) for trace in traces)
    first = min(x for trace in traces for x, y in zip(trace["x"], trace["y"], strict=True) if y >= 0.02 * most)
    layout = axes(
        "share of inputs that are answered", "share of answers that are wrong",
        xaxis={"tickformat": ".0%", "range": [math.floor(10 * first) / 10, 1.005], "dtick": 0.1},
        yaxis={"tickformat": ".2~%", "rangemode": "tozero"},
    )  # fmt: skip
    return section(
        "refusal",
        "What if it may refuse?",
        plot(
            "plot-refusal", "Share of wrong answers of each method against the share of inputs it answers",
            View(traces, layout), below=legend(results.methods, results.methods),
            caption="The most confident share of the inputs is answered, the rest left to somebody else. Lower is "
            "better.",
        ),
    )  # fmt: skip


MEASURES = {
    "accuracy": ("accuracy", ".1%", ".0%"),
    "nll": ("negative log-likelihood", ".3f", ""),
    "ece": ("calibration error (ECE)", ".1%", ".0%"),
    "rmse": ("RMSE", ".4g", ""),
    "crps": ("CRPS", ".4g", ""),
}
"""Scores of shifted inputs: what they are called, and how they are written, also on an axis."""


def shift(results: Results) -> Section | None:
    """Accuracy, NLL and ECE against the severity of corruptions: their mean, and each of them."""
    names = [name.split("/") for name in results.score_names() if name.startswith("shift/")]
    found = [parts for parts in names if len(parts) == 4 and parts[2].isdigit()]
    corruptions = sorted({parts[1] for parts in found}, key=lambda name: (name != "mean", name))
    severities = sorted({int(parts[2]) for parts in found})
    plots = {}
    for measure, (title, _, ticks) in MEASURES.items():
        if not any(parts[3] == measure for parts in found):
            continue
        views = [
            View(
                _severity(results, corruption, severities, measure),
                axes("severity", title, xaxis={"dtick": 1}, yaxis={"tickformat": ticks}),
                "the mean of all corruptions" if corruption == "mean" else corruption.replace("_", " "),
            )
            for corruption in corruptions
        ]
        alt = f"{title} of each method against the severity of corruption, 0 for clean data"
        plots[f"plot-shift-{measure}"] = plot(f"plot-shift-{measure}", alt, *views)
    if not plots:
        return None
    return section(
        "shift",
        "What if the data get worse?",
        "<p>Test inputs are corrupted, the more the further to the right; at 0 they are as they are. What falls later, "
        "or stays calibrated, is more robust.</p>",
        chooser(views, *plots),
        f'<div class="row">{"".join(plots.values())}</div>',
        legend(results.methods, results.methods),
    )


def _severity(results: Results, corruption: str, severities: Sequence[int], measure: str) -> list[Trace]:
    place: Callable[[int], str] = lambda severity: f"shift/{corruption}/{severity}/{measure}" if severity else measure  # noqa: E731
    traces = []
    for at, method in enumerate(results.methods):
        columns = {severity: results.scores(method, place(severity)) for severity in (0, *severities)}
        known = {severity: values for severity, values in columns.items() if values}
        if len(known) > 1:
            hover = f"severity %{{x}}: %{{y:{MEASURES[measure][1]}}}"
            traces.append(with_spread(at, method, list(known), list(known.values()), hover))
    return traces
