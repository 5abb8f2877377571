"""Tile the batch of members that share weights as late as possible.

One run of a network, alone, shows in which order its modules are called, with which tensors, and how much work comes
before each. A second run, with one row more, shows which of these tensors have the batch as their first axis. From a
`Boundary` on, all modules tile what they are given, where it is not tiled: so hidden states and masks are tiled on the
way into a block of a transformer, and the residual addition inside it meets nothing that is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.trace import Shape, recording
from multitudes.core.views import Changes, view

__all__ = ["Boundary", "Run", "Slot", "Unseen", "find_boundary", "mapped", "observed", "tiled_view"]

Slot = tuple[int | str, ...]
"""The place of a tensor in the arguments of a call: `(0,)` or `("mask",)`, and further inside tuples and dicts."""


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
    """A module was called with a tensor that no run has shown before."""


@dataclass(frozen=True)
class Boundary:
    """The place where the rows `[B, ...]` of all members become `[M*B, ...]`, as one run has shown it.

    `layers` are the member layers that are given rows which are not tiled. Other modules tile what they are given:
    `tiled` are these arguments, by the module's name, and `left` all others, with the lengths that they had where these
    were not tiled before.
    """

    layers: frozenset[str]
    tiled: Mapping[str, frozenset[Slot]] = field(default_factory=dict)
    left: Mapping[str, Mapping[Slot, int]] = field(default_factory=dict)

    def joined(self, other: Boundary) -> Boundary:
        """Add what another run has shown: a mask is not there in every batch."""
        names = dict.fromkeys([*self.tiled, *other.tiled])
        tiled = {name: self.tiled.get(name, frozenset()) | other.tiled.get(name, frozenset()) for name in names}
        left = {name: {**other.left.get(name, {}), **self.left.get(name, {})} for name in names}
        return Boundary(self.layers | other.layers, tiled, left)


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

    def row_slots(self, name: str, other: Run) -> dict[str, frozenset[Slot]]:
        """Return the arguments that hold rows, of a module and all that are called after it.

        That is shown by this run and one with another number of rows. Modules inside others are left out.
        """
        slots: dict[str, frozenset[Slot]] = {}
        for each in self.order[self.order.index(name) :]:
            if not any(each.startswith(f"{outer}.") for outer in slots):
                mine, theirs = self.lengths[each], other.lengths.get(each, {})
                slots[each] = frozenset(slot for slot, length in mine.items() if theirs.get(slot, length) != length)
        return slots


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


# -- tiling ------------------------------------------------------------------------------------------------


def find_boundary(
    network: nn.Module,
    layers: Mapping[str, Any],
    row_slots: Mapping[str, frozenset[Slot]],
    batch: int,
    members: int,
    run: Callable[[nn.Module], Any],
) -> Boundary:
    """Run a view of a network in which these arguments are tiled, and return the boundary that this makes."""
    tiled: dict[str, set[Slot]] = {name: set() for name in row_slots}
    left: dict[str, dict[Slot, int]] = {name: {} for name in row_slots}
    untiled: dict[str, bool] = {}

    def look(name: str, slot: Slot, tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        if len(tensor) == batch and slot in row_slots[name]:
            tiled[name].add(slot)
            return _repeated(tensor, members)
        left[name][slot] = 0 if len(tensor) == members * batch else len(tensor)
        return tensor

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _each(partial(look, name), args, kwargs)

    def expand(name: str, module: Any, args: Any, kwargs: Any) -> None:
        lengths: list[int] = []
        _each(lambda _, tensor: lengths.append(len(tensor)) if tensor.dim() else None, args, kwargs)
        module.untiled = max((n for n in lengths if n in (batch, members * batch)), default=0) == batch
        if untiled.setdefault(name, module.untiled) != module.untiled:
            raise ValueError(f"layer {name!r} is called with rows that are tiled, and with rows that are not")

    own = {name: enter for name in row_slots if name not in layers or not layers[name].tiles}
    expanding = {name: expand for name, layer in layers.items() if layer.tiles}
    run(_with_hooks(network, own | expanding, {name: layer.as_all() for name, layer in layers.items()}))
    if twice := next((name for name in own if tiled[name] & {s for s, n in left[name].items() if n != 1}), None):
        raise ValueError(f"layer {twice!r} is called with rows that are tiled, and with rows that are not")
    kept = [name for name in own if tiled[name] or any(network.get_submodule(name).children())]
    return Boundary(
        frozenset(name for name, value in untiled.items() if value),
        {name: frozenset(tiled[name]) for name in kept},
        {name: left[name] for name in kept},
    )


def tiled_view(network: nn.Module, boundary: Boundary, layers: Mapping[str, Any], members: int) -> nn.Module:
    """Return a view of a network that tiles at a boundary.

    An argument that may hold rows and was not seen, as a mask in the first batch with padding, is `Unseen`.
    """

    def tile(name: str, slot: Slot, tensor: Tensor) -> Tensor:
        length = boundary.left[name].get(slot)
        if slot in boundary.tiled[name] and (length != 1 or len(tensor) != 1):  # one row for all may be broadcast
            return _repeated(tensor, members)
        if tensor.dim() and (length is None or (length == 1 and len(tensor) != 1)):
            raise Unseen(f"{name} {slot}")
        return tensor

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _each(partial(tile, name), args, kwargs)

    changes = {name: {**layer.as_all(), "untiled": name in boundary.layers} for name, layer in layers.items()}
    return _with_hooks(network, {name: enter for name in boundary.tiled}, changes)


def _each(function: Callable[[Slot, Tensor], Any], args: Any, kwargs: Any) -> Any:
    given = tuple(mapped(function, value, (number,)) for number, value in enumerate(args))
    return given, {key: mapped(function, value, (key,)) for key, value in kwargs.items()}


def _repeated(tensor: Tensor, members: int) -> Tensor:
    return tensor.repeat(members, *[1] * (tensor.dim() - 1))


def _with_hooks(network: nn.Module, hooks: Mapping[str, Callable[..., Any]], changes: Changes) -> nn.Module:
    """Return a view of a network whose modules have hooks of their own, each called with the module's name."""
    registries = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    own = dict(changes)
    for name in hooks:
        module = network.get_submodule(name)
        own[name] = {**own.get(name, {}), **{each: copy.copy(getattr(module, each)) for each in registries}}
    hooked = view(network, own)
    for name, hook in hooks.items():
        hooked.get_submodule(name).register_forward_pre_hook(partial(hook, name), with_kwargs=True)
    return hooked
