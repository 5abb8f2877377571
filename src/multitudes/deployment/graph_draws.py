"""Draws for CUDA graphs: a network's draws as a function of its input and of random numbers.

One run records the random numbers that layers request (`networks/stochastic.py`). In a graph these numbers are tensors,
which kernels of the graph fill from the usual generators, so that a seed gives the same draws as in the network.
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
from multitudes.networks.calls import Input, map_tensors, plain_attention, tensors_in
from multitudes.networks.devices import free_bytes
from multitudes.networks.seeds import mixed
from multitudes.networks.settings import override_attribute
from multitudes.networks.stochastic import Draw, Stochastic, drawing, stochastic_layers
from multitudes.networks.vmap import vmap_level


@dataclass(frozen=True)
class NumberRequest:
    """Numbers that a layer requests in each draw; draw d takes them from the source `d * stride + start`."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: int
    start: int


class _SourceDraw(Draw):
    """A draw that tracks the source of its numbers, since each member has its own sources."""

    def __init__(self) -> None:
        super().__init__(seed=0)
        self.stride, self.start = 1, 0

    @contextmanager
    def of_member(self, index: int | Tensor, members: int) -> Iterator[None]:
        if isinstance(index, Tensor):
            raise CannotTrace("its members draw together")
        before = self.stride, self.start
        self.stride, self.start = self.stride * members, self.start * members + index
        try:
            with super().of_member(index, members):
                yield
        finally:
            self.stride, self.start = before


class _RecordingDraw(_SourceDraw):
    """A draw that records the requests for numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[NumberRequest] = []

    def numbers(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.requests.append(NumberRequest(kind, shape, dtype, self.stride, self.start))
        return super().numbers(kind, shape, dtype, device)


class _SuppliedDraw(_SourceDraw):
    """A draw that returns given numbers."""

    given: Iterator[Tensor]

    def numbers(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return next(self.given)


class Noise:
    """The random numbers of several draws: a tensor `[D, ...]` per request, and their generators."""

    def __init__(self, requests: Sequence[NumberRequest], draws: int, device: torch.device) -> None:
        self.requests, self.draws = requests, draws
        self.numbers = [torch.empty((draws, *each.shape), dtype=each.dtype, device=device) for each in requests]
        sources = {number * each.stride + each.start for each in requests for number in range(draws)}
        self.generators = {source: torch.Generator(device) for source in sorted(sources)}
        self.seed(0)
        self.fill()  # a network may reject uninitialized values

    def seed(self, seed: int | None) -> None:
        """Seed the generators; None draws a seed from torch's random state."""
        chosen = int(torch.randint(2**62, ())) if seed is None else seed
        for source, generator in self.generators.items():
            generator.manual_seed(mixed(chosen, source))

    def fill(self) -> None:
        """Draw the numbers, in the order of the requests."""
        for each, numbers in zip(self.requests, self.numbers, strict=True):
            for draw in range(self.draws):
                generator = self.generators[draw * each.stride + each.start]
                row = numbers[draw]
                row.normal_(generator=generator) if each.kind == "normal" else row.uniform_(generator=generator)


@torch.no_grad()
def noise_of(plain: TorchEngine, x: Input, draws: int) -> Noise:
    """Return the noise of draws on inputs like `x`; raise `CannotTrace` if draws cannot be batched."""
    net, cache = plain.net, plain.net._draw_cache
    plain(x, draws=draws, seed=0)  # chooses how draws run, and measures their cost
    if cache.seeds_torch or cache.runner != "vmapped" or any(s.noise == "network" for s in _layers(net)):
        raise CannotTrace("its draws share no computation, or run one by one")
    cost, room = cache.costs.get(cost_key(x)), free_bytes(plain.device) / 4
    if cost is not None and cost.shared + draws * cost.each > room:
        raise CannotTrace(f"not enough memory for {draws} draws at once")
    draw = _RecordingDraw()
    with plain.precision(), _drawing(net, draw), vmap_level(draws) as each:
        draw.index = each.own(torch.arange(draws))
        net._predictions(x)
    if not draw.requests:
        raise CannotTrace("its layers request no random numbers")
    return Noise(draw.requests, draws, plain.device)


def draw_function(plain: TorchEngine, x: Input) -> Callable[..., Tensor]:
    """Return a network's draws `[M * D, B, ...]` as a function of the tensors in `x` and of random numbers."""
    net, count = plain.net, len(tensors_in(x))

    def call(*tensors: Tensor) -> Tensor:
        own = iter(tensors[:count])
        given = map_tensors(lambda _: next(own), x)
        numbers, draw = tensors[count:], _SuppliedDraw()
        with plain.precision(), _drawing(net, draw), vmap_level(len(numbers[0])) as each:
            draw.given = map(each.own, numbers)
            found = each.whole(net._predictions(given))
        return found.transpose(0, 1).flatten(0, 1)

    return call


def _layers(net: Multitude) -> list[Stochastic]:
    return stochastic_layers(net.network)


@contextmanager
def _drawing(net: Multitude, draw: Draw) -> Iterator[None]:
    """Take the layers' numbers from `draw`, and run members one by one, inside the context."""
    with (
        plain_attention(),
        drawing(_layers(net), draw),
        override_attribute([net] if isinstance(net, Members) else [], "_runner", "loop"),
    ):
        yield
