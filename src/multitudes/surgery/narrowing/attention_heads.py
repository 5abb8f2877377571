"""Observe which channels each head of an attention reads, and choose the heads to keep.

Heads are kept whole, so that rotary and relative positions stay valid. Gradients show which channels a head reads,
whatever the network does in between. Heads that share channels, such as query heads with the same keys and values, form
a group; all kept groups keep the same number of heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.networks.attention import AttentionArguments, attend_with_dropout
from multitudes.networks.calls import Input, tensors_in
from multitudes.networks.trace import Trace, observing, recording
from multitudes.surgery.narrowing.cuts import CannotNarrow, form_of, is_attention, scaled
from multitudes.surgery.observe import LayerInputs, run_replacing

Pattern = tuple[int, int]
"""A split of channels: into this many equal parts, and in blocks of this many neighbors."""

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
_PARTS = {"chunk", "split", "tensor_split", "glu", "__getitem__"}
_GROUPS = {"view", "reshape", "unflatten", "channel_shuffle", "pixel_shuffle"}


@dataclass(frozen=True, eq=False)
class ObservedAttention:
    """The channels that the heads of one attention read."""

    size: int
    """Number of channels of a head's queries."""
    reads: Mapping[str, Tensor]
    """By the name of the layer that makes the channels, `[H, C]`: True if a head reads a channel."""

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(next(iter(self.reads.values())))

    @property
    def width(self) -> int:
        """The number of channels of all query heads."""
        return self.heads * self.size

    @property
    def groups(self) -> list[list[int]]:
        """The heads that share channels; a single group if groups would differ in size."""
        shared = torch.stack([reads.float() @ reads.float().T for reads in self.reads.values()]).sum(0) > 0
        groups = sorted({tuple(row.nonzero()[:, 0].tolist()) for row in shared})
        equal = len({len(group) for group in groups}) == 1 and sum(map(len, groups)) == self.heads
        return [list(group) for group in groups] if equal else [list(range(self.heads))]


