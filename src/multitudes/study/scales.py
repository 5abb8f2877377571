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


def at_scale(raw: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """The tables of a file at a scale; None is the file without its scales.

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
    """A table whose values are replaced by those of another; tables in it likewise."""
    merged = dict(table)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
