"""Views: module objects of their own over the tensors of one network.

Members that share weights are views of one network: in view `i`, each layer that differs between members is that of
member `i`. A view shares parameters, buffers, hooks and unchanged layers with the network; attributes that its code
writes are its own. Running a view swaps nothing, so gradient checkpointing may run any part of it again at any time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from operator import is_not
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, call
from multitudes.core.compiling import uncompiled
from multitudes.core.settings import FOUND_ANEW

__all__ = ["RUNNING", "Changes", "Views", "may_write", "run", "same", "view"]

Changes = Mapping[str, Mapping[str, Any]]
"""Attributes that differ in a view, by the name of the module."""

_REGISTRIES = frozenset(vars(nn.Module())) - {"_modules"}
_CONTAINERS = (list, dict, set, tuple)
_MISSING = object()


def may_write(module: nn.Module) -> bool:
    """Return whether a module's code may write attributes; torch's own layers write buffers alone."""
    kind = type(module).__module__
    own = not kind.startswith(("torch.nn.", "multitudes.")) or ".models." in kind
    return own or bool(module._forward_pre_hooks or module._forward_hooks)


def view(network: nn.Module, changes: Changes, own: Callable[[nn.Module], bool] = lambda _: False) -> nn.Module:
    """Return a view of a network with these changes; modules that need none are the network's, but for `own` ones."""
    named = dict(network.named_modules(remove_duplicate=False))
    changed = {id(named[name]): attributes for name, attributes in changes.items()}
    modules = list(_modules(network))
    twins = {
        id(module): object.__new__(type(module))
        for module in modules
        if any(id(inner) in changed or own(inner) for inner in _modules(module))
    }
    for module in modules:
        if (twin := twins.get(id(module))) is not None:
            vars(twin).update({name: _seen(name, value, twins) for name, value in vars(module).items()})
            vars(twin).update(changed.get(id(module), {}))
    return twins.get(id(network), network)


def _modules(network: nn.Module) -> Iterator[nn.Module]:
    """All modules of a network, with those whose registries they share (a multitude's network)."""
    for module in network.modules():
        yield module
        inner = vars(module).get(str(getattr(type(module), "shares", None)))
        if isinstance(inner, nn.Module):
            yield inner


def _seen(name: str, value: Any, twins: Mapping[int, nn.Module], depth: int = 3) -> Any:
    """An attribute with twins in the place of modules, in a container of its own."""
    if name in _REGISTRIES:
        return value
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    if not depth or type(value) not in _CONTAINERS:
        return value
    if isinstance(value, dict):
        return {key: _seen("", held, twins, depth - 1) for key, held in value.items()}
    return type(value)(_seen("", held, twins, depth - 1) for held in value)


RUNNING: ContextVar[tuple[bool, bool]] = ContextVar("running", default=(False, False))
"""Two flags of the current run: a view runs; gradients are wanted."""


def run(each: nn.Module, x: Input, is_view: bool = True) -> Tensor:
    """Run a view, or the network itself, and find its prediction."""
    if torch.compiler.is_compiling():
        return call(each, x)
    token = RUNNING.set((is_view, torch.is_grad_enabled()))
    try:
        return call(each, x)
    finally:
        RUNNING.reset(token)


