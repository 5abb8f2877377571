"""Draws for CUDA graphs: a network's draws as a function of its input and of random numbers.

Stochastic layers request their numbers in one place (`networks/stochastic.py`). One run records these requests. In a
graph the numbers are tensors, filled by the graph's kernels from the usual sources, so a seed gives the same draws as
the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from multitudes.deployment.engines import TorchEngine
from multitudes.deployment.operation_graph import CannotTrace
from multitudes.draws.engine import cost_key
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude
from multitudes.networks.calls import Input, mapped, plain_attention, tensors_in
from multitudes.networks.memory import free_bytes
from multitudes.networks.seeds import mixed
from multitudes.networks.settings import holding
from multitudes.networks.stochastic import Draw, Stochastic, drawing, stochastic_layers
from multitudes.networks.vmap import at_once


@dataclass(frozen=True)
class NumberRequest:
    """Numbers that a layer requests in each draw; those of draw d come from the source `d * stride + start`."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: int
    start: int


class _SourceDraw(Draw):
    """A draw that tracks the source of its numbers: each member of a network has its own sources."""

    def __init__(self) -> None:
        super().__init__(seed=0)
        self.stride, self.start = 1, 0

    @contextmanager
    def of_member(self, index: int | Tensor, members: int) -> Iterator[None]:
        if isinstance(index, Tensor):
            raise CannotTrace("its members draw at once")
        before = self.stride, self.start
        self.stride, self.start = self.stride * members, self.start * members + index
        try:
            with super().of_member(index, members):
                yield
        finally:
            self.stride, self.start = before


class _RecordingDraw(_SourceDraw):
    """A draw that records the requested numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[NumberRequest] = []

    def numbers(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.requests.append(NumberRequest(kind, shape, dtype, self.stride, self.start))
        return super().numbers(kind, shape, dtype, device)


class _SuppliedDraw(_SourceDraw):
    """A draw with given numbers."""

    given: Iterator[Tensor]

    def numbers(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return next(self.given)


class Noise:
    """The random numbers of several draws: a tensor `[D, ...]` per request, and their sources."""

    def __init__(self, requests: Sequence[NumberRequest], draws: int, device: torch.device) -> None:
        self.requests, self.draws = requests, draws
        self.numbers = [torch.empty((draws, *each.shape), dtype=each.dtype, device=device) for each in requests]
        sources = {number * each.stride + each.start for each in requests for number in range(draws)}
        self.generators = {source: torch.Generator(device) for source in sorted(sources)}
        self.seed(0)
        self.fill()  # arbitrary values may be invalid for a network

    def seed(self, seed: int | None) -> None:
        """Seed the generators; None takes a seed from torch's random state."""
        chosen = int(torch.randint(2**62, ())) if seed is None else seed
        for source, generator in self.generators.items():
            generator.manual_seed(mixed(chosen, source))

    def fill(self) -> None:
        """Draw the numbers, in the order in which the network requests them."""
        for each, numbers in zip(self.requests, self.numbers, strict=True):
            for draw in range(self.draws):
                generator = self.generators[draw * each.stride + each.start]
                row = numbers[draw]
                row.normal_(generator=generator) if each.kind == "normal" else row.uniform_(generator=generator)


@torch.no_grad()
def noise_of(plain: TorchEngine, x: Input, draws: int) -> Noise:
    """Return the noise for draws of a network on inputs like `x`; raise `CannotTrace` if they cannot be batched."""
    net, cache = plain.net, plain.net._draw_cache
    plain(x, draws=draws, seed=0)  # determines how draws are made and their cost
    if cache.seeds_torch or cache.runner != "vmapped" or any(s.noise == "network" for s in _layers(net)):
        raise CannotTrace("its draws have nothing in common, or are made one by one")
    cost, room = cache.costs.get(cost_key(x)), free_bytes(plain.device) / 4
    if cost is not None and cost.shared + draws * cost.each > room:
        raise CannotTrace(f"there is not enough memory for {draws} draws at once")
    draw = _RecordingDraw()
    with plain.precision(), _drawing(net, draw), at_once(draws) as each:
        draw.index = each.own(torch.arange(draws))
        net._predictions(x)
    if not draw.requests:
        raise CannotTrace("its layers ask for no random numbers")
    return Noise(draw.requests, draws, plain.device)


def draw_function(plain: TorchEngine, x: Input) -> Callable[..., Tensor]:
    """Return a network's draws `[M * D, B, ...]` as a function of the tensors in `x` and of its noise."""
    net, count = plain.net, len(tensors_in(x))

    def call(*tensors: Tensor) -> Tensor:
        own = iter(tensors[:count])
        given = mapped(lambda _: next(own), x)
        numbers, draw = tensors[count:], _SuppliedDraw()
        with plain.precision(), _drawing(net, draw), at_once(len(numbers[0])) as each:
            draw.given = map(each.own, numbers)
            found = each.whole(net._predictions(given))
        return found.transpose(0, 1).flatten(0, 1)

    return call


def _layers(net: Multitude) -> list[Stochastic]:
    return stochastic_layers(net.network)


@contextmanager
def _drawing(net: Multitude, draw: Draw) -> Iterator[None]:
    """Make layers take their numbers from `draw`, and run members one after the other, inside the context."""
    with (
        plain_attention(),
        drawing(_layers(net), draw),
        holding([net] if isinstance(net, Members) else [], "_runner", "loop"),
    ):
        yield