class _Observed(TorchFunctionMode):
    """Find each attention of a run: torch's own layer, or a product with a softmax of a product.

    The layers' outputs are replaced by random numbers that require gradients.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.run, self.batch = Trace(), batch
        self.found: list[ObservedAttention] = []
        self.patterns: dict[int, Pattern] = {}  # how axes are split, by their size
        self.made: list[tuple[str, int, Tensor]] = []  # layers, the axis of channels, and their outputs
        self.sizes: dict[tuple[int, ...], int] = {}  # last size of a product's factors, by the product's shape
        self.scores: Tensor | None = None  # input of the last softmax
        self.generator = torch.Generator().manual_seed(0)

    def randomize(self, name: str, layer: Any, read: LayerInputs, y: Tensor) -> Tensor:
        """Replace a layer's output by random numbers."""
        with torch._C.DisableTorchFunction():
            made = torch.randn(y.shape, generator=self.generator).to(y).requires_grad_()
            self.made.append((name, form_of(layer).axis, made))
            if is_attention(layer):
                reads = torch.eye(layer.num_heads, dtype=torch.bool).repeat_interleave(layer.head_dim, 1)
                self.found.append(ObservedAttention(layer.head_dim, {name: reads}))
            return made * 1  # the network's code may change it in place

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, running = getattr(function, "__name__", ""), kwargs or {}, self.run.running
        if running and form_of(running[-1].module).makes:
            return function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            with self:
                return attend_with_dropout(lambda weights: weights, AttentionArguments(*args, **kwargs))
        result = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            tensors = tensors_in((*args, *kwargs.values()))
            if name in _PRODUCTS and isinstance(result, Tensor):
                self._record_attention(function, args, kwargs)
                self.sizes[tuple(result.shape)] = tensors[name == "baddbmm"].shape[-1]
            elif name == "softmax" and tensors[0].dim() > 2 and tuple(tensors[0].shape) in self.sizes:
                self.scores = tensors[0]
            elif name in _PARTS | _GROUPS:
                self._record_split(name, tensors[0], result, args)
        return result

    def _heads(self, x: Tensor) -> Sequence[Tensor]:
        """Split `[..., H, T, _]` by head; if heads are folded into the batch, return those of one row."""
        if x.dim() != 3 or len(x) % self.batch:
            return x.unbind(-3) if x.dim() > 2 else [x]
        return [x[index] for index in dict.fromkeys([*range(len(x) // self.batch), *range(0, len(x), self.batch)])]

    def _record_attention(self, function: Any, args: Any, kwargs: Any) -> None:
        """Record an attention if a product multiplies values with the weights of a softmax.

        A head reads the channels that make its scores, and the values that remain if other heads' weights are zero.
        """
        scores = self.scores
        shapes = [] if scores is None else [scores.shape, scores.mT.shape]
        weights = next((x for x in tensors_in(args) if x.shape in shapes), None)
        if scores is None or weights is None:
            return
        self.scores, heads = None, []
        for index, head in enumerate(self._heads(scores)):
            alone = torch.zeros_like(weights)
            self._heads(alone)[index].copy_(self._heads(weights)[index].detach())
            heads.append([head, function(*[alone if x is weights else x for x in args], **kwargs)])
        if reads := self._reads(heads):
            self.found.append(ObservedAttention(self.sizes[tuple(scores.shape)], reads))

    def _reads(self, heads: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the channels that heads read, `[H, C]` by layer: those with a gradient."""
        reads: dict[str, Tensor] = {}
        for index, head in enumerate(heads):
            trained = [x for x in head if x.requires_grad]
            if not trained:
                continue
            random = [torch.rand(x.shape, generator=self.generator).to(x) + 0.5 for x in trained]
            made = [each for _, _, each in self.made]
            gradients = torch.autograd.grad(trained, made, random, retain_graph=True, allow_unused=True)
            for (name, axis, _), gradient in zip(self.made, gradients, strict=True):
                if gradient is not None:
                    read = (gradient != 0).movedim(axis, 0).flatten(1).any(1).cpu()
                    reads.setdefault(name, torch.zeros(len(heads), len(read), dtype=torch.bool))[index] |= read
        return {name: each for name, each in reads.items() if bool(each.any())}

    def _record_split(self, name: str, x: Tensor, result: Any, args: Sequence[Any]) -> None:
        """Record that an axis is split into equal parts, or in blocks."""
        part = result[0] if isinstance(result, (tuple, list)) else result
        if name == "pixel_shuffle":
            self._add(x.shape[-3], 1, x.shape[-3] // part.shape[-3])
        elif name == "channel_shuffle":
            self._add(x.shape[1], int(args[1]), 1)
        elif (
            name in _GROUPS
        ):  # feature maps: `[B, C, H, W] -> [B, groups, C / groups, H, W]`, or `[B, C / 4, 2, 2, ...]`
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


def _merged(attention: ObservedAttention) -> ObservedAttention:
    """Merge heads that read the same channels, such as heads folded into the batch."""
    rows = torch.cat(list(attention.reads.values()), 1).tolist()
    first = [index for index, row in enumerate(rows) if row not in rows[:index]]
    return replace(attention, reads={name: reads[first] for name, reads in attention.reads.items()})


def observe_attention(
    model: nn.Module, example: Input, names: Collection[str]
) -> tuple[list[ObservedAttention], dict[int, Pattern]]:
    """Return the attentions of a run, in order, and how axes are split; `names` are the layers that make channels."""
    observed = _Observed(tensors_in(example)[0].shape[0])
    with observing(model), torch.enable_grad(), recording(model, trace=observed.run), suppress(RuntimeError):
        run_replacing(model, example, names, observed.randomize, observed)  # some code cannot run with gradients
    return list(map(_merged, observed.found)), observed.patterns


# -- choice of heads ---------------------------------------------------------------------------------------


class HeadChoice:
    """The heads, and thus channels, to keep in the layers that attention reads from.

    `counts` holds the target widths of layers, if known; others are scaled by `factor` and rounded up to whole heads.
    Layers in `whole` keep all heads.
    """

    def __init__(
        self,
        found: Sequence[ObservedAttention],
        factor: float,
        generator: torch.Generator,
        counts: Mapping[str, int],
        whole: Collection[str],
        patterns: Mapping[int, Pattern] = {},
    ) -> None:
        self.found, self.factor, self.generator = found, factor, generator
        self.counts, self.whole, self.patterns = counts, whole, patterns
        self._chosen: dict[tuple[int, int], Tensor] = {}  # one choice per width, so that added channels match
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def sources(self) -> set[str]:
        """The layers that attentions read from."""
        return {name for attention in self.found for name in attention.reads}

    @property
    def shares(self) -> dict[int, int]:
        """Map numbers of heads in a group to the numbers kept."""
        pairs = {len(a.groups[0]): len(self.kept(a)[0]) // len(self.kept(a)[1]) for a in self.found}
        return {before: after for before, after in pairs.items() if before > 1}

    def outputs(self, name: str, width: int) -> Tensor:
        """Return the kept channels of a layer of this width."""
        if name in self.whole:
            return torch.arange(width)
        count, bound = self.counts.get(name), self._bound(name, width)
        if bound is not None and count in (None, len(bound)):
            return bound
        pattern = self.patterns.get(width, (1, 1))
        unit = math.prod(pattern)
        count = count or scaled(width, self.factor / unit) * unit
        if (width, count) not in self._chosen:
            self._chosen[width, count] = choose(width, count, self.generator, pattern)
        return self._chosen[width, count]

    def _bound(self, name: str, width: int) -> Tensor | None:
        """Return the channels of the kept heads; None if attention does not constrain the layer."""
        for attention in self.found:
            if name in attention.reads:
                reads = attention.reads[name]
                return (reads[self.kept(attention)[0]].any(0) | ~reads.any(0)).nonzero()[:, 0]
        across = [attention for attention in self.found if attention.width == width]
        if not across:
            return None
        kept = self.kept(across[0])[0].unsqueeze(1)
        return (kept * across[0].size + torch.arange(across[0].size)).flatten()

    def note(self, name: str) -> str:
        """Describe how many of the heads that read a layer are kept."""
        attention = next((a for a in self.found if name in a.reads), None)
        if attention is None:
            return ""
        kept, exact = len(self.kept(attention)[0]), attention.heads * self.factor
        rounded = f", rounded up from {exact:.3g}" if name not in self.whole and kept > exact + 1e-9 else ""
        return f"{attention.heads} heads -> {kept}{rounded}"

    @property
    def entries(self) -> dict[int, Tensor]:
        """The kept groups and heads by their former number, for parameters with one entry each."""
        return {len(a.groups): self.kept(a)[1] for a in self.found} | {a.heads: self.kept(a)[0] for a in self.found}

    def kept(self, attention: ObservedAttention) -> tuple[Tensor, Tensor]:
        """Return the kept heads, and the kept groups."""
        kind = attention.heads, len(attention.groups)
        if kind not in self._kept:
            groups = torch.tensor(attention.groups)
            heads, shared = self._counts(attention)
            kept = choose(len(groups), shared, self.generator)
            each = choose(groups.shape[1], heads // shared, self.generator)
            self._kept[kind] = groups[kept][:, each].flatten().sort().values, kept
        return self._kept[kind]

    def _counts(self, attention: ObservedAttention) -> tuple[int, int]:
        """Return how many heads are kept, and how many groups."""
        heads, shared = attention.heads, len(attention.groups)
        same = [a for a in self.found if (a.heads, len(a.groups)) == (heads, shared)]
        if any(name in self.whole for each in same for name in each.reads):
            return heads, shared
        kept = {heads: scaled(heads, self.factor), shared: scaled(shared, self.factor)}
        for each in same:
            for name, reads in each.reads.items():
                if name in self.counts and (of := reads.shape[1] // each.size) in kept and reads.any(0).all():
                    if self.counts[name] % each.size:
                        raise CannotNarrow(
                            f"layer {name!r} would make {self.counts[name]} of {reads.shape[1]} channels, which is not "
                            f"a multiple of its head size, {each.size}"
                        )
                    kept[of] = self.counts[name] // each.size
        return math.ceil(kept[heads] / kept[shared]) * kept[shared], kept[shared]


def choose(width: int, count: int, generator: torch.Generator | None = None, pattern: Pattern = (1, 1)) -> Tensor:
    """Choose `count` of `width` channels, one at random from each of equal intervals, sorted.

    So each group of a grouped layer loses the same share. With a `pattern` that divides the widths, parts lose the same
    channels, and blocks stay whole.
    """
    parts, block = pattern if not (width % math.prod(pattern) or count % math.prod(pattern)) else (1, 1)
    positions, own = width // parts // block, count // parts // block
    edges = torch.arange(own + 1) * positions // own
    chosen = edges[:-1] + (torch.rand(own, generator=generator) * (edges[1:] - edges[:-1])).long()
    blocks = (chosen.unsqueeze(1) * block + torch.arange(block)).flatten()
    return (torch.arange(parts).unsqueeze(1) * (width // parts) + blocks).flatten()
