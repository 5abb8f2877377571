"""Layers of other classes than torch's, whose channels are known by observing what they compute."""

from __future__ import annotations

import math
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from multitudes.core.copying import copied
from multitudes.surgery.affine import AffineMap, computes, kind_of, maps_of

__all__ = ["channel_axis", "cut_affine", "cut_channels", "foreign_map"]

_maps: WeakKeyDictionary[nn.Module, AffineMap | None] = WeakKeyDictionary()
_axes: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def foreign_map(layer: nn.Module) -> AffineMap | None:
    """The affine map that a layer of another class computes, as Hugging Face's `Conv1D` does; None where none is."""
    if layer not in _maps:
        own = kind_of(layer) is None and not isinstance(layer, nn.Embedding) and _own_parameters(layer)
        found = maps_of(layer) if own else ()
        _maps[layer] = found[0] if len(found) == 1 else None
    return _maps[layer]


def channel_axis(layer: nn.Module) -> int | None:
    """The axis of the channels that a layer of another class treats alike, as norms and scales do; None where none is.

    Such a layer has a number for each channel in each of its parameters, and with permuted channels and numbers it
    gives the permuted output.
    """
    if layer not in _axes:
        _axes[layer] = _observed_axis(layer)
    return _axes[layer]


def _own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}


def _observed_axis(layer: nn.Module) -> int | None:
    parameters = _own_parameters(layer)
    tensors = [*parameters.values(), *[b for b in layer._buffers.values() if b is not None and b.dim()]]
    widths = {p.shape[-1] if p.dim() else 1 for p in tensors}
    if len(widths) != 1 or (width := widths.pop()) < 2 or not parameters or layer._modules:
        return None
    if any(tensor.numel() != width for tensor in tensors):
        return None
    if type(layer).forward.__module__.startswith(("torch.", "multitudes.")) or "forward" in vars(layer):
        return None
    shapes = ((-1, (2, 3, width)), (-1, (2, 3, 3, width)), (1, (2, width, 3, 3)))
    return next((axis for axis, shape in shapes if _is_equivariant(layer, shape, axis)), None)


@torch.no_grad()
def _is_equivariant(layer: nn.Module, shape: tuple[int, ...], axis: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    order = torch.randperm(x.shape[axis], generator=generator)
    order = order if not torch.equal(order, torch.arange(len(order))) else order.flip(0)
    probe, permuted = (_bare(layer).double() for _ in range(2))
    for one, other in zip([*probe.parameters()], [*permuted.parameters()], strict=True):
        one.data = torch.rand(one.shape, generator=generator, dtype=torch.float64) + 0.5
        other.data = one.data[..., order]
    with torch.random.fork_rng([]):
        try:
            y, z = probe(x.double()), permuted(x.double().index_select(axis, order))
        except Exception:  # whatever a user's own code may raise: it is no layer of this kind
            return False
    same = isinstance(y, Tensor) and isinstance(z, Tensor) and y.shape == x.shape == z.shape
    return same and torch.allclose(y.index_select(axis, order), z, equal_nan=True)


def _bare(layer: nn.Module) -> nn.Module:
    bare = copied(layer).cpu().eval()
    bare._forward_hooks.clear()
    bare._forward_pre_hooks.clear()
    return bare


# -- cuts --------------------------------------------------------------------------------------------------


def cut_affine(layer: Any, inputs: Tensor, outputs: Tensor, name: str) -> nn.Module:
    """A smaller layer of the same class that computes its affine map, with the kept channels' weights."""
    affine = foreign_map(layer)
    assert affine is not None
    small = copied(layer)
    kept = (inputs, outputs) if affine.inputs == 0 else (outputs, inputs)
    weight = layer.weight.data[kept[0].to(layer.weight.device)][:, kept[1].to(layer.weight.device)]
    small.weight = nn.Parameter(weight.clone(), layer.weight.requires_grad)
    if layer._parameters.get("bias") is not None:
        small.bias = nn.Parameter(layer.bias.data[outputs].clone(), layer.bias.requires_grad)
    before = affine.widths(layer.weight.shape)
    options = {(before[0], len(inputs)), (before[1], len(outputs))}
    fixed = [(key, value) for key, value in vars(layer).items() if type(value) is int and value in before]
    for values in product(*[[new for old, new in options if old == value] for _, value in fixed]):
        vars(small).update({key: value for (key, _), value in zip(fixed, values, strict=True)})
        if computes(small, affine):
            return small
    raise ValueError(f"layer {name!r} ({type(layer).__name__}) computes something else when its widths change")


def cut_channels(layer: nn.Module, kept: Tensor, name: str) -> nn.Module:
    """A smaller layer of the same class, with the kept channels' numbers; what it holds of its width follows."""
    width, count = next(p.shape[-1] for p in layer.parameters()), len(kept)
    small = copied(layer)
    follow: dict[Any, Any] = {width: count, (width,): (count,)} | {width**p: count**p for p in (0.5, -0.5)}
    for key, value in vars(layer).items():
        if isinstance(value, int | float | tuple) and not isinstance(value, bool) and value in follow:
            vars(small)[key] = type(value)(follow[value])
    for each, parameter in layer.named_parameters():
        setattr(small, each, nn.Parameter(parameter.data[..., kept].clone(), parameter.requires_grad))
    for each, buffer in layer.named_buffers():
        if buffer.dim():
            setattr(small, each, buffer[..., kept].clone())
    if not _is_like(layer, small, width, count):
        raise ValueError(
            f"layer {name!r} ({type(layer).__name__}) computes with its width of {width}, which cannot be narrowed; "
            "deep_ensemble keeps it whole"
        )
    return small


def _is_like(layer: nn.Module, small: nn.Module, width: int, count: int) -> bool:
    """Whether both give the same of channels that repeat, so that none of them counts its channels."""
    each = math.gcd(width, count)
    if channel_axis(layer) == 1:
        return _repeat_alike(layer, small, (2, each, 3, 3), 1)
    try:
        return _repeat_alike(layer, small, (2, 3, each), -1)
    except (RuntimeError, ValueError, IndexError):  # of a layer of feature maps
        return _repeat_alike(layer, small, (2, 3, 3, each), -1)


@torch.no_grad()
def _repeat_alike(layer: nn.Module, small: nn.Module, shape: tuple[int, ...], axis: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, values, answers = torch.randn(shape, generator=generator).double(), None, []
    for network in (layer, small):
        probe = _bare(network).double()
        repeats = next(p.shape[-1] for p in probe.parameters()) // shape[axis]
        values = values or [torch.rand(shape[axis], generator=generator).double() + 0.5 for _ in probe.parameters()]
        for parameter, value in zip(probe.parameters(), values, strict=True):
            parameter.data = value.repeat(repeats).view(parameter.shape)
        answers.append(probe(torch.cat([x] * repeats, axis)).narrow(axis, 0, shape[axis]))
    return torch.allclose(answers[0], answers[1], equal_nan=True)
