"""Find where a network makes its feature maps smaller, in one run on an example.

A strided convolution or a pooling layer makes a map smaller. A block that does so along several paths, such as a
residual block, is one down-sampling. To find other paths, the block gets NaN as input while its strided layer returns
zeros: a NaN in the output took another path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from multitudes.networks.calls import Input, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.trace import Call, hooked, observing, record
from multitudes.surgery.select import PRODUCTS

POOLINGS = (nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.FractionalMaxPool2d)
ADAPTIVE = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


class MedianPool(nn.Module):
    """The median of each feature map, `[B, C, H, W] -> [B, C, 1, 1]`; the mean of the middle two of an even number."""

    def forward(self, x: Tensor) -> Tensor:
        values = x.flatten(2).sort(-1).values
        count = values.shape[-1]
        return ((values[..., (count - 1) // 2] + values[..., count // 2]) / 2)[..., None, None]


GLOBAL = (*ADAPTIVE, MedianPool)
LAYERS = (*PRODUCTS, *POOLINGS, *GLOBAL, *NORMS)


@dataclass(eq=False)
class LayerCall(Call):
    """A call of a module, with links to the layers before it."""

    inside: tuple[LayerCall, ...]
    start: int = 0  # number of layers that ran before
    feeder: LayerCall | None = None  # the layer whose output it read, unchanged
    previous: LayerCall | None = None  # the layer that ran last

    @property
    def input(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else None

    @property
    def on_map(self) -> bool:
        """True if it reads a feature map, `[B, C, H, W]`."""
        return isinstance(self.input, Tensor) and self.input.dim() == 4 and self.input.is_floating_point()

    @property
    def has_weights(self) -> bool:
        """True if it has weights, except norms."""
        return not isinstance(self.module, NORMS) and any(True for _ in self.module.parameters())

    @property
    def pools(self) -> bool:
        """True for a pooling layer."""
        return isinstance(self.module, (*POOLINGS, *GLOBAL)) and self.on_map

    @property
    def gives_one_value(self) -> bool:
        """True for a pooling layer that returns one value per map."""
        return self.pools and isinstance(self.output, Tensor) and self.output[0, 0].numel() == 1

    @property
    def passes_on(self) -> bool:
        """True for norms, activations, dropout and padding, which neither pool nor make features."""
        if self.pools or isinstance(self.module, PRODUCTS):
            return False
        same = isinstance(self.output, Tensor) and self.on_map and self.output.shape == self.input.shape
        return same or not self.has_weights

    @property
    def downsamples(self) -> bool:
        """True for a strided convolution or a pooling layer, even on a single pixel."""
        if not self.on_map:
            return False
        if isinstance(self.module, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d)):
            stride: Any = self.module.stride
            return max(stride if isinstance(stride, (tuple, list)) else (stride,)) > 1
        return self.pools and (self.gives_one_value or smaller(self.output, self.input))

    def behind(self) -> Iterator[LayerCall]:
        """Yield the layers before this one, last first: each made the input of the next, or ran just before it."""
        before = self.feeder or self.previous
        while before is not None:
            yield before
            before = before.feeder or before.previous


def smaller(output: Any, input: Any) -> bool:
    """Return whether one feature map `[B, C, H, W]` is smaller than another."""
    maps = isinstance(output, Tensor) and isinstance(input, Tensor) and output.dim() == input.dim() == 4
    return maps and any(after < before for after, before in zip(output.shape[2:], input.shape[2:], strict=True))


class LayerTrace:
    """The calls of layers and blocks in one run of a copy of the network, in order.

    A layer is a module of the classes in `LAYERS`, or any module without children.
    """

    def __init__(self, model: nn.Module, example: Input) -> None:
        self.model = copied(model)
        self.inputs = tensors_in(example)
        self.layers: list[LayerCall] = []
        names = [name for name, _ in self.model.named_modules() if name]
        trace = record(self.model, example, names)
        self.output = trace.output
        self._steps: dict[Call, LayerCall] = {}
        makers: dict[int, LayerCall] = {}
        for call, begins in trace.steps:
            if begins:
                own = vars(call) | {"inside": tuple(self._steps[outer] for outer in call.inside)}
                feeder = makers.get(id(call.args[0])) if call.args else None
                previous = self.layers[-1] if self.layers else None
                self._steps[call] = LayerCall(**own, start=len(self.layers), feeder=feeder, previous=previous)
            elif isinstance(call.module, LAYERS) or not any(True for _ in call.module.children()):
                self.layers.append(self._steps[call])
                makers[id(call.output)] = self._steps[call]  # ids are unique, since the trace holds all outputs

    def calls(self, name: str) -> list[LayerCall]:
        """Return the calls of a module."""
        module = self.model.get_submodule(name)
        return [seen for seen in self._steps.values() if seen.module is module]

    def reads_input(self, seen: LayerCall) -> bool:
        """Return whether a layer reads the network's input, before any layer with weights."""
        if any(seen.input is given for given in self.inputs):
            return True
        return not any(layer.has_weights for layer in self.layers[: seen.start])