class Views:
    """Views of one network, made anew where its modules, modes or attributes have changed.

    An attribute that a view's code has written stays, unless it was set in the network since. The network itself shows
    what the last view has written.
    """

    def __init__(self, network: nn.Module, make: Callable[[nn.Module], list[nn.Module]]) -> None:
        self.network = network
        self.make = make
        self.views: list[nn.Module] = []
        self.state: list[_State] = []  # of the modules that have views of their own
        self.given: list[dict[tuple[str, str], Any]] = []  # the attributes that each view was made with
        self.may_write = False

    def current(self) -> list[nn.Module]:
        """Return the views of the network as it is now."""
        if self.views and (torch.compiler.is_compiling() or not any(state.is_outdated() for state in self.state)):
            return self.views
        return self._made()

    @uncompiled
    def _made(self) -> list[nn.Module]:
        before = {id(state.module): state.attributes for state in self.state}
        modules = dict(self.network.named_modules())

        def stands(path: str, name: str) -> bool:
            module = modules.get(path)
            return module is not None and vars(module).get(name) is before.get(id(module), {}).get(name)

        written = [{key: value for key, value in own.items() if stands(*key)} for own in self._all_written()]
        self.views = self.make(self.network)
        self.given = [_writable(each) for each in self.views]
        self.may_write = any(self.given)
        self._give(written)
        first = dict(self.views[0].named_modules())
        self.state = [_State(module) for path, module in modules.items() if first.get(path) is not module]
        return self.views

    def _give(self, written: list[dict[tuple[str, str], Any]]) -> None:
        for each, own in zip(self.views, written, strict=False):
            for (path, name), value in own.items():
                each.get_submodule(path).__dict__[name] = value

    def _all_written(self) -> list[dict[tuple[str, str], Any]]:
        return [self._written(index) for index in range(len(self.views))]

    def _written(self, index: int) -> dict[tuple[str, str], Any]:
        """Return what the code of a view has written, by the names of module and attribute."""
        now, given = _writable(self.views[index]), self.given[index]
        return {key: value for key, value in now.items() if not same(value, given.get(key, _MISSING))}

    def show(self) -> None:
        """Give the network the attributes that the last view has written."""
        if torch.compiler.is_compiling():
            return
        if written := self._written(len(self.views) - 1):
            modules = dict(self.network.named_modules())
            for (path, name), value in written.items():
                modules[path].__dict__[name] = _copied(value)
            self.state = [_State(state.module) for state in self.state]

    def __deepcopy__(self, memo: dict[int, Any]) -> Views:
        twin = Views(copy.deepcopy(self.network, memo), copy.deepcopy(self.make, memo))
        if self.views:
            twin._made()
            twin._give([{key: _copied(value) for key, value in own.items()} for own in self._all_written()])
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the views, which are made anew."""
        return {"network": self.network, "make": self.make, "views": [], "state": [], "given": [], "may_write": False}


class _State:
    """A snapshot of what a view takes from a module: its class, children and attributes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind = type(module)
        self.attributes = dict(vars(module))
        own = [value for name, value in self.attributes.items() if name not in _REGISTRIES]
        inside = [held for value in own for held in _containers(value)]
        self.contents = [(held, _items(held)) for held in (*inside, module._forward_pre_hooks)]

    def is_outdated(self) -> bool:
        """Return whether the module has changed since."""
        now, then = vars(self.module), self.attributes
        if type(self.module) is not self.kind or now.keys() != then.keys():
            return True
        if any(map(is_not, now.values(), then.values())):
            return True
        for held, items in self.contents:
            values = (*held, *held.values()) if isinstance(held, dict) else tuple(held)
            if len(values) != len(items) or any(map(is_not, values, items)):
                return True
        return False


def _containers(value: Any, depth: int = 3) -> Iterator[Any]:
    if depth and type(value) in _CONTAINERS:
        yield value
        for held in value.values() if isinstance(value, dict) else value:
            yield from _containers(held, depth - 1)


def _items(held: Any) -> tuple[Any, ...]:
    return (*held, *held.values()) if isinstance(held, dict) else tuple(held)


def _writable(each: nn.Module) -> dict[tuple[str, str], Any]:
    """The attributes that a view's code may write; containers as they are now."""
    return {
        (path, name): copy.copy(value) if type(value) in _CONTAINERS else value
        for path, module in each.named_modules()
        if may_write(module)
        for name, value in vars(module).items()
        if name not in _REGISTRIES and name != "_modules" and name not in FOUND_ANEW
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in _CONTAINERS else value


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same object, or containers of the same objects."""
    if type(one) is not type(other) or type(one) not in _CONTAINERS:
        return one is other
    if isinstance(one, set):
        return one == other
    ones, others = _items(one), _items(other)
    return len(ones) == len(others) and all(map(same, ones, others))
