"""How a method looks on the whole page: one colour, dash and symbol, in plots, tables and legends alike.

Colours are Okabe and Ito's, as variables of the style sheet, so that they follow the light and the dark theme; the
symbol and the dash tell methods apart where colours do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multitudes.landscape.figures import COLOURS, DASHES, SYMBOLS
from multitudes.report.html import embedded, text

__all__ = ["Style", "View", "chooser", "key", "legend", "named", "plot"]

_SHAPES = {
    "circle": '<circle cx="14" cy="7" r="4"/>',
    "square": '<path d="M10 3h8v8h-8z"/>',
    "diamond": '<path d="M14 2l5 5-5 5-5-5z"/>',
    "cross": '<path d="M12.4 2h3.2v3.4H19v3.2h-3.4V12h-3.2V8.6H9V5.4h3.4z"/>',
    "x": '<path d="M10.7 2.2L14 5.5l3.3-3.3 1.5 1.5L15.5 7l3.3 3.3-1.5 1.5L14 8.5l-3.3 3.3-1.5-1.5L12.5 7 9.2 3.7z"/>',
    "triangle-up": '<path d="M14 2l5 9H9z"/>',
    "star": '<path d="M14 1l1.6 4.2 4.4.2-3.4 2.8 1.1 4.3L14 10.1l-3.7 2.4 1.1-4.3L8 5.4l4.4-.2z"/>',
    "hexagon": '<path d="M11.5 2.7h5L19 7l-2.5 4.3h-5L9 7z"/>',
}
_STROKES = {
    "solid": "none", "dash": "5 3", "dot": "1.5 2", "dashdot": "5 2 1.5 2", "longdash": "9 3",
    "longdashdot": "9 2 1.5 2",
}  # fmt: skip


@dataclass(frozen=True)
class Style:
    """The style of the method with this number: the eight colours come again, with other symbols and dashes."""

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

    @property
    def line(self) -> dict[str, Any]:
        """The `line` of a trace."""
        return {"color": self.colour, "dash": self.dash, "width": 2}

    def marker(self, size: float = 8) -> dict[str, Any]:
        """The `marker` of a trace."""
        return {"color": self.colour, "symbol": self.symbol, "size": size}


def key(number: int) -> str:
    """The line and the symbol of a method, as a small picture."""
    style = Style(number)
    return (
        f'<svg class="key" viewBox="0 0 28 14" aria-hidden="true" style="color:{style.colour}">'
        f'<path class="dash" d="M0 7h28" stroke-dasharray="{_STROKES[style.dash]}"/>{_SHAPES[style.symbol]}</svg>'
    )


def named(number: int, method: str) -> str:
    """The name of a method behind its line and symbol, for a table; it may break after an underscore."""
    return key(number) + text(method).replace("_", "_<wbr>")


def legend(methods: Sequence[str], shown: Sequence[str]) -> str:
    """Buttons, one for each method of a plot, that hide and show it in all plots."""
    buttons = [
        f'<button type="button" aria-pressed="true" data-method="{at}">{key(at)}{text(name)}</button>'
        for at, name in enumerate(methods)
        if name in shown
    ]
    return '<div class="legend" role="group" aria-label="Methods shown in the plots">' + "".join(buttons) + "</div>"


@dataclass(frozen=True)
class View:
    """What a plot can show: Plotly's traces and layout. A trace says by `meta` the number of its method."""

    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    label: str = ""


def plot(name: str, alt: str, *views: View, caption: str = "", below: str = "") -> str:
    """A Plotly figure, drawn by the page when it opens, with what it shows in words.

    Args:
        name: its id.
        alt: what it shows, for who does not see it; plain text.
        views: what it can show, at first the first one; see `chooser`.
        caption, below: HTML under the plot; a legend.
    """
    return (
        f'<figure><div class="plot" id="{name}" role="img" aria-label="{text(alt)}">'
        f'<script type="application/json">{embedded([[view.traces, view.layout] for view in views])}</script></div>'
        f"{below}{f'<figcaption>{caption}</figcaption>' if caption else ''}</figure>"
    )


def chooser(views: Sequence[View], *names: str) -> str:
    """What to show in the plots of these names, where there is something to choose from."""
    if len(views) < 2:
        return ""
    options = "".join(f'<option value="{at}">{text(view.label)}</option>' for at, view in enumerate(views))
    return f'<label class="chooser">Show <select data-plots="{" ".join(names)}">{options}</select></label>'
