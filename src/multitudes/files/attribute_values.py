"""Attributes of a user's modules that are not plain values.

Configurations, dataclasses and namespaces come from the given network, with the plain values of the file. Other
attributes (functions, tensors in lists) are not saved: they must be the same in the given network, or loading raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from multitudes.networks.settings import FLAT_WEIGHTS, HF_CACHES, computing_hooks, describe_setting

_DEPTH = 4
_CODE = re.compile(r"\{(\d+\.\d+):[0-9a-f]+\}")
"""Python version and digest of a function's code; the digest depends on the version."""
_MODULES = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_<])")


def describe_attributes(module: nn.Module, keys: Iterable[str], seen: set[int]) -> dict[str, Any]:
    """Describe attributes of a module, with their plain parts; skip objects in `seen`."""
    held: dict[str, str] = {}
    parts: dict[str, Any] = {}
    for key in keys:
        value = vars(module)[key]
        if key in (*computing_hooks(module), *HF_CACHES, *FLAT_WEIGHTS) or id(value) in seen:
            continue
        seen.add(id(value))
        held[key] = describe_setting(value)
        if (tree := _parts(value)) is not None:
            parts[key] = tree
    return {"held": held, "parts": parts}


def restore_attributes(module: nn.Module, node: Mapping[str, Any]) -> None:
    """Restore saved plain parts in a copy of the user's module; raise if other attributes differ."""
    for key, tree in node.get("parts", {}).items():
        if key in vars(module):
            _restore_parts(vars(module)[key], tree)
    for key, want in node.get("held", {}).items():
        got = describe_setting(vars(module)[key]) if key in vars(module) else "missing"
        if _comparable(got, want) != _comparable(want, got):
            place = f"layer {node['origin']!r}" if node["origin"] else "the network"
            kind = node["class"].rpartition(".")[2]
            was, now = _excerpts(want, got)
            raise ValueError(
                f"model does not fit the file: {place} ({kind}) has {key} = {was} in the file and {now} in model"
            )


def lazy_hooks(hooks: Mapping[int, Any]) -> list[int]:
    """Return the ids of the hooks that Hugging Face models add on demand."""
    return [n for n, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _parts(value: Any, depth: int = _DEPTH) -> Any:
    """Return the plain parts of an object, dict or list as JSON; None for other values."""
    if not depth:
        return None
    if type(value) is dict:
        return {"entries": {k: _part(v, depth) for k, v in value.items() if type(k) is str}}
    if type(value) is list:
        return {"items": [_part(v, depth) for v in value]}
    closed = (Tensor, nn.Module, ModuleType, Enum, type)
    if callable(value) or isinstance(value, closed) or not hasattr(value, "__dict__"):
        return None
    return {"attributes": {k: _part(v, depth) for k, v in vars(value).items()}}


def _part(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    return _parts(value, depth - 1)


def _restore_parts(value: Any, tree: Mapping[str, Any]) -> None:
    """Write plain parts back into an object; create none."""
    ((kind, parts),) = tree.items()
    into: Any = None
    if kind == "entries" and type(value) is dict:
        into = value
    elif kind == "items" and type(value) is list and len(value) == len(parts):
        into, parts = value, dict(enumerate(parts))
    elif kind == "attributes" and _parts(value, 1) is not None and type(value) not in (dict, list):
        into = vars(value)
    for key, part in (parts if into is not None else {}).items():
        if part is not None and "value" in part:
            into[key] = part["value"]
        elif part is not None and (type(into) is list or key in into):
            _restore_parts(into[key], part)


def _comparable(one: str, other: str) -> str:
    """Remove code digests if Python versions differ, and module names if one is `__main__`."""
    versions = set(_CODE.findall(one)) | set(_CODE.findall(other))
    one = _CODE.sub("", one) if len(versions) > 1 else one
    return _MODULES.sub("", one) if "__main__." in one + other else one


def _excerpts(one: str, other: str, around: int = 60) -> tuple[str, str]:
    """Return excerpts of two descriptions around their first difference."""
    same = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    start = 0 if same < around else same - 20
    dots = "..." if start else ""
    first, second = (
        dots + text[start : start + around] + "..." * (len(text) > start + around) for text in (one, other)
    )
    return first, second
