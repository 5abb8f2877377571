"""The look of every figure: one palette, one layout. Plotly is needed where a figure is made, and nowhere else."""

from __future__ import annotations

from typing import Any

from multitudes.core.checks import needed

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Colours that colour-blind people tell apart (Okabe & Ito, 2008); lines also differ by `DASHES`."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")
SCALE = "Viridis"
"""The colour scale of anything continuous."""


def graph_objects() -> Any:
    """`plotly.graph_objects`, or an error that names the extra to install."""
    return needed("plotly.graph_objects", "plots", "a figure")


def figure(title: str, x: str = "", y: str = "") -> Any:
    """An empty figure in the house's look, with the axes' titles."""
    return styled(graph_objects().Figure(), title, x, y)


def styled(fig: Any, title: str, x: str = "", y: str = "") -> Any:
    """Give a figure, or one of subplots, the house's look; the axes' titles where there are any."""
    fig.update_layout(
        title=title, template="plotly_white", colorway=COLOURS, margin={"l": 60, "r": 20, "t": 50, "b": 50}
    )
    if x:
        fig.update_xaxes(title_text=x)
    if y:
        fig.update_yaxes(title_text=y)
    return fig
