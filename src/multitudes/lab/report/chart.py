"""Figures and templates: lines, points with error bars, and surfaces, on two axes.

A `View` is plain data; a `Drawing` computes all positions; `svg` draws it. `render` fills templates.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from torch import nn

from multitudes.base.checks import needed
from multitudes.lab.study.results.score_columns import fixed

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


# -- axes: values to positions, with ticks at round numbers -------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """An axis: its title, its ends and its ticks."""

    title: str = ""
    percent: bool = False
    """True if values are fractions whose ticks are in percent."""
    log: bool = False
    """True for a logarithmic scale, which needs explicit ticks."""
    ticks: tuple[float, ...] = ()
    """Tick positions; empty for round numbers."""
    low: float | None = None
    high: float | None = None
    """Ends of the axis; None fits the values with some margin."""
    bare: bool = False
    """True if values are meaningless; no ticks."""


@dataclass(frozen=True)
class Scale:
    """An axis in a figure: maps `low` to position `start` and `high` to `end`."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        low, high, at = (self._linear(each) for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def _linear(self, value: float) -> float:
        return math.log(value) if self.axis.log else value

    def holds(self, value: float) -> bool:
        """Return whether a value is on the axis."""
        room = 1e-9 * (self.high - self.low)
        return math.isfinite(value) and self.low - room <= value <= self.high + room

    def ticks(self, apart: float) -> list[tuple[float, str]]:
        """Return positions and texts of the ticks, skipping those closer than `apart` to the one before."""
        values, decimals = self._values()
        kept: list[tuple[float, str]] = []
        for value in values:
            if not kept or abs(self(value) - kept[-1][0]) >= apart:
                kept.append((self(value), self._text(value, decimals)))
        return kept

    def _values(self) -> tuple[list[float], int | None]:
        """Return candidate tick values and their decimal places; None for as many as each needs."""
        if self.axis.bare or self.axis.ticks:
            return [value for value in self.axis.ticks if self.holds(value)], None
        unit = 100 if self.axis.percent else 1
        values, decimals = round_ticks(unit * self.low, unit * self.high)
        return [value / unit for value in values], decimals

    def _text(self, value: float, decimals: int | None) -> str:
        value = 100 * value if self.axis.percent else value
        text = f"{value:g}" if decimals is None else f"{value + 0.0:,.{decimals}f}"
        return text.replace("-", "−") + (" %" if self.axis.percent else "")


def fitted(axis: Axis, values: Iterable[float], start: float, end: float, room: float = 0.06) -> Scale:
    """Fit a scale to all finite values, with some margin at ends that the axis does not fix.

    >>> scale = fitted(Axis(low=0.0), [1.0, 5.0], 0, 100, room=0)
    >>> scale.high, scale(2.5)
    (5.0, 50.0)
    """
    known = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    low, high = min(known, default=1.0), max(known, default=2.0)
    if axis.log:
        extra = (high / low) ** room if high > low else 1.5
        ends = low / extra, high * extra
    else:
        extra = room * (high - low) if high > low else 0.05 * abs(high) or 0.5
        ends = low - extra, high + extra
    low, high = (end if given is None else given for given, end in zip((axis.low, axis.high), ends, strict=True))
    return Scale(axis, low, high if high > low else low + 1, start, end)


def round_ticks(low: float, high: float, most: int = 6) -> tuple[list[float], int]:
    """Return round numbers between two ends, and the decimal places they need.

    >>> round_ticks(0.0, 1.0), round_ticks(-3.0, 17.0)
    (([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], 1), ([0.0, 5.0, 10.0, 15.0], 0))
    """
    power = math.floor(math.log10((high - low) / most))
    steps = ((factor * 10.0**exponent, exponent) for exponent in (power, power + 1) for factor in (1, 2, 5))
    step, exponent = next((step, at) for step, at in steps if (high - low) / step <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -exponent)
    return [round(number * step, decimals + 1) for number in range(first, last + 1)], decimals


# -- figures -----------------------------------------------------------------------------------------------


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


# -- templates; Jinja escapes all values ---------------------------------------------------------------------


def render(template: str, package: str = "multitudes.lab.report", **values: Any) -> Markup:
    """Render a template from the `templates/` of a package."""
    return Markup(_environment(package).get_template(template).render(values))


def svg(view: View, alt: str, size: str = "wide") -> Markup:
    """Render a figure; `alt` is its text alternative."""
    return render("chart.html", drawing=Drawing(view, *SIZES[size]), alt=alt, star=STAR)


def resource(name: str, package: str = "multitudes.lab.report") -> Markup:
    """Read a style sheet or script of a package, without escaping."""
    return Markup(files(package).joinpath(name).read_text(encoding="utf-8"))


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"fixed": fixed, "picture": picture, "place": place, "png": png}
    environment.globals |= {"style": Style, "isfinite": math.isfinite, "svg": svg}
    return environment
