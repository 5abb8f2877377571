"""One study, smaller or larger: tables `[scales.NAME]` of a `study.toml` say what differs there.

[training]
epochs = 75

[scales.smoke.training]           # multitudes compare study.toml --scale smoke
epochs = 1
[scales.smoke.data]
limit = 500
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["at_scale"]

Place = tuple[str | int, ...]


def at_scale(
    raw: Mapping[str, Any], lines: Mapping[Place, int], scale: str | None
) -> tuple[dict[str, Any], dict[Place, int]]:
    """What a file says at a scale, None for the file as it stands, and on which line each of its keys is.

    >>> raw = {"training": {"epochs": 75, "lr": 0.1}, "scales": {"smoke": {"training": {"epochs": 1}}}}
    >>> at_scale(raw, {}, "smoke")[0]
    {'training': {'epochs': 1, 'lr': 0.1}}
    >>> at_scale(raw, {}, None)[0]
    {'training': {'epochs': 75, 'lr': 0.1}}
    """
    scales = raw.get("scales", {})
    own = {key: value for key, value in raw.items() if key != "scales"}
    if not isinstance(scales, dict) or not all(isinstance(each, dict) for each in scales.values()):
        raise ValueError(f"scales must be tables, [scales.NAME], of what differs at each scale, got {scales!r}")
    if scale is None:
        return own, dict(lines)
    if scale not in scales:
        choices = f"be one of {', '.join(scales)}" if scales else "be a table [scales.NAME] of the file, which has none"
        raise ValueError(f"scale must {choices}, got {scale!r}")
    start = ("scales", scale)
    moved = {place[2:]: line for place, line in lines.items() if place[:2] == start and len(place) > 2}
    return _over(own, scales[scale]), {**lines, **moved}


def _over(table: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A table with what another one says in its place; tables in it likewise."""
    merged = dict(table)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged
