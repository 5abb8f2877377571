"""What `tomllib` leaves out: on which line of a file each key is, and how to write a file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["key_lines", "to_toml"]

Place = tuple[str | int, ...]
"""The way to a value: names of keys, and indices of lists."""


# -- reading -----------------------------------------------------------------------------------------------


def key_lines(text: str) -> dict[Place, int]:
    """The line, from 1, on which each key, table and item of a list begins, in a text that `tomllib` accepts.

    >>> key_lines("seeds = [0,\\n 1]\\n[training]\\nepochs = 3\\n[[a.b]]\\nc.d = {e = 1}")  # doctest: +ELLIPSIS
    {('seeds',): 1, ('seeds', 0): 1, ('seeds', 1): 2, ('training',): 3, ('training', 'epochs'): 4, ('a',): 5, ...}
    """
    return _Scanner(text.replace("\r\n", "\n")).lines()


_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""+'  # up to two quotes may stand before the closing three
    r"|'''.*?'''+"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


class _Scanner:
    """Goes through a text once; it need not find faults, for there are none."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.found: dict[Place, int] = {}
        self.counts: dict[Place, int] = {}  # of tables in each list of tables

    def lines(self) -> dict[Place, int]:
        table: Place = ()
        self.skip(_BLANK)
        while self.at < len(self.text):
            if self.text.startswith("[", self.at):
                table = self.header()
            else:
                self.pair(table)
            self.skip(_BLANK)
        return self.found

    def header(self) -> Place:
        """`[a.b]`, or `[[a.b]]`: the place of the table that begins."""
        line, listed = self.line(), self.text.startswith("[[", self.at)
        self.at += 2 if listed else 1
        keys = self.keys()
        self.at += 2 if listed else 1
        table: Place = ()
        for key in keys[:-1]:
            table = self.newest((*table, key), line)
        table = (*table, keys[-1])
        if not listed:
            return self.newest(table, line)
        self.counts[table] = self.counts.get(table, 0) + 1
        return self.newest(table, line)

    def newest(self, table: Place, line: int) -> Place:
        """A table, or the last one of a list of them."""
        self.found.setdefault(table, line)
        if table in self.counts:
            table = (*table, self.counts[table] - 1)
            self.found.setdefault(table, line)
        return table

    def pair(self, table: Place) -> None:
        """`a.b = value`."""
        line = self.line()
        for key in self.keys():
            table = (*table, key)
            self.found.setdefault(table, line)
        self.at += 1  # =
        self.skip(_SPACE)
        self.value(table)

    def keys(self) -> list[str]:
        """`a . "b"`, up to what follows it."""
        keys = []
        while True:
            self.skip(_SPACE)
            quoted = self.text[self.at] in "\"'"
            word = self.take(_STRING if quoted else _BARE)
            keys.append(_unquoted(word) if quoted else word)
            self.skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return keys
            self.at += 1

    def value(self, place: Place) -> None:
        start = self.text[self.at]
        if start in "\"'":
            self.take(_STRING)
        elif start in "[{":
            self.items(place, "]" if start == "[" else "}")
        else:
            self.take(_SCALAR)

    def items(self, place: Place, end: str) -> None:
        """The items of a list or an inline table."""
        index = 0
        self.at += 1
        while True:
            self.skip(_BLANK)
            if self.text[self.at] == end:
                self.at += 1
                return
            if end == "}":
                self.pair(place)
            else:
                self.found.setdefault((*place, index), self.line())
                self.value((*place, index))
                index += 1
            self.skip(_BLANK)
            self.at += self.text[self.at] == ","

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def skip(self, pattern: re.Pattern[str]) -> None:
        self.take(pattern)

    def take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError(f"line {self.line()} is no TOML: {self.text[self.at : self.at + 20]!r}")
        self.at = match.end()
        return match.group()


def _unquoted(word: str) -> str:
    import tomllib

    return next(iter(tomllib.loads(f"{word} = 0")))


# -- writing -----------------------------------------------------------------------------------------------


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """A table as TOML: plain values first, then the tables in it. What is None is left out: TOML has no word for it.

    >>> print(to_toml({"training": {"lr": 0.1}, "seeds": [0, 1], "device": "cpu"}), end="")
    seeds = [0, 1]
    device = "cpu"
    <BLANKLINE>
    [training]
    lr = 0.1
    """
    plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    text = "".join(f"{_key(key)} = {_value(value)}\n" for key, value in plain.items())
    if name and (plain or not any(isinstance(value, Mapping) for value in table.values())):
        text = f"\n[{name}]\n{text}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            text += to_toml(value, f"{name}.{_key(key)}" if name else _key(key))
    return text


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)  # dates and times
