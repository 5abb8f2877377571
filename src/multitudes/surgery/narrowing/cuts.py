"""Cuts: smaller layers of the same class, with the kept channels' weights.

Torch's own classes are built in. Other classes are tested by running them: one with exactly a matrix and a vector may
compute an affine map, and one with a number per channel may treat channels independently, as norms do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from multitudes.networks.copies import copied
from multitudes.surgery.affine import AffineMap, computes, is_changed, is_computed, kind_of, maps_of
from multitudes.surgery.select import CONVOLUTIONS, PRODUCTS, TRANSPOSED

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
LAST_NORMS = (nn.LayerNorm, nn.RMSNorm)
FOLLOWING: tuple[type[nn.Module], ...] = (*BATCH_NORMS, *INSTANCE_NORMS, nn.GroupNorm, *LAST_NORMS, nn.PReLU)
"""Layers whose outputs are their inputs' channels."""

_NUMBERS = ("num_features", "num_channels", "num_parameters")
_INPUTS = ("in_features", "in_channels", "num_embeddings", "embed_dim", *_NUMBERS)
_OUTPUTS = ("out_features", "out_channels", "embedding_dim", "embed_dim")
"""The names of widths in torch's layers."""


class CannotNarrow(ValueError):
    """Raised if a network cannot be narrowed, with the reason and the two ways out."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}; use packed(build, ...), where build(width) constructs the network at that fraction of its "
            "width, or deep_ensemble, which keeps the full width"
        )


def scaled(value: int, factor: float) -> int:
    """Return a width or a number of heads at a fraction of its size, rounded up."""
    return math.ceil(round(value * factor, 9))


@dataclass(frozen=True)
class Form:
    """The numbers of channels that a layer reads and makes, and their axis; 0 outputs if unknown."""

    inputs: int = 0
    outputs: int = 0
    axis: int = -1
    follows: bool = False
    """True if its outputs are its inputs' channels."""
    affine: AffineMap | None = None
    """The map that a layer of another class computes, such as Hugging Face's `Conv1D`."""
    dims: int = 0
    """The rank of the inputs of a layer of another class that follows channels."""

    @property
    def makes(self) -> bool:
        """True if a layer makes new channels and can be cut."""
        return self.outputs > 0 and not self.follows


@dataclass(frozen=True, eq=False)
class Cut:
    """The indices of a layer's kept inputs and outputs, and its gamma."""

    inputs: Tensor
    outputs: Tensor
    gamma: int = 1
    note: str = ""
    others: tuple[Tensor, ...] = ()
    """The kept inputs of attention's keys and values."""

    def __eq__(self, other: object) -> bool:
        pairs = zip(self.indices, other.indices, strict=True) if isinstance(other, Cut) else ()
        return isinstance(other, Cut) and all(torch.equal(one, two) for one, two in pairs)

    @property
    def indices(self) -> tuple[Tensor, ...]:
        """The kept indices of all inputs, and of the outputs."""
        return (self.inputs, *self.others, self.outputs)


