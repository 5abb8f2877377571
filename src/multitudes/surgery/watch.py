"""Which channels survive: observed in one run in which each layer's dropped channels are NaN."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.core.calling import Input, call
from multitudes.surgery.cuts import Cut, follows, input_axis, is_depthwise, makes, output_axis, width_of
from multitudes.surgery.observe import hooked

__all__ = ["PATTERNS", "Pattern", "Watch", "choose", "gives_output"]

Pattern = tuple[int, int]
PATTERNS: tuple[Pattern, ...] = ((1, 1), (2, 1), (4, 1), (3, 1), (1, 4))
"""Ways to choose channels: any; the same of each half, as gated units need it, of each quarter or third; or those that
lie together, as a shuffle of pixels needs them."""


_LOOKS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__}


class Watch(TorchFunctionMode):
    """One run in which each layer's dropped channels are NaN; layers in `last` keep all of theirs.

    A channel that is NaN anywhere is dropped. Elsewhere it may have been padded, or masked, with numbers.
    """

    def __init__(self, factor: float, last: set[str], generator: torch.Generator, pattern: Pattern = (1, 1)) -> None:
        super().__init__()
        self.factor, self.last, self.generator, self.pattern = factor, last, generator, pattern
        self.cuts: dict[str, Cut] = {}
        self.chosen: dict[int, Tensor] = {}  # one choice a width, so that channels that are added agree
        self.inside: list[tuple[str, nn.Module]] = []  # the modules that are running, outermost first
        self.mixer = ""  # what made all channels NaN of some, and where

    def run(self, model: nn.Module, example: Input, names: Collection[str]) -> Tensor:
        with self._entered(model), self, hooked(model, names, lambda n, m, args, y: self.see(n, m, args[0], y)):
            return call(model, example)

    @contextmanager
    def _entered(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda m, _, name=name: self.inside.append((name, m))))
            handles.append(module.register_forward_hook(lambda *_: self.inside.pop() and None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            raise ValueError(
                f"{self._place()} is attention, which ties its widths together, so it cannot be narrowed; "
                "deep_ensemble keeps it whole"
            )
        if function in _LOOKS and args[0].is_floating_point() and bool(args[0].isnan().any()):
            raise ValueError(
                f"{self._place()} decides by the values of channels ({function.__name__.strip('_')}), so the network "
                "cannot be narrowed; deep_ensemble keeps it whole"
            )
        result = function(*args, **(kwargs or {}))
        if not self.mixer and isinstance(result, Tensor) and result.is_floating_point():
            self._look_for_a_mixer(function, (*args, *(kwargs or {}).values()), result)
        return result

    def _look_for_a_mixer(self, function: Any, args: tuple[Any, ...], result: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if self.inside and (makes(self.inside[-1][1]) or follows(self.inside[-1][1])):
                return  # what layers do is known, and their outputs are replaced
            flat = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else (arg,))]
            dense = [t for t in flat if isinstance(t, Tensor) and t.layout is torch.strided and t.numel()]
            nan = [t.isnan() for t in dense if t.is_floating_point()]
            some = any(bool(mask.any()) for mask in nan) and not any(bool(mask.all()) for mask in nan)
            if some and result.numel() and bool(result.isnan().all()):
                self.mixer = f"{getattr(function, '__name__', 'a function')} in {self._place()}"

    def _place(self) -> str:
        if not self.inside or not self.inside[-1][0]:
            return f"the network's own forward ({type(self.inside[0][1]).__name__})" if self.inside else "the network"
        name, module = self.inside[-1]
        return f"layer {name!r} ({type(module).__name__})"

    def see(self, name: str, layer: Any, x: Tensor, y: Tensor) -> Tensor:
        """Note what a layer keeps, and let its dropped channels be NaN."""
        with torch._C.DisableTorchFunction():
            return self._see(name, layer, x, y)

    def _see(self, name: str, layer: Any, x: Tensor, y: Tensor) -> Tensor:
        embedding = isinstance(layer, nn.Embedding)
        inputs = torch.arange(layer.num_embeddings) if embedding else self._kept(x, input_axis(layer), name)
        if follows(layer):
            cut, out = Cut(inputs, inputs), torch.where(x.isnan(), torch.nan, 0.0).to(y)
        else:
            outputs = self._outputs(name, layer, inputs)
            cut, out = Cut(inputs, outputs), torch.full_like(y, torch.nan)
            out.index_fill_(output_axis(layer), outputs.to(y.device), 0.0)
        before = self.cuts.setdefault(name, cut)
        if not (torch.equal(before.inputs, cut.inputs) and torch.equal(before.outputs, cut.outputs)):
            raise ValueError(f"layer {name!r} is used in several places that see different channels")
        return out

    def _outputs(self, name: str, layer: Any, inputs: Tensor) -> Tensor:
        width = width_of(layer)
        if is_depthwise(layer):
            each = width // layer.in_channels
            return (inputs.unsqueeze(1) * each + torch.arange(each)).flatten()
        if name in self.last:
            return torch.arange(width)
        if width not in self.chosen:
            count = math.ceil(round(width * self.factor, 9))
            self.chosen[width] = choose(width, count, self.generator, self.pattern)
        return self.chosen[width]

    def _kept(self, x: Tensor, axis: int, name: str) -> Tensor:
        dropped = x.isnan().movedim(axis, 0).flatten(1).any(1)
        if bool(dropped.all()):
            by = f" by {self.mixer}" if self.mixer else ""
            raise ValueError(
                f"the channels that reach layer {name!r} are mixed on their way{by}, so the network cannot be "
                "narrowed; deep_ensemble keeps it whole"
            )
        return (~dropped).nonzero()[:, 0].cpu()


def gives_output(model: nn.Module, name: str, example: Input, names: Collection[str]) -> bool:
    """Whether a layer's output reaches the network's without another layer between: NaN gets through."""

    def mark(other: str, layer: nn.Module, args: Any, y: Tensor) -> Tensor:
        if follows(layer):
            return torch.where(args[0].isnan(), torch.nan, 0.0).to(y)
        return torch.full_like(y, torch.nan if other == name else 0.0)

    with hooked(model, names, mark):
        return bool(call(model, example).isnan().any())


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
