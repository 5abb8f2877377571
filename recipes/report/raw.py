"""The raw files of the results, and how their numbers are written and drawn."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["MISSING", "Claim", "Raw", "Section", "line_figure", "mean_of", "number", "percent", "spread", "table"]

MISSING = "–"
"""What a table says where there is no number: the paper gives none, or it was not measured."""


@dataclass(frozen=True)
class Claim:
    """Something that must show in the results."""

    text: str
    holds: bool | None
    """None where it has not been measured."""
    numbers: str = ""
    """The numbers that it is read from."""


@dataclass(frozen=True)
class Section:
    """What the page says about one recipe."""

    title: str
    text: str
    """Markdown: what was done, the tables with the paper's numbers beside ours, what was scaled down, what differs."""
    claims: Sequence[Claim] = ()
    figures: dict[str, Figure] = field(default_factory=dict)
    """Plotly figures by the name of their file in the recipe's folder; `text` shows them: `![...](RECIPE/NAME.svg)`."""


class Raw:
    """The pieces of a recipe: `raw["layer"]` is the result of a piece, and None where there is none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files = sorted(directory.glob("*.json")) if directory.is_dir() else []
        self.pieces: dict[str, dict[str, Any]] = {file.stem: json.loads(file.read_text("utf-8")) for file in files}

    def __contains__(self, piece: str) -> bool:
        return piece in self.pieces

    def __getitem__(self, piece: str) -> Any:
        return self.pieces[piece]["result"] if piece in self.pieces else None

    def matching(self, start: str) -> dict[str, Any]:
        """The results of all pieces whose names begin so: those of several seeds, `single-0`, `single-1`."""
        return {name: piece["result"] for name, piece in self.pieces.items() if name.startswith(start)}


# -- numbers -----------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """A number, or that there is none.

    >>> number(0.12345), number(None)
    ('0.123', '–')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share, in percent.

    >>> percent(0.9345)
    '93.5'
    """
    return MISSING if value is None else number(100 * value, digits)


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of what there is."""
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def spread(values: Iterable[float | None], digits: int = 3, scale: float = 1.0) -> str:
    """The mean over seeds, and with two or more of them the deviation.

    >>> spread([0.1, 0.3]), spread([0.1])
    ('0.200 ± 0.141', '0.100')
    """
    found = [scale * value for value in values if value is not None]
    if not found:
        return MISSING
    mean = number(statistics.fmean(found), digits)
    return mean if len(found) == 1 else f"{mean} ± {number(statistics.stdev(found), digits)}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers.

    >>> print(table(["method", "NLL"], [["single", "0.2"]]))
    | method | NLL |
    | --- | ---: |
    | single | 0.2 |
    """
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def line_figure(title: str, x: str, y: str, at: Sequence[float], curves: Mapping[str, Sequence[float]]) -> Figure:
    """Curves by name over the same places, `at`; `x` and `y` are the titles of the axes."""
    from multitudes.landscape.figures import DASHES, figure, graph_objects

    fig = figure(title, x, y)
    for (name, values), dash in zip(curves.items(), DASHES, strict=False):
        fig.add_trace(graph_objects().Scatter(x=list(at), y=list(values), name=name, line={"dash": dash}))
    return fig
