"""The pages of the server: one to try the network, and one that lists the routes. They load no external resources."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from multitudes.lab.report.render import render, resource

HERE = "multitudes.lab.serve"


@cache
def page() -> str:
    """Return the page to try the network. It is static: its script loads `/about`."""
    return render("page.html", HERE, css=_css(), script=resource("templates/page.js", HERE))


def docs_page(openapi: Mapping[str, Any]) -> str:
    """Return the page of routes, from their OpenAPI description."""
    return render("docs.html", HERE, css=_css(), openapi=openapi)


def _css() -> str:
    return resource("page.css") + resource("templates/serve.css", HERE)


@cache
def policy(html: str) -> str:
    """Return the Content-Security-Policy of a page: only its own style sheet and script may run."""
    allowed = {
        name: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL))
        for name, tag in (("style-src", "style"), ("script-src", "script"))
    }
    own = "; ".join(f"{name} {digests or repr('none')}" for name, digests in allowed.items())
    rest = "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {own}; {rest}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
