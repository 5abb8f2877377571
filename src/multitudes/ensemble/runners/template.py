"""A network without weights that runs with the stacked tensors of several networks of its architecture."""

from __future__ import annotations

from operator import eq
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.networks.architecture import check_architecture, equal, stackable
from multitudes.networks.calls import InputError
from multitudes.networks.copies import copied
from multitudes.networks.stochastic import Stochastic
from multitudes.networks.versions import Snapshot, hooked_module

Slot = tuple[str, bool, list[dict[str, Any]]]
"""A tensor's last name, whether it is a buffer, and the registries of all members that hold it."""


class CannotStack(InputError):
    """Raised if members cannot run with stacked tensors; holds the reason."""


class Template:
    """A copy of the first of several networks, on the meta device, with the places of each network's tensors.

    `tensors()` stacks them, `[M, ...]`, by name; gradients reach each network's own parameters. Rebuild the template
    if `current()` is false. Sparse and quantized tensors cannot be stacked and must be equal in all networks.
    """

    def __init__(self, networks: nn.ModuleList) -> None:
        first = networks[0]
        for index, network in enumerate(networks):
            if (name := hooked_module(network)) is not None:
                raise CannotStack(f"module {name!r} has hooks, which must receive each member's own tensors")
            if index:
                _check_like(first, network, index)
        self.network = _without_weights(first)
        self.members = len(networks)
        self.slots = _slots(networks)
        self._unstacked = _unstacked(self.slots)
        self._drawing: list[tuple[Any, Any]] = [
            (own, theirs)
            for own, theirs in zip(self.network.modules(), first.modules(), strict=True)
            if isinstance(theirs, Stochastic)
        ]
        self._training = any(module.training for module in first.modules())
        self._snapshot = Snapshot(list(networks.modules()))

    def current(self) -> bool:
        """Return whether the networks still have the same modules, hooks and settings."""
        same = all(
            held[last] is tensor and tensor._version == version for held, last, tensor, version in self._unstacked
        )
        return same and self._snapshot.unchanged()

    def tensors(self) -> dict[str, Tensor]:
        """Stack the networks' tensors, `[M, ...]`, by name; expand those that all share."""
        stacked = {}
        for name, (last, _, registries) in self.slots.items():
            own = [registry[last] for registry in registries]
            first = own[0]
            if stackable(first):
                shared = len(own) > 1 and all(tensor is first for tensor in own)
                stacked[name] = first.expand(len(own), *first.shape) if shared else torch.stack(own)
        return stacked

    @torch.no_grad()
    def keep_buffers(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        """Copy the buffers that a run has written or replaced to the networks."""
        targets: list[Tensor] = []
        values: list[Tensor] = []
        for name, (last, is_buffer, registries) in self.slots.items():
            if not is_buffer or name not in before:
                continue
            whole = after[name]
            compiling = torch.compiler.is_compiling()  # graphs cannot read versions
            if whole is before[name] and not self._training and not compiling and not whole._version:
                continue  # batch norms in training do not increment the version
            for registry, value in zip(registries, whole.detach().unbind(), strict=True):
                old = registry[last]
                if old.shape == value.shape and old.dtype == value.dtype:
                    targets.append(old)
                    values.append(value)
                else:
                    registry[last] = value.clone()
        if targets:
            torch._foreach_copy_(targets, values)

    def take_draws(self) -> None:
        """Copy the current draw of the first network's stochastic layers to those of the template."""
        for own, theirs in self._drawing:
            own.draw, own.expects = theirs.draw, theirs.expects


def _check_like(first: nn.Module, other: nn.Module, index: int) -> None:
    try:
        check_architecture(first, other, index)
    except ValueError as difference:
        raise CannotStack(str(difference)) from difference
    modes = ([module.training for module in network.modules()] for network in (first, other))
    if not all(map(eq, *modes)):
        raise CannotStack("a module is in training mode in some members and in evaluation mode in others")


def _without_weights(network: nn.Module) -> nn.Module:
    """Copy a network with parameters and buffers on the meta device; keep its sparse and quantized tensors."""
    memo: dict[int, Any] = {}
    for tensor in (*network.parameters(), *network.buffers()):
        memo[id(tensor)] = tensor
        if stackable(tensor):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copied(network, memo)


def _slots(networks: nn.ModuleList) -> dict[str, Slot]:
    """Return every place of a parameter or a buffer, by name."""
    modules = [dict(network.named_modules()) for network in networks]
    slots: dict[str, Slot] = {}
    for path, module in modules[0].items():
        prefix = f"{path}." if path else ""
        for registry in ("_parameters", "_buffers"):
            held = [getattr(own[path], registry) for own in modules]
            for name, tensor in getattr(module, registry).items():
                if tensor is not None:
                    slots[prefix + name] = name, registry == "_buffers", held
    return slots


def _unstacked(slots: dict[str, Slot]) -> list[tuple[dict[str, Any], str, Tensor, int]]:
    """Return the tensors that cannot be stacked, with places and versions; raise an error if they differ."""
    found = []
    for name, (last, _, registries) in slots.items():
        first = registries[0][last]
        if not stackable(first):
            if not all(equal(first, registry[last]) for registry in registries):
                raise CannotStack(f"{name!r} ({first.layout}) cannot be stacked and differs between members")
            found += [(registry, last, registry[last], registry[last]._version) for registry in registries]
    return found
