"""Where a network makes its feature maps smaller, seen in one run on an example.

A strided convolution or a pooling layer makes a map smaller. Where a block does so along several paths at once, as
residual blocks do, the whole block is one down-sampling. That is not read off its code but observed: NaN is put into
the block, zeros in place of what its strided layer gives, and where NaN comes out there is another path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from multitudes.core.calling import Input, call, tensors_in
from multitudes.core.copying import copied
from multitudes.surgery.layers import PRODUCTS
from multitudes.surgery.observe import observing

POOLINGS = (nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.FractionalMaxPool2d)
ADAPTIVE = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


class MedianPool(nn.Module):
    """The median of each feature map: `[B, C, H, W] -> [B, C, 1, 1]`; of an even number, the middle two's mean."""

    def forward(self, x: Tensor) -> Tensor:
        values = x.flatten(2).sort(-1).values
        count = values.shape[-1]
        return ((values[..., (count - 1) // 2] + values[..., count // 2]) / 2)[..., None, None]


GLOBAL = (*ADAPTIVE, MedianPool)
LAYERS = (*PRODUCTS, *POOLINGS, *GLOBAL, *NORMS)


@dataclass(eq=False)
class Call:
    """One call of a module while the network ran."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    start: int  # how many layers had run before
    inside: tuple[Call, ...]  # the blocks that it was called in, outermost first
    feeder: Call | None  # the layer whose output it read, where it read one as it was
    previous: Call | None  # the layer that ran last
    output: Any = None

    @property
    def input(self) -> Any:
        """What it is about: its first argument."""
        return self.args[0] if self.args else None

    @property
    def on_map(self) -> bool:
        """Whether it reads a feature map, `[B, C, H, W]`."""
        return isinstance(self.input, Tensor) and self.input.dim() == 4 and self.input.is_floating_point()

    @property
    def has_weights(self) -> bool:
        """Whether it computes with weights of its own, norms aside."""
        return not isinstance(self.module, NORMS) and any(True for _ in self.module.parameters())

    @property
    def pools(self) -> bool:
        """Whether it is a pooling layer."""
        return isinstance(self.module, (*POOLINGS, *GLOBAL)) and self.on_map

    @property
    def gives_one_value(self) -> bool:
        """Whether it is a pooling layer that gives one value for each map."""
        return self.pools and isinstance(self.output, Tensor) and self.output[0, 0].numel() == 1

    @property
    def passes_on(self) -> bool:
        """Whether it is a norm, an activation, a dropout, a padding: nothing that makes new features or pools."""
        if self.pools or isinstance(self.module, PRODUCTS):
            return False
        same = isinstance(self.output, Tensor) and self.on_map and self.output.shape == self.input.shape
        return same or not self.has_weights

    @property
    def downsamples(self) -> bool:
        """Whether it is a strided convolution or a pooling layer, also where the map is a single pixel already."""
        if not self.on_map:
            return False
        if isinstance(self.module, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d)):
            stride: Any = self.module.stride
            return max(stride if isinstance(stride, (tuple, list)) else (stride,)) > 1
        return self.pools and (self.gives_one_value or smaller(self.output, self.input))

    def origin(self) -> Call | None:
        """The last layer before this one that does not just pass on what it reads, as far as layers show it."""
        before = self.feeder or self.previous
        while before is not None and before.passes_on:
            before = before.feeder or before.previous
        return before


def smaller(output: Any, input: Any) -> bool:
    """Whether one feature map `[B, C, H, W]` is smaller than another."""
    maps = isinstance(output, Tensor) and isinstance(input, Tensor) and output.dim() == input.dim() == 4
    return maps and any(after < before for after, before in zip(output.shape[2:], input.shape[2:], strict=True))


class Run:
    """What was seen in one run of a network in evaluation: its layers' calls in order, and those of its blocks.

    A layer is a module without children, or one that torch's parametrisations or a subclass gave some. What runs is a
    copy of the network, which may keep something of what it is made to see.
    """

    def __init__(self, model: nn.Module, example: Input) -> None:
        self.model = copied(model)
        self.inputs = tensors_in(example)
        self.layers: list[Call] = []
        self.blocks: list[Call] = []
        self._open: list[Call] = []
        self._makers: dict[int, Call] = {}
        with observing(self.model), self._watching():
            self.output = call(self.model, example)

    def calls(self, name: str) -> list[Call]:
        """The calls of a module."""
        module = self.model.get_submodule(name)
        return [seen for seen in (*self.layers, *self.blocks) if seen.module is module]

    def reads_input(self, seen: Call) -> bool:
        """Whether it reads the network's own input, and not yet what a layer with weights has made of it."""
        if any(seen.input is given for given in self.inputs):
            return True
        return not any(layer.has_weights for layer in self.layers[: seen.start])

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        for name, module in self.model.named_modules():
            if name:
                handles += [
                    module.register_forward_pre_hook(
                        lambda m, args, kwargs, name=name: self._enter(name, m, args, kwargs), with_kwargs=True
                    ),
                    module.register_forward_hook(lambda m, args, y: self._leave(y)),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        feeder = self._makers.get(id(args[0])) if args else None
        previous = self.layers[-1] if self.layers else None
        self._open.append(Call(name, module, args, kwargs, len(self.layers), tuple(self._open), feeder, previous))

    def _leave(self, output: Any) -> None:
        seen = self._open.pop()
        seen.output = output  # kept, so that no other tensor gets its id
        if any(True for _ in seen.module.children()) and not isinstance(seen.module, LAYERS):
            self.blocks.append(seen)
        else:
            self.layers.append(seen)
            self._makers[id(output)] = seen


def downsamplings(run: Run) -> list[str]:
    """The layers and blocks that make feature maps smaller, in the order in which they run.

    Left out are those that read the network's own input; poolings that go on where another down-sampling left off,
    such as the max-pool of a stem; the global poolings of gates (squeeze-and-excitation); and the global
    pooling of pre-activation networks, whose last norm stands alone between blocks and head.
    """
    places: dict[str, None] = {}
    for seen in run.layers:
        if not seen.downsamples or run.reads_input(seen) or _continues(run, seen) or _after_lone_norm(seen):
            continue
        place = _place(seen)
        if place is not None and not any(run.reads_input(other) for other in run.calls(place)):
            places[place] = None
    return list(places)


def _continues(run: Run, seen: Call) -> bool:
    """A pooling right after another pooling; or one that is not global, right after a first strided convolution."""
    origin = seen.origin()
    if isinstance(seen.module, nn.Conv2d) or origin is None or not origin.downsamples:
        return False
    if isinstance(origin.module, nn.Conv2d):
        return run.reads_input(origin) and not isinstance(seen.module, GLOBAL)
    return True


def _after_lone_norm(seen: Call) -> bool:
    """A global pooling whose last norm reads what no layer gave: a sum of branches, as in pre-activation networks."""
    before = seen.feeder or seen.previous
    while before is not None and before.passes_on and not isinstance(before.module, NORMS):
        before = before.feeder or before.previous
    if not seen.gives_one_value or before is None or not isinstance(before.module, NORMS):
        return False
    origin = before.feeder
    while origin is not None and origin.passes_on:
        origin = origin.feeder
    return origin is None


def _place(seen: Call) -> str | None:
    """The layer itself, or the innermost block of which it is one of several paths; None inside a gate."""
    for block in reversed(seen.inside):
        if not block.on_map or not has_other_path(block, seen.module):
            continue
        if smaller(block.output, block.input):
            return block.name
        if isinstance(seen.module, GLOBAL):
            return None
        return block.name if block.input[0, 0].numel() == 1 else seen.name  # a single pixel cannot get smaller
    return seen.name


def has_other_path(block: Call, layer: nn.Module) -> bool:
    """Whether a block's input reaches its output around a layer: NaN gets through."""
    handle = layer.register_forward_hook(lambda m, args, y: tree_map(torch.zeros_like, y))
    try:
        with observing(block.module):
            nan = torch.full_like(block.input, torch.nan)
            output = block.module(nan, *block.args[1:], **block.kwargs)
    finally:
        handle.remove()
    return isinstance(output, Tensor) and bool(output.isnan().any())
