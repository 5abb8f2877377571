"""A network without weights that runs with the stacked tensors of several networks of its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import eq, is_not
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.architecture import check_architecture, equal, stackable
from multitudes.core.calling import InputError
from multitudes.core.copying import copied, held_by
from multitudes.core.draws.stochastic import Stochastic, attached
from multitudes.core.settings import fingerprint

__all__ = ["CannotStack", "Template", "hooked_module"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Slot = tuple[str, bool, list[dict[str, Any]]]
"""A tensor's last name, if it is a buffer, and the registries of all members that hold it."""


class CannotStack(InputError):
    """Why members cannot run with stacked tensors."""


class Template:
    """A copy of the first of several networks, on the meta device, and where each network keeps its tensors.

    `tensors()` stacks them, `[M, ...]`, by name; gradients reach each network's own parameters. `current()` is false
    once a module of any network was replaced, hooked or given another setting: then the template must be made anew. A
    sparse or quantized tensor cannot be stacked; it must be the same in all networks.
    """

    def __init__(self, networks: nn.ModuleList) -> None:
        first = networks[0]
        for index, network in enumerate(networks):
            if (name := hooked_module(network)) is not None:
                raise CannotStack(f"module {name!r} has hooks, which must see each member's own tensors")
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
        self._watch = _Watch(list(networks.modules()))

    def current(self) -> bool:
        """Return whether the networks have the modules, hooks and settings that they had."""
        same = all(
            held[last] is tensor and tensor._version == version for held, last, tensor, version in self._unstacked
        )
        return same and self._watch.unchanged()

    def tensors(self) -> dict[str, Tensor]:
        """Stack the networks' tensors, `[M, ...]`, by name; one that all of them share is expanded."""
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
        """Give each network its part of the buffers that a run has written or replaced."""
        targets: list[Tensor] = []
        values: list[Tensor] = []
        for name, (last, is_buffer, registries) in self.slots.items():
            if not is_buffer or name not in before:
                continue
            whole = after[name]
            compiling = torch.compiler.is_compiling()  # a graph cannot ask for versions
            if whole is before[name] and not self._training and not compiling and not whole._version:
                continue  # batch norms in training write without raising the version
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
        """Let the template's stochastic layers make the draw that the first network's make."""
        for own, theirs in self._drawing:
            own.draw, own.expects = theirs.draw, theirs.expects


def hooked_module(network: nn.Module) -> str | None:
    """Return the name of a module with hooks, forward or backward, other than a stochastic layer's."""
    for name, module in network.named_modules():
        own = 2 * len(attached(module))  # one before and one after the module's forward
        if sum(len(getattr(module, hooks)) for hooks in _HOOKS) > own:
            return name
    return None


class _Watch:
    """Notice changes of modules: another class, child, hook or setting. Runs before every call, so it is quick.

    Dictionaries are compared with copies of themselves, which compares objects by identity first.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.types = list(map(type, modules))
        plain = [vars(module) for module in modules if not isinstance(module, Stochastic)]
        registries = [getattr(module, registry) for module in modules for registry in (*_HOOKS, "_modules")]
        self.live = [*plain, *filter(None, registries)]
        self.before = list(map(dict, self.live))
        self.empty = [registry for registry in registries if not registry]
        self.deep = [(vars(m), key, fingerprint(value)) for m in modules for key, value in _deep_settings(m)]
        tensors = [getattr(module, registry) for module in modules for registry in ("_parameters", "_buffers")]
        self.tensors = list(filter(None, tensors))
        self.empty += [registry for registry in tensors if not registry]
        self.places = self._places()
        own = {id(tensor) for registry in self.tensors for tensor in registry.values()}
        held = [tensor for module in modules for tensor in held_by(module) if isinstance(tensor, Tensor)]
        self.constants = [(tensor, _numbers_of(tensor)) for tensor in held if id(tensor) not in own]
        kinds = {kind for module in modules for kind in type(module).__mro__ if _is_foreign(kind)}
        self.of_classes = [(kind, _class_settings(kind)) for kind in kinds]

    def unchanged(self) -> bool:
        try:
            same = all(map(eq, self.live, self.before))
        except (RuntimeError, ValueError):  # a tensor among the settings is another one
            return False
        return (
            same
            and not any(self.empty)
            and list(map(type, self.modules)) == self.types
            and self._places() == self.places
            and all(_numbers_of(tensor) == before for tensor, before in self.constants)
            and all(fingerprint(held.get(key)) == before for held, key, before in self.deep)
            and all(_class_settings(kind) == before for kind, before in self.of_classes)
        )

    def _places(self) -> tuple[list[str], list[bool]]:
        """Return the names of all parameters and buffers, and whether there is one."""
        values = chain.from_iterable(map(dict.values, self.tensors))
        return list(chain.from_iterable(self.tensors)), list(map(is_not, values, repeat(None)))


def _numbers_of(tensor: Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written in place, or gets other numbers by `.data`."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if stackable(tensor) else 0


def _deep_settings(module: nn.Module) -> list[tuple[str, Any]]:
    """A module's settings that may change in place (lists, configurations), and all those of stochastic layers."""
    return [
        (key, value)
        for key, value in vars(module).items()
        if key not in _STANDARD
        and key not in getattr(module, "found_anew", ())
        and (isinstance(module, Stochastic) or not isinstance(value, _PLAIN))
        and not isinstance(value, (Tensor, nn.Module))
    ]


_STANDARD = frozenset(vars(nn.Module())) - {"training"} | {"draw", "expects"}


def _is_foreign(kind: type) -> bool:
    return not kind.__module__.startswith(("torch.", "builtins", "multitudes."))


def _class_settings(kind: type) -> dict[str, Any]:
    """The attributes of a class that its code may read, and its methods."""
    return {
        key: fingerprint(value) if isinstance(value, _READ) else value
        for key, value in vars(kind).items()
        if isinstance(value, (*_READ, *_METHODS)) and not key.startswith("__")
    }


_READ = (bool, int, float, complex, str, tuple, list, dict, set)
_METHODS = (FunctionType, property, staticmethod, classmethod)


def _check_like(first: nn.Module, other: nn.Module, index: int) -> None:
    try:
        check_architecture(first, other, index)
    except ValueError as difference:
        raise CannotStack(str(difference)) from difference
    modes = ([module.training for module in network.modules()] for network in (first, other))
    if not all(map(eq, *modes)):
        raise CannotStack("some members' modules are in training mode while the same ones of others are not")


def _without_weights(network: nn.Module) -> nn.Module:
    """A copy of a network whose parameters and buffers hold no numbers; sparse and quantized ones are the network's."""
    memo: dict[int, Any] = {}
    for tensor in (*network.parameters(), *network.buffers()):
        memo[id(tensor)] = tensor
        if stackable(tensor):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copied(network, memo)


def _slots(networks: nn.ModuleList) -> dict[str, Slot]:
    """Every place that holds a parameter or a buffer, each module under one name."""
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
    """The tensors that cannot be stacked, where they are and their versions; they must be the same in all networks."""
    found = []
    for name, (last, _, registries) in slots.items():
        first = registries[0][last]
        if not stackable(first):
            if not all(equal(first, registry[last]) for registry in registries):
                raise CannotStack(f"{name!r} ({first.layout}) cannot be stacked, and is not the same in all members")
            found += [(registry, last, registry[last], registry[last]._version) for registry in registries]
    return found
