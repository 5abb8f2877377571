"""Read the raw files of the results, and format and plot their numbers."""

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

MISSING = "–"
"""Table cell without a number: not in the paper, or not measured."""


@dataclass(frozen=True)
class Claim:
    """A claim to be checked against the results."""

    text: str
    holds: bool | None
    """None if not measured."""
    numbers: str = ""
    """The numbers it is based on."""


@dataclass(frozen=True)
class Section:
    """The page's section on one recipe."""

    title: str
    text: str
    """Markdown: method, tables with the paper's numbers next to ours, reductions in scale, and differences."""
    claims: Sequence[Claim] = ()
    figures: dict[str, Figure] = field(default_factory=dict)
    """Plotly figures by file name in the recipe's folder; `text` embeds them: `![...](RECIPE/NAME.svg)`."""


class Raw:
    """The pieces of a recipe: `raw["layer"]` is the result of a piece, or None."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files = sorted(directory.glob("*.json")) if directory.is_dir() else []
        self.pieces: dict[str, dict[str, Any]] = {file.stem: json.loads(file.read_text("utf-8")) for file in files}

    def __contains__(self, piece: str) -> bool:
        return piece in self.pieces

    def __getitem__(self, piece: str) -> Any:
        return self.pieces[piece]["result"] if piece in self.pieces else None

    def matching(self, start: str) -> dict[str, Any]:
        """Return the results of all pieces with this prefix, such as several seeds: `single-0`, `single-1`."""
        return {name: piece["result"] for name, piece in self.pieces.items() if name.startswith(start)}


# -- numbers -----------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """Format a number, or a dash for None.

    >>> number(0.12345), number(None)
    ('0.123', '–')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share in percent.

    >>> percent(0.9345)
    '93.5'
    """
    return MISSING if value is None else number(100 * value, digits)


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean, ignoring None; None if there are no values."""
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def spread(values: Iterable[float | None], digits: int = 3, scale: float = 1.0) -> str:
    """Format the mean over seeds, with the standard deviation for two or more.

    >>> spread([0.1, 0.3]), spread([0.1])
    ('0.200 ± 0.141', '0.100')
    """
    found = [scale * value for value in values if value is not None]
    if not found:
        return MISSING
    mean = number(statistics.fmean(found), digits)
    return mean if len(found) == 1 else f"{mean} ± {number(statistics.stdev(found), digits)}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table; the first column is text, the others are numbers.

    >>> print(table(["method", "NLL"], [["single", "0.2"]]))
    | method | NLL |
    | --- | ---: |
    | single | 0.2 |
    """
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def line_figure(title: str, x: str, y: str, at: Sequence[float], curves: Mapping[str, Sequence[float]]) -> Figure:
    """Plot curves by name over the positions `at`; `x` and `y` are the titles of the axes."""
    from multitudes.landscape.figures import DASHES, figure

    fig = figure(title, x, y)
    for (name, values), dash in zip(curves.items(), DASHES, strict=False):
        fig.add_scatter(x=list(at), y=list(values), name=name, line={"dash": dash})
    return fig


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value.

    >>> standard_error([1.0, 3.0])
    1.0
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def compared(ours: Sequence[float], others: Sequence[float]) -> tuple[int, float]:
    """Compare errors on the same splits: -1 if ours are lower, 1 if higher, 0 within two standard errors.

    Also return the difference relative to the mean of the others.

    >>> compared([1.0, 1.1, 0.9], [2.0, 2.1, 1.9])
    (-1, -0.5)
    """
    differences = [a - b for a, b in zip(ours, others, strict=True)]
    mean, doubt = statistics.fmean(differences), 2 * standard_error(differences)
    way = 0 if len(differences) < 2 or abs(mean) <= doubt else (-1 if mean < 0 else 1)
    return way, mean / abs(statistics.fmean(others))
