"""Tile the batch of members that share weights, as late as possible.

One run of a network, alone, shows in which order its modules are called, with which tensors, and how much work comes
before each. A second run, with one row more, shows which of these tensors have the batch as their first axis. A
`Boundary` is a module that tiles what it is given, and with it all modules that are called after it: so what a block of
a transformer is given, hidden states and masks, is tiled on the way into the block, and the residual addition inside it
meets nothing that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.trace import Shape, hooked, recording

__all__ = ["Boundary", "Run", "Slot", "Unseen", "mapped", "observed", "tiling"]

Slot = tuple[int | str, ...]
"""The place of a tensor in the arguments of a call: `(0,)` or `("mask",)`, and further in tuples and dicts."""


def mapped(function: Callable[[Slot, Any], Any], value: Any, at: Slot = ()) -> Any:
    """A function of every tensor in arguments or answers, and of its place."""
    if isinstance(value, (Tensor, Shape)):
        return function(at, value)
    if type(value) is dict:
        return {key: mapped(function, held, (*at, key)) for key, held in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(function, held, (*at, number)) for number, held in enumerate(value))
    return value


class Unseen(Exception):
    """A module was called with a tensor of which no run has shown whether it holds rows."""


@dataclass(frozen=True)
class Boundary:
    """The modules that tile, by name, and which of their arguments; `others` are those that hold no rows."""

    slots: Mapping[str, frozenset[Slot]]
    others: Mapping[str, Mapping[Slot, int]] = field(default_factory=dict)  # with the lengths that they had

    def __str__(self) -> str:
        return next(iter(self.slots))

    def joined(self, other: Boundary) -> Boundary:
        """Join two boundaries at the same module: a mask is not there in every batch."""
        if str(self) != str(other):
            return self
        names = dict.fromkeys([*self.slots, *other.slots])
        slots = {name: self.slots.get(name, frozenset()) | other.slots.get(name, frozenset()) for name in names}
        others = {name: {**other.others.get(name, {}), **self.others.get(name, {})} for name in names}
        return Boundary(slots, others)


@dataclass
class Run:
    """One run of a network: its modules in the order of their first calls, and what each was called with."""

    order: list[str] = field(default_factory=list)
    work: dict[str, int] = field(default_factory=dict)  # how much comes before the first call of each
    total: int = 0
    lengths: dict[str, dict[Slot, int]] = field(default_factory=dict)  # of the first axes
    nbytes: dict[str, int] = field(default_factory=dict)  # of the largest tensor that each is called with
    drawing: set[str] = field(default_factory=set)  # the first modules that draw, or hold what draws
    never: bool = False  # whether something draws that is never called

    def before(self, name: str) -> float:
        """The share of the multiply-adds that comes before a module."""
        return self.work[name] / self.total if self.total else 0.0

    def may_tile(self, name: str) -> bool:
        """Return whether nothing draws before a module: members have random numbers of their own."""
        return not self.never and all(self.order.index(each) >= self.order.index(name) for each in self.drawing)

    def around(self, name: str) -> list[str]:
        """A module and those that it lies in, innermost first, but for the network itself."""
        parts = name.split(".")
        names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        return [each for each in names if each in self.work]

    def boundary(self, name: str, other: Run) -> Boundary:
        """A module as the one that tiles, by this run and one with another number of rows."""
        slots: dict[str, frozenset[Slot]] = {}
        others: dict[str, dict[Slot, int]] = {}
        for each in self.order[self.order.index(name) :]:
            if any(each.startswith(f"{outer}.") for outer in slots):
                continue
            mine, theirs = self.lengths[each], other.lengths.get(each, {})
            slots[each] = frozenset(slot for slot, length in mine.items() if theirs.get(slot, length) != length)
            others[each] = {slot: length for slot, length in mine.items() if slot not in slots[each]}
        return Boundary(slots, others)


def observed(network: nn.Module, inside: set[int], run: Callable[[], Any]) -> Run:
    """Record a run of a network; the modules of `inside`, by their `id`, count as the ones that hold them."""
    names = {name for name, module in network.named_modules() if name and id(module) not in inside}
    with recording(network, names, tensors=False, work=True) as trace:
        run()
    seen = Run(total=trace.multiply_adds)
    for call in trace.calls:
        if call.name not in seen.work:
            seen.order.append(call.name)
            seen.work[call.name] = call.before
        lengths = seen.lengths.setdefault(call.name, {})
        given: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
        for key, value in given:
            mapped(partial(_note, seen, call.name, lengths), value, (key,))
    for name, module in network.named_modules():
        if isinstance(module, Stochastic):
            holder = next((each for each in seen.around(name) if each in seen.work), None) if name else None
            seen.never = seen.never or holder is None
            seen.drawing |= set() if holder is None else {holder}
    return seen


def _note(seen: Run, name: str, lengths: dict[Slot, int], slot: Slot, tensor: Tensor | Shape) -> None:
    seen.nbytes[name] = max(tensor.nbytes, seen.nbytes.get(name, 0))
    if len(tensor.shape):
        lengths.setdefault(slot, tensor.shape[0])


@contextmanager
def tiling(network: nn.Module, boundary: Boundary, batch: int, members: int) -> Iterator[None]:
    """Let the modules of a boundary tile what they are given: rows `[B, ...]` become `[M*B, ...]`.

    What may hold rows and has not been seen, as a mask in the first batch with padding, is `Unseen`.
    """
    done: dict[int, tuple[Tensor, Tensor]] = {}  # a mask that many blocks are given is tiled once

    def tiled(name: str, slot: Slot, tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != batch:
            return tensor
        if slot not in boundary.slots[name]:
            if boundary.others.get(name, {}).get(slot) != batch:
                raise Unseen(f"{name} {slot}")
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor, tensor.repeat(members, *[1] * (tensor.dim() - 1))
        return done[id(tensor)][1]

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        own = partial(tiled, name)
        given = tuple(mapped(own, value, (number,)) for number, value in enumerate(args))
        return given, {key: mapped(own, value, (key,)) for key, value in kwargs.items()}

    with hooked(network, boundary.slots, enter=enter):
        yield
