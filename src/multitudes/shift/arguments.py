"""Checks of arguments and networks for attacks, noise and corruptions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from multitudes.ensemble.predictor import multitude_of

Bounds = tuple[float, float] | None
"""Minimum and maximum of a pixel; None for no bounds."""


def class_predictions(net: nn.Module, x: Tensor, draws: int | None, seed: int | None) -> Tensor:
    """Predict classes with a multitude or a plain network, `[S, B, C]`."""
    multitude = multitude_of(net)
    if multitude.reading.class_axis != 1:
        raise ValueError(f"net must be for classification, got a multitude for {multitude.task}")
    if draws is not None and multitude is not net:
        raise ValueError(f"draws={draws!r} needs a multitude, got a {type(net).__name__}")
    predictions = multitude(x, draws=draws, seed=seed)
    if predictions.dim() != 3 or predictions.shape[1] != len(x) or predictions.shape[2] < 2:
        raise ValueError(
            f"net must return [S, B, C], with 2 or more classes and B = {len(x)} inputs, got {list(predictions.shape)}"
        )
    return predictions


def check_labels(name: str, labels: Tensor, x: Tensor) -> None:
    """Raise unless labels are integers, at least 0, one for each input."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = getattr(labels, "dtype", type(labels).__name__)
        raise ValueError(f"{name} must be a tensor of whole numbers, got {kind}")
    if labels.shape != x.shape[:1]:
        raise ValueError(f"{name} must hold one class for each of {len(x)} inputs, got shape {list(labels.shape)}")
    _check_all(labels >= 0, labels, f"{name} must hold classes, 0 or more")


def check_classes(name: str, labels: Tensor, classes: int) -> None:
    """Raise unless labels are below the number of classes."""
    _check_all(labels < classes, labels, f"{name} must hold classes 0 to {classes - 1}")


def check_call(net: nn.Module, x: Tensor, bounds: Bounds) -> None:
    """Raise unless the network can be attacked and the batch is finite, floating-point and within the bounds."""
    multitude_of(net)  # raises for anything but a multitude or a network
    check_floats("x", x, "[B, ...] with at least one input")
    check_bounds(bounds)
    check_values("x", x, bounds, " (bounds)")


def check_floats(name: str, x: Tensor, shape: str = "images [..., H, W]") -> None:
    """Raise unless x is a non-empty floating-point tensor of two or more dimensions."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 2 or not x.numel():
        raise ValueError(f"{name} must be {shape}, got shape {list(x.shape)}")


def check_values(name: str, x: Tensor, bounds: Bounds, whose: str = "") -> None:
    """Raise unless values are finite and within the bounds."""
    if bounds is None:
        _check_all(x.isfinite(), x, f"{name} must be finite")
    else:
        low, high = bounds
        _check_all((x >= low) & (x <= high), x, f"{name} must lie in [{low:g}, {high:g}]{whose}")


def check_bounds(bounds: Bounds) -> None:
    """Raise unless bounds are two finite numbers in order, or None."""
    if bounds is None:
        return
    pair = isinstance(bounds, tuple) and len(bounds) == 2
    if not pair or any(isinstance(b, bool) or not isinstance(b, (int, float)) or not math.isfinite(b) for b in bounds):
        raise ValueError(f"bounds must be None or (minimum, maximum), two finite numbers, got {bounds!r}")
    if not bounds[0] < bounds[1]:
        raise ValueError(f"bounds must be (minimum, maximum) in this order, got {bounds!r}")


def _check_all(valid: Tensor, values: Tensor, message: str) -> None:
    """Raise with the first invalid value unless all are valid."""
    if not bool(valid.all()):
        first = (~valid).nonzero()[0].tolist()
        raise ValueError(f"{message}, got {values[tuple(first)].item()} at {first if len(first) > 1 else first[0]}")
