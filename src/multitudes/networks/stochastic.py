"""Stochastic layers and their random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.networks.devices import Meter
from multitudes.networks.seeds import mixed
from multitudes.networks.settings import override_attribute


class Stochastic(nn.Module):
    """A layer that draws random numbers in training and in evaluation.

    It computes one draw of one batch. A subclass's `forward` takes random numbers from `self.normal` and
    `self.uniform`; if `self.expects` is true, it computes with expectations instead.

    The class attribute `noise` is the kind of noise: `"rows"` (each row of the batch has its own), `"weights"` (weights
    for the whole batch), or `"network"` (all weights of a network, so that draws share no computation).

    >>> class Jitter(Stochastic):
    ...     def forward(self, x: Tensor) -> Tensor:
    ...         return x if self.expects else x + self.normal(x.shape, like=x)
    """

    noise = "rows"
    expects = False
    draw: Draw | None = None

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return standard normal numbers with the dtype and device of `like`."""
        if self.draw is not None:
            return self.draw.numbers("normal", tuple(shape), like.dtype, like.device)
        return torch.randn(tuple(shape), dtype=like.dtype, device=like.device)

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return numbers from [0, 1) with the dtype, at least float32, and the device of `like`."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.draw is not None:
            return self.draw.numbers("uniform", tuple(shape), dtype, like.device)
        return torch.rand(tuple(shape), dtype=dtype, device=like.device)

    def fold(self) -> nn.Module | None:
        """Return one draw as a plain layer, or None if there is none, for example if each row has its own noise."""
        return None

    def attach(self, network: nn.Module) -> None:
        """Make one draw for each call of a whole network: register `begin` and `end` as its forward hooks."""
        network.register_forward_pre_hook(self.begin)
        network.register_forward_hook(self.end, always_call=True)

    def begin(self, network: nn.Module, args: Any) -> None:
        """Draw before an attached network runs."""

    def end(self, network: nn.Module, args: Any, output: Any) -> None:
        """Discard the draw after the network has run."""


@dataclass
class Draw:
    """The random numbers of one draw.

    `index` is the number of the draw; under vmap, a batch of numbers. Memory is reserved from `meter`.
    """

    seed: int = 0
    index: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    meter: Meter | None = None
    _generators: dict[tuple[int, torch.device], torch.Generator] = field(default_factory=dict)

    def numbers(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the draw's next random numbers."""
        several = torch._C._functorch.is_batchedtensor(self.index)
        ask = _Numbers.apply if several else _Numbers.forward  # apply costs 0.1 ms
        return ask(self.index, self, kind, shape, dtype, device)

    def of_member(self, index: int | Tensor, members: int) -> AbstractContextManager[None]:
        """Use the random numbers of one member inside `with`."""
        return self.at(self.index * members + index)

    @contextmanager
    def at(self, index: Tensor) -> Iterator[None]:
        """Use the random numbers of another draw inside `with`."""
        before, self.index = self.index, index
        try:
            yield
        finally:
            self.index = before

    def generator(self, draw_index: int, device: torch.device) -> torch.Generator:
        key = draw_index, device
        if key not in self._generators:
            self._generators[key] = torch.Generator(device).manual_seed(mixed(self.seed, draw_index))
        return self._generators[key]


class _Numbers(torch.autograd.Function):
    """Random numbers `[*draws, *shape]`, with a generator per draw; under vmap, those of the calling draw."""

    @staticmethod
    def forward(
        draw_index: Tensor, draw: Draw, kind: str, shape: Any, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if draw.meter is not None:
            draw.meter.reserve(draw_index.numel() * math.prod(shape) * dtype.itemsize)
        numbers = torch.empty((*draw_index.shape, *shape), dtype=dtype, device=device)
        for row, index in zip(numbers.view(draw_index.numel(), *shape), draw_index.flatten().tolist(), strict=True):
            generator = draw.generator(index, numbers.device)
            if kind == "normal":
                row.normal_(generator=generator)
            else:
                row.uniform_(generator=generator)
        return numbers

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None,) * 6

    @staticmethod
    def vmap(info: Any, in_dims: Any, draw_index: Tensor, *rest: Any) -> tuple[Tensor, int]:
        draw_index = draw_index.movedim(in_dims[0], 0)
        several = torch._C._functorch.is_batchedtensor(draw_index)  # members under vmap inside draws under vmap
        return (_Numbers.apply if several else _Numbers.forward)(draw_index, *rest), 0


# -- all layers of a network -------------------------------------------------------------------------------


def stochastic_layers(network: nn.Module) -> list[Stochastic]:
    """Return the layers that draw."""
    return [module for module in network.modules() if isinstance(module, Stochastic)]


def attached_layers(network: nn.Module) -> list[Stochastic]:
    """Return the layers attached to a network (see `Stochastic.attach`)."""
    owners = [getattr(hook, "__self__", None) for hook in network._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, Stochastic)]


def detach_layers(network: nn.Module) -> None:
    """Remove the hooks of the layers attached to a network."""
    for hooks in (network._forward_pre_hooks, network._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Stochastic):
                del hooks[key]
                network._forward_hooks_always_called.pop(key, None)


def expecting(network: nn.Module) -> AbstractContextManager[None]:
    """Make stochastic layers compute with expectations inside `with`."""
    return override_attribute(stochastic_layers(network), "expects", True)


@contextmanager
def drawing(layers: Sequence[Stochastic], draw: Draw) -> Iterator[None]:
    """Make the layers take their random numbers from `draw` inside `with`."""
    before = [vars(layer).pop("draw", None) for layer in layers]
    for layer in layers:
        layer.draw = draw
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            vars(layer).pop("draw", None)  # delattr could find a child of that name
            if own is not None:
                layer.draw = own


def as_member(network: nn.Module, index: int | Tensor, members: int) -> AbstractContextManager[None]:
    """Use the random numbers of one member inside `with`, if the network is making a draw."""
    for layer in stochastic_layers(network):
        if layer.draw is not None:
            return layer.draw.of_member(index, members)
    return nullcontext()
