"""Draws: many predictions of a network that draws.

A stochastic layer computes one draw for one batch. There are two runners: `vmapped` makes all draws at once, under
vmap, which computes everything before the first stochastic layer once; `one_by_one` is a loop, and always right. Each
draw has a random source of its own, made from the seed and the draw's number, so that a seed gives the same draws with
both runners and in chunks of any size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor, nn

from multitudes.core.at_once import at_once
from multitudes.core.calling import Input, InputError, kind_of, tensors_in
from multitudes.core.dispatching import NumbersDrawn
from multitudes.core.draws.memory import Meter, OverBudget, free_bytes, in_bytes
from multitudes.core.draws.stochastic import Draw, Stochastic, drawing, expecting
from multitudes.core.proof import FAILURES, Verdicts, difference
from multitudes.core.seeding import mixed, seeded, torch_generators
from multitudes.core.settings import holding
from multitudes.core.trace import Trace, recording, unmoved

CACHED = 128e6
"""Bytes that draws may hold at once on a CPU, however much memory there is: with more, each draw takes longer."""


@dataclass
class Run:
    """A network that draws, and an input; `predict` makes one draw of every member, `[B, ...] -> [M, B, ...]`."""

    network: nn.Module
    layers: Sequence[Stochastic]
    predict: Callable[[Input], Tensor]
    x: Input
    seed: int = 0
    memory: float | None = None

    def budget(self) -> float:
        """Return how many bytes draws may hold at once: by default a quarter of what is free."""
        return free_bytes(tensors_in(self.x)[0].device) / 4 if self.memory is None else self.memory


@dataclass(frozen=True)
class Cost:
    """Bytes alive at once: `shared` by all draws, when the first random number is drawn, and for `each` draw."""

    shared: float
    each: float


def one_by_one(run: Run, numbers: range, seeds_torch: bool = False) -> Tensor:
    """Make the draws of these numbers one after the other: `[D, M, B, ...]`.

    With `seeds_torch`, torch's own random state is seeded for each draw, and put back after it, for networks whose code
    draws from it. Other threads see that state meanwhile; there is no other way to give such code a seed.
    """
    drawn = []
    for number in numbers:
        own_random_state = seeded(mixed(run.seed, number)) if seeds_torch else nullcontext()
        with drawing(run.layers, Draw(run.seed, torch.tensor(number))), own_random_state:
            drawn.append(run.predict(run.x))
    return torch.stack(drawn)


def vmapped(run: Run, numbers: range, meter: Meter | None = None) -> Tensor:
    """Make the draws of these numbers under vmap: `[D, M, B, ...]`."""
    with at_once(len(numbers)) as draws:
        index = draws.own(torch.arange(numbers.start, numbers.stop))
        with drawing(run.layers, Draw(run.seed, index, meter)):
            return draws.whole(run.predict(run.x))


@dataclass
class Draws:
    """Make a multitude's draws. The fields are caches, which no file keeps.

    `runner` is "vmapped" until vmap fails, or gives other draws than `one_by_one`.
    """

    runner: str = "vmapped"
    seeds_torch: bool = False  # whether random numbers come from torch's own state as well
    verdicts: Verdicts = field(default_factory=Verdicts)
    costs: dict[Hashable, Cost] = field(default_factory=dict)

    def make(self, run: Run, numbers: range, seed: int | None = None, memory: str | float | None = None) -> Tensor:
        """Make the draws of these numbers: `[D, M, B, ...]`."""
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InputError(f"seed must be a whole number, got {seed!r}")
        run.memory = None if memory is None else in_bytes(memory)
        run.seed = int(torch.randint(2**62, ())) if seed is None else seed
        return self._drawn(run, numbers) if seed is None else self._seeded(run, numbers)

    def _seeded(self, run: Run, numbers: range) -> Tensor:
        """Make draws that a seed repeats; leave torch's random state as it was."""
        if not self.seeds_torch:
            before = [(generator, generator.get_state()) for generator in torch_generators(run.x)]
            drawn = self._drawn(run, numbers)
            same = all(torch.equal(generator.get_state(), state) for generator, state in before)
            if same or not _draws_from_torch(run, numbers):  # another thread moved it
                return drawn
            for generator, state in before:
                generator.set_state(state)
            self.seeds_torch = True
        return one_by_one(run, numbers, seeds_torch=True)

    def _drawn(self, run: Run, numbers: range) -> Tensor:
        """Make draws under vmap where that works and they share some computation; otherwise one by one."""
        nothing_shared = len(numbers) == 1 or any(layer.noise == "network" for layer in run.layers)
        if self.runner == "one_by_one" or nothing_shared:
            return one_by_one(run, numbers)
        try:
            return self._in_chunks(run, numbers)
        except OverBudget:  # two draws are too many
            return one_by_one(run, numbers)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            place, trouble = _culprit(run.network, error.__traceback__), str(error).splitlines()[0]
        drawn = one_by_one(run, numbers)  # an error where the input does not fit
        self.runner = "one_by_one"
        warnings.warn(
            f"vmap cannot run {place} ({trouble}), so the draws run one after the other, which is slower", stacklevel=2
        )
        return drawn

    def _in_chunks(self, run: Run, numbers: range) -> Tensor:
        """Make draws under vmap, as many at once as fit; two show for each new size how much memory they take."""
        key = cost_key(run.x)
        if key not in self.costs:
            self.costs[key] = self._cost(run, numbers[-2:])
        cost, size = self.costs[key], len(numbers)
        if cost.shared + size * cost.each > min(CACHED, run.memory or CACHED):
            budget = run.budget()
            most = budget if tensors_in(run.x)[0].is_cuda else CACHED
            size = int(min(budget - cost.shared, most) / cost.each)
        if size <= 1:  # chunks of one share nothing
            return one_by_one(run, numbers)
        parts = [vmapped(run, numbers[start : start + size]) for start in range(0, len(numbers), size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cost(self, run: Run, numbers: range) -> Cost:
        """Return what these draws cost under vmap; raise an error if they differ from draws made one by one."""
        meter, written = Meter(run.budget() / 2), Trace()  # an operation's result is seen only when it is there
        with unmoved(run.network, run.x, written), meter:
            vmapped(run, numbers, meter)
        runner = "vmapped", torch.is_grad_enabled()
        try:
            reason = self.verdicts.reason(runner, run.network, run.x, lambda: _difference(run, numbers, written))
        except torch.OutOfMemoryError as error:  # of the moved weights, which draws do not need
            raise OverBudget from error
        if reason:
            raise ValueError(reason)
        shared = meter.base or 0
        return Cost(shared, max(1, meter.peak - shared) / len(numbers))


def _difference(run: Run, numbers: range, written: Trace) -> str:
    """Return how draws under vmap differ from the last of them made alone; `written` shows what they write."""
    if names := sorted(written.attributes | written.buffers):
        return f"it writes {names[0]!r} as it runs, which each draw must do by itself"

    def drawn(runner: Callable[[Run, range], Tensor], own: range) -> Callable[[Input], Tensor]:
        def last(x: Input) -> Tensor:
            with holding(run.layers, "expects", False):  # which a verification holds to be true
                return runner(run, own)[-1]

        return last

    return difference(run.network, run.x, drawn(vmapped, numbers), drawn(one_by_one, numbers[-1:]))


def cost_key(x: Input) -> Hashable:
    """Return a key of inputs whose draws are computed in the same way and cost the same memory."""
    tensors = [x] if isinstance(x, Tensor) else tensors_in(x)
    device = tensors[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    kind = x.dtype if isinstance(x, Tensor) else kind_of(x)
    return torch.is_grad_enabled(), device, autocast, kind, *(tensor.shape for tensor in tensors)


def _draws_from_torch(run: Run, numbers: range) -> bool:
    """Return whether the network's code draws from torch's own random state."""
    with unmoved(run.network, run.x), NumbersDrawn() as torchs:
        one_by_one(run, numbers[:1])
    return torchs.seen


def _culprit(network: nn.Module, traceback: TracebackType | None) -> str:
    """Return the innermost of the network's own modules that an error passed through."""
    names = {id(module): name for name, module in network.named_modules()}
    found = "the network itself"
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if name := names.get(id(module)):
            found = f"layer {name!r} ({type(module).__name__})"
        traceback = traceback.tb_next
    return found


def check_called(network: nn.Module, x: Input, predict: Callable[[Input], Tensor]) -> None:
    """Run a network once; raise an error where it computes with the weight of a layer that draws past its forward.

    The noise of that layer would be left out in silence.
    """
    drawing_layers = {name: module for name, module in network.named_modules() if isinstance(module, Stochastic)}
    layers = {name: layer for name, layer in drawing_layers.items() if next(layer.parameters(), None) is not None}
    owners: dict[Tensor, str] = {
        parameter: f"{own.rpartition('.')[2]} of layer {name!r} ({type(layer).__name__})"
        for name, layer in layers.items()
        for own, parameter in layer.named_parameters()
    }
    if not layers or "" in drawing_layers:  # a network that is such a layer itself is always called
        return
    trace = Trace()
    watched = recording(network, layers, trace, tensors=False, functions=owners.keys())
    try:
        with unmoved(network, x), expecting(network), torch.no_grad(), watched:
            predict(x)
    finally:  # a weight with components has another rank, at which the run may fail
        for use in trace.functions:
            if not use.inside:
                raise InputError(
                    f"the network computes with the {owners[use.tensors[0]]} instead of calling the layer, so that "
                    "its noise would be left out: leave the layer out by layers="
                )
