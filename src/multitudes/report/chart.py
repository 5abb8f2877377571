"""Figures as SVG: lines, points with error bars, and surfaces, on two axes.

A `View` is plain data; `svg` draws it. What belongs to a method is a group of class `m` with the method's number, which
the style sheet colours where the method is highlighted; its polyline has a point for each tip, which the page's script
shows where the pointer is near. Every text is escaped.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from markupsafe import Markup
from torch import nn

from multitudes.core.checks import needed
from multitudes.report.scales import Axis, Scale, fitted
from multitudes.report.style import STAR, Style

__all__ = ["Axis", "Field", "Series", "View", "picture", "png", "svg"]

SIZES = {"wide": (560, 350), "small": (400, 300)}
LEFT, RIGHT, TOP, BOTTOM = 62, 28, 32, 50
LETTER = 6.4
"""The mean width of a letter."""
LONGEST = 24
"""Letters of a name beside a point."""
STEPS, PIXELS = 16, 256
"""Of a surface: how many colours it has, and its pixels on each side."""
VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
"""From low to high, at equal distances (matplotlib's scale of this name)."""


@dataclass(frozen=True)
class Series:
    """Points `x [N]`, `y [N]` of a method, or, without one, for comparison."""

    x: Sequence[float]
    y: Sequence[float]
    method: int | None = None
    line: bool = True
    """Whether they are joined."""
    marks: bool = False
    """Whether each has the symbol of the method, or a star."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """The ends of error bars; NaN for none."""
    tips: Sequence[str] = ()
    """What is said about each point."""
    labels: Sequence[str] = ()
    """Written beside the points; empty for none."""


@dataclass(frozen=True)
class Field:
    """Heights on a grid: `heights[j][i]` at `x[i]` and `y[j]`, all of them finite."""

    x: Sequence[float]
    y: Sequence[float]
    heights: Sequence[Sequence[float]]
    title: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest."""
        return min(map(min, self.heights)), max(map(max, self.heights))


@dataclass(frozen=True)
class View:
    """One state of a figure, and the label by which the reader selects it."""

    series: Sequence[Series]
    x: Axis
    y: Axis
    label: str = ""
    field: Field | None = None
    """A surface behind the series, whose axes have the same scale."""


def svg(view: View, alt: str, size: str = "wide") -> Markup:
    """A figure; `alt` says what it shows to a reader who does not see it."""
    width, height = SIZES[size]
    x, y = _scales(view, width, height)
    parts = [_axes(view, x, y)]
    if view.field is not None:
        parts.append(_surface(view.field, x, y))
    # What is drawn last lies on top: the methods that are highlighted, the first of all.
    order = sorted(view.series, key=lambda each: math.inf if each.method is None else each.method, reverse=True)
    parts += [_series(each, x, y) for each in order]
    parts.append(_labels(view.series, x, y))
    start = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, height, alt)
    return start + Markup("").join(parts) + Markup("</svg>")


def _scales(view: View, width: int, height: int) -> tuple[Scale, Scale]:
    right, bottom = width - RIGHT, height - BOTTOM
    if view.field is not None:
        return _equal_scales(view.field, view, right - 60, bottom)
    across = [value for each in view.series for value in each.x]
    up = [value for each in view.series for some in (each.y, each.low, each.high) for value in some]
    return fitted(view.x, across, LEFT, right), fitted(view.y, up, bottom, TOP)


def _equal_scales(field: Field, view: View, right: float, bottom: float) -> tuple[Scale, Scale]:
    """Of a surface: the same length is the same distance on both axes."""
    across, up = field.x[-1] - field.x[0], field.y[-1] - field.y[0]
    unit = min((right - LEFT) / across, (bottom - TOP) / up)
    return (
        Scale(view.x, field.x[0], field.x[-1], LEFT, LEFT + unit * across),
        Scale(view.y, field.y[0], field.y[-1], bottom, bottom - unit * up),
    )


# -- axes --------------------------------------------------------------------------------------------------


def _axes(view: View, x: Scale, y: Scale) -> Markup:
    """Grid, ticks and titles: that of the vertical axis stands above it, where it can be read."""
    across, up = x.ticks(48), y.ticks(24)
    grid = "".join(f"M{_n(at)} {_n(y.start)}V{_n(y.end)}" for at, _ in across)
    grid += "".join(f"M{_n(x.start)} {_n(at)}H{_n(x.end)}" for at, _ in up)
    if view.x.bare and view.y.bare:
        grid = f"M{_n(x.start)} {_n(y.start)}H{_n(x.end)}V{_n(y.end)}H{_n(x.start)}z"
    parts = [Markup('<path class="grid" d="{}"/>').format(grid)]
    parts += [_text(at, y.start + 23, text, "middle") for at, text in across]
    parts += [_text(x.start - 7, at + 4, text, "end") for at, text in up]
    parts.append(_text((x.start + x.end) / 2, y.start + 46, view.x.title, "middle", "title"))
    parts.append(_text(4, y.end - 16, view.y.title, "start", "title"))
    return Markup("").join(parts)


def _text(x: float, y: float, text: str, anchor: str, style: str = "tick") -> Markup:
    if not text:
        return Markup("")
    place = Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>')
    return place.format(style, _n(x), _n(y), anchor, text)


