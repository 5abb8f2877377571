"""The methods that a study compares: the rows that their own files declare (see `multitudes.methods.registry`)."""

from __future__ import annotations

from multitudes.data.kinds import kind_of_shape
from multitudes.methods.registry import Method, chosen, collect

__all__ = ["METHODS", "Method", "method_of", "methods_for", "unfit"]

METHODS = collect()
"""The methods by name, the single network first."""


def method_of(name: str) -> Method:
    """The method of this name, or an error that lists them."""
    return chosen(METHODS, name)


def unfit(method: Method, shape: tuple[int, ...]) -> str | None:
    """Why a method is not for inputs of this shape; None where it is."""
    kind = kind_of_shape(shape)
    if method.feature_maps and not kind.feature_maps:
        return f"method {method.name!r} smooths feature maps, and the inputs are no images but {kind.describe(shape)}"
    if method.tables and not kind.named:
        return f"method {method.name!r} is for tables, and the inputs are {kind.describe(shape)}"
    return None


def methods_for(shape: tuple[int, ...]) -> list[str]:
    """The names of the methods for inputs of this shape.

    >>> [name for name in METHODS if name not in methods_for((13,))]
    ['smooth', 'smooth_dropout']
    """
    return [name for name, method in METHODS.items() if unfit(method, shape) is None]
