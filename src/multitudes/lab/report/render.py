"""Templates and their filters. Jinja escapes all values; only templates, the style sheet and the script are markup."""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from multitudes.lab.report.chart import SIZES, STAR, Drawing, Style, View, picture, place, png
from multitudes.lab.study.results.score_columns import fixed


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
