"""Attributes that a network's own code writes as it runs: a counter, a hidden state, a list that grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from multitudes.core.settings import FLAT_WEIGHTS, FOUND_ANEW
from multitudes.core.views import may_write, same

__all__ = ["attributes_restored", "writing_modules"]

_PASSED = frozenset([*vars(nn.Module()), *FOUND_ANEW, *FLAT_WEIGHTS])
_CONTAINERS = (list, dict, set)


def writing_modules(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules, by name, whose code may write attributes: of the user's own classes, or with hooks."""
    return [(path, module) for path, module in network.named_modules() if may_write(module)]


@contextmanager
def attributes_restored(writing: Sequence[tuple[str, nn.Module]]) -> Iterator[set[tuple[str, str]]]:
    """Restore the attributes of modules afterwards; yield the names, of module and attribute, that were written.

    A list, a dictionary or a set gets its items back as well.
    """
    modules = [(path, module, _attributes(module)) for path, module in writing]
    contents = {
        (path, key): value.copy() if type(value) in _CONTAINERS else value
        for path, _, before in modules
        for key, value in before.items()
    }
    written: set[tuple[str, str]] = set()
    try:
        yield written
    finally:
        for path, module, before in modules:
            now = _attributes(module)
            written |= {(path, key) for key in now.keys() ^ before.keys()}
            written |= {(path, key) for key in now.keys() & before.keys() if not same(now[key], contents[path, key])}
            for key in now.keys() - before.keys():
                del vars(module)[key]
            for key, value in before.items():
                vars(module)[key] = value
                if not same(value, items := contents[path, key]):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(items)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _PASSED}
