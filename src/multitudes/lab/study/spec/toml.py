"""TOML helpers that `tomllib` lacks: find the line of a key for errors, write files, and apply scales.

A study can be run smaller or larger: tables `[scales.NAME]` of a `study.toml` hold what differs there.

    [training]
    epochs = 75
    [scales.smoke.training]           # multitudes compare study.toml --scale smoke
    epochs = 1
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Place = tuple[str | int, ...]
"""Path of a value: `("training", "epochs")`, `("seeds", 1)`."""


@dataclass(frozen=True)
class TomlText:
    """The text of a TOML file, its name, and the scale at which it was read."""

    text: str
    name: str
    scale: str | None = None

    def line(self, place: Place) -> int | None:
        """Return the line, from 1, where the key of a value begins, or that of the innermost table around it.

        >>> text = TomlText("seeds = [0,\\n 1]\\n\\n[training]\\nepochs = 3", "study.toml")
        >>> text.line(("seeds", 1)), text.line(("training", "epochs")), text.line(("training", "lr"))
        (1, 5, 4)
        """
        starts: list[Place] = [(), ("scales", self.scale)] if self.scale else [()]
        places = [(*start, *place[:end]) for end in range(len(place), 0, -1) for start in reversed(starts)]
        return next((self._lines[each] for each in places if each in self._lines), None)

    @cached_property
    def _lines(self) -> dict[Place, int]:
        """Lines by place: the first line after the longest valid prefix of the text that lacks the key."""
        found: dict[Place, int] = {}
        lines, start = self.text.split("\n"), 1
        for end in range(1, len(lines) + 1):
            try:
                table = tomllib.loads("\n".join(lines[:end]))
            except tomllib.TOMLDecodeError:
                continue  # inside a value of several lines
            for place in _places(table):
                found.setdefault(place, start)
            start = end + 1
        return found


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*place, key)
        yield from _places(each, (*place, key))


# -- writing -----------------------------------------------------------------------------------------------


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """Format a table as TOML: plain values first, then nested tables. None is left out: TOML has no null.

    >>> print(to_toml({"training": {"lr": 0.1}, "seeds": [0, 1], "device": "cpu"}), end="")
    seeds = [0, 1]
    device = "cpu"
    <BLANKLINE>
    [training]
    lr = 0.1
    """
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in tables and value is not None}
    head = f"\n[{name}]\n" if name and (plain or not tables) else ""
    text = head + "".join(f"{_key(key)} = {_value(value)}\n" for key, value in plain.items())
    return text + "".join(to_toml(each, f"{name}.{_key(key)}".removeprefix(".")) for key, each in tables.items())


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)  # numbers and dates


# -- scales ------------------------------------------------------------------------------------------------


def at_scale(raw: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """Return the tables of a file at a scale; None is the file without its scales.

    >>> raw = {"training": {"epochs": 75, "lr": 0.1}, "scales": {"smoke": {"training": {"epochs": 1}}}}
    >>> at_scale(raw, "smoke")
    {'training': {'epochs': 1, 'lr': 0.1}}
    >>> at_scale(raw, None)
    {'training': {'epochs': 75, 'lr': 0.1}}
    """
    own = dict(raw)
    scales = own.pop("scales", {})
    if not isinstance(scales, dict) or not all(isinstance(each, dict) for each in scales.values()):
        raise ValueError(f"scales must be tables, [scales.NAME], of what differs at each scale, got {scales!r}")
    if scale is None:
        return own
    if scale not in scales:
        choices = f"one of {', '.join(scales)}" if scales else "a table [scales.NAME] of the file, which has none"
        raise ValueError(f"scale must be {choices}, got {scale!r}")
    return _merged(own, scales[scale])


def _merged(table: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables recursively; values of `other` win."""
    merged = dict(table)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
