"""Cuts: smaller layers of the same class, with the kept channels' weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.copying import copied
from multitudes.surgery.affine import is_computed, kind_of
from multitudes.surgery.foreign import channel_axis, cut_affine, cut_channels, foreign_map
from multitudes.surgery.layers import CONVOLUTIONS, PRODUCTS, TRANSPOSED

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
LAST_NORMS = (nn.LayerNorm, nn.RMSNorm)
FOLLOWING: tuple[type[nn.Module], ...] = (*BATCH_NORMS, *INSTANCE_NORMS, nn.GroupNorm, *LAST_NORMS, nn.PReLU)
"""Layers whose outputs are their inputs' channels."""


@dataclass(frozen=True)
class Cut:
    """What is left of one layer: the indices of its kept inputs and outputs, and its gamma."""

    inputs: Tensor
    outputs: Tensor
    gamma: int = 1
    note: str = ""


class GroupedLinear(nn.Module):
    """A linear layer of `groups` groups, `[..., I] -> [..., O]`, each of which sees its own share of the inputs."""

    def __init__(self, in_features: int, out_features: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.groups = in_features, out_features, groups
        self.weight = nn.Parameter(torch.empty(out_features, in_features // groups))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])  # as nn.Linear's, for the inputs that an output sees
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1)).unsqueeze(-2)
        y = (parts @ self.weight.unflatten(0, (self.groups, -1)).mT).squeeze(-2).flatten(-2)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, groups={self.groups}"


def width_of(layer: Any) -> int:
    """The number of channels that a layer makes."""
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim
    if (affine := foreign_map(layer)) is not None:
        return affine.widths(layer.weight.shape)[1]
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def makes(layer: nn.Module) -> bool:
    """Whether a layer makes channels of its own, in a way that is known and can be cut."""
    kind = kind_of(layer)
    if kind in PRODUCTS:
        return not is_computed(layer)
    return isinstance(layer, nn.Embedding) or foreign_map(layer) is not None


def follows(layer: nn.Module) -> bool:
    """Whether a layer's outputs are its inputs' channels."""
    return _inherits(layer, FOLLOWING) or channel_axis(layer) is not None


def _inherits(layer: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a layer runs the `forward` of one of these classes."""
    return any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in kinds)


def input_axis(layer: nn.Module) -> int:
    """The axis of channels in what a layer sees."""
    if (axis := channel_axis(layer)) is not None:
        return axis
    if isinstance(layer, LAST_NORMS):
        return -len(layer.normalized_shape)
    return -1 if isinstance(layer, nn.Linear) or foreign_map(layer) is not None else 1


def output_axis(layer: nn.Module) -> int:
    """The axis of channels in what a layer makes."""
    return -1 if isinstance(layer, nn.Linear | nn.Embedding) or foreign_map(layer) is not None else 1


def inputs_of(layer: Any) -> int:
    """The number of channels that a layer reads."""
    if channel_axis(layer) is not None:
        return next(parameter.shape[-1] for parameter in layer.parameters())
    if isinstance(layer, LAST_NORMS):
        return int(layer.normalized_shape[0])
    if (affine := foreign_map(layer)) is not None:
        return affine.widths(layer.weight.shape)[0]
    names = ("in_features", "in_channels", "num_features", "num_channels", "num_embeddings", "num_parameters")
    return next(int(getattr(layer, name)) for name in names if hasattr(layer, name))


def is_depthwise(layer: Any) -> bool:
    """Whether each output channel sees one input channel alone, so that its outputs are its inputs'."""
    return isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) and layer.groups == layer.in_channels > 1


def cut_layer(layer: Any, cut: Cut, name: str) -> nn.Module:
    """A smaller layer of the same class, with the kept channels' weights."""
    inputs, outputs = len(cut.inputs), len(cut.outputs)
    if channel_axis(layer) is not None:
        return cut_channels(layer, cut.inputs, name)
    if foreign_map(layer) is not None:
        return cut_affine(layer, cut.inputs, cut.outputs, name)
    small = copied(layer)
    if isinstance(layer, LAST_NORMS):
        small.normalized_shape = (inputs, *layer.normalized_shape[1:])
        return _indexed(small, cut.inputs)
    if isinstance(layer, nn.PReLU):
        if layer.num_parameters == 1:
            return small
        small.num_parameters = inputs
        return _indexed(small, cut.inputs)
    if isinstance(layer, nn.GroupNorm):
        small.num_channels, small.num_groups = inputs, norm_groups(layer, inputs)
        return _indexed(small, cut.inputs)
    if follows(layer):
        small.num_features = inputs
        return _indexed(small, cut.inputs)
    if isinstance(layer, nn.Embedding):
        small.embedding_dim = outputs
        small.weight = nn.Parameter(layer.weight.data[:, cut.outputs].clone(), layer.weight.requires_grad)
        return small
    return _cut_product(layer, small, cut, name)


def _cut_product(layer: Any, small: Any, cut: Cut, name: str) -> nn.Module:
    inputs, outputs = len(cut.inputs), len(cut.outputs)
    linear = isinstance(layer, nn.Linear)
    groups = (inputs if is_depthwise(layer) else getattr(layer, "groups", 1)) * cut.gamma
    if inputs % groups or outputs % groups:
        raise ValueError(f"layer {name!r} has {groups} groups, which do not divide its narrowed width of {inputs}")
    if linear:
        if cut.gamma > 1:
            small = GroupedLinear(inputs, outputs, groups, layer.bias is not None).to(layer.weight)
        small.in_features, small.out_features = inputs, outputs
    else:
        small.in_channels, small.out_channels, small.groups = inputs, outputs, groups
    small.weight = nn.Parameter(_cut_weight(layer, cut, groups, name), layer.weight.requires_grad)
    if layer.bias is not None:
        small.bias = nn.Parameter(layer.bias.data[cut.outputs].clone(), layer.bias.requires_grad)
    return small


def _cut_weight(layer: Any, cut: Cut, groups: int, name: str) -> Tensor:
    """`[O', I'/groups, ...]` of a layer's `[O, I/G, ...]`."""
    weight, own = layer.weight.data, getattr(layer, "groups", 1)
    transposed = isinstance(layer, TRANSPOSED)
    if transposed:
        weight = weight.unflatten(0, (own, -1)).transpose(1, 2).flatten(0, 1)  # [O, I/G, ...]
    each = weight.shape[1]
    kept = cut.inputs.view(groups, -1).repeat_interleave(len(cut.outputs) // groups, 0)  # [O', I'/groups]
    local = kept - (cut.outputs * own // weight.shape[0] * each).unsqueeze(1)
    if int(local.min()) < 0 or int(local.max()) >= each:
        raise ValueError(f"layer {name!r} has {own} groups of {each} inputs, which its narrowed width does not fit")
    small = weight[cut.outputs.unsqueeze(1), local]
    if transposed:
        small = small.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return small.contiguous()


def norm_groups(layer: nn.GroupNorm, width: int) -> int:
    """The most groups, up to the layer's own, that divide a width."""
    return next(g for g in range(layer.num_groups, 0, -1) if width % g == 0)


def _indexed(layer: nn.Module, index: Tensor) -> nn.Module:
    """Keep the indexed entries of all of a layer's per-channel parameters and buffers."""
    for name, parameter in layer.named_parameters():
        setattr(layer, name, nn.Parameter(parameter.data[index].clone(), parameter.requires_grad))
    for name, buffer in layer.named_buffers():
        if buffer.dim():
            setattr(layer, name, buffer[index].clone())
    return layer
