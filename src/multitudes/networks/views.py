"""Views: copies of a network's module objects that share its tensors.

Members that share weights are views of one network: in view `i`, each layer that differs between members is the layer
of member `i`. A view shares parameters, buffers, hooks and unchanged layers with the network, but not the attributes
that its code writes. Running a view swaps no tensors, so gradient checkpointing may rerun any part of it at any time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multitudes.networks.calls import Input, call
from multitudes.networks.dispatch import uncompiled
from multitudes.networks.settings import HF_CACHES
from multitudes.networks.versions import Versions
from multitudes.networks.vmap import LazyVmap

Changes = Mapping[str, Mapping[str, Any]]
"""Attributes that differ in a view, by the name of the module."""

_REGISTRIES = frozenset(vars(nn.Module())) - {"_modules"}
_CONTAINERS = (list, dict, set, tuple)
_MISSING = object()


def may_write(module: nn.Module) -> bool:
    """Return whether a module's code may write attributes: a user's class, or a module with hooks."""
    kind = type(module).__module__
    own = not kind.startswith(("torch.nn.", "multitudes.")) or ".models." in kind
    return own or bool(module._forward_pre_hooks or module._forward_hooks)


def view(network: nn.Module, changes: Changes, own: Callable[[nn.Module], bool] = lambda _: False) -> nn.Module:
    """Return a view of a network with these changes. It shares modules without changes, unless `own` selects them."""
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
            vars(twin).update({name: _with_twins(name, value, twins) for name, value in vars(module).items()})
            vars(twin).update(changed.get(id(module), {}))
    return twins.get(id(network), network)


def _modules(network: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules of a network, and those whose registries they share (a multitude's network)."""
    for module in network.modules():
        yield module
        inner = vars(module).get(str(getattr(type(module), "shares", None)))
        if isinstance(inner, nn.Module):
            yield inner


def _with_twins(name: str, value: Any, twins: Mapping[int, nn.Module], depth: int = 3) -> Any:
    """Replace modules in an attribute by their twins; copy containers."""
    if name in _REGISTRIES:
        return value
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    if not depth or not _holds(value):
        return value
    if isinstance(value, dict):
        return {key: _with_twins("", held, twins, depth - 1) for key, held in value.items()}
    return type(value)(_with_twins("", held, twins, depth - 1) for held in value)


class Running(NamedTuple):
    """State of the current run of a network whose members share weights."""

    is_view: bool = False
    learns: bool = False
    """True if gradients are enabled."""
    lazy_vmap: LazyVmap | None = None
    """The vmap of a view in which all members run together."""
    late: list[Any] | None = None
    """The layers that have repeated their rows so far, in a view where the first differing layer does so."""


RUNNING: ContextVar[Running] = ContextVar("running", default=Running())  # noqa: B039 (immutable)


def run(
    each: nn.Module, x: Input, is_view: bool = True, lazy_vmap: LazyVmap | None = None, late: list[Any] | None = None
) -> Tensor:
    """Run a view or the network itself, and return its prediction."""
    if torch.compiler.is_compiling():
        return call(each, x)
    token = RUNNING.set(Running(is_view, torch.is_grad_enabled(), lazy_vmap, late))
    try:
        return call(each, x)
    finally:
        RUNNING.reset(token)


class Views:
    """Views of one network, rebuilt after it has changed.

    An attribute that a view's code wrote survives, unless it was set in the network since. The network itself gets what
    the last view wrote (`show`).
    """

    def __init__(
        self, network: nn.Module, make: Callable[[nn.Module], list[nn.Module]], versions: Versions | None = None
    ) -> None:
        self.network = network
        self.make = make
        self.versions = Versions(network) if versions is None else versions
        self.views: list[nn.Module] = []
        self.given: list[dict[tuple[str, str], Any]] = []  # attributes with which each view was made
        self.base: dict[tuple[str, str], Any] = {}  # the network's attributes at that time
        self.made_of = (0, 0)
        self.may_write = False

    def current(self) -> list[nn.Module]:
        """Return the views of the network's last known version."""
        if not self.views or (self.versions.number, self.versions.written) != self.made_of:
            self._make()
        return self.views

    @uncompiled
    def _make(self) -> None:
        now = _writable(self.network)
        written = [
            {key: value for key, value in self.written(index).items() if same_objects(now.get(key), self.base.get(key))}
            for index in range(len(self.views))
        ]
        self.views = self.make(self.network)
        self.given = [_writable(each) for each in self.views]
        self.base = now
        self.may_write = any(self.given)
        for each, own in zip(self.views, written, strict=False):
            write_attributes(each, own)
        self.made_of = self.versions.number, self.versions.written

    def written(self, index: int) -> Written:
        """Return the attributes that the code of a view wrote, by the names of module and attribute."""
        now, given = _writable(self.views[index]), self.given[index]
        return {key: value for key, value in now.items() if not same_objects(value, given.get(key, _MISSING))}

    def show(self) -> None:
        """Set the attributes that the last view wrote in the network."""
        if torch.compiler.is_compiling() or not (written := self.written(len(self.views) - 1)):
            return
        write_attributes(self.network, copy_attributes(written))
        self.base = _writable(self.network)
        self.versions.accept([self.network.get_submodule(path) for path, _ in written])
        self.made_of = self.versions.number, self.versions.written

    def __deepcopy__(self, memo: dict[int, Any]) -> Views:
        network, make, versions = (copy.deepcopy(each, memo) for each in (self.network, self.make, self.versions))
        twin = Views(network, make, versions)  # type: ignore[arg-type]
        if self.views:
            twin._make()
            for index, each in enumerate(twin.views):
                write_attributes(each, copy_attributes(self.written(index)))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Omit the views, which are rebuilt."""
        return vars(Views(self.network, self.make, self.versions))


Written = Mapping[tuple[str, str], Any]
"""Attributes that code wrote, by the names of module and attribute."""


def write_attributes(network: nn.Module, attributes: Written) -> None:
    """Set attributes of a network's modules."""
    for (path, name), value in attributes.items():
        vars(network.get_submodule(path))[name] = value


def copy_attributes(attributes: Written) -> Written:
    """Copy tensors (detached) and containers among attributes."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.copy(value) if _holds(value) else value
        for key, value in attributes.items()
    }


def _holds(value: Any) -> bool:
    return type(value) in _CONTAINERS


def items_in(held: Any) -> tuple[Any, ...]:
    """Return the items of a container; for a dictionary, the keys and then the values."""
    return (*held, *held.values()) if isinstance(held, dict) else tuple(held)


def _writable(each: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the attributes that a view's code may write, with copies of containers."""
    return {
        (path, name): copy.copy(value) if _holds(value) else value
        for path, module in each.named_modules()
        if may_write(module)
        for name, value in vars(module).items()
        if name not in _REGISTRIES and name != "_modules" and name not in HF_CACHES
    }


def same_objects(one: Any, other: Any) -> bool:
    """Return whether two values are the same object or containers of the same objects."""
    if type(one) is not type(other) or not _holds(one):
        return one is other
    if isinstance(one, set):
        return one == other
    ones, others = items_in(one), items_in(other)
    return len(ones) == len(others) and all(map(same_objects, ones, others))