def _n(value: float) -> str:
    """A place, to a tenth of a pixel.

    >>> _n(12.04), _n(-0.04), _n(3.25)
    ('12', '0', '3.2')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


# -- series ------------------------------------------------------------------------------------------------


def _series(series: Series, x: Scale, y: Scale) -> Markup:
    """A group: the line, the error bars and the symbols. Points that have no place are left out."""
    shown = [at for at in range(len(series.x)) if x.holds(series.x[at]) and y.holds(series.y[at])]
    if not shown:
        return Markup("")
    places = [(x(series.x[at]), y(series.y[at])) for at in shown]
    points = " ".join(f"{_n(a)},{_n(b)}" for a, b in places)
    style = None if series.method is None else Style(series.method)
    dash = Markup(' stroke-dasharray="{}"').format(style.dash) if style and style.dash and series.line else ""
    kind = "" if series.line and len(shown) > 1 else Markup(' class="none"')
    parts = [Markup('<polyline{} points="{}"{}/>').format(kind, points, dash)]
    if series.low:
        bars = "".join(_bar(a, y, series.low[at], series.high[at]) for (a, _), at in zip(places, shown, strict=True))
        parts += [Markup('<path class="bars" d="{}"/>').format(bars)] if bars else []
    if series.marks:
        symbol = STAR if style is None else style.symbol
        marks = "".join(f"M{_n(a)} {_n(b)}{symbol}" for a, b in places)
        parts.append(Markup('<path class="marks" d="{}"/>').format(marks))
    tips = Markup(' data-tips="{}"').format("\n".join(series.tips[at] for at in shown)) if series.tips else ""
    if style is None:
        head = Markup('<g class="guide"{}>').format(tips)
    else:
        head = Markup('<g class="{}" data-method="{}" style="--own:{}"{}>')
        head = head.format(style.classes, series.method, style.colour, tips)
    return head + Markup("").join(parts) + Markup("</g>")


def _bar(at: float, y: Scale, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    bottom, top = (y(min(max(each, y.low), y.high)) for each in (low, high))
    return f"M{_n(at - 3)} {_n(bottom)}h6m-3 0V{_n(top)}m-3 0h6"


def _labels(series: Iterable[Series], x: Scale, y: Scale) -> Markup:
    """Names beside points, where they cover neither a point nor another name."""
    taken: list[tuple[float, float, float, float]] = []
    wanted: list[tuple[float, float, str]] = []
    for each in series:
        for at, (across, up) in enumerate(zip(each.x, each.y, strict=True)):
            if x.holds(across) and y.holds(up) and (each.method is not None or each.labels):
                taken += [] if each.line and not each.marks else [_box(x(across), y(up), 8, 8)]
                if each.labels and each.labels[at]:
                    wanted.append((x(across), y(up), _short(each.labels[at])))
    parts = []
    for across, up, text in wanted:
        wide = LETTER * len(text)
        spots = [(sign_x * (wide / 2 + 7), sign_y) for sign_y in (-9, 9, 0) for sign_x in (1, -1)] + [(0, -14), (0, 14)]
        boxes = [_box(across + right, up + down, wide, 12) for right, down in spots]
        inside = [box for box in boxes if box[0] >= x.start - 4 and box[2] <= x.end + 8 and box[1] >= TOP - 8]
        free = [box for box in inside if not any(_overlap(box, other) for other in taken)]
        box = (free or inside or boxes)[0]
        taken.append(box)
        parts.append(_text((box[0] + box[2]) / 2, box[3] - 2, text, "middle", "label"))
    return Markup("").join(parts)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _box(x: float, y: float, wide: float, high: float) -> tuple[float, float, float, float]:
    return x - wide / 2, y - high / 2, x + wide / 2, y + high / 2


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# -- surfaces ----------------------------------------------------------------------------------------------


def _surface(field: Field, x: Scale, y: Scale) -> Markup:
    """The heights as colours; and beside them the colours, with the heights that they stand for."""
    low, high = field.range
    shown = _image(x.start, y.end, x.end - x.start, y.start - y.end, picture(field.heights))
    key = _image(x.end + 14, y.end, 10, y.start - y.end, picture([[low], [high]]))
    scale = Scale(Axis(), low, high if high > low else low + 1, y.start, y.end)
    ticks = [_text(x.end + 28, at + 4, text, "start") for at, text in scale.ticks(24)]
    title = _text(x.end + 14, y.end - 16, field.title, "middle", "title")
    return shown + key + Markup("").join(ticks) + title


def _image(x: float, y: float, width: float, height: float, address: str) -> Markup:
    found = Markup('<image x="{}" y="{}" width="{}" height="{}" preserveAspectRatio="none" href="{}"/>')
    return found.format(*map(_n, (x, y, width, height)), address)


def picture(heights: Sequence[Sequence[float]]) -> str:
    """Heights on a grid, the first row below, as a picture: a colour for each step, whose edges are lines of height."""
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
    """An image, uint8 `[C, H, W]` with 1 or 3 channels, as the address of a picture within the page.

    One that is larger than `most` pixels in height or width is made as small as that.
    """
    image = needed("PIL.Image", "data", "a report with images")
    file = io.BytesIO()
    made = image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    made.thumbnail((most, most))
    made.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
