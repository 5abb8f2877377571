"""What is wrong with a specification, in sentences: `SpecError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from multitudes.study.toml import Place, TomlText

__all__ = ["SpecError", "close", "one_of", "problem"]


class SpecError(ValueError):
    """What is wrong with a specification: one line for each problem, with its line in the file, if there is one.

    `in_file` is whether it was read from a file, whose keys are then meant.
    """

    def __init__(self, problems: Iterable[tuple[Place, str]], source: TomlText | None = None) -> None:
        found = [(source.line(place) if source else None, message) for place, message in problems]
        found.sort(key=lambda each: each[0] or 0)
        self.lines = [line for line, _ in found]
        self.in_file = source is not None
        start = source.name if source else ""
        where = [f"{start}, line {line}: " if line else f"{start}: " if start else "" for line in self.lines]
        super().__init__("\n".join(place + message for place, (_, message) in zip(where, found, strict=True)))


_MUST = {
    "missing": "is missing",
    "int_type": "must be a whole number, got {input!r}",
    "float_type": "must be a number, got {input!r}",
    "finite_number": "must be a finite number, got {input!r}",
    "string_type": "must be a string, got {input!r}",
    "bool_type": "must be true or false, got {input!r}",
    "list_type": "must be a list, got {input!r}",
    "dict_type": "must be a table, got {input!r}",
    "model_type": "must be a table, got {input!r}",
    "literal_error": "must be {expected}, got {input!r}",
    "greater_than": "must be above {gt}, got {input!r}",
    "greater_than_equal": "must be {ge} or more, got {input!r}",
    "less_than": "must be below {lt}, got {input!r}",
    "less_than_equal": "must be {le} at most, got {input!r}",
    "too_short": "must have at least {min_length} values, got {input!r}",
    "too_long": "must have at most {max_length} values, got {input!r}",
    "value_error": "{error}",
}


def problem(
    kind: type[BaseModel], error: Mapping[str, Any], sections: Mapping[str, type[BaseModel]]
) -> tuple[Place, str]:
    """The place of an error that Pydantic found, and a sentence about it; `sections` are the tables of a file."""
    path: Place = error["loc"]
    if error["type"] == "extra_forbidden":
        for key in path[:-1]:
            kind = kind.model_fields[str(key)].annotation  # type: ignore[assignment]
        known = list(kind.model_fields)
        owner = next((name for name, section in sections.items() if path[-1] in section.model_fields), None)
        hint = f" (did you mean [{owner}] {path[-1]}?)" if owner else close(path[-1], known)
        table = f"[{'.'.join(map(str, path[:-1]))}]" if path[1:] else "the file"
        return path, f"unknown key {_name(path)!r}{hint}; the keys of {table} are {', '.join(known)}"
    rule = _MUST.get(error["type"], "is wrong: " + error["msg"].replace("{", "{{").replace("}", "}}"))
    return path, f"{_name(path)} {rule.format(input=error['input'], **error.get('ctx', {}))}"


def _name(path: Place) -> str:
    """A path as one writes it: `evaluation.severities[1]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def one_of(names: Iterable[str]) -> str:
    """All of these, to choose from."""
    return f"one of {', '.join(names)}"


def close(name: Any, names: Iterable[str]) -> str:
    """The one of these that was probably meant, in brackets."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
