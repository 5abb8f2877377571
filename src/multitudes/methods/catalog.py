"""The rows of the methods as plain values, parsed from the source files, so listing them does not import torch.

`registry.py` documents the fields of a row.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multitudes import methods


@dataclass(frozen=True)
class ListedMethod:
    """Name, settings with defaults, costs, advice and place of a method."""

    name: str
    settings: Mapping[str, Any]
    costs: str
    pick: str
    place: int


def list_methods() -> list[ListedMethod]:
    """Return all methods in order.

    >>> [(each.name, dict(each.settings)) for each in list_methods()[:2]]
    [('single', {}), ('deep', {'members': 4})]
    """
    files = [path for folder in methods.__path__ for path in sorted(Path(folder).rglob("*.py"))]
    rows = [row for path in files for row in _File(path).rows()]
    return sorted(rows, key=lambda row: (row.place, row.name))


def _row(name: str, build: Any, settings: Any, costs: str, pick: str, place: int = 1000, **rest: Any) -> ListedMethod:
    return ListedMethod(name, settings, costs, pick, place)


class _File(dict[str, Any]):
    """Names that the rows of a file use: its constants, other files, and placeholders for functions."""

    def __init__(self, path: Path) -> None:
        super().__init__(Method=_row)
        self.path = path
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assigned = [(each.targets[0], each.value) for each in body if isinstance(each, ast.Assign)]
        self.constants = {name.id: value for name, value in assigned if isinstance(name, ast.Name)}

    def rows(self) -> tuple[ListedMethod, ...]:
        return self["ROWS"] if "ROWS" in self.constants else ()

    def __missing__(self, name: str) -> Any:
        if name in self.constants:
            expression = compile(ast.Expression(self.constants[name]), self.path, "eval")
            return eval(expression, {"__builtins__": {}}, self)
        other = self.path.with_name(f"{name}.py")
        return _File(other) if other.exists() else lambda *args, **options: None

    def __getattr__(self, name: str) -> Any:
        return self[name]
