"""How methods look in all plots and tables, and the parts that plots share.

A method has one colour, dash and symbol on the whole page. Colours are Okabe and Ito's, as variables of the style
sheet, so that they follow the light and the dark theme; symbols and dashes distinguish methods where colours do not.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multitudes.landscape.figures import COLOURS, DASHES, SYMBOLS
from multitudes.report.results import mean_spread

__all__ = ["MEASURES", "REFERENCE", "Style", "Trace", "View", "axes", "curve", "curve_with_spread", "plotly_text"]

Trace = dict[str, Any]
"""A trace of Plotly's; its `meta` is the number of its method."""

MEASURES = {
    "accuracy": ("accuracy", ".1~%"),
    "nll": ("negative log-likelihood", ".3~f"),
    "ece": ("calibration error (ECE)", ".1~%"),
    "rmse": ("RMSE", ".4~g"),
    "crps": ("CRPS", ".4~g"),
}
"""The scores that plots show: their titles, and their number formats (d3's)."""

REFERENCE = {"color": "var(--quiet)", "dash": "dot", "width": 1.5}
"""The `line` of what is drawn for comparison and belongs to no method."""


@dataclass(frozen=True)
class Style:
    """The style of the method with this number: after eight, colours repeat with other symbols and dashes."""

    number: int

    @property
    def colour(self) -> str:
        """A variable of the style sheet."""
        return f"var(--c{self.number % len(COLOURS)})"

    @property
    def symbol(self) -> str:
        """A symbol of Plotly's."""
        return SYMBOLS[(self.number + self.number // len(COLOURS)) % len(SYMBOLS)]

    @property
    def dash(self) -> str:
        """A dash of Plotly's."""
        return DASHES[(self.number + self.number // len(COLOURS)) % len(DASHES)]

    def marker(self, size: float = 8, **more: Any) -> dict[str, Any]:
        """The `marker` of a trace."""
        return {"color": self.colour, "symbol": self.symbol, "size": size, **more}

    def bars(self, spread: Sequence[float]) -> dict[str, Any]:
        """The error bars of a trace."""
        return {"type": "data", "array": list(spread), "thickness": 1, "width": 3, "color": self.colour}


@dataclass(frozen=True)
class View:
    """One state of a plot: Plotly's traces and layout, and the label by which the reader selects it."""

    traces: list[Trace]
    layout: dict[str, Any]
    label: str = ""


def plotly_text(value: object) -> str:
    """A name for a figure: Plotly would take `<b>` for markup."""
    return html.escape(str(value), quote=False)


def axes(x: str, y: str, *, xaxis: dict[str, Any] | None = None, yaxis: dict[str, Any] | None = None) -> dict[str, Any]:
    """A layout with the titles and further settings of both axes."""
    return {"xaxis": {"title": {"text": x}, **(xaxis or {})}, "yaxis": {"title": {"text": y}, **(yaxis or {})}}


def curve(at: int, method: str, x: Sequence[float], y: Sequence[float], hover: str, **more: Any) -> Trace:
    """The line of a method; `hover` is what Plotly writes below its name."""
    style = Style(at)
    return {
        "type": "scatter", "mode": "lines", "meta": at, "x": list(x), "y": list(y), "text": plotly_text(method),
        "line": {"color": style.colour, "dash": style.dash, "width": 2},
        "hovertemplate": f"<b>%{{text}}</b><br>{hover}<extra></extra>", **more,
    }  # fmt: skip


def curve_with_spread(at: int, method: str, x: Sequence[float], values: Sequence[list[float]], hover: str) -> Trace:
    """The line of a method through the means over seeds, with bars for the deviation between them."""
    means, spreads = zip(*map(mean_spread, values), strict=True)
    style = Style(at)
    marked = {"mode": "lines+markers", "marker": style.marker(), "error_y": style.bars(spreads)}
    return curve(at, method, x, means, hover, **marked)
