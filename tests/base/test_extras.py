"""The extras named in errors exist."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_extra_that_an_error_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "needed" and len(node.args) == 3:
                named[f"{path.name}:{node.lineno}"] = ast.literal_eval(node.args[1])
    assert len(named) > 20
    assert {place: extra for place, extra in named.items() if extra not in extras} == {}
