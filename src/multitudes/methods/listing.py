"""What the rows of the methods say in words and plain values, read from their files without running them.

So listing the methods needs no torch. What a row does is in `registry`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from multitudes import methods

__all__ = ["Listed", "listed"]

PLACE = 1000
"""Of a method that names none."""
POSITIONAL = ("name", "build", "settings", "costs", "pick")
"""The first arguments of `Method`."""


@dataclass(frozen=True)
class Listed:
    """A method's name, its settings with their defaults, what it costs and when to pick it."""

    name: str
    settings: Mapping[str, Any]
    costs: str
    pick: str
    place: int = PLACE


def listed() -> list[Listed]:
    """All methods, in their order.

    >>> [(each.name, dict(each.settings)) for each in listed()[:2]]
    [('single', {}), ('deep', {'members': 4})]
    """
    files = [path for folder in methods.__path__ for path in sorted(Path(folder).rglob("*.py"))]
    rows = [row for path in files for row in _rows(path)]
    return sorted(rows, key=lambda row: (row.place, row.name))


def _rows(path: Path) -> Iterator[Listed]:
    rows = _assigned(path).get("ROWS")
    for call in rows.elts if isinstance(rows, ast.Tuple) else ():
        if isinstance(call, ast.Call):
            given = dict(zip(POSITIONAL, call.args, strict=False)) | {
                each.arg or "": each.value for each in call.keywords
            }
            fields = ("name", "settings", "costs", "pick", "place")
            yield Listed(**{name: _value(given[name], path) for name in fields if name in given})


@cache
def _assigned(path: Path) -> dict[str, ast.expr]:
    """What is assigned to names at the top of a file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {
        target.id: statement.value
        for statement in body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _value(node: ast.expr, path: Path) -> Any:
    """A literal, a name of the same file or of another method's (`dropout.SETTINGS`), or a dict of such."""
    if isinstance(node, ast.Name):
        return _value(_assigned(path)[node.id], path)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        other = path.with_name(f"{node.value.id}.py")
        return _value(_assigned(other)[node.attr], other)
    if isinstance(node, ast.Dict):
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            found |= _value(value, path) if key is None else {ast.literal_eval(key): _value(value, path)}
        return found
    return ast.literal_eval(node)
