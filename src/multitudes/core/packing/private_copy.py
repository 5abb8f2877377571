"""A private copy of a network, whose code a tracer follows: fx's own way patches `nn.Module` for the whole process.

In the copy each module's `forward` goes through the tracer, parameters and buffers are read as the tracer's stand-ins,
and the network's own code has a `len` and a `math` that take stand-ins too. Tensors are shared with the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn

from multitudes.core.copying import copied

__all__ = ["OwnCode", "private_copy"]


def private_copy(
    network: nn.Module,
    call: Callable[[nn.Module, Callable[..., Any], Any, Any], Any],
    read: Callable[[Tensor], Any],
    code: OwnCode,
) -> nn.Module:
    """Copy a network so that `call(module, forward, args, kwargs)` runs its modules and `read` its tensors."""
    tensors = [*network.parameters(), *network.buffers()]
    copy = copied(network, {id(tensor): tensor for tensor in tensors})
    for module in copy.modules():
        held = vars(module)
        for kind in reversed(type(module).__mro__):
            own = {} if kind.__module__.startswith("torch.") else vars(kind)
            methods = {key: value for key, value in own.items() if type(value) is FunctionType and key[:2] != "__"}
            held |= {key: MethodType(code.copied(method), module) for key, method in methods.items()}
        held["forward"] = partial(_called, call, module, module.forward)
        held["_parameters"] = _Registry(module._parameters, read)
        held["_buffers"] = _Registry(module._buffers, read)
    return copy


def _called(call: Callable[..., Any], module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(module, forward, args, kwargs)


class _Registry(dict[str, Any]):
    """A module's tensors: `self.weight` reads a stand-in, `named_parameters()` the tensors themselves."""

    def __init__(self, tensors: Any, read: Callable[[Tensor], Any]) -> None:
        super().__init__(tensors)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return None if value is None else self.read(value)


def _follows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function that takes stand-ins as well."""

    def run(*args: Any, **kwargs: Any) -> Any:
        proxy = next((value for value in args if isinstance(value, fx.Proxy)), None)
        if proxy is None:
            return function(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", function, args, kwargs)

    return run


_FOLLOWING = {id(value): _follows(value) for value in vars(math).values() if callable(value)}
_FOLLOWING[id(math)] = SimpleNamespace(**{key: _FOLLOWING.get(id(value), value) for key, value in vars(math).items()})  # type: ignore[assignment]


class OwnCode:
    """Copies of functions, with globals of their own in which `len` and `math` take stand-ins."""

    def __init__(self) -> None:
        self.files: dict[int, dict[str, Any]] = {}
        """The new globals by the `id` of the old."""

    def copied(self, function: FunctionType) -> FunctionType:
        """A function with the globals of its file; those of torch are left as they are."""
        old = function.__globals__
        if str(old.get("__name__")).startswith("torch."):
            return function
        if id(old) not in self.files:
            new = self.files[id(old)] = {"len": _follows(len), **old}
            for key, value in old.items():
                if type(value) is FunctionType and value.__globals__ is old:
                    new[key] = _with_globals(value, new)
                else:
                    new[key] = _FOLLOWING.get(id(value), value)
        return _with_globals(function, self.files[id(old)])


def _with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy
