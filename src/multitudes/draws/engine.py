"""Make many draws of a network.

A stochastic layer computes one draw of one batch. There are two runners: `vmapped` makes all draws at once and computes
everything before the first stochastic layer once; `one_by_one` is a loop and always right. Each draw has its own random
numbers, from the seed and the draw's number, so a seed gives the same draws with both runners and any chunk size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor, nn

from multitudes.networks.calls import Input, InputError, input_kind, tensors_in
from multitudes.networks.devices import Meter, OverBudget, free_bytes, in_bytes
from multitudes.networks.dispatch import RandomUse
from multitudes.networks.seeds import mixed, seeded, torch_states
from multitudes.networks.settings import override_attribute
from multitudes.networks.stochastic import Draw, Stochastic, drawing, expecting
from multitudes.networks.trace import Trace, preserve_state, recording
from multitudes.networks.verification import FAILURES, Verdicts, difference
from multitudes.networks.vmap import vmap_level

CACHED = 128e6
"""The maximum number of bytes of simultaneous draws on a CPU; with more, each draw takes longer."""


@dataclass
class DrawRun:
    """A stochastic network and an input; `predict` makes one draw of all members, `[B, ...] -> [M, B, ...]`."""

    network: nn.Module
    layers: Sequence[Stochastic]
    predict: Callable[[Input], Tensor]
    x: Input
    seed: int = 0
    memory: float | None = None

    def budget(self) -> float:
        """Return the maximum number of bytes of simultaneous draws, by default a quarter of the free memory."""
        return free_bytes(tensors_in(self.x)[0].device) / 4 if self.memory is None else self.memory


@dataclass(frozen=True)
class Cost:
    """Peak memory in bytes: `shared` at the first random number, plus `each` per draw."""

    shared: float
    each: float


def one_by_one(run: DrawRun, numbers: range, seeds_torch: bool = False) -> Tensor:
    """Make the draws with these numbers in a loop: `[D, M, B, ...]`.

    With `seeds_torch`, seed torch's random state for each draw and restore it, for networks whose code draws from it.
    Other threads share that state meanwhile.
    """
    draws = []
    for number in numbers:
        own_random_state = seeded(mixed(run.seed, number)) if seeds_torch else nullcontext()
        with drawing(run.layers, Draw(run.seed, torch.tensor(number))), own_random_state:
            draws.append(run.predict(run.x))
    return torch.stack(draws)


def vmapped(run: DrawRun, numbers: range, meter: Meter | None = None) -> Tensor:
    """Make the draws with these numbers under vmap: `[D, M, B, ...]`."""
    with vmap_level(len(numbers)) as draws:
        index = draws.own(torch.arange(numbers.start, numbers.stop))
        with drawing(run.layers, Draw(run.seed, index, meter)):
            return draws.whole(run.predict(run.x))


@dataclass
class Draws:
    """A multitude's draws. The fields are caches; not saved.

    `runner` is "vmapped" until vmap fails or its draws differ from those of `one_by_one`.
    """

    runner: str = "vmapped"
    seeds_torch: bool = False  # True if code also draws from torch's random state
    verdicts: Verdicts = field(default_factory=Verdicts)
    costs: dict[Hashable, Cost] = field(default_factory=dict)

    def make(self, run: DrawRun, numbers: range, seed: int | None = None, memory: str | float | None = None) -> Tensor:
        """Make the draws with these numbers: `[D, M, B, ...]`."""
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InputError(f"seed must be a whole number, got {seed!r}")
        run.memory = None if memory is None else in_bytes(memory)
        run.seed = int(torch.randint(2**62, ())) if seed is None else seed
        return self._make(run, numbers) if seed is None else self._seeded(run, numbers)

    def _seeded(self, run: DrawRun, numbers: range) -> Tensor:
        """Make repeatable draws; leave torch's random state unchanged."""
        if not self.seeds_torch:
            before = torch_states(run.x)
            draws = self._make(run, numbers)
            same = all(torch.equal(generator.get_state(), state) for generator, state in before)
            if same or not _draws_from_torch(run, numbers):  # another thread moved it
                return draws
            for generator, state in before:
                generator.set_state(state)
            self.seeds_torch = True
        return one_by_one(run, numbers, seeds_torch=True)

    def _make(self, run: DrawRun, numbers: range) -> Tensor:
        """Make draws under vmap if that works and saves computation; otherwise, one by one."""
        nothing_shared = len(numbers) == 1 or any(layer.noise == "network" for layer in run.layers)
        if self.runner == "one_by_one" or nothing_shared:
            return one_by_one(run, numbers)
        try:
            return self._in_chunks(run, numbers)
        except OverBudget:  # two draws do not fit
            return one_by_one(run, numbers)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            place, trouble = _culprit(run.network, error.__traceback__), str(error).splitlines()[0]
        draws = one_by_one(run, numbers)  # raises if x does not fit
        self.runner = "one_by_one"
        warnings.warn(
            f"vmap cannot run {place} ({trouble}), so draws run one after the other, which is slower", stacklevel=2
        )
        return draws

    def _in_chunks(self, run: DrawRun, numbers: range) -> Tensor:
        """Make draws under vmap, in chunks that fit in memory; two draws of each new input size measure the memory."""
        key = cost_key(run.x)
        if key not in self.costs:
            self.costs[key] = self._cost(run, numbers[-2:])
        cost, size = self.costs[key], len(numbers)
        if cost.shared + size * cost.each > min(CACHED, run.memory or CACHED):
            budget = run.budget()
            most = budget if tensors_in(run.x)[0].is_cuda else CACHED
            size = int(min(budget - cost.shared, most) / cost.each)
        if size <= 1:  # nothing to share
            return one_by_one(run, numbers)
        parts = [vmapped(run, numbers[start : start + size]) for start in range(0, len(numbers), size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cost(self, run: DrawRun, numbers: range) -> Cost:
        """Return the memory of draws under vmap; raise an error if they differ from draws made one by one."""
        meter, written = Meter(run.budget() / 2), Trace()  # half, since the meter counts results after they exist
        with preserve_state(run.network, run.x, written), meter:
            vmapped(run, numbers, meter)
        runner = "vmapped", torch.is_grad_enabled()
        try:
            reason = self.verdicts.reason(runner, run.network, run.x, lambda: _difference(run, numbers, written))
        except torch.OutOfMemoryError as error:  # only the moved weights of the verification do not fit
            raise OverBudget from error
        if reason:
            raise ValueError(reason)
        shared = meter.base or 0
        return Cost(shared, max(1, meter.peak - shared) / len(numbers))


def _difference(run: DrawRun, numbers: range, written: Trace) -> str:
    """Describe how the last of some draws under vmap differs from the same draw alone; return "" if it does not."""
    if names := sorted(written.attributes | written.buffers):
        return f"it writes {names[0]!r} as it runs, so each draw must run on its own"

    def last_draw(runner: Callable[[DrawRun, range], Tensor], own: range) -> Callable[[Input], Tensor]:
        def last(x: Input) -> Tensor:
            with override_attribute(run.layers, "expects", False):  # a verification sets it
                return runner(run, own)[-1]

        return last

    return difference(run.network, run.x, last_draw(vmapped, numbers), last_draw(one_by_one, numbers[-1:]))


def cost_key(x: Input) -> Hashable:
    """Return a cache key of an input, equal for inputs whose draws run in the same way with the same memory."""
    tensors = [x] if isinstance(x, Tensor) else tensors_in(x)
    device = tensors[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    kind = x.dtype if isinstance(x, Tensor) else input_kind(x)
    return torch.is_grad_enabled(), device, autocast, kind, *(tensor.shape for tensor in tensors)


def _draws_from_torch(run: DrawRun, numbers: range) -> bool:
    """Return whether the network's code draws from torch's random state."""
    with preserve_state(run.network, run.x), RandomUse() as random_use:
        one_by_one(run, numbers[:1])
    return random_use.seen


def _culprit(network: nn.Module, traceback: TracebackType | None) -> str:
    """Return the innermost of the network's modules in a traceback."""
    names = {id(module): name for name, module in network.named_modules()}
    found = "the network itself"
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if name := names.get(id(module)):
            found = f"layer {name!r} ({type(module).__name__})"
        traceback = traceback.tb_next
    return found


def check_called(network: nn.Module, x: Input, predict: Callable[[Input], Tensor]) -> None:
    """Run a network once; raise an error if it uses the weight of a stochastic layer without calling the layer."""
    drawing_layers = {name: module for name, module in network.named_modules() if isinstance(module, Stochastic)}
    layers = {name: layer for name, layer in drawing_layers.items() if next(layer.parameters(), None) is not None}
    owners: dict[Tensor, str] = {
        parameter: f"{own.rpartition('.')[2]} of layer {name!r} ({type(layer).__name__})"
        for name, layer in layers.items()
        for own, parameter in layer.named_parameters()
    }
    if not layers or "" in drawing_layers:  # the network itself is a stochastic layer
        return
    trace = Trace()
    watched = recording(network, layers, trace, tensors=False, functions=owners.keys())
    try:
        with preserve_state(network, x), expecting(network), torch.no_grad(), watched:
            predict(x)
    finally:  # the run may fail: a weight with components has another rank
        for use in trace.functions:
            if not use.inside:
                raise InputError(
                    f"the network computes with the {owners[use.tensors[0]]} instead of calling the layer, which "
                    "would skip its noise: exclude the layer with layers="
                )
