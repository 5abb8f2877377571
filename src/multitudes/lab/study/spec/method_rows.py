"""The methods that a study compares, as registered in their own files (see `multitudes.methods.registry`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.lab.data.kinds import kind_of_shape
from multitudes.methods.registry import Method, collect, method_named

METHODS = collect()
"""Methods by name, the single network first."""


def method_of(name: str) -> Method:
    """Return the method with this name; raise with a list of all names if there is none."""
    return method_named(name, METHODS)


def build(
    method: Method,
    network: nn.Module,
    example: Tensor,
    settings: Mapping[str, Any],
    seed: int,
    model: Mapping[str, Any],
) -> Multitude:
    """Convert a network by a method; a pretrained network keeps all weights except its output layers."""
    start = {"init": "heads"} if model.get("weights") else {}
    return method.build(network, example, {**settings, **start}, seed)


def unfit(method: Method, shape: tuple[int, ...], kind_name: str | None = None, pretrained: bool = False) -> str | None:
    """Return the reason why a method cannot handle inputs of this shape and kind; None if it can.

    `pretrained` is True if the network may have been trained before.
    """
    kind = kind_of_shape(shape, kind_name)
    if method.feature_maps and not kind.feature_maps:
        return f"method {method.name!r} smooths feature maps and needs images, got {kind.describe(shape)}"
    if method.tables and not kind.has_columns:
        return f"method {method.name!r} is for tables, got {kind.describe(shape)}"
    if method.pretrained and not pretrained:
        return f"method {method.name!r} needs a pretrained network, such as model hf:FOLDER with weights"
    return None


def methods_for(shape: tuple[int, ...], kind_name: str | None = None, pretrained: bool = False) -> list[str]:
    """List the methods for inputs of this shape and kind.

    >>> [name for name in METHODS if name not in methods_for((13,))]
    ['lora', 'smooth', 'smooth_dropout']
    """
    return [name for name, method in METHODS.items() if unfit(method, shape, kind_name, pretrained) is None]
