"""Figures: lines, points with error bars, and surfaces, on two axes.

A `View` is plain data; a `Drawing` computes all positions; `render.svg` draws it.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from multitudes.base.checks import needed
from multitudes.lab.report.scales import Axis, Scale, fitted

HIGHLIGHTED = 6
"""Maximum number of methods in colour at once."""

COLOURS = 8
"""Number of colours, `--c0` to `--c7` in the style sheet."""

DASHES = ("", "6 3", "2 2.5", "6 2.5 2 2.5", "10 3", "10 2.5 2 2.5")

STAR = "m0-6l1.6 4.2 4.4.2-3.4 2.8 1.1 4.3-3.7-2.4-3.7 2.4 1.1-4.3-3.4-2.8 4.4-.2z"
SYMBOLS = (
    "m-4 0a4 4 0 1 1 8 0a4 4 0 1 1-8 0z",  # a circle
    "m-3.6-3.6h7.2v7.2h-7.2z",  # a square
    "m0-5l5 5-5 5-5-5z",  # a diamond
    "m-1.6-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",  # a cross
    "m-3.3-4.8l3.3 3.3 3.3-3.3 1.5 1.5-3.3 3.3 3.3 3.3-1.5 1.5-3.3-3.3-3.3 3.3-1.5-1.5 3.3-3.3-3.3-3.3z",  # an x
    "m0-5l5 9h-10z",  # a triangle
    STAR,
    "m-2.5-4.3h5l2.5 4.3-2.5 4.3h-5l-2.5-4.3z",  # a hexagon
)
"""SVG paths of the symbols, relative to their position."""
SIZES = {"wide": (560, 350), "small": (400, 300)}
LEFT, RIGHT, TOP, BOTTOM = 62, 28, 32, 50
LETTER = 6.4
"""Mean width of a letter, in pixels."""
LONGEST = 24
"""Maximum letters of a name next to a point."""
STEPS, PIXELS = 16, 256
"""Number of colours of a surface, and its pixels per side."""
VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
"""Colours from low to high, equally spaced (matplotlib's scale of this name)."""


@dataclass(frozen=True)
class Style:
    """The look of the method with this index in all figures and tables: colour, dash and symbol.

    The colours are Okabe and Ito's, as style sheet variables that follow the light or dark theme. After eight methods
    they repeat with other symbols and dashes. The first methods are highlighted initially; the others are grey until
    the reader selects them.
    """

    number: int

    @property
    def colour(self) -> str:
        """Colour, as a style sheet variable."""
        return f"var(--c{self.number % COLOURS})"

    @property
    def symbol(self) -> str:
        """SVG path of the symbol, relative to its position."""
        return SYMBOLS[(self.number + self.number // COLOURS) % len(SYMBOLS)]

    @property
    def dash(self) -> str:
        """Lengths of dashes and gaps; empty for a solid line."""
        return DASHES[(self.number + self.number // COLOURS) % len(DASHES)]

    @property
    def classes(self) -> str:
        """CSS classes of an element, coloured if the method is highlighted."""
        return "m on" if self.number < HIGHLIGHTED else "m"


@dataclass(frozen=True)
class Series:
    """Points `x [N]`, `y [N]` of a method, or of a reference curve if `method` is None."""

    x: Sequence[float]
    y: Sequence[float]
    method: int | None = None
    line: bool = True
    """True to join the points."""
    marks: bool = False
    """True to mark each point with the method's symbol, or a star."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """Ends of the error bars; NaN for none."""
    tips: Sequence[str] = ()
    """Tooltip of each point."""
    labels: Sequence[str] = ()
    """Text next to each point; empty for none."""


@dataclass(frozen=True)
class Field:
    """Heights on a grid: `heights[j][i]` at `x[i]` and `y[j]`, all finite."""

    x: Sequence[float]
    y: Sequence[float]
    heights: Sequence[Sequence[float]]
    title: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest value."""
        return min(map(min, self.heights)), max(map(max, self.heights))


@dataclass(frozen=True)
class View:
    """One state of a figure, and the label that selects it."""

    series: Sequence[Series]
    x: Axis
    y: Axis
    label: str = ""
    field: Field | None = None
    """Surface behind the series; its axes have the same scale."""


@dataclass(frozen=True)
class Group:
    """A series in a figure: positions of its visible points, their tooltips, and the path of the error bars."""

    series: Series
    places: Sequence[tuple[float, float]]
    tips: Sequence[str]
    bars: str

    @property
    def joined(self) -> bool:
        """True if the points are joined by a line."""
        return self.series.line and len(self.places) > 1

    @property
    def style(self) -> Style | None:
        """Style of its method; None for reference curves."""
        return None if self.series.method is None else Style(self.series.method)


@dataclass(frozen=True)
class Drawing:
    """Positions of everything in a figure, for the template `chart.html`."""

    view: View
    width: int
    height: int

    @cached_property
    def scales(self) -> tuple[Scale, Scale]:
        """Both axes; those of a surface have the same unit length."""
        view, right, bottom = self.view, self.width - RIGHT, self.height - BOTTOM
        if view.field is None:
            across = [value for each in view.series for value in each.x]
            up = [value for each in view.series for some in (each.y, each.low, each.high) for value in some]
            return fitted(view.x, across, LEFT, right), fitted(view.y, up, bottom, TOP)
        (left, *_, last), (low, *_, high) = view.field.x, view.field.y
        unit = min((right - 60 - LEFT) / (last - left), (bottom - TOP) / (high - low))
        return (
            Scale(view.x, left, last, LEFT, LEFT + unit * (last - left)),
            Scale(view.y, low, high, bottom, bottom - unit * (high - low)),
        )

    @property
    def key(self) -> Scale:
        """Colour scale of a surface."""
        assert self.view.field is not None
        (low, high), y = self.view.field.range, self.scales[1]
        return Scale(Axis(), low, high if high > low else low + 1, y.start, y.end)

    @property
    def groups(self) -> list[Group]:
        """All series with a visible point, in drawing order: highlighted methods last, the first method on top."""
        order = sorted(self.view.series, key=lambda one: math.inf if one.method is None else one.method, reverse=True)
        return [group for each in order if (group := self._group(each)).places]

    def _group(self, series: Series) -> Group:
        x, y = self.scales
        shown = [at for at in range(len(series.x)) if x.holds(series.x[at]) and y.holds(series.y[at])]
        bars = [self._bar(series.x[at], series.low[at], series.high[at]) for at in shown] if series.low else []
        tips = [series.tips[at] for at in shown] if series.tips else []
        return Group(series, [(x(series.x[at]), y(series.y[at])) for at in shown], tips, "".join(bars))

    def _bar(self, value: float, low: float, high: float) -> str:
        if not (math.isfinite(low) and math.isfinite(high)):
            return ""
        x, y = self.scales
        bottom, top = (y(min(max(each, y.low), y.high)) for each in (low, high))
        return f"M{place(x(value) - 3)} {place(bottom)}h6m-3 0V{place(top)}m-3 0h6"

    @property
    def labels(self) -> list[tuple[float, float, str]]:
        """Names next to points, placed to avoid points and other names."""
        x, y = self.scales
        taken: list[Box] = []
        wanted: list[tuple[float, float, str]] = []
        for each in self.view.series:
            for at, (across, up) in enumerate(zip(each.x, each.y, strict=True)):
                if x.holds(across) and y.holds(up) and (each.method is not None or each.labels):
                    taken += [] if each.line and not each.marks else [_box(x(across), y(up), 8, 8)]
                    if each.labels and (name := each.labels[at]):
                        short = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
                        wanted.append((x(across), y(up), short))
        found = []
        for across, up, text in wanted:
            wide = LETTER * len(text)
            beside = [(sign * (wide / 2 + 7), down) for down in (-9, 9, 0) for sign in (1, -1)]
            boxes = [_box(across + right, up + down, wide, 12) for right, down in [*beside, (0, -14), (0, 14)]]
            inside = [box for box in boxes if box[0] >= x.start - 4 and box[2] <= x.end + 8 and box[1] >= TOP - 8]
            free = [box for box in inside if not any(_overlap(box, other) for other in taken)]
            box = (free or inside or boxes)[0]
            taken.append(box)
            found.append(((box[0] + box[2]) / 2, box[3] - 2, text))
        return found


Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def _box(x: float, y: float, wide: float, high: float) -> Box:
    return x - wide / 2, y - high / 2, x + wide / 2, y + high / 2


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def place(value: float) -> str:
    """Format a position to a tenth of a pixel.

    >>> place(12.04), place(-0.04), place(3.25)
    ('12', '0', '3.2')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


# -- pictures ----------------------------------------------------------------------------------------------


def picture(heights: Sequence[Sequence[float]]) -> str:
    """Draw heights on a grid as a contour picture, first row at the bottom."""
    low, high = min(map(min, heights)), max(map(max, heights))
    grid = torch.tensor(heights, dtype=torch.float64).flip(0)
    size = [1 if length == 1 else PIXELS for length in grid.shape]
    fine = nn.functional.interpolate(grid[None, None], size, mode="bilinear", align_corners=True)[0, 0]
    step = ((fine - low) / (high - low or 1.0) * STEPS).floor().clamp(0, STEPS - 1) / (STEPS - 1)
    numpy = needed("numpy", "study", "a report")
    places = numpy.linspace(0, 1, len(VIRIDIS))
    channels = numpy.array([tuple(bytes.fromhex(colour)) for colour in VIRIDIS]).T
    return png(numpy.stack([numpy.interp(step, places, each) for each in channels]).round().astype("uint8"), PIXELS)


def png(pixels: Any, most: int = 112) -> str:
    """Encode an image, uint8 `[C, H, W]` with 1 or 3 channels, as a data URL.

    Images larger than `most` pixels in height or width are shrunk to fit.
    """
    image = needed("PIL.Image", "data", "a report with images")
    file = io.BytesIO()
    made = image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    made.thumbnail((most, most))
    made.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
