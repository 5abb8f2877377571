"""Lending: inside, a network that serves many members is one member, with its tensors and what its code has written.

A network's own code may write as it runs: a buffer is assigned (`self.mean = ...`), an attribute remembers something
(`self.hidden = h`, `self.steps += 1`). Each member has its own of these, as it would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from multitudes.core.calling import InputError
from multitudes.core.settings import FLAT_WEIGHTS, FOUND_ANEW
from multitudes.core.views import may_write

__all__ = [
    "Attributes",
    "Written",
    "apart",
    "checkpointed",
    "keep_written",
    "lent",
    "put_back",
    "remember",
    "show_last",
    "standing",
    "written_attributes",
]

Written = dict[str, Tensor]
"""Buffers that a run has assigned, by their names."""

Attributes = dict[tuple[str, str], tuple[Any, Any]]
"""What a run has written beside tensors, by the names of module and attribute, and what was there instead."""

_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set)
_MISSING = object()


# -- tensors -----------------------------------------------------------------------------------------------


@contextmanager
def lent(network: nn.Module, state: Mapping[str, Tensor]) -> Iterator[Written]:
    """Inside, the network has these tensors in the place of its own, by the names of `slots`.

    After, it has its own again, and what it is given says which buffers were assigned meanwhile.
    """
    modules = dict(network.named_modules())
    before = {path: (dict(module._parameters), dict(module._buffers)) for path, module in modules.items()}
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        module = modules[path]
        (module._parameters if last in module._parameters else module._buffers)[last] = tensor
    written: Written = {}
    try:
        yield written
    finally:
        for path, (parameters, buffers) in before.items():
            module, prefix = modules[path], f"{path}." if path else ""
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer is not state.get(prefix + name, buffers.get(name)):
                    written[prefix + name] = buffer
            _refill(module._parameters, parameters)
            _refill(module._buffers, buffers)


@torch.no_grad()
def keep_written(network: nn.Module, written: Sequence[Written]) -> None:
    """Keep the buffers that the members' runs have assigned, stacked."""
    for name in dict.fromkeys(name for own in written for name in own):
        path, _, last = name.rpartition(".")
        module = network.get_submodule(path)
        old = module._buffers.get(last)
        own = [one.get(name, old[index] if old is not None else None) for index, one in enumerate(written)]
        values = [value.detach() for value in own if value is not None]
        if len({(value.shape, value.dtype) for value in values}) > 1 or len(values) < len(written):
            raise InputError(f"the members' forwards give buffer {name!r} different shapes, which cannot be kept")
        if old is not None and old.shape[1:] == values[0].shape and old.dtype == values[0].dtype:
            for index, value in enumerate(values):
                old[index].copy_(value)
        else:
            module._buffers[last] = torch.stack(values)


def _refill(registry: dict[str, Any], items: dict[str, Any]) -> None:
    registry.clear()
    registry.update(items)


@contextmanager
def checkpointed(again: Callable[[], AbstractContextManager[Any]] | None) -> Iterator[None]:
    """Inside, what gradient checkpointing will run a second time, in the backward pass, runs within `again()` there.

    By then the network is no longer lent to the member whose activations are asked for. With None, it is an error.
    """
    module: Any = torch.utils.checkpoint
    reentrant, generator = module.CheckpointFunction, module._checkpoint_without_reentrant_generator

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        if again is None:
            raise InputError("it uses gradient checkpointing")

        def run(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return run

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], *args: Any) -> Any:
            return reentrant.apply(wrapped(function), *args)

    def without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(wrapped(function), *args, **kwargs)

    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = Reentrant, without_reentrant
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = reentrant, generator


# -- attributes --------------------------------------------------------------------------------------------


@contextmanager
def written_attributes(network: nn.Module, own: Attributes) -> Iterator[None]:
    """Inside, attributes are as `own` has them; after, as they were before, and `own` has what was written.

    Only modules of the user's own classes, or with hooks, are looked at: torch's layers write buffers alone. So are
    those whose hooks have written before and are gone. What was written to a module that is gone is forgotten.
    """
    wrote = {path for path, _ in own}
    modules = {path: module for path, module in network.named_modules() if path in wrote or may_write(module)}
    before = {path: _attributes(module) for path, module in modules.items()}
    contents = {
        (path, key): value.copy()
        for path, held in before.items()
        for key, value in held.items()
        if type(value) in _CONTAINERS
    }
    for (path, key), (value, instead) in list(own.items()):
        if path in modules and before[path].get(key, _MISSING) is instead:
            put_back(modules[path], key, value.copy() if type(value) in _CONTAINERS else value)
        else:  # set from outside since then, which counts, or gone with its module
            del own[path, key]
    try:
        yield
    finally:
        for path, module in modules.items():
            _keep_written(path, module, before[path], contents, own)


def show_last(network: nn.Module, owns: Sequence[Attributes]) -> None:
    """Let the network itself show what the last member's code has written, so that setting it anew is seen."""
    for (path, key), (last, before) in list(owns[-1].items()):
        held = vars(network.get_submodule(path))
        if held.get(key, _MISSING) is not before:  # set by the run's own code for all
            continue
        shown = last.detach() if isinstance(last, Tensor) else apart(last)
        for own in owns:
            value = own[path, key][0] if (path, key) in own else before
            own[path, key] = value, shown
        held[key] = shown


def remember(network: nn.Module, own: Attributes, path: str, key: str, value: Any) -> None:
    """Add an attribute to what was written, as a run of the network would have."""
    own[path, key] = value, vars(network.get_submodule(path)).get(key, _MISSING)


def standing(network: nn.Module, own: Attributes) -> Iterator[tuple[str, str, Any]]:
    """What was written and has not been set from outside since: module, attribute and value."""
    modules = dict(network.named_modules())
    for (path, key), (value, instead) in own.items():
        if path in modules and vars(modules[path]).get(key, _MISSING) is instead:
            yield path, key, value


def put_back(module: nn.Module, key: str, value: Any) -> None:
    """Give a module an attribute that was written, or take away one that was not there."""
    if value is _MISSING:
        vars(module).pop(key, None)
    else:
        vars(module)[key] = value


def apart(value: Any) -> Any:
    """What was written, so that writing into the one leaves the other alone."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if type(value) in _CONTAINERS else value


def _keep_written(
    path: str, module: nn.Module, before: dict[str, Any], contents: dict[tuple[str, str], Any], own: Attributes
) -> None:
    held = vars(module)
    for key, value in _attributes(module).items():
        if key not in before or value is not before[key]:
            own[path, key] = value, before.get(key, _MISSING)
        elif (path, key) in contents and not _same_content(value, contents[path, key]):
            own[path, key] = value.copy(), value
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(contents[path, key])
    for key in _attributes(module).keys() - before.keys():
        del held[key]
    held.update(before)


def _same_content(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    return one == other if isinstance(one, set) else all(a is b for a, b in zip(one, other, strict=True))


def _attributes(module: nn.Module) -> dict[str, Any]:
    passed = {*_REGISTRIES, *FOUND_ANEW, "training", *(FLAT_WEIGHTS if isinstance(module, nn.RNNBase) else ())}
    return {key: value for key, value in vars(module).items() if key not in passed}
