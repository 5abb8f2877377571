"""Templates and their filters. Jinja escapes every value; only the JSON of figures and Plotly itself are markup."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from multitudes.core.checks import needed
from multitudes.report.style import Style, View

__all__ = ["figure_json", "fixed", "png", "render"]


def render(template: str, **values: Any) -> Markup:
    """A template of `templates/` with these values."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("multitudes.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"figure_json": figure_json, "fixed": fixed, "png": png, "numbers_shown": numbers_shown}
    environment.globals |= {"style": Style, "isfinite": math.isfinite}
    return environment


def fixed(value: float, digits: int = 1) -> str:
    """A number with so many decimal places, and a dash for NaN.

    >>> fixed(-0.0314, 3), fixed(1234567.0, 0), fixed(float("nan")), fixed(float("inf"))
    ('−0.031', '1,234,567', '–', '∞')
    """
    if math.isnan(value):
        return "–"
    return f"{value:,.{digits}f}".replace("-", "−").replace("inf", "∞")


def numbers_shown(views: Sequence[View]) -> list[int]:
    """The numbers of the methods that a plot has traces of."""
    return sorted({trace["meta"] for view in views for trace in view.traces if "meta" in trace})


def figure_json(views: Sequence[View]) -> Markup:
    """Traces and layout of each view as JSON that may stand in a `<script>`; what is not finite is null.

    >>> figure_json([View([{"text": "</script>", "y": [float("nan"), 0.123456789]}], {})])
    Markup('[[[{"text":"\\\\u003c/script\\\\u003e","y":[null,0.123457]}],{}]]')
    """
    plain = _plain([[view.traces, view.layout] for view in views])
    return htmlsafe_json_dumps(plain, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):  # six digits draw the same picture in half the space
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def png(pixels: Any) -> str:
    """An image, uint8 `[C, H, W]` with 1 or 3 channels, as the address of a picture within the page."""
    image = needed("PIL.Image", "data", "a report with images")
    file = io.BytesIO()
    image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
