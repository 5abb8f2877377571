"""Draws: many answers of a network that draws, for little more than what follows its first random number.

A stochastic layer computes one draw for one batch and knows nothing of how many there are. The draws run under
`torch.vmap`, which computes what comes before the first stochastic layer once. Each draw has a random source of
its own, made from the seed and the draw's number, so that the same seed gives the same draws however they are
cut into chunks, and whichever way they run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, InputError, tensors_in, tile
from multitudes.core.draws.memory import Meter, OverBudget, free_bytes, in_bytes
from multitudes.core.draws.stochastic import Draw, drawing, stochastic_layers
from multitudes.core.draws.vmap import vmap_friendly
from multitudes.core.lending import Attributes, lent, written_attributes
from multitudes.core.proof import Looks, alike, kind_of, trial, unmoved
from multitudes.core.seeding import mixed

CACHED = 128e6
"""The bytes that draws may hold at once on a CPU, however much memory there is: more of them take longer each."""


class Different(ValueError):
    """Two ways to make the same draws give different predictions."""


Predict = Callable[[Input], Tensor]
"""One draw of every member: `[B, ...] -> [M, B, ...]`."""


@dataclass
class DrawCache:
    """What making draws has taught about a network."""

    way: str = "vmap"  # under vmap; "expand": as one batch of all draws' rows; "loop": one after the other
    draws_elsewhere: bool = False  # random numbers beside those that its stochastic layers ask for
    proven: set[Any] = field(default_factory=set)  # ways, with the kinds of inputs for which they were tried
    costs: dict[Any, Cost] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """Bytes alive at once: by what all draws share, when the first random number is drawn, and by each draw."""

    shared: float
    each: float


@dataclass
class Draws:
    """Draws of one input, each known by its number and the seed."""

    network: nn.Module
    predict: Predict
    x: Input
    cache: DrawCache
    seed: int | None = None
    memory: str | float | None = None
    expands: bool = True

    def make(self, numbers: range) -> Tensor:
        """The draws of these numbers, `[D, M, B, ...]`."""
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise InputError(f"seed must be a whole number, got {self.seed!r}")
        if self.memory is not None:
            in_bytes(self.memory)  # an error of its own, before anything else can go wrong
        self.layers = stochastic_layers(self.network)
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        self.draw = Draw(seed)
        with drawing(self.layers, self.draw), self._own_random_state() as used:
            result, way = self._first_way_that_works(numbers)
            if way == "loop" or not used():
                return result
        # What it draws elsewhere would depend on the chunks, so each draw must have a random state of its own.
        self.cache.draws_elsewhere = True
        return self.make(numbers)

    @contextmanager
    def _own_random_state(self) -> Iterator[Callable[[], bool]]:
        """With a seed, torch's random state is left as it was; yields whether it has been used."""
        if self.seed is None:
            yield lambda: False
            return
        with torch.random.fork_rng([g.device for g in self._generators() if g.device.type == "cuda"]):
            before = [generator.get_state() for generator in self._generators()]
            yield lambda: any(
                not torch.equal(state, generator.get_state())
                for state, generator in zip(before, self._generators(), strict=True)
            )

    def _generators(self) -> list[torch.Generator]:
        """Torch's own random sources, on the CPU and on the devices of the input."""
        devices = {tensor.device.index for tensor in tensors_in(self.x) if tensor.is_cuda}
        return [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]

    # -- ways --------------------------------------------------------------------------------------------

    def _first_way_that_works(self, numbers: range) -> tuple[Tensor, str]:
        trouble = ""
        for way in (ways := self._ways(len(numbers))):
            try:
                result = self._run(way, numbers) if self._is_proven(way) else self._proven_run(way, numbers)
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                if way == ways[-1] or isinstance(error, torch.OutOfMemoryError):
                    raise
                self.draw.forget()
                seen = f"{_culprit(self.network, error.__traceback__)} ({str(error).splitlines()[0]})"
                trouble = trouble or (str(error) if isinstance(error, Different) else f"vmap cannot run {seen}")
                continue
            if trouble:
                self.cache.way = way
                how = "as one large batch" if way == "expand" else "one after the other"
                warnings.warn(f"{trouble}, so the draws run {how}, which is slower", stacklevel=2)
            return result, way
        raise AssertionError("unreachable: the last way returns or raises")

    def _is_proven(self, way: str) -> bool:
        return way == "loop" or (way, torch.is_grad_enabled(), kind_of(self.x)) in self.cache.proven

    def _proven_run(self, way: str, numbers: range) -> Tensor:
        """Make draws by a quick way for the first time, and compare them with draws made one by one.

        Under vmap one of them is made again. As one batch, two are tried with moved weights before, since what lets
        rows see each other may be behind a gate that is still closed.
        """
        if way == "expand":
            looks = Looks([*self.network.parameters(), *tensors_in(self.x)])
            with trial(self.network, self.x), looks:
                self._compare(self._run(way, range(2)), range(2))
            if looks.seen:
                raise Different("the network's code looks at values, so that rows decide for each other")
        attributes: Attributes = {}
        versions = [buffer._version for buffer in self.network.buffers()]
        with written_attributes(self.network, attributes), lent(self.network, {}) as written:
            result = self._run(way, numbers)
        if attributes or written or versions != [buffer._version for buffer in self.network.buffers()]:
            name = next(iter([*written, *(key for _, key in attributes), "a buffer"]))
            raise Different(f"the network writes {name!r} as it runs, which each draw must do by itself")
        with unmoved(self.network, self.x):
            self._compare(result[-1:], numbers[-1:])
        self.cache.proven.add((way, torch.is_grad_enabled(), kind_of(self.x)))
        return result

    def _compare(self, got: Tensor, numbers: range) -> None:
        self.draw.forget()
        want = torch.stack([self._one(number) for number in numbers])
        self.draw.forget()
        if not alike(got.flatten(0, 1), want.flatten(0, 1)):
            raise Different("at once the network gives other predictions than draw by draw")

    def _ways(self, draws: int) -> list[str]:
        kinds = {layer.noise for layer in self.layers}
        if draws == 1 or "network" in kinds or (self.cache.draws_elsewhere and self.seed is not None):
            return ["loop"]
        if self.cache.way == "loop":
            return ["loop"]
        ways = ["vmap", *(["expand"] if self.expands and kinds == {"rows"} else []), "loop"]
        return ways[ways.index(self.cache.way) :]

    def _run(self, way: str, numbers: range) -> Tensor:
        if way == "loop":
            return torch.stack([self._one(number) for number in numbers])
        several = self._under_vmap if way == "vmap" else self._as_one_batch
        parts: list[Tensor] = []
        done = 0
        while done < len(numbers):
            part = self._within_budget(several, numbers[done:])
            parts.append(part)
            done += len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _one(self, number: int) -> Tensor:
        if self.seed is not None:
            for generator in self._generators():
                generator.manual_seed(mixed(self.seed, number))
        self.draw.index = torch.tensor(number)
        return self.predict(self.x)

    def _under_vmap(self, numbers: range) -> Tensor:
        def one(draw_index: Tensor) -> Tensor:
            self.draw.index = draw_index
            with vmap_friendly(lambda: self.draw.begun):
                return self.predict(self.x)

        self.draw.begun = False
        return torch.vmap(one, randomness="different")(torch.arange(numbers.start, numbers.stop))

    def _as_one_batch(self, numbers: range) -> Tensor:
        if self.draw.meter is not None:  # a first layer's result may be many times as large as its input
            self.draw.meter.reserve(16 * len(numbers) * sum(t.nbytes for t in tensors_in(self.x)))
        self.draw.index = torch.arange(numbers.start, numbers.stop)
        self.draw.rows = len(numbers)
        try:
            predictions = self.predict(tile(self.x, len(numbers)))
        finally:
            self.draw.rows = None
        return predictions.unflatten(1, (len(numbers), -1)).transpose(0, 1)

    # -- memory ------------------------------------------------------------------------------------------

    def _within_budget(self, several: Callable[[range], Tensor], numbers: range) -> Tensor:
        """As many of the draws as fit into the budget, one at least.

        How much one takes is measured the first time. A chunk that turns out too large is broken off: at half the
        budget, since an operation's result is seen only when it is there.
        """
        key = cost_key(self.x)
        most = self.budget if tensors_in(self.x)[0].is_cuda else CACHED
        cost = self.cache.costs.get(key)
        if cost is not None:
            room = min(self.budget - cost.shared, most)
            return several(numbers[: max(1, int(room / cost.each))])
        count = len(numbers)
        while True:
            one = count == 1
            meter = self.draw.meter = Meter(inf, inf) if one else Meter(self.budget / 2, most)
            try:
                with meter:
                    result = several(numbers[:count])
                shared = meter.base or 0
                self.cache.costs[key] = Cost(shared, max(1, meter.peak - shared) / count)
                return result
            except OverBudget:
                self.draw.forget()
                count = (count + 1) // 2
            finally:
                self.draw.meter = None

    @cached_property
    def budget(self) -> float:
        """How many bytes the draws may hold at once."""
        return free_bytes(tensors_in(self.x)[0].device) / 4 if self.memory is None else in_bytes(self.memory)


def cost_key(x: Input) -> Any:
    """What inputs have in common of which draws cost the same memory."""
    return torch.is_grad_enabled(), *((tensor.shape, tensor.dtype) for tensor in tensors_in(x))


def _culprit(network: nn.Module, traceback: TracebackType | None) -> str:
    """The innermost of the network's own modules that an error passed through."""
    names = {id(module): name for name, module in network.named_modules()}
    found = "the network itself"
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if name := names.get(id(module)):
            found = f"layer {name!r} ({type(module).__name__})"
        traceback = traceback.tb_next
    return found
