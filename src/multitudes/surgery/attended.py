"""Attention, observed: which layers make its queries, keys and values, and which of its heads are kept.

Whole heads are kept, and their size stays, so that rotary and relative positions keep their meaning. Where a group of
query heads shares a head of keys and values, each head that is kept of these keeps as many of its query heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.core.calling import Input, call, tensors_in
from multitudes.surgery.cuts import width_of
from multitudes.surgery.observe import followed_attention, hooked, observing

__all__ = ["Attention", "HeadChoice", "Inside", "attentions", "choose"]

Pattern = tuple[int, int]

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}


@dataclass(frozen=True)
class Attention:
    """One attention: the module that computes it, the layers that ran in it before, and its heads."""

    place: str
    sources: tuple[str, ...]
    heads: int
    shared: int
    """How many heads of keys and values there are; each is shared by a group of query heads, or has one of its own."""
    size: int

    @property
    def width(self) -> int:
        """The channels of all its query heads."""
        return self.heads * self.size


class Inside(TorchFunctionMode):
    """Knows which modules of a network are running, outermost first."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[tuple[str, nn.Module]] = []

    @contextmanager
    def entered(self, model: nn.Module) -> Iterator[None]:
        """Inside, modules are followed as they run."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda m, _, name=name: self.enter(name, m)))
            handles.append(module.register_forward_hook(lambda *_: self.leave()))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def enter(self, name: str, module: nn.Module) -> None:
        """A module begins to run."""
        self.inside.append((name, module))

    def leave(self) -> None:
        """The innermost module has run."""
        self.inside.pop()


class _Attending(Inside):
    """Notes each attention of a run: torch's own function, or a softmax of a product."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.found: list[Attention] = []
        self.ran: list[tuple[str, int]] = []  # the layers that have made channels, and how many
        self.since: list[int] = []  # of each running module, how many layers had run when it began
        self.sizes: dict[tuple[int, ...], int] = {}  # of products, by their shape: the last axis of what they multiply

    def enter(self, name: str, module: nn.Module) -> None:
        super().enter(name, module)
        self.since.append(len(self.ran))

    def leave(self) -> None:
        super().leave()
        self.since.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunction():
            tensors = _tensors((*args, *(kwargs or {}).values()))
            if function is F.scaled_dot_product_attention:
                self._note(tensors[0].shape, tensors[0].shape[-1], tensors[1].shape)
            elif name in _PRODUCTS and isinstance(result, Tensor):
                self.sizes[tuple(result.shape)] = tensors[name == "baddbmm"].shape[-1]
            elif name == "softmax" and tensors[0].dim() > 2 and tuple(tensors[0].shape) in self.sizes:
                self._note(tensors[0].shape, self.sizes[tuple(tensors[0].shape)])
        return result

    def _note(self, shape: Sequence[int], size: int, keys: Sequence[int] | None = None) -> None:
        """Note an attention by the shape `[..., H, T, _]` of its queries or scores, and the size of its heads."""
        for (place, _), since in zip(reversed(self.inside), reversed(self.since), strict=True):
            made = [width // size for _, width in self.ran[since:] if width % size == 0]
            if not made:
                continue
            heads = shape[-3] if len(shape) > 3 else _merged_heads(shape, made, self.batch)
            shared = keys[-3] if keys is not None and len(keys) > 3 else heads
            shared = shared if shared < heads else _shared_heads(made[-3:], heads)
            self.found.append(Attention(place, tuple(n for n, _ in self.ran[since:]), heads, shared, size))
            return


def _tensors(args: Any) -> list[Tensor]:
    flat = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return [t for t in flat if isinstance(t, Tensor)]


def _merged_heads(shape: Sequence[int], made: list[int], batch: int) -> int:
    """The number of heads that lie in the batch axis, `[B * H, T, _]`."""
    by_batch = shape[0] // batch if len(shape) == 3 and shape[0] % batch == 0 else 1
    if any(by_batch * parts in made for parts in (1, 2, 3)):
        return by_batch
    return next((each for each in reversed(made) if len(shape) == 3 and shape[0] % each == 0), 1)


def _shared_heads(made: list[int], heads: int) -> int:
    """How many heads of keys and values the last layers have made, counted in heads; as many as queries by default."""
    own = []
    if (made[-1] - heads) % 2 == 0:
        own.append((made[-1] - heads) // 2)  # one layer for queries, keys and values
    if len(made) == 3 and made[0] == heads and made[1] == made[2]:
        own.append(made[2])
    if len(made) > 1 and made[-2] == heads and made[-1] % 2 == 0:
        own.append(made[-1] // 2)  # one for keys and values
    return next((each for each in own if 0 < each <= heads and heads % each == 0), heads)


def attentions(model: nn.Module, example: Input, names: Mapping[str, nn.Module]) -> list[Attention]:
    """The attentions of a run, in order; `names` are the layers that make channels."""
    attending = _Attending(tensors_in(example)[0].shape[0])

    def see(name: str, layer: nn.Module, *_: Any) -> None:
        attending.ran.append((name, width_of(layer)))

    with observing(model), followed_attention(), hooked(model, names, see), attending.entered(model), attending:
        call(model, example)
    return attending.found


# -- which heads are kept ----------------------------------------------------------------------------------


class HeadChoice:
    """Which heads, and so which channels, are kept of the layers that attention reads from.

    `counts` gives the wanted widths of layers, where they are known; else `factor` does, rounded up to whole heads.
    Layers in `whole` keep all their heads. Where one layer makes queries, keys and values, they come one after the
    other, or, with `heads_first`, head by head.
    """

    def __init__(
        self,
        found: Sequence[Attention],
        widths: Mapping[str, int],
        factor: float,
        generator: torch.Generator,
        counts: Mapping[str, int] | None = None,
        whole: set[str] | None = None,
        heads_first: bool = False,
    ) -> None:
        self.found, self.widths, self.factor, self.generator = found, widths, factor, generator
        self.counts, self.whole, self.heads_first = counts or {}, whole or set(), heads_first
        self._kept: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    @property
    def sources(self) -> set[str]:
        """The layers that attentions read from."""
        return {name for attention in self.found for name in attention.sources}

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
        """What became of the heads that a layer makes."""
        attention = next((a for a in self.found if name in a.sources), None)
        if attention is None or width % attention.size or self._of_source(attention, width) is None:
            return ""
        kept, heads = self.kept(attention)[0], attention.heads
        exact = heads * self.factor
        rounded = f", rounded up from {exact:.3g}" if name not in self.whole and len(kept) > exact + 1e-9 else ""
        return f"{heads} heads -> {len(kept)}{rounded}"

    def inside(self, place: str) -> dict[int, Tensor]:
        """The kept heads, by how many there were, of the attentions in a module, or that it is in."""
        near = [a for a in self.found if _within(place, a.place) or _within(a.place, place)]
        return {a.shared: self.kept(a)[1] for a in near} | {a.heads: self.kept(a)[0] for a in near}

    def counted(self, place: str) -> dict[str, dict[int, int]]:
        """What a module may count of its attentions, before and after: heads, their groups, their size."""
        near = [a for a in self.found if _within(place, a.place) or _within(a.place, place)]
        groups = {a.heads // a.shared: len(self.kept(a)[0]) // len(self.kept(a)[1]) for a in near if a.shared < a.heads}
        sizes = {a.size: a.size for a in near}
        return {"heads": {h: len(kept) for h, kept in self.inside(place).items()}, "groups": groups, "sizes": sizes}

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
        """How many heads are kept, of queries and of keys and values."""
        heads, shared, size = attention.heads, attention.shared, attention.size
        alike = [a for a in self.found if (a.heads, a.shared, a.size) == (heads, shared, size)]
        sources = {n: self.widths[n] for a in alike for n in a.sources if self.widths[n] % size == 0}
        makers = {n: w for n, w in sources.items() if w // size in (heads, shared, heads + 2 * shared, 2 * shared)}
        if any(name in self.whole for name in makers):
            return heads, shared
        kept_shared = math.ceil(round(shared * self.factor, 9))
        kept = math.ceil(round(heads * self.factor, 9))
        if any(name in self.counts for name in makers):
            makers = {name: width for name, width in makers.items() if name in self.counts}
            kept_shared = self._wanted(makers, shared, size, kept_shared)
            kept = self._wanted(makers, heads, size, 0) or self._of_one(makers, attention, kept_shared)
        return math.ceil(kept / kept_shared) * kept_shared, kept_shared

    def _wanted(self, makers: Mapping[str, int], heads: int, size: int, default: int) -> int:
        """How many of so many heads are wanted, by the wanted width of a layer that makes them alone."""
        for name, width in makers.items():
            if width == heads * size:
                if self.counts[name] % size:
                    raise ValueError(
                        f"layer {name!r} would make {self.counts[name]} of {width} channels, which are no whole heads "
                        f"of {size}"
                    )
                return self.counts[name] // size
        return default

    def _of_one(self, makers: Mapping[str, int], attention: Attention, kept_shared: int) -> int:
        """How many query heads are wanted of a layer that makes keys and values as well."""
        for name, width in makers.items():
            if width == (attention.heads + 2 * attention.shared) * attention.size:
                parts = self.counts[name] // attention.size
                return parts // 3 if attention.heads == attention.shared else parts - 2 * kept_shared
        return math.ceil(round(attention.heads * self.factor, 9))

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
        size = attention.size
        if not self.heads_first:
            starts = [sum(count for count, _ in parts[:index]) * size for index in range(len(parts))]
            return torch.cat([start + _blocks(kept, size) for start, (_, kept) in zip(starts, parts, strict=True)])
        keys = parts[-1][1]
        each = [count // attention.shared for count, _ in parts]  # heads in each group
        places = []
        for key in keys.tolist():
            begin = key * sum(each)
            for index, (_, kept) in enumerate(parts):
                own = kept[kept // each[index] == key] - key * each[index]
                places.append(begin + sum(each[:index]) + own)
        return _blocks(torch.cat(places), size)


def _within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


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
