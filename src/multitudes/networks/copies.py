"""Copies of networks, including parts that `copy.deepcopy` cannot copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

Network = TypeVar("Network", bound=nn.Module)


def copied(network: Network, memo: dict[int, Any] | None = None) -> Network:
    """Return a deep copy of a network; `memo` maps the `id` of some of its parts to their replacements.

    Tensors that autograd computed, such as the weight of the old `weight_norm`, are copied without history. Generators
    keep their state. A function in an attribute, `self.act = lambda x: self.fc(x)`, is rebound to the copy.
    """
    memo = {} if memo is None else memo
    try:
        held = tree_leaves([vars(module) for module in network.modules()])
        for value in held:
            if isinstance(value, torch.Generator):
                memo.setdefault(id(value), value.clone_state())
            elif isinstance(value, Tensor) and _is_computed(value):
                memo.setdefault(id(value), value.data.clone())
        twin = copy.deepcopy(network, memo)
    except (TypeError, RecursionError) as error:  # a lock or a file in some attribute; a list that contains itself
        raise ValueError(f"model ({type(network).__name__}) cannot be copied: {error}") from error
    for module in twin.modules() if any(isinstance(value, FunctionType) for value in held) else ():
        vars(module).update({name: _bound(value, memo) for name, value in vars(module).items()})
    return twin


def _bound(value: Any, memo: dict[int, Any]) -> Any:
    """Rebind functions, also in containers, to the copies of the objects in their closures."""
    leaves, spec = tree_flatten(value)
    bound = [_bound_function(leaf, memo) if isinstance(leaf, FunctionType) else leaf for leaf in leaves]
    return value if all(map(is_, bound, leaves)) else tree_unflatten(bound, spec)


def _bound_function(function: FunctionType, memo: dict[int, Any], depth: int = 3) -> FunctionType:
    cells = function.__closure__ or ()
    own = []
    for cell in cells if depth else ():
        try:
            held = cell.cell_contents
        except ValueError:  # empty cell
            own.append(cell)
            continue
        new = memo.get(id(held), held)
        if isinstance(held, FunctionType):
            new = _bound_function(held, memo, depth - 1)
        elif isinstance(held, MethodType):
            new = MethodType(held.__func__, memo.get(id(held.__self__), held.__self__))
        own.append(cell if new is held else CellType(new))
    if all(map(is_, own, cells)):
        return function
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(own))
    twin.__kwdefaults__, twin.__qualname__ = function.__kwdefaults__, function.__qualname__
    twin.__module__, twin.__dict__ = function.__module__, dict(function.__dict__)
    return twin


def _is_computed(tensor: Tensor) -> bool:
    """Return whether autograd computed a tensor."""
    try:
        return not tensor.is_leaf
    except RuntimeError:  # a view whose base was changed in place, such as a recurrent layer's flat weights
        return True


def share_hooks(module: nn.Module, other: nn.Module) -> None:
    """Add the forward and backward hooks of `module` to another module."""
    for name, hooks in vars(module).items():
        if name.startswith(("_forward_", "_backward_")):
            vars(other)[name].update(hooks)


def share_registries(sharer: nn.Module, network: nn.Module) -> None:
    """Share a network's registries of parameters, buffers and children, so that names are the same."""
    for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        object.__setattr__(sharer, registry, getattr(network, registry))


class Sharing(nn.Module):
    """A module that shares the registries of another one, stored in the attribute that `shares` names."""

    shares: str

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        share_registries(self, inner)
        object.__setattr__(self, self.shares, inner)  # a registered child would add a prefix to names
        self.training = inner.training

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        getattr(self, self.shares)._apply(fn, recurse)
        return self
