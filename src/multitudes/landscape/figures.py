"""Common style of all figures. Plotly is imported when a figure is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from multitudes.base.checks import needed

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Colours for colour-blind readers (Okabe and Ito, 2008); lines also differ by `DASHES`."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")
SCALE = "Viridis"
"""Colour scale for continuous values."""


def figure(title: str, x: str = "", y: str = "") -> Any:
    """Return an empty figure in the common style, with axis titles."""
    return styled(needed("plotly.graph_objects", "plots", "a figure").Figure(), title, x, y)


def subplots(title: str, *parts: str, x: str = "") -> Any:
    """Return an empty figure with titled subplots side by side."""
    made = needed("plotly.subplots", "plots", "a figure").make_subplots(cols=len(parts), subplot_titles=parts)
    return styled(made, title, x)


def styled(fig: Any, title: str, x: str = "", y: str = "") -> Any:
    """Apply the common style and axis titles to a figure or subplots."""
    fig.update_layout(
        title=title, template="plotly_white", colorway=COLOURS, margin={"l": 60, "r": 20, "t": 50, "b": 50}
    )
    if x:
        fig.update_xaxes(title_text=x)
    if y:
        fig.update_yaxes(title_text=y)
    return fig


def add_line(
    fig: Any, x: Any, y: Any, name: str = "", colour: int = 0, dash: int = 0, mode: str | None = None, **options: Any
) -> None:
    """Add a line through the points `x [N]`, `y [N]`; `colour` and `dash` are indices."""
    line = {"color": COLOURS[colour % len(COLOURS)], "dash": DASHES[dash % len(DASHES)]}
    fig.add_scatter(x=_listed(x), y=_listed(y), name=name, mode=mode, line=line, **options)


def add_lines(fig: Any, names: Iterable[str], x: Iterable[float], values: Tensor, column: int | None = None) -> None:
    """Add a line with markers for each row of `values [K, X]`; subplots share one legend."""
    place = {} if column is None else {"row": 1, "col": column}
    for number, (name, y) in enumerate(zip(names, values, strict=True)):
        options = {"marker": {"symbol": SYMBOLS[number % len(SYMBOLS)]}, "legendgroup": name, **place}
        add_line(fig, x, y, name, number, number, "lines+markers", showlegend=column in (None, 1), **options)


def add_points(fig: Any, x: Any, y: Any, name: str = "", colour: int = 0, symbol: int = 0, **options: Any) -> None:
    """Add the points `x [N]`, `y [N]`; `colour` and `symbol` are indices."""
    marker = {"color": COLOURS[colour % len(COLOURS)], "symbol": SYMBOLS[symbol % len(SYMBOLS)], "size": 8}
    fig.add_scatter(x=_listed(x), y=_listed(y), name=name, mode="markers", marker=marker, **options)


def coloured(values: Tensor, what: str) -> tuple[Tensor, dict[str, Any]]:
    """Return the values to plot in colour, and the options of the colour scale.

    A loss is plotted as its logarithm, or if it has negative values as the logarithm of `1 + loss - lowest`.
    """
    if what != "loss":
        return values, {"colorscale": SCALE, "reversescale": False, "colorbar": {"title": what}}
    above = float(values.min()) < 0
    shown = (1 + values - values.min() if above else values.clamp(min=1e-12)).log10()
    title = "log10 (1 + loss - lowest)" if above else "log10 loss"
    return shown, {"colorscale": SCALE, "reversescale": True, "colorbar": {"title": title}}


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
