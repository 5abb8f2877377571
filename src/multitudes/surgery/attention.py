"""Attention, observed: which layers make its queries, keys and values, and which of its heads are kept.

Whole heads are kept, and their size stays, so that rotary and relative positions keep their meaning. Where a group of
query heads shares a head of keys and values, each head that is kept of these keeps as many of its query heads. Where
one layer makes queries, keys and values, their order is observed by a block of its channels that is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.core.calling import Input, call, tensors_in
from multitudes.core.copying import copied
from multitudes.core.trace import Call, Trace, hooked, observing, recording
from multitudes.surgery.affine import is_changed, kind_of
from multitudes.surgery.cuts import CannotNarrow, output_axis, width_of
from multitudes.surgery.layers import replace as replace_layers
from multitudes.surgery.layers import within
from multitudes.surgery.observe import followed_attention

__all__ = [
    "Attention",
    "HeadChoice",
    "Pattern",
    "attention_layers",
    "choose",
    "close_attention",
    "observe_attention",
    "open_attention",
]

Pattern = tuple[int, int]
"""How channels are taken apart: into how many equal parts, and in blocks of how many neighbors."""

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
_PARTS = {"chunk", "split", "tensor_split", "glu", "__getitem__"}
_GROUPS = {"view", "reshape", "unflatten", "channel_shuffle", "pixel_shuffle"}


@dataclass(frozen=True)
class Attention:
    """One attention: the module that computes it, the layers that ran in it before, and its heads."""

    place: str
    sources: tuple[str, ...]
    heads: int
    shared: int
    """How many heads of keys and values there are; each is shared by a group of query heads, or has one of its own."""
    size: int
    heads_first: bool = False
    """Whether one layer makes queries, keys and values head by head, not one after the other."""

    @property
    def width(self) -> int:
        """The channels of all its query heads."""
        return self.heads * self.size


class _Observed(TorchFunctionMode):
    """Records each attention of a run: torch's own function, or a softmax of a product."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.run = Trace()
        self.batch = batch
        self.found: list[Attention] = []
        self.lost: list[tuple[bool, bool]] = []  # whether the first head, and whether any head, has NaN scores
        self.patterns: dict[int, Pattern] = {}  # how axes are taken apart, by their size
        self.ran: list[tuple[str, int, list[Call]]] = []  # layers that made channels, how many, and inside which calls
        self.sizes: dict[tuple[int, ...], int] = {}  # of products, by their shape: the last axis of what they multiply

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunction():
            tensors = tensors_in((*args, *(kwargs or {}).values()))
            if function is F.scaled_dot_product_attention:
                self._note(tensors[:2], tensors[0].shape[-1], tensors[1].shape)
            elif name in _PRODUCTS and isinstance(result, Tensor):
                self.sizes[tuple(result.shape)] = tensors[name == "baddbmm"].shape[-1]
            elif name == "softmax" and tensors[0].dim() > 2 and tuple(tensors[0].shape) in self.sizes:
                self._note(tensors[:1], self.sizes[tuple(tensors[0].shape)])
            elif name in _PARTS | _GROUPS:
                self._take_apart(name, tensors[0], result, args)
        return result

    def _note(self, scores: list[Tensor], size: int, keys: Sequence[int] | None = None) -> None:
        """Record an attention by `[..., H, T, _]`, its scores or its queries and keys, and the size of its heads."""
        shape = scores[0].shape
        for running in reversed(self.run.running):
            before = [(name, width) for name, width, inside in self.ran if running in inside]
            made = [width // size for _, width in before if width % size == 0]
            if not made:
                continue
            heads = shape[-3] if len(shape) > 3 else _merged_heads(shape, made, self.batch)
            shared = keys[-3] if keys is not None and len(keys) > 3 else heads
            shared = shared if shared < heads else _shared_heads(made[-3:], heads)
            self.found.append(Attention(running.name, tuple(n for n, _ in before), heads, shared, size))
            first = [x.movedim(-3, 0)[0] if x.dim() > 3 else x[:1] for x in scores]
            self.lost.append((_has_nan(first), _has_nan(scores)))
            return

    def _take_apart(self, name: str, x: Tensor, result: Any, args: Sequence[Any]) -> None:
        """Record that an axis is taken apart into equal parts, or in blocks."""
        part = result[0] if isinstance(result, (tuple, list)) else result
        if name == "pixel_shuffle":
            self._add(x.shape[-3], 1, x.shape[-3] // part.shape[-3])
        elif name == "channel_shuffle":
            self._add(x.shape[1], int(args[1]), 1)
        elif (
            name in _GROUPS
        ):  # of feature maps: `[B, C, H, W] -> [B, groups, C / groups, H, W]`, or `[B, C / 4, 2, 2, ...]`
            channels = part.shape[1 : part.dim() - x.dim() + 2]
            if x.dim() > 3 and (*x.shape[:1], *channels, *x.shape[2:]) == tuple(part.shape) and len(channels) in (2, 3):
                whole = len(channels) == 2
                self._add(x.shape[1], channels[0] if whole else 1, 1 if whole else math.prod(channels[1:]))
        elif part.dim() == x.dim():
            for size, own in zip(x.shape, part.shape, strict=True):
                parts = size // own if 1 < own < size and size % own == 0 else 1
                if parts > 1 and (name != "__getitem__" or parts < 5):
                    self._add(size, parts, 1)

    def _add(self, size: int, parts: int, block: int) -> None:
        before = self.patterns.get(size, (1, 1))
        both = math.lcm(before[0], parts), math.lcm(before[1], block)
        self.patterns[size] = both if size % math.prod(both) == 0 else before


def _has_nan(tensors: Sequence[Tensor]) -> bool:
    return any(bool(x.isnan().any()) for x in tensors)


def _merged_heads(shape: Sequence[int], made: list[int], batch: int) -> int:
    """The number of heads that lie in the batch axis, `[B * H, T, _]`."""
    by_batch = shape[0] // batch if len(shape) == 3 and shape[0] % batch == 0 else 1
    if any(by_batch * parts in made for parts in (1, 2, 3)):
        return by_batch
    return next((each for each in reversed(made) if len(shape) == 3 and shape[0] % each == 0), 1)


def _shared_heads(made: list[int], heads: int) -> int:
    """Return how many heads of keys and values the last layers have made; as many as queries by default."""
    for shared in range(heads, 0, -1):
        ways = made[-1:] == [heads + 2 * shared], made == [heads, shared, shared], made[-2:] == [heads, 2 * shared]
        if heads % shared == 0 and any(ways):
            return shared
    return heads


def observe_attention(
    model: nn.Module, example: Input, names: Mapping[str, nn.Module]
) -> tuple[list[Attention], dict[int, Pattern]]:
    """The attentions of a run, in order, and how axes are taken apart; `names` are the layers that make channels.

    A second run observes the order in which one layer makes heads: a block of its channels is NaN which belongs to the
    keys of the first head if they come head by head, and to other queries, or other keys, if they do not.
    """
    first = _traced(model, example, names, {})
    widths = {name: width_of(layer) for name, layer in names.items()}
    fused = [_fused_layer(attention, widths) for attention in first.found]
    blocks: dict[str, tuple[int, int]] = {}
    for attention, (name, of_queries) in zip(first.found, fused, strict=True):
        if name:
            blocks[name] = (attention.heads // attention.shared if of_queries else 1), attention.size
    lost = _traced(model, example, names, blocks).lost if blocks else first.lost
    return [
        replace(attention, heads_first=in_first if of_queries else bool(name) and not in_any)
        for attention, (name, of_queries), (in_first, in_any) in zip(first.found, fused, lost, strict=True)
    ], first.patterns


def _fused_layer(attention: Attention, widths: Mapping[str, int]) -> tuple[str, bool]:
    """The layer that makes keys and values, if one does, and whether it makes queries too."""
    heads, shared, size = attention.heads, attention.shared, attention.size
    for name in attention.sources:
        if widths[name] == (heads + 2 * shared) * size:
            return name, True
        if widths[name] == 2 * shared * size and 2 * shared != heads:
            return name, False
    return "", False


def _traced(
    model: nn.Module, example: Input, names: Mapping[str, nn.Module], blocks: Mapping[str, tuple[int, int]]
) -> _Observed:
    """Trace a run; with `blocks`, of NaN in one block of some layers' channels, by index and size, and else zeros."""
    trace = _Observed(tensors_in(example)[0].shape[0])

    def see(name: str, layer: nn.Module, _: Any, y: Tensor) -> Tensor | None:
        trace.ran.append((name, width_of(layer), list(trace.run.running)))
        if not blocks:
            return None
        with torch._C.DisableTorchFunction():
            y = torch.zeros_like(y)
            index, size = blocks.get(name, (0, 0))
            y.narrow(output_axis(layer), index * size, size).fill_(torch.nan)
        return y

    with observing(model), followed_attention(), hooked(model, names, see), recording(model, trace=trace.run), trace:
        call(model, example)
    return trace


# -- which heads are kept ----------------------------------------------------------------------------------


class HeadChoice:
    """The choice of heads, and so of channels, that are kept of the layers that attention reads from.

    `counts` gives the wanted widths of layers, where they are known; else `factor` does, rounded up to whole heads.
    Layers in `whole` keep all their heads.
    """

    def __init__(
        self,
        found: Sequence[Attention],
        widths: Mapping[str, int],
        factor: float,
        generator: torch.Generator,
        counts: Mapping[str, int] | None = None,
        whole: set[str] | None = None,
    ) -> None:
        self.found, self.widths, self.factor, self.generator = found, widths, factor, generator
        self.counts, self.whole = counts or {}, whole or set()
        self._kept: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    @property
    def sources(self) -> set[str]:
        """The layers that attentions read from."""
        return {name for attention in self.found for name in attention.sources}

    @property
    def groups(self) -> dict[int, int]:
        """The numbers of query heads that share a head of keys and values, before and after."""
        return {
            a.heads // a.shared: len(self.kept(a)[0]) // len(self.kept(a)[1]) for a in self.found if a.shared < a.heads
        }

    def outputs(self, name: str, width: int, table: bool = False) -> Tensor | None:
        """The kept channels of a layer of some width; None where attention does not bind them.

        A `table` may have an entry for each head, as relative positions do.
        """
        for attention in self.found:
            if name in attention.sources:
                index = self._of_source(attention, width)
                if index is not None:
                    return index
                break
        across = [attention for attention in self.found if attention.width == width]
        if not across:
            of_heads = [attention for attention in self.found if table and attention.heads == width]
            return self.kept(of_heads[0])[0] if of_heads else None
        widest = max(across, key=lambda attention: attention.size)
        return _blocks(self.kept(widest)[0], widest.size)

    def note(self, name: str, width: int) -> str:
        """Describe how many of the heads that a layer makes are kept."""
        attention = next((a for a in self.found if name in a.sources), None)
        if attention is None or width % attention.size or self._of_source(attention, width) is None:
            return ""
        kept, heads = self.kept(attention)[0], attention.heads
        exact = heads * self.factor
        rounded = f", rounded up from {exact:.3g}" if name not in self.whole and len(kept) > exact + 1e-9 else ""
        return f"{heads} heads -> {len(kept)}{rounded}"

    def inside(self, place: str) -> dict[int, Tensor]:
        """The kept heads, by how many there were, of the attentions in a module, or that it is in."""
        near = [a for a in self.found if within(place, a.place) or within(a.place, place)]
        return {a.shared: self.kept(a)[1] for a in near} | {a.heads: self.kept(a)[0] for a in near}

    def kept(self, attention: Attention) -> tuple[Tensor, Tensor]:
        """The kept query heads, and the kept heads of keys and values."""
        kind = attention.heads, attention.shared, attention.size
        if kind not in self._kept:
            self._kept[kind] = self._choose(attention)
        return self._kept[kind]

    def _choose(self, attention: Attention) -> tuple[Tensor, Tensor]:
        heads, shared, group = attention.heads, attention.shared, attention.heads // attention.shared
        larger = [a for a in self.found if a.width == attention.width and a.size > attention.size]
        if larger:  # of the same channels, cut elsewhere into larger heads
            widest = max(larger, key=lambda a: a.size)
            if widest.size % attention.size:
                return torch.arange(heads), torch.arange(shared)
            kept = _blocks(self.kept(widest)[0], widest.size)[:: attention.size] // attention.size
            return kept, (kept // group).unique()
        wanted, wanted_shared = self._counts(attention)
        groups = choose(shared, wanted_shared, self.generator)
        each = choose(group, wanted // wanted_shared, self.generator)
        return (groups.unsqueeze(1) * group + each).flatten(), groups

    def _counts(self, attention: Attention) -> tuple[int, int]:
        """Return how many heads are kept, of queries and of keys and values."""
        heads, shared, size = attention.heads, attention.shared, attention.size
        alike = [a for a in self.found if (a.heads, a.shared, a.size) == (heads, shared, size)]
        made = {n: self.widths[n] // size for a in alike for n in a.sources if self.widths[n] % size == 0}
        if any(n in self.whole and m in (heads, shared, heads + 2 * shared, 2 * shared) for n, m in made.items()):
            return heads, shared
        kept = {heads: math.ceil(round(heads * self.factor, 9)), shared: math.ceil(round(shared * self.factor, 9))}
        for name, count in made.items():
            if name in self.counts and count in kept:
                if self.counts[name] % size:
                    raise CannotNarrow(
                        f"layer {name!r} would make {self.counts[name]} of {count * size} channels, which are no whole "
                        f"heads of {size}"
                    )
                kept[count] = self.counts[name] // size
        return math.ceil(kept[heads] / kept[shared]) * kept[shared], kept[shared]

    def _of_source(self, attention: Attention, width: int) -> Tensor | None:
        """The kept channels of a layer of some width that an attention reads from."""
        heads, shared, size = attention.heads, attention.shared, attention.size
        queries, keys = self.kept(attention)
        alone = {shared: (keys, 1), heads: (queries, 1), shared * size: (keys, size), heads * size: (queries, size)}
        if width == (heads + 2 * shared) * size:
            return self._fused(attention, [(heads, queries), (shared, keys), (shared, keys)])
        if width == 2 * shared * size and width not in alone:
            return self._fused(attention, [(shared, keys), (shared, keys)])
        return _blocks(*alone[width]) if width in alone else None

    def _fused(self, attention: Attention, parts: list[tuple[int, Tensor]]) -> Tensor:
        """The kept channels of a layer that makes several parts of some heads, one after the other or head by head."""
        groups = attention.shared if attention.heads_first else 1
        stays = [
            group * (count // groups) + head in kept
            for group in range(groups) for count, kept in parts for head in range(count // groups)
        ]  # fmt: skip
        return _blocks(torch.tensor(stays).nonzero()[:, 0], attention.size)


def _blocks(kept: Tensor, size: int) -> Tensor:
    """The channels of blocks of some size."""
    return (kept.unsqueeze(1) * size + torch.arange(size)).flatten()


def choose(width: int, count: int, generator: torch.Generator | None = None, pattern: Pattern = (1, 1)) -> Tensor:
    """`count` of `width` channels, one at random from each of equal stretches, sorted.

    Stretches keep the choice even, so that each group of a grouped layer loses the same share. A `pattern` of parts and
    block chooses the same of each of so many equal parts, and whole blocks of neighbours, where the widths divide.
    """
    parts, block = pattern if not (width % math.prod(pattern) or count % math.prod(pattern)) else (1, 1)
    positions, own = width // parts // block, count // parts // block
    edges = torch.arange(own + 1) * positions // own
    chosen = edges[:-1] + (torch.rand(own, generator=generator) * (edges[1:] - edges[:-1])).long()
    blocks = (chosen.unsqueeze(1) * block + torch.arange(block)).flatten()
    return (torch.arange(parts).unsqueeze(1) * (width // parts) + blocks).flatten()


# -- torch's own attention, opened ----------------------------------------------------------------------------

_MAPS = ("q", "k", "v")


class OpenAttention(nn.MultiheadAttention):
    """A layer that computes the same as an `nn.MultiheadAttention`, with a linear layer for each of its four maps.

    The number of heads follows from the width of the projections; `head_dim` is fixed.
    """

    def __init__(self, attention: Any) -> None:
        nn.Module.__init__(self)
        self.embed_dim, self.head_dim, self.num_heads = attention.embed_dim, attention.head_dim, attention.num_heads
        self.batch_first, self.dropout = attention.batch_first, attention.dropout
        self.add_zero_attn = attention.add_zero_attn
        self.in_proj_bias, self._qkv_same_embed_dim = None, False  # type: ignore[assignment]
        for index, name in enumerate(_MAPS):
            setattr(self, f"{name}_proj", _projection(attention, index))
        own = copied(attention)
        self.out_proj, self.bias_k, self.bias_v = own.out_proj, own.bias_k, own.bias_v

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
    """Return the mask that is added to the scores `[B, H, T, S]`; None where nothing is hidden."""
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


def _projection(attention: Any, index: int) -> nn.Linear:
    """The map of queries, keys or values as a linear layer."""
    whole, fused = attention.in_proj_weight, attention._qkv_same_embed_dim
    whole = whole if fused else getattr(attention, f"{_MAPS[index]}_proj_weight")
    weight, bias = whole.data.chunk(3)[index] if fused else whole.data, attention.in_proj_bias
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.clone(), whole.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.data.chunk(3)[index].clone(), bias.requires_grad)
    return layer


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
    opened = replace_layers(model, {name: OpenAttention(layer) for name, layer in layers.items()})
    for module in opened.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # which would read the weights of attention
    return opened


def close_attention(opened: nn.Module, model: nn.Module) -> nn.Module:
    """The opened network, of whatever widths, with torch's own attention layers again."""
    layers = attention_layers(model)
    if not layers:
        return opened
    closed = replace_layers(
        opened, {name: _closed(opened.get_submodule(name), layer, name) for name, layer in layers.items()}
    )
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
        raise CannotNarrow(
            f"layer {name!r} is a MultiheadAttention, which is as wide as its heads together, {heads} x "
            f"{opened.head_dim}, and would read {ends[0]} and give {ends[1]} channels"
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
