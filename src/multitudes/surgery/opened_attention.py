"""Torch's attention as linear layers, whose channels can be followed one by one, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.core.copying import copied
from multitudes.surgery.affine import is_changed, kind_of
from multitudes.surgery.layers import replace

__all__ = ["OpenAttention", "attention_layers", "close_attention", "open_attention"]

_MAPS = ("q", "k", "v")


class OpenAttention(nn.MultiheadAttention):
    """What an `nn.MultiheadAttention` computes, with a linear layer for each of its four maps.

    The number of heads follows from the width of the projections; `head_dim` is fixed.
    """

    def __init__(self, attention: Any) -> None:
        nn.Module.__init__(self)
        self.embed_dim, self.head_dim, self.num_heads = attention.embed_dim, attention.head_dim, attention.num_heads
        self.batch_first, self.dropout = attention.batch_first, attention.dropout
        self.add_zero_attn = attention.add_zero_attn
        self.in_proj_bias, self._qkv_same_embed_dim = None, False  # type: ignore[assignment]
        for name, weight in zip(_MAPS, _weights(attention), strict=True):
            setattr(self, f"{name}_proj", _linear(weight, _bias(attention, name)))
        self.out_proj = copied(attention.out_proj)
        self.bias_k, self.bias_v = _copied(attention.bias_k), _copied(attention.bias_v)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Torch's own signature; `is_causal` is a hint about `attn_mask`, which is given with it."""
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (self.get_submodule(f"{n}_proj")(x) for n, x in zip(_MAPS, (query, key, value), strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), -1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (torch.cat([x, x[:, :1] * 0], 1) for x in (k, v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        mask = _mask(q, k, key_padding_mask, attn_mask)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        y = self.out_proj(y.transpose(1, 2).flatten(-2))
        weights = _attention_weights(q, k, mask, average_attn_weights) if need_weights else None
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return (y if self.batch_first else y.transpose(0, 1)), weights


def _mask(q: Tensor, k: Tensor, padding: Tensor | None, given: Tensor | None) -> Tensor | None:
    """What is added to the scores `[B, H, T, S]`; None where nothing is hidden."""
    masks = []
    for mask, shape in ((padding, (len(k), 1, 1, -1)), (given, None)):
        if mask is None:
            continue
        hidden = (
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf) if mask.dtype is torch.bool else mask
        )
        if shape is None:
            shape = (1, 1, *mask.shape) if mask.dim() == 2 else (len(q), -1, *mask.shape[1:])
        hidden = hidden.to(q.dtype).view(shape)
        masks.append(F.pad(hidden, (0, k.shape[2] - hidden.shape[-1])))
    return sum(masks[1:], masks[0]) if masks else None


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, average: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return weights.mean(1) if average else weights


def _weights(attention: Any) -> tuple[nn.Parameter, ...]:
    if attention._qkv_same_embed_dim:
        parts: Any = attention.in_proj_weight.data.chunk(3)
        return tuple(nn.Parameter(part.clone(), attention.in_proj_weight.requires_grad) for part in parts)
    return tuple(_copied(getattr(attention, f"{name}_proj_weight")) for name in _MAPS)


def _bias(attention: Any, name: str) -> nn.Parameter | None:
    if attention.in_proj_bias is None:
        return None
    part = attention.in_proj_bias.data.chunk(3)[_MAPS.index(name)]
    return nn.Parameter(part.clone(), attention.in_proj_bias.requires_grad)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


def _copied(parameter: nn.Parameter | None) -> Any:
    """A parameter of its own with the same values."""
    return None if parameter is None else nn.Parameter(parameter.data.clone(), parameter.requires_grad)


# -- there and back ----------------------------------------------------------------------------------------


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Torch's own attention layers in a network, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if kind_of(module) is nn.MultiheadAttention and not is_changed(module)
    }


def open_attention(model: nn.Module) -> nn.Module:
    """A copy of a network with its attention layers opened; a network that has none is given back as it is."""
    layers = attention_layers(model)
    if not layers:
        return model
    opened = replace(model, {name: OpenAttention(layer) for name, layer in layers.items()})
    for module in opened.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # which would read the weights of attention
    return opened


def close_attention(opened: nn.Module, model: nn.Module) -> nn.Module:
    """The opened network, of whatever widths, with torch's own attention layers again."""
    layers = attention_layers(model)
    if not layers:
        return opened
    closed = replace(opened, {name: _closed(opened.get_submodule(name), layer, name) for name, layer in layers.items()})
    given: dict[str, Any] = dict(model.named_modules())
    for name, module in closed.named_modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = given[name].use_nested_tensor
        if isinstance(module, nn.TransformerEncoderLayer) and type(module.linear1) is type(module.linear2) is nn.Linear:
            module.activation_relu_or_gelu = given[name].activation_relu_or_gelu
    return closed


def _closed(opened: Any, attention: Any, name: str) -> nn.MultiheadAttention:
    width, heads = opened.q_proj.out_features, opened.q_proj.out_features // opened.head_dim
    ends = opened.q_proj.in_features, opened.out_proj.out_features
    if ends != (width, width):
        raise ValueError(
            f"layer {name!r} is a MultiheadAttention, which is as wide as its heads together, {heads} x "
            f"{opened.head_dim}, and would read {ends[0]} and give {ends[1]} channels; deep_ensemble keeps it whole"
        )
    closed = copied(attention)
    maps = [getattr(opened, f"{each}_proj") for each in _MAPS]
    closed.embed_dim, closed.num_heads = width, heads
    closed.kdim, closed.vdim = maps[1].in_features, maps[2].in_features
    trained = maps[0].weight.requires_grad
    if attention._qkv_same_embed_dim and closed.kdim == closed.vdim == width:
        closed.in_proj_weight = nn.Parameter(torch.cat([each.weight.data for each in maps]), trained)
    else:
        closed._qkv_same_embed_dim, closed.in_proj_weight = False, None
        for each, layer in zip(_MAPS, maps, strict=True):
            setattr(closed, f"{each}_proj_weight", nn.Parameter(layer.weight.data, layer.weight.requires_grad))
    if attention.in_proj_bias is not None:
        biases = torch.cat([each.bias.data for each in maps])
        closed.in_proj_bias = nn.Parameter(biases, attention.in_proj_bias.requires_grad)
    out: Any = closed.out_proj
    out.in_features = out.out_features = width
    out.weight, out.bias = opened.out_proj.weight, opened.out_proj.bias
    closed.bias_k, closed.bias_v = opened.bias_k, opened.bias_v
    return closed
