"""Snapshots of networks, to detect changes that make caches stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import eq
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.networks.architecture import stackable
from multitudes.networks.settings import DEPTH, PLAIN
from multitudes.networks.stochastic import Stochastic, attached_layers

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_STANDARD = frozenset(vars(nn.Module())) - {"training"} | {"draw", "expects"}
_FIXED = (*PLAIN, torch.dtype, torch.device, torch.Size)
_OURS = ("torch.", "builtins", "multitudes.")
_METHODS = (FunctionType, property, staticmethod, classmethod)

Settings = list[tuple[dict[str, Any], str, Any]]
"""Settings that may change in place: attribute dictionary, name and fingerprint of each."""


class Snapshot:
    """The classes, children, modes, settings and hooks of modules, and the names of their tensors.

    `unchanged()` runs before every call. It is fast because it compares dictionaries with copies of themselves, and
    Python compares objects by identity first. Values of parameters and buffers may change.
    """

    def __init__(self, modules: Sequence[nn.Module], hooks: Sequence[str] = _HOOKS) -> None:
        self.modules = modules
        registries = [getattr(module, registry) for module in modules for registry in (*hooks, "_modules")]
        self.empty = [registry for registry in registries if not registry]
        plain = [vars(module) for module in modules if not _writes_itself(module)]
        self.live = [*plain, *filter(None, registries)]
        self.before = list(map(dict, self.live))
        self.tensors = [getattr(module, registry) for module in modules for registry in ("_parameters", "_buffers")]
        self.names = [[name for name, tensor in held.items() if tensor is not None] for held in self.tensors if held]
        self.types = list(map(type, modules))
        kinds = {kind for module in modules for kind in type(module).__mro__ if not kind.__module__.startswith(_OURS)}
        self.methods = [(kind, _methods(kind)) for kind in kinds]
        self.deep: dict[int, Settings] = {}
        seen: set[int] = set()  # read a configuration that modules share only once
        for module in modules:
            if settings := _deep_settings(module, seen):
                self.deep[id(module)] = settings

    def unchanged(self) -> bool:
        """Return whether nothing has changed."""
        try:
            same = all(map(eq, self.live, self.before))
        except (RuntimeError, ValueError):  # another tensor among the settings
            return False
        return (
            same
            and not any(self.empty)
            and list(map(type, self.modules)) == self.types
            and [[name for name, tensor in held.items() if tensor is not None] for held in self.tensors if held]
            == self.names
            and all(fingerprint(held.get(key)) == before for held, key, before in chain(*self.deep.values()))
            and all(_methods(kind) == before for kind, before in self.methods)
        )

    def accept(self, modules: Sequence[nn.Module]) -> None:
        """Treat the current attributes of these modules as unchanged."""
        written = {id(vars(module)): module for module in modules}
        for index, held in enumerate(self.live):
            if (module := written.get(id(held))) is not None:
                self.before[index] = dict(held)
                self.deep[id(module)] = _deep_settings(module, set())


class Versions:
    """Number the states of a network: a new number after each change, and one for each mode.

    Attributes that the network's own code writes do not count (`accept`), nor do hooks. `hooks` holds the keys of all
    hooks but the library's own.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.forget()

    def forget(self) -> None:
        """Start again with the current network."""
        self.modules: list[nn.Module] = []
        self.snapshots: dict[tuple[bool, ...], tuple[int, Snapshot]] = {}
        self.hooks: tuple[int, ...] = ()
        self.number = self.count = self.written = 0

    def look(self) -> int:
        """Return the number of the current state; in compiled graphs, the number of the last call."""
        if torch.compiler.is_compiling():
            return self.number
        known = self.snapshots.get(tuple([module.training for module in self.modules]))
        if known is None or not known[1].unchanged():
            self.modules = list(self.network.modules())
            self.count += 1
            known = self.count, Snapshot(self.modules, hooks=())
            self.snapshots[tuple([module.training for module in self.modules])] = known
        hooked = [m for m in self.modules if m._forward_hooks or m._forward_pre_hooks]
        registries = [registry for m in hooked for registry in (m._forward_hooks, m._forward_pre_hooks)]
        self.hooks = tuple(key for held in registries for key, hook in held.items() if not _is_own_hook(hook))
        self.number = known[0]
        return self.number

    def accept(self, modules: Sequence[nn.Module]) -> None:
        """Treat the current attributes of these modules as unchanged."""
        self.written += 1
        for _, snapshot in self.snapshots.values():
            snapshot.accept(modules)

    def __getstate__(self) -> dict[str, Any]:
        """Omit references to the current objects."""
        return {"network": self.network}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.network = state["network"]
        self.forget()


def hooked_module(network: nn.Module) -> str | None:
    """Return the name of a module that has hooks other than those of stochastic layers, or None."""
    for name, module in network.named_modules():
        own = 2 * len(attached_layers(module))  # one before and one after the module's forward
        if sum(len(getattr(module, hooks)) for hooks in _HOOKS) > own:
            return name
    return None


def _writes_itself(module: nn.Module) -> bool:
    """Return whether a module is one of the library's that write their own attributes in a run."""
    return isinstance(module, Stochastic) or hasattr(type(module), "cache_attributes")


def _deep_settings(module: nn.Module, seen: set[int]) -> Settings:
    """Return the settings that may change in place: tensors, lists, configurations; all of stochastic layers."""
    caches = getattr(module, "cache_attributes", ())
    own = type(module).__module__.startswith("multitudes.methods.")  # their containers do not change
    settings: Settings = []
    for key, value in vars(module).items():
        if key in _STANDARD or key in caches or isinstance(value, nn.Module):
            continue
        fixed = _is_fixed(value) or id(value) in seen or (own and not isinstance(value, Tensor))
        if _writes_itself(module) or not fixed:
            seen.add(id(value))
            settings.append((vars(module), key, fingerprint(value)))
    return settings


def _is_fixed(value: Any) -> bool:
    """Return whether a value cannot change in place."""
    return isinstance(value, _FIXED) or (type(value) is tuple and all(map(_is_fixed, value)))


def fingerprint(value: Any, depth: int = DEPTH) -> Any:
    """Return a key that changes with a setting: with the content of plain values and containers, with the identity of
    objects, and with the identity and the values of arrays and of tensors that are not parameters.
    """
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        return id(value) if isinstance(value, nn.Parameter) else (id(value), *_numbers_of(value))
    if hasattr(value, "tobytes") and hasattr(value, "shape") and not isinstance(value, type):
        return id(value), hash(value.tobytes())
    if depth and isinstance(value, Mapping):
        return type(value), [(str(key), fingerprint(held, depth - 1)) for key, held in value.items()]
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return type(value), [fingerprint(held, depth - 1) for held in value]
    if depth and not callable(value):  # classes and modules are callable
        held = getattr(value, "__dict__", {})
        return id(value), [(key, fingerprint(inner, depth - 1)) for key, inner in held.items()]
    return id(value)


def _numbers_of(tensor: Tensor) -> tuple[int, int]:
    """Return numbers that change if a tensor is written in place or replaced through `.data`."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if stackable(tensor) else 0


def _is_own_hook(hook: Any) -> bool:
    """Return whether a hook is the library's own."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("multitudes.")


def _methods(kind: type) -> dict[str, Any]:
    return {key: value for key, value in vars(kind).items() if isinstance(value, _METHODS)}
