"""Keep the scale of a pretrained network's activations in a network cut from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.core.calling import Input, call, plain_attention
from multitudes.core.member_layer import MemberLayer
from multitudes.core.trace import hooked, observing
from multitudes.surgery.affine import RECURRENT, axis_of, is_computed
from multitudes.surgery.cuts import attention_maps, is_attention
from multitudes.surgery.layers import is_frozen
from multitudes.surgery.observe import read_by


def keep_scale(
    model: nn.Module,
    converted: nn.Module,
    example: Input,
    own_example: Input,
    kept: Mapping[str, Tensor | None],
) -> None:
    """Scale the weights of `converted`, in place, so that its layers' outputs are as large as the model's.

    `kept` gives the layers, by name, and which of the model's outputs the converted one has (None: all). The size
    is the root mean square over an example, biases aside. Layers are set in the order in which they run, each
    behind those that are set already.
    """
    sizes: dict[tuple[str, int], Tensor] = {}

    def measure(name: str, layer: nn.Module, y: Tensor) -> None:
        sizes.setdefault((name, 0), _size(layer, y, kept[name]))

    def measure_maps(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        for place, (_, y) in enumerate(_mapped(layer, args, kwargs), 1):
            sizes.setdefault((name, place), _root(y if kept[name] is None else y[..., kept[name]]))

    def adjust(name: str, layer: nn.Module, y: Tensor) -> Tensor | None:
        size = _size(layer, y)
        if (name, 0) not in sizes or not (size > 0 and sizes[name, 0] > 0):
            return None
        if is_frozen(_inner(layer)) and not hasattr(layer, "scale"):
            return None
        factor = sizes.pop((name, 0)) / size
        _scale(layer, factor)
        return y + _without_bias(layer, y) * (factor - 1)

    def adjust_maps(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        for place, (weight, y) in enumerate(_mapped(layer, args, kwargs), 1):
            if _root(y) > 0 and sizes.get((name, place), 0) > 0 and not is_frozen(layer):
                weight.mul_(sizes.pop((name, place)) / _root(y))

    names = [name for name in kept if not isinstance(model.get_submodule(name), RECURRENT)]  # bounded whatever it sees
    _run(model, example, names, measure, measure_maps)
    _run(converted, own_example, names, adjust, adjust_maps)


def _run(model: nn.Module, example: Input, names: list[str], see: Any, begin: Any) -> None:
    def seen(name: str, layer: nn.Module, _: Any, y: Any) -> Any:
        if isinstance(y, Tensor):
            return see(name, layer, y)
        changed = see(name, layer, y[0])  # of attention
        return None if changed is None else (changed, *y[1:])

    with observing(model), plain_attention(), hooked(model, names, seen, begin):
        call(model, example)


def _mapped(layer: nn.Module, args: Any, kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    """The maps of attention to queries, keys and values, and what they make of its inputs, biases aside."""
    if not is_attention(layer):
        return []
    inputs = read_by(layer, args, kwargs).inputs
    return [(weight, F.linear(x, weight)) for weight, x in zip(attention_maps(layer), inputs, strict=True)]


def _inner(layer: Any) -> Any:
    """The layer that gives the output: of attention its last map."""
    layer = layer.layer if isinstance(layer, MemberLayer) else layer
    return layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer


def _scale(layer: Any, factor: Tensor) -> None:
    if is_computed(_inner(layer)) or (is_frozen(_inner(layer)) and hasattr(layer, "scale")):
        layer.scale *= factor.item()
    else:
        _inner(layer).weight.data.mul_(factor)


def _size(layer: nn.Module, y: Tensor, outputs: Tensor | None = None) -> Tensor:
    y = _without_bias(layer, y)
    if outputs is not None:
        y = y.index_select(axis_of(_inner(layer)), outputs.to(y.device))
    return _root(y)


def _root(y: Tensor) -> Tensor:
    return y.float().square().mean().sqrt()


def _without_bias(layer: nn.Module, y: Tensor) -> Tensor:
    bias = getattr(_inner(layer), "bias", None)
    if bias is None:
        return y
    shape = [1] * y.dim()
    shape[axis_of(_inner(layer))] = -1
    return y - bias.data.view(shape)
