"""Which channels survive: observed in one run in which each layer's dropped channels are NaN."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.core.calling import Input, call, tensors_in
from multitudes.core.trace import Trace, hooked, observing, recording
from multitudes.surgery.attention import HeadChoice, Pattern, choose
from multitudes.surgery.cuts import (
    CannotNarrow,
    Cut,
    follows,
    input_axis,
    inputs_of,
    is_depthwise,
    makes,
    output_axis,
    width_of,
)
from multitudes.surgery.observe import followed_attention
from multitudes.surgery.sizes import Size, followed_sizes, note_sizes

__all__ = ["Along", "Watch", "gives_output", "loses_the_same"]

Along = Mapping[str, tuple[tuple[int, Tensor], ...]]
"""Cuts of parameters that stand alone, by name: which axes are cut, and the entries that are kept along them."""

_LOOKS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__}


class Watch(TorchFunctionMode):
    """One run in which each layer's dropped channels are NaN; layers in `last` keep all of theirs.

    A channel that is NaN anywhere is dropped. Elsewhere it may have been padded, or masked, with numbers. `heads`
    chooses where attention binds channels together, `patterns` say how the network takes axes of some sizes apart, and
    `counts` gives wanted widths, where they are known.
    """

    def __init__(
        self,
        factor: float,
        last: set[str],
        generator: torch.Generator,
        heads: HeadChoice,
        patterns: Mapping[int, Pattern],
        counts: Mapping[str, int],
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.factor, self.last, self.generator = factor, last, generator
        self.heads, self.patterns, self.counts = heads, patterns, counts
        self.cuts: dict[str, Cut] = {}
        self.chosen: dict[tuple[int, int], Tensor] = {}  # one choice a width, so that channels that are added agree
        self.sizes: list[Size] = []  # the numbers that the network holds
        self.mixer = ""  # what made all channels NaN of some, and where

    def run(self, model: nn.Module, example: Input, names: Collection[str]) -> Tensor:
        def see(name: str, layer: nn.Module, args: Any, y: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                return self.see(name, layer, args[0] if args else y, y)

        try:
            with followed_sizes(model, names) as self.sizes:
                return self._run(model, example, names, see)
        except (KeyError, TypeError, RuntimeError):  # as of a table whose keys are held numbers, or a scripted function
            self.sizes, self.trace, self.cuts = [], Trace(), {}
            return self._run(model, example, names, see)

    def _run(self, model: nn.Module, example: Input, names: Collection[str], see: Any) -> Tensor:
        with recording(model, trace=self.trace), followed_attention(), self, hooked(model, names, see):
            return call(model, example)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _LOOKS and args[0].is_floating_point() and bool(args[0].isnan().any()):
            raise CannotNarrow(
                f"{self._place()} decides by the values of channels ({function.__name__.strip('_')}), so the network "
                "cannot be narrowed"
            )
        result = function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            note_sizes(getattr(function, "__name__", ""), args, kwargs or {}, result, self.heads.groups)
        if not self.mixer and isinstance(result, Tensor) and result.is_floating_point():
            self._look_for_a_mixer(function, (*args, *(kwargs or {}).values()), result)
        return result

    def _look_for_a_mixer(self, function: Any, args: tuple[Any, ...], result: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            running = self.trace.running
            if running and (makes(running[-1].module) or follows(running[-1].module)):
                return  # what layers do is known, and their outputs are replaced
            dense = [t for t in tensors_in(args) if t.layout is torch.strided and t.numel()]
            nan = [t.isnan() for t in dense if t.is_floating_point()]
            some = any(bool(mask.any()) for mask in nan) and not any(bool(mask.all()) for mask in nan)
            if some and result.numel() and bool(result.isnan().all()):
                self.mixer = f"{getattr(function, '__name__', 'a function')} in {self._place()}"

    def _place(self) -> str:
        running = self.trace.running
        if not running or not running[-1].name:
            return f"the network's own forward ({type(running[0].module).__name__})" if running else "the network"
        name, module = running[-1].name, running[-1].module
        kind = nn.MultiheadAttention if isinstance(module, nn.MultiheadAttention) else type(module)
        return f"layer {name!r} ({kind.__name__})"

    def see(self, name: str, layer: Any, x: Tensor, y: Tensor) -> Tensor:
        """Note what a layer keeps, and let its dropped channels be NaN."""
        embedding = isinstance(layer, nn.Embedding)
        dropped: Any = None if embedding else x.isnan().movedim(input_axis(layer), 0)
        if self._is_of_each_head(layer, dropped):
            whole = torch.arange(inputs_of(layer))
            cut = Cut(whole, whole if follows(layer) else torch.arange(width_of(layer)))
            out = torch.where(dropped[0].unsqueeze(-1), torch.nan, 0.0).to(y).expand_as(y).clone()
        elif follows(layer):
            inputs = self._kept(dropped, name)
            cut, out = Cut(inputs, inputs), torch.where(x.isnan(), torch.nan, 0.0).to(y)
        else:
            inputs = torch.arange(layer.num_embeddings) if embedding else self._kept(dropped, name)
            outputs = self._outputs(name, layer, inputs)
            cut, out = Cut(inputs, outputs), torch.full_like(y, torch.nan)
            out.index_fill_(output_axis(layer), outputs.to(y.device), 0.0)
        before = self.cuts.setdefault(name, cut)
        if not (torch.equal(before.inputs, cut.inputs) and torch.equal(before.outputs, cut.outputs)):
            raise CannotNarrow(f"layer {name!r} is used in several places that see different channels")
        return out

    def _is_of_each_head(self, layer: nn.Module, dropped: Any) -> bool:
        """Return whether a layer's channels are kept in some places, and dropped in others, as those of heads are."""
        if dropped is None or not self.heads.found or input_axis(layer) != -1:
            return False
        return bool(dropped.any()) and not bool(dropped.all()) and bool((dropped == dropped[:1]).all())

    def _outputs(self, name: str, layer: Any, inputs: Tensor) -> Tensor:
        width = width_of(layer)
        if is_depthwise(layer):
            each = width // layer.in_channels
            return (inputs.unsqueeze(1) * each + torch.arange(each)).flatten()
        if name in self.last:
            return torch.arange(width)
        count = self.counts.get(name)
        bound = self.heads.outputs(name, width, isinstance(layer, nn.Embedding))
        if bound is not None and count in (None, len(bound)):
            return bound
        pattern = self.patterns.get(width, (1, 1))
        unit = math.prod(pattern)
        count = count or math.ceil(round(width * self.factor / unit, 9)) * unit
        if (width, count) not in self.chosen:
            self.chosen[width, count] = choose(width, count, self.generator, pattern)
        return self.chosen[width, count]

    def _kept(self, mask: Any, name: str) -> Tensor:
        dropped = mask.flatten(1).any(1)
        if bool(dropped.all()):
            by = f" by {self.mixer}" if self.mixer else ""
            raise CannotNarrow(
                f"the channels that reach layer {name!r} are mixed on their way{by}, so the network cannot be narrowed"
            )
        return (~dropped).nonzero()[:, 0].cpu()


