"""What attacks and noise ask of their arguments, and of a network."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from multitudes.core.calling import call
from multitudes.core.multitude import Multitude

Bounds = tuple[float, float] | None
"""The least and the largest value that a pixel may have; None where there are no such values."""


def class_predictions(net: nn.Module, x: Tensor, draws: int | None, seed: int | None) -> Tensor:
    """What a multitude or a plain network says of the classes of `x`, `[S, B, C]`."""
    if isinstance(net, Multitude):
        if net.task != "classification":
            raise ValueError(f"net must be for classification, got a multitude for {net.task}")
        predictions = net(x, draws=draws, seed=seed)
    elif draws is not None:
        raise ValueError(f"draws={draws!r} is for a multitude, got a {type(net).__name__}")
    else:
        predictions = call(net, x)
        predictions = predictions.unsqueeze(0) if predictions.dim() == 2 else predictions
    if predictions.dim() != 3 or predictions.shape[1] != len(x) or predictions.shape[2] < 2:
        raise ValueError(
            f"net must give [S, B, C], or a plain network [B, C], with 2 or more classes and B = {len(x)} inputs, "
            f"got {list(predictions.shape)}"
        )
    return predictions


def check_labels(name: str, labels: Tensor, x: Tensor) -> None:
    """Labels must be whole numbers, one for each input."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = getattr(labels, "dtype", type(labels).__name__)
        raise ValueError(f"{name} must be a tensor of whole numbers, got {kind}")
    if labels.shape != x.shape[:1]:
        raise ValueError(f"{name} must hold one class for each of {len(x)} inputs, got shape {list(labels.shape)}")
    if labels.numel() and bool((labels < 0).any()):
        first = int((labels < 0).nonzero()[0])
        raise ValueError(f"{name} must hold classes, 0 or more, got {int(labels[first])} at {first}")


def check_classes(name: str, labels: Tensor, classes: int) -> None:
    """Labels must be among the classes that a network knows."""
    if bool((wrong := labels >= classes).any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(f"{name} must hold classes 0 to {classes - 1}, got {int(labels[first])} at {first}")


def check_call(net: nn.Module, x: Tensor, bounds: Bounds) -> None:
    """A network must be a module, and a batch finite floating-point numbers that lie within the bounds."""
    if not isinstance(net, nn.Module):
        raise ValueError(f"net must be a module, got a {type(net).__name__}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 2 or not x.numel():
        raise ValueError(f"x must be [B, ...] with at least one input, got shape {list(x.shape)}")
    check_bounds(bounds)
    wrong = ~x.isfinite() if bounds is None else ~((x >= bounds[0]) & (x <= bounds[1]))
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        where = "be finite" if bounds is None else f"lie within bounds={bounds}"
        raise ValueError(f"x must {where}, got {x[tuple(first)].item()} at {first}")


def check_positive(name: str, value: float, *, zero: bool = True) -> None:
    """A finite number, above 0, or 0 where that makes sense."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a finite number, {'0 or more' if zero else 'above 0'}, got {value!r}")


def check_bounds(bounds: Bounds) -> None:
    """Bounds are two finite numbers in order, or None."""
    if bounds is None:
        return
    if not isinstance(bounds, tuple) or len(bounds) != 2:
        raise ValueError(f"bounds must be None or (least, largest), got {bounds!r}")
    if any(isinstance(b, bool) or not isinstance(b, (int, float)) or not math.isfinite(b) for b in bounds):
        raise ValueError(f"bounds must be two finite numbers, got {bounds!r}")
    if not bounds[0] < bounds[1]:
        raise ValueError(f"bounds must be (least, largest) with the least first, got {bounds!r}")
