"""Lazy imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], packages: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports its names on first access.

    `homes` maps modules to their public names, joined by spaces; `packages` maps public names to sub-packages.

    >>> offer, _ = lazy_names("multitudes.base", {"checks": "check_count check_number"})
    >>> offer("check_count")("members", 4)
    4
    """
    home = {name: f"{package}.{module}" for module, names in homes.items() for name in names.split()}

    def offer(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{packages[name]}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home, *packages})

    return offer, names
