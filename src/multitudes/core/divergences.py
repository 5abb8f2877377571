"""Divergences: the Kullback-Leibler terms of the methods' objectives, declared so that a saved file may name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Divergence = Callable[..., Tensor]
"""`(network, **prior) -> scalar`: a term of a variational objective."""

DIVERGENCES: dict[str, Divergence] = {}
"""Every declared divergence by its module and name. A file can name no other function."""


F = TypeVar("F", bound=Divergence)


def divergence(function: F) -> F:
    """Declare a module's function as a divergence: a decorator."""
    DIVERGENCES[name_of(function)] = function
    return function


def name_of(function: Divergence) -> str:
    """The name under which a divergence is declared."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
