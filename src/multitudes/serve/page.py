"""The pages of the server: one to try the network on, and one with the addresses. Both load nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["docs_page", "page", "policy"]


@cache
def page() -> str:
    """The page to try the network on. It has nothing of the network in it: its script asks `/about`."""
    return _rendered("page.html", script=Markup(_file("multitudes.serve", "templates/page.js")))


def docs_page(openapi: Mapping[str, Any]) -> str:
    """The addresses of the server, from its description by OpenAPI."""
    return _rendered("docs.html", openapi=openapi)


@cache
def policy(html: str) -> str:
    """The Content-Security-Policy of a page: its own style sheet and script may run, and nothing else."""
    allowed = {
        name: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL))
        for name, tag in (("style-src", "style"), ("script-src", "script"))
    }
    own = "; ".join(f"{name} {digests or repr('none')}" for name, digests in allowed.items())
    rest = "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {own}; {rest}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _rendered(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("multitudes.serve"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    css = _file("multitudes.report", "page.css") + _file("multitudes.serve", "templates/serve.css")
    return environment.get_template(template).render(css=Markup(css), **values)


def _file(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
