"""How the columns of a table were read."""

from __future__ import annotations

from typing import Any

from multitudes.report.results import Results

__all__ = ["columns_read"]

FIELDS = ("name", "read_as", "values", "missing", "dropped", "note")
"""Of a column, as `data.json` describes it."""


def columns_read(results: Results) -> dict[str, Any]:
    """For each column, what it was read as, and what became of it; those that need a look first."""
    columns = [{field: each.get(field, "") for field in FIELDS} for each in results.about.get("columns") or []]
    columns.sort(key=lambda each: not (each["dropped"] or each["note"]))
    if not columns:
        return {}
    changeable = results.about.get("kind") != "text"
    return {"columns": columns, "dropped": sum(bool(each["dropped"]) for each in columns), "changeable": changeable}
