"""Copies of networks, whatever they hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["copied", "held_by", "share_registries"]

Network = TypeVar("Network", bound=nn.Module)


def copied(network: Network, memo: dict[int, Any] | None = None) -> Network:
    """A deep copy of a network; `memo` gives what stands in the place of some of its parts, by their `id`.

    Python's own copy refuses tensors that autograd has made, such as the weight that an old `weight_norm` computes, or
    a feature map that a network remembers: these are copied without their history. Random generators keep their state.
    """
    memo = {} if memo is None else memo
    for value in (held for module in network.modules() for held in held_by(module)):
        if isinstance(value, torch.Generator):
            memo.setdefault(id(value), value.clone_state())
        elif _is_made(value):
            memo.setdefault(id(value), value.data.clone())
    try:
        return copy.deepcopy(network, memo)
    except TypeError as error:  # Python's own sentence, about a lock or a file that some attribute holds
        raise ValueError(f"model ({type(network).__name__}) holds something that cannot be copied: {error}") from error


def _is_made(tensor: Tensor) -> bool:
    """Whether autograd has made a tensor."""
    try:
        return not tensor.is_leaf
    except RuntimeError:  # it is one of several views of what was changed since, as a recurrent layer's flat weights
        return True


def held_by(module: nn.Module) -> Iterator[Any]:
    """The tensors and generators that a module holds as plain attributes, in lists, tuples and dicts too."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from _inside(value)


def _inside(value: Any, depth: int = 3) -> Iterator[Any]:
    if isinstance(value, (Tensor, torch.Generator)):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for held in value:
            yield from _inside(held, depth - 1)
    elif depth and isinstance(value, dict):
        for held in value.values():
            yield from _inside(held, depth - 1)


def share_registries(sharer: nn.Module, network: nn.Module) -> None:
    """Share a network's registries of parameters, buffers and children, and so its names."""
    for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        object.__setattr__(sharer, registry, getattr(network, registry))