def downsamplings(run: LayerTrace) -> list[str]:
    """Return the layers and blocks that make feature maps smaller, in the order in which they run.

    This excludes layers that read the network's input; poolings that continue another down-sampling, such as the
    max-pool of a stem; global poolings of gates (squeeze-and-excitation); and the global pooling of pre-activation
    networks, after a norm between blocks and head.
    """
    places: dict[str, None] = {}
    for seen in run.layers:
        if not seen.downsamples or run.reads_input(seen) or _continues(run, seen) or _after_lone_norm(seen):
            continue
        place = _place(seen)
        if place is not None and not any(run.reads_input(other) for other in run.calls(place)):
            places[place] = None
    return list(places)


def _continues(run: LayerTrace, seen: LayerCall) -> bool:
    """Return whether a pooling follows a pooling, or is local and follows the first strided convolution."""
    origin = next((before for before in seen.behind() if not before.passes_on), None)
    if isinstance(seen.module, nn.Conv2d) or origin is None or not origin.downsamples:
        return False
    first = isinstance(origin.module, nn.Conv2d)
    return not first or (run.reads_input(origin) and not isinstance(seen.module, GLOBAL))


def _after_lone_norm(seen: LayerCall) -> bool:
    """Return whether a global pooling follows a norm of a sum of branches, as in pre-activation networks."""
    norm = next((b for b in seen.behind() if isinstance(b.module, NORMS) or not b.passes_on), None)
    if not seen.gives_one_value or norm is None or not isinstance(norm.module, NORMS):
        return False
    origin = norm.feeder
    while origin is not None and origin.passes_on:
        origin = origin.feeder
    return origin is None


def _place(seen: LayerCall) -> str | None:
    """Return the layer, or the innermost block in which it is one of several paths; None inside a gate."""
    for block in reversed(seen.inside):
        if not block.on_map or not has_other_path(block, seen.module):
            continue
        if smaller(block.output, block.input):
            return block.name
        if isinstance(seen.module, GLOBAL):
            return None
        return block.name if block.input[0, 0].numel() == 1 else seen.name  # a single pixel cannot get smaller
    return seen.name


def has_other_path(block: LayerCall, layer: nn.Module) -> bool:
    """Return whether a NaN in a block's input reaches its output around a layer."""
    others = {name for name, module in block.module.named_modules(remove_duplicate=False) if module is layer}
    with (
        observing(block.module),
        hooked(block.module, others, lambda _, module, args, y: tree_map(torch.zeros_like, y)),
    ):
        nan = torch.full_like(block.input, torch.nan)
        output = block.module(nan, *block.args[1:], **block.kwargs)
    return isinstance(output, Tensor) and bool(output.isnan().any())
