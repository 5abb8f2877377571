"""Generated parts of docs/networks.md, each between two markers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "networks.md"


def _marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: generated -->\n", f"<!-- end of {part} -->"


def written(text: str, part: str, lines: Iterable[str]) -> str:
    """Return a page with one generated part replaced."""
    begin, end = _marks(part)
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no part {part!r}")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.partition(end)[2]


def table_in(text: str, part: str) -> list[list[str]]:
    """Return the cells of a generated table, header first."""
    begin, end = _marks(part)
    lines = text.partition(begin)[2].partition(end)[0].splitlines()
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if set("".join(row)) - set("-: ")]
