"""Tracing: from a network's own code to the steps of a `Plan`, or a reason why not."""

from __future__ import annotations

import builtins
import inspect
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from multitudes.packing.plan import Plan, settings_of
from multitudes.packing.rules import LAYERS
from multitudes.packing.values import CannotPack


def trace(network: nn.Module, members: int, training: bool) -> Plan:
    """Trace a network in one mode, or raise `CannotPack` with the reason.

    A trace keeps what the network's own code did while it was traced, so whatever a trace would freeze is
    refused: control flow on values, random numbers drawn in plain Python, attributes written by `forward`.
    """
    hooked = [name for name, m in network.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    if hooked:
        raise CannotPack(f"module {hooked[0]!r} has forward hooks, which must see each member's own tensors")
    mode = {module: module.training for module in network.modules()}
    attributes, noise = _attributes(network), _random_states()
    try:
        network.train(training)
        tracer = _Tracer()
        with _len_of_proxies():
            graph = tracer.trace(network, _defaults(network))
    except Exception as error:
        raise CannotPack(f"it cannot be traced ({type(error).__name__}: {error})") from error
    finally:
        for module, flag in mode.items():
            module.training = flag
    if _random_states() != noise:
        raise CannotPack("it draws random numbers in its own code")
    changed = [name for name, before in attributes.items() if before != settings_of(network.get_submodule(name))]
    if changed:
        raise CannotPack(f"the forward of module {changed[0]!r} writes its own attributes")
    return Plan(graph, members, training, {name: attributes[name] for name in sorted(tracer.entered)})


def _defaults(network: nn.Module) -> dict[str, Any]:
    """The optional arguments of a forward, which are traced as they are."""
    parameters = inspect.signature(network.forward).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise CannotPack(f"its forward takes any number of arguments ({parameter})")
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@contextmanager
def _len_of_proxies() -> Iterator[None]:
    """Let `len(x)` be traced: Python takes no stand-in for its result, so `len` itself is replaced for a while."""
    real = builtins.len

    def traced(value: Any) -> Any:
        if isinstance(value, fx.Proxy):
            return value.tracer.create_proxy("call_function", real, (value,), {})
        return real(value)

    builtins.len = traced
    try:
        yield
    finally:
        builtins.len = real


class _Proxy(fx.Proxy):
    """fx's stand-in for a tensor, which takes `a += b` for `a = a + b`; here it stays in place."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)

    def _in_place(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.entered: set[str] = {""}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        own = type(module).__module__.startswith("multitudes.") and ".models" not in type(module).__module__
        leaf = own or type(module) in LAYERS or super().is_leaf_module(module, qualified_name)
        if not leaf:
            self.entered.add(qualified_name)
        return leaf


def _attributes(network: nn.Module) -> dict[str, dict[str, int]]:
    return {name: settings_of(module) for name, module in network.named_modules()}


def _random_states() -> list[Any]:
    states: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    if "numpy" in sys.modules:
        states.append(str(sys.modules["numpy"].random.get_state()))
    return states
