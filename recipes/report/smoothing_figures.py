"""The figures of spatial smoothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from multitudes.landscape.figures import COLOURS, DASHES, SCALE, figure, styled

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Curves = Mapping[str, Mapping[str, Mapping[str, Mapping[int, float]]]]
"""Scores by name, `{size or severity: value}`, for each network and method."""

SCORES = {"nll": "NLL", "accuracy": "accuracy %", "ece": "ECE %"}


def by_size(curves: Curves) -> Figure:
    """Fig. 3: NLL, accuracy and ECE against the number of draws; deterministic networks are horizontal lines."""
    fig = _panels(curves, lambda curve: len(curve) > 1)
    return fig.update_xaxes(type="log", title_text="draws", tickvals=[1, 2, 5, 10, 20, 50])


def by_severity(curves: Curves) -> Figure:
    """NLL, accuracy and ECE under corruptions, against their severity."""
    return _panels(curves, lambda curve: True).update_xaxes(title_text="severity", dtick=1)


def _panels(curves: Curves, varies: Callable[[Mapping[int, float]], bool]) -> Figure:
    """Plot one row per network and one column per score."""
    fig = _subplots(len(curves), len(SCORES), [f"{net}: {name}" for net in curves for name in SCORES.values()])
    methods = list(dict.fromkeys(method for each in curves.values() for method in each))
    in_legend = set()
    for row, each in enumerate(curves.values(), 1):
        for method, scores in each.items():
            number = methods.index(method)
            line = {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number % len(DASHES)]}
            for column, name in enumerate(SCORES, 1):
                points = {at: value * (1 if name == "nll" else 100) for at, value in scores[name].items()}
                if not points:
                    continue
                if varies(points):
                    x, y = list(points), list(points.values())
                else:
                    x, y = _extent(each, name), [next(iter(points.values()))] * 2
                fig.add_scatter(
                    x=x, y=y, name=method, legendgroup=method, showlegend=method not in in_legend, line=line,
                    mode="lines+markers" if varies(points) else "lines", row=row, col=column,
                )  # fmt: skip
                in_legend.add(method)
    return styled(fig, "").update_layout(width=1000, height=80 + 300 * len(curves))


def _extent(methods: Mapping[str, Mapping[str, Mapping[int, float]]], name: str) -> list[int]:
    """Return the fewest and the most draws of any method."""
    every = [at for scores in methods.values() for at in scores[name]]
    return [min(every), max(every)]


def spectra(largest: Mapping[str, Sequence[float]]) -> Figure:
    """Fig. 8: the largest Hessian eigenvalues of batches, by head."""
    fig = figure("Largest Hessian eigenvalues of training batches", "", "eigenvalue")
    for (name, values), colour in zip(largest.items(), COLOURS, strict=False):
        shown = {"boxpoints": "all", "jitter": 0.4, "pointpos": 0, "marker_color": colour, "showlegend": False}
        fig.add_box(y=list(values), name=name, **shown)
    return fig


def planes(found: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Fig. 7: the logarithm of the loss on planes, all in the same colours."""
    fig = _subplots(1, len(found), list(found))
    logs = {name: logarithms(own["loss"]) for name, own in found.items()}
    every = [value for lines in logs.values() for line in lines for value in line if value is not None]
    for column, (name, own) in enumerate(found.items(), 1):
        fig.add_contour(
            x=own["axis"], y=own["axis"], z=list(zip(*logs[name], strict=True)), zmin=min(every), zmax=max(every),
            colorscale=SCALE, reversescale=True, showscale=column == 1, colorbar={"title": "log10 NLL"},
            contours={"showlines": False}, ncontours=40, row=1, col=column,
        )  # fmt: skip
    return styled(fig, "").update_layout(width=360 * len(found), height=380)


def logarithms(loss: list[list[float | None]]) -> list[list[float | None]]:
    """Return log10 of losses, keeping None."""
    return [[None if value is None else math.log10(max(value, 1e-6)) for value in line] for line in loss]


def _subplots(rows: int, columns: int, titles: Sequence[str]) -> Figure:
    from plotly.subplots import make_subplots

    return make_subplots(rows, columns, subplot_titles=titles)
