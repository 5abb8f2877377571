"""Divergences: the Kullback-Leibler terms of the methods' objectives, registered so that saved files can name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Divergence = Callable[..., Tensor]
"""`(network, **prior) -> scalar`: a term of a variational objective."""

DIVERGENCES: dict[str, Divergence] = {}
"""All registered divergences, by module and name; files can name no other function."""


F = TypeVar("F", bound=Divergence)


def divergence(function: F) -> F:
    """Register a function of a module as a divergence (decorator)."""
    DIVERGENCES[name_of(function)] = function
    return function


def name_of(function: Divergence) -> str:
    """Return the name of a registered divergence."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