class GroupedLinear(nn.Module):
    """A linear layer in `groups`, `[..., I] -> [..., O]`, each on its own part of the inputs."""

    def __init__(self, in_features: int, out_features: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.groups = in_features, out_features, groups
        self.weight = nn.Parameter(torch.empty(out_features, in_features // groups))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])  # as nn.Linear, with the inputs of one output
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1)).unsqueeze(-2)
        y = (parts @ self.weight.unflatten(0, (self.groups, -1)).mT).squeeze(-2).flatten(-2)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, groups={self.groups}"


def form_of(layer: Any) -> Form:
    """Return the channels of a layer, by class for torch's own and by running others."""
    if _inherits(layer, LAST_NORMS):
        width = int(layer.normalized_shape[0])
        return Form(width, width, -len(layer.normalized_shape), follows=True)
    if _inherits(layer, FOLLOWING):
        return Form(_width(layer, _INPUTS), _width(layer, _INPUTS), 1, follows=True)
    kind = kind_of(layer)
    if isinstance(layer, nn.Embedding) or is_attention(layer) or (kind in PRODUCTS and not is_computed(layer)):
        axis = 1 if kind in (*CONVOLUTIONS, *TRANSPOSED) else -1
        return Form(_width(layer, _INPUTS), _width(layer, _OUTPUTS), axis)
    if layer not in _others:
        _others[layer] = _form_of_other(layer)
    return _others[layer]


def _width(layer: Any, names: tuple[str, ...]) -> int:
    return next(int(getattr(layer, name)) for name in names if hasattr(layer, name))


def _inherits(layer: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a layer runs the `forward` of one of these classes."""
    return any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in kinds)


def is_attention(layer: nn.Module) -> bool:
    """Return whether a layer is torch's own attention, with its own weights."""
    return kind_of(layer) is nn.MultiheadAttention and not is_changed(layer)


def attention_maps(layer: Any) -> Sequence[Tensor]:
    """Return the matrices `[E, I]` of attention's queries, keys and values."""
    if layer._qkv_same_embed_dim:
        return tuple(layer.in_proj_weight.data.chunk(3))
    return [getattr(layer, f"{each}_proj_weight").data for each in "qkv"]


def is_depthwise(layer: Any) -> bool:
    """Return whether each output channel depends on one input channel alone, so that outputs follow inputs."""
    return isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) and layer.groups == layer.in_channels > 1


def cut_layer(layer: Any, cut: Cut, name: str) -> nn.Module:
    """Return a smaller layer of the same class, with the kept channels' weights."""
    form, small = form_of(layer), copied(layer)
    if is_attention(layer):
        return _cut_attention(layer, small, cut, name)
    if form.affine is not None:
        return _cut_map(layer, small, form.affine, cut, name)
    if form.follows:
        return _cut_following(layer, small, cut.inputs, name)
    if isinstance(layer, nn.Embedding):
        small.embedding_dim = len(cut.outputs)
        small.weight = nn.Parameter(layer.weight.data[:, cut.outputs].clone())
        return small
    return _cut_product(layer, small, cut, name)


def _cut_product(layer: Any, small: Any, cut: Cut, name: str) -> nn.Module:
    inputs, outputs = len(cut.inputs), len(cut.outputs)
    linear = isinstance(layer, nn.Linear)
    groups = (inputs if is_depthwise(layer) else getattr(layer, "groups", 1)) * cut.gamma
    if inputs % groups or outputs % groups:
        raise CannotNarrow(f"layer {name!r} has {groups} groups, which do not divide its narrowed width, {inputs}")
    if linear:
        if cut.gamma > 1:
            small = GroupedLinear(inputs, outputs, groups, layer.bias is not None).to(layer.weight)
        small.in_features, small.out_features = inputs, outputs
    else:
        small.in_channels, small.out_channels, small.groups = inputs, outputs, groups
    small.weight = nn.Parameter(_cut_weight(layer, cut, groups, name))
    if layer.bias is not None:
        small.bias = nn.Parameter(layer.bias.data[cut.outputs].clone())
    return small


def _cut_weight(layer: Any, cut: Cut, groups: int, name: str) -> Tensor:
    """Cut a layer's weight `[O, I/G, ...]` to `[O', I'/groups, ...]`."""
    weight, own = layer.weight.data, getattr(layer, "groups", 1)
    transposed = isinstance(layer, TRANSPOSED)
    if transposed:
        weight = weight.unflatten(0, (own, -1)).transpose(1, 2).flatten(0, 1)  # [O, I/G, ...]
    each = weight.shape[1]
    kept = cut.inputs.view(groups, -1).repeat_interleave(len(cut.outputs) // groups, 0)  # [O', I'/groups]
    local = kept - (cut.outputs * own // weight.shape[0] * each).unsqueeze(1)
    if int(local.min()) < 0 or int(local.max()) >= each:
        raise CannotNarrow(f"layer {name!r} has {own} groups of {each} inputs, which do not fit its narrowed width")
    small = weight[cut.outputs.unsqueeze(1), local]
    if transposed:
        small = small.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return small.contiguous()


def _cut_attention(layer: Any, small: Any, cut: Cut, name: str) -> nn.Module:
    """Return attention of fewer heads; each projection keeps the channels of these heads."""
    kept, width, inputs = cut.outputs, len(cut.outputs), (cut.inputs, *cut.others)
    if len(cut.inputs) != width:
        raise CannotNarrow(
            f"layer {name!r} is a MultiheadAttention of width {width // layer.head_dim} x {layer.head_dim}, heads x "
            f"head size, and would read {len(cut.inputs)} channels"
        )
    maps = [weight[kept][:, read] for weight, read in zip(attention_maps(layer), inputs, strict=True)]
    small.embed_dim, small.num_heads = width, width // layer.head_dim
    small.kdim, small.vdim = map(len, cut.others)
    if layer._qkv_same_embed_dim and small.kdim == small.vdim == width:
        small.in_proj_weight = nn.Parameter(torch.cat(maps))
    else:
        small._qkv_same_embed_dim, small.in_proj_weight = False, None
        for each, weight in zip("qkv", maps, strict=True):
            setattr(small, f"{each}_proj_weight", nn.Parameter(weight))
    if layer.in_proj_bias is not None:
        small.in_proj_bias = nn.Parameter(torch.cat([bias[kept] for bias in layer.in_proj_bias.data.chunk(3)]))
    if layer.bias_k is not None:
        small.bias_k, small.bias_v = (nn.Parameter(each.data[..., kept]) for each in (layer.bias_k, layer.bias_v))
    out = small.out_proj
    out.in_features = out.out_features = width
    out.weight = nn.Parameter(layer.out_proj.weight.data[kept][:, kept])
    if out.bias is not None:
        out.bias = nn.Parameter(out.bias.data[kept])
    return small


def norm_groups(layer: nn.GroupNorm, width: int) -> int:
    """Return the largest number of groups, up to the layer's own, that divides a width."""
    return next(g for g in range(layer.num_groups, 0, -1) if width % g == 0)


def _cut_following(layer: Any, small: Any, kept: Tensor, name: str) -> nn.Module:
    """Return a smaller norm, or another smaller layer with numbers per channel."""
    form, count = form_of(layer), len(kept)
    if form.inputs == 1:  # one number for all channels
        return small
    axis = -1 if form.dims else 0
    for own, parameter in layer.named_parameters():
        setattr(small, own, nn.Parameter(parameter.data.index_select(axis, kept.to(parameter.device))))
    for own, buffer in layer.named_buffers():
        if buffer.dim():
            setattr(small, own, buffer.index_select(axis, kept.to(buffer.device)))
    if form.dims:
        return _follow_width(layer, small, count, name)
    if isinstance(layer, LAST_NORMS):
        small.normalized_shape = (count, *layer.normalized_shape[1:])
    for number in _NUMBERS:
        if hasattr(layer, number):
            setattr(small, number, count)
    if isinstance(layer, nn.GroupNorm):
        small.num_groups = norm_groups(layer, count)
    return small


# -- layers of other classes ---------------------------------------------------------------------------------

_others: WeakKeyDictionary[nn.Module, Form] = WeakKeyDictionary()


def _form_of_other(layer: Any) -> Form:
    """Test whether a layer of another class computes an affine map, or follows its channels, as norms do.

    A layer that follows has one number per channel in each parameter; permuting channels and numbers permutes its
    output.
    """
    parameters = [p for p in layer._parameters.values() if p is not None]
    if not parameters or kind_of(layer) is not None:
        return Form()
    if len(maps := maps_of(layer)) == 1:
        return Form(*maps[0].widths(layer.weight.shape), affine=maps[0])
    tensors = [*parameters, *(b for b in layer._buffers.values() if b is not None and b.dim())]
    sizes = {size for t in tensors for size in (t.numel(), t.shape[-1] if t.dim() else 1)}
    foreign = not type(layer).forward.__module__.startswith(("torch.", "multitudes.")) and "forward" not in vars(layer)
    if len(sizes) > 1 or (width := min(sizes)) < 2 or not foreign or layer._modules:
        return Form()
    forms = [Form(width, width, axis, follows=True, dims=dims) for axis, dims in ((-1, 3), (-1, 4), (1, 4))]
    return next((form for form in forms if _permutes(layer, form)), Form())


@torch.no_grad()
def _permutes(layer: nn.Module, form: Form) -> bool:
    x, values = _probe(layer, form, form.inputs)
    order = torch.randperm(form.inputs, generator=torch.Generator().manual_seed(0))
    order = order.flip(0) if torch.equal(order, torch.arange(form.inputs)) else order
    try:
        y = _answer(layer, values, x)
        z = _answer(layer, [value[order] for value in values], x.index_select(form.axis, order))
    except Exception:  # the user's code may raise anything
        return False
    same = isinstance(y, Tensor) and isinstance(z, Tensor) and y.shape == x.shape == z.shape
    return same and torch.allclose(y.index_select(form.axis, order), z, equal_nan=True)


def _probe(layer: nn.Module, form: Form, width: int) -> tuple[Tensor, list[Tensor]]:
    """Return an input of this width, and as many numbers for each of a layer's parameters."""
    generator, shape = torch.Generator().manual_seed(0), [2, 3, 3, 3][: form.dims]
    shape[form.axis] = width
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, [torch.rand(width, generator=generator, dtype=torch.float64) + 0.5 for _ in layer.parameters()]


def _answer(layer: nn.Module, values: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the output of a bare copy of a layer whose parameters have other values."""
    bare = copied(layer).cpu().double().eval()
    bare._forward_hooks.clear()
    bare._forward_pre_hooks.clear()
    for parameter, value in zip(bare.parameters(), values, strict=True):
        parameter.data = value.view(parameter.shape)
    with torch.random.fork_rng([]):
        y: Tensor = bare(x)
    return y


def _cut_map(layer: Any, small: Any, affine: AffineMap, cut: Cut, name: str) -> nn.Module:
    """Return a smaller layer with its affine map; adapt integer attributes that are equal to its widths."""
    weight = layer.weight.data
    for axis, kept in ((affine.inputs, cut.inputs), (affine.outputs, cut.outputs)):
        weight = weight.index_select(axis, kept.to(weight.device))
    small.weight = nn.Parameter(weight.clone())
    if layer._parameters.get("bias") is not None:
        small.bias = nn.Parameter(layer.bias.data[cut.outputs].clone())
    follow = dict(zip(affine.widths(layer.weight.shape), (len(cut.inputs), len(cut.outputs)), strict=True))
    held = {key: value for key, value in vars(layer).items() if type(value) is int}
    vars(small).update({key: follow.get(value, value) for key, value in held.items()})
    if not computes(small, affine):
        raise CannotNarrow(f"layer {name!r} ({type(layer).__name__}) is no affine map after its widths change")
    return small


@torch.no_grad()
def _follow_width(layer: nn.Module, small: nn.Module, count: int, name: str) -> nn.Module:
    """Set the attributes of a norm that hold its width or a root of it.

    Both layers must return the same for repeated channels, so that neither depends on their number.
    """
    form, answers = form_of(layer), []
    width = form.inputs
    follow: dict[Any, Any] = {width: count, (width,): (count,)} | {width**p: count**p for p in (0.5, -0.5)}
    for key, value in vars(layer).items():
        if isinstance(value, int | float | tuple) and not isinstance(value, bool) and value in follow:
            vars(small)[key] = type(value)(follow[value])
    x, values = _probe(layer, form, shared := math.gcd(width, count))
    for each, times in ((layer, width // shared), (small, count // shared)):
        y = _answer(each, [value.repeat(times) for value in values], torch.cat([x] * times, form.axis))
        answers.append(y.narrow(form.axis, 0, shared))
    if not torch.allclose(answers[0], answers[1], equal_nan=True):
        raise CannotNarrow(
            f"layer {name!r} ({type(layer).__name__}) computes with its width, {width}, and cannot be narrowed"
        )
    return small
