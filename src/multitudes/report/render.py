"""Templates and their filters. Jinja escapes every value; only figures, the style sheet and the script are markup."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from multitudes.report.chart import png, svg
from multitudes.report.style import Style
from multitudes.study.columns import fixed

__all__ = ["render"]


def render(template: str, **values: Any) -> Markup:
    """A template of `templates/` with these values."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("multitudes.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"fixed": fixed, "png": png}
    environment.globals |= {"style": Style, "isfinite": math.isfinite, "svg": svg}
    return environment