def gives_output(model: nn.Module, name: str, example: Input, names: Collection[str]) -> bool:
    """Return whether a layer's output reaches the network's without another layer between: NaN gets through."""

    def mark(other: str, layer: nn.Module, args: Any, y: Tensor) -> Tensor:
        if follows(layer):
            return torch.where(args[0].isnan(), torch.nan, 0.0).to(y)
        return torch.full_like(y, torch.nan if other == name else 0.0)

    with followed_attention(), hooked(model, names, mark):
        return bool(call(model, example).isnan().any())


def loses_the_same(model: nn.Module, example: Input, cuts: Mapping[str, Cut], along: Along) -> bool:
    """Return whether the entries that parameters would lose reach, as NaN, only channels that the next layers lose."""
    reached: list[bool] = []

    def see(name: str, layer: nn.Module, args: Any, y: Tensor) -> Tensor:
        if isinstance(layer, nn.Embedding):
            return torch.zeros_like(y)
        nan = args[0].isnan()
        seen = nan.movedim(input_axis(layer), 0).flatten(1).any(1).cpu()
        reached.extend((~seen[cuts[name].inputs]).tolist() if bool(seen.any()) else ())
        return torch.where(nan, torch.nan, 0.0).to(y) if follows(layer) else torch.zeros_like(y)

    before = {name: model.get_parameter(name).data for name in along}
    try:
        for name, kept in along.items():
            values = before[name].clone()
            for axis, index in kept:
                dropped = torch.ones(values.shape[axis], dtype=torch.bool).index_fill_(0, index, False).nonzero()[:, 0]
                values.index_fill_(axis, dropped.to(values.device), torch.nan)
            model.get_parameter(name).data = values
        with observing(model), followed_attention(), hooked(model, cuts, see):
            output = call(model, example)
    finally:
        for name, values in before.items():
            model.get_parameter(name).data = values
    return bool(reached) and all(reached) and not bool(output.isnan().any())
