"""The methods that a study compares: the rows that their own files declare (see `multitudes.methods.registry`)."""

from __future__ import annotations

from multitudes.methods.registry import Method, collect

__all__ = ["METHODS", "Method", "method_of", "methods_for"]

METHODS = collect()
"""The methods by name, the single network first."""


def method_of(name: str) -> Method:
    """The method of this name, or an error that lists them."""
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


def methods_for(shape: tuple[int, ...]) -> list[str]:
    """The names of the methods for inputs of this shape.

    >>> [name for name in METHODS if name not in methods_for((13,))]
    ['smooth', 'smooth_dropout']
    """
    return [name for name, method in METHODS.items() if method.unfit(shape) is None]
