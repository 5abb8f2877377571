"""Keep the scale of a pretrained network's activations in a network cut from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.ensemble.member_layer import MemberLayer
from multitudes.networks.calls import Input
from multitudes.networks.trace import observing
from multitudes.surgery.affine import RECURRENT, axis_of, is_computed
from multitudes.surgery.narrowing.cuts import attention_maps, is_attention
from multitudes.surgery.observe import LayerInputs, run_replacing
from multitudes.surgery.select import is_frozen


def keep_scale(
    model: nn.Module,
    converted: nn.Module,
    example: Input,
    own_example: Input,
    kept: Mapping[str, Tensor | None],
) -> None:
    """Scale the weights of `converted`, in place, so that its layers' outputs are as large as the model's.

    `kept` maps each layer to the model's outputs that the converted one keeps (None: all). The size is the root mean
    square over an example, without biases. Layers are scaled in the order in which they run.
    """
    wanted: dict[str, list[Tensor]] = {}

    def measure(name: str, layer: nn.Module, read: LayerInputs, y: Tensor) -> Tensor:
        made = [*(made for _, made in _inner_maps(layer, read)), _without_bias(layer, y)]
        wanted.setdefault(name, [_size(each, axis_of(_last_map(layer)), kept[name]) for each in made])
        return y

    def adjust(name: str, layer: nn.Module, read: LayerInputs, y: Tensor) -> Tensor:
        if name not in wanted:
            return y
        *inner, last = wanted.pop(name)
        if is_attention(layer) and not is_frozen(layer):
            for (weight, made), size in zip(_inner_maps(layer, read), inner, strict=True):
                weight.mul_(_ratio(size, _size(made)))
            y = layer.forward(*read.inputs, *read.args, **read.kwargs)[0]
        if is_frozen(_last_map(layer)) and not hasattr(layer, "scale"):
            return y
        ratio = _ratio(last, _size(_without_bias(layer, y)))
        _scale(layer, ratio)
        return y + _without_bias(layer, y) * (ratio - 1)

    names = [name for name in kept if not isinstance(model.get_submodule(name), RECURRENT)]  # their outputs are bounded
    for network, x, see in ((model, example, measure), (converted, own_example, adjust)):
        with observing(network):
            run_replacing(network, x, names, see)


def _inner_maps(layer: nn.Module, read: LayerInputs) -> list[tuple[Tensor, Tensor]]:
    """Return attention's query, key and value matrices, each with its product with the input."""
    if not is_attention(layer):
        return []
    return [(weight, F.linear(x, weight)) for weight, x in zip(attention_maps(layer), read.inputs, strict=True)]


def _last_map(layer: Any) -> Any:
    """Return the layer whose weight makes the output; for attention, its last projection."""
    layer = layer.layer if isinstance(layer, MemberLayer) else layer
    return layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer


def _scale(layer: Any, ratio: Tensor) -> None:
    last = _last_map(layer)
    if is_computed(last) or is_frozen(last):
        layer.scale *= ratio.item()
    else:
        last.weight.data.mul_(ratio)


def _size(y: Tensor, axis: int = -1, outputs: Tensor | None = None) -> Tensor:
    y = y if outputs is None else y.index_select(axis, outputs.to(y.device))
    return y.float().square().mean().sqrt()


def _ratio(size: Tensor, now: Tensor) -> Tensor:
    return size / now if size > 0 and now > 0 else now.new_ones(())


def _without_bias(layer: nn.Module, y: Tensor) -> Tensor:
    bias = getattr(_last_map(layer), "bias", None)
    if bias is None:
        return y
    return y - bias.data.unflatten(0, (-1, *[1] * (-1 - axis_of(_last_map(layer)))))
