"""Tracing: from a network's own code to the steps of a `Plan`, or a reason why not."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from multitudes.core.calling import chosen_output
from multitudes.core.dispatching import NumbersDrawn
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.packing.plan import Plan
from multitudes.core.packing.private_copy import OwnCode, private_copy
from multitudes.core.packing.rules import LAYERS
from multitudes.core.packing.values import CannotPack
from multitudes.core.settings import fingerprint
from multitudes.core.trace import python_states


def trace(template: nn.Module, members: int) -> Plan:
    """Trace a network that nobody else uses, in its present mode, or raise `CannotPack` with the reason.

    A trace keeps what the network's own code did while it was traced, so whatever a trace would freeze is
    refused: control flow on values, random numbers drawn in plain Python, attributes written by `forward`.
    """
    if callable(chosen_output(template)):
        raise CannotPack("its output is chosen by a function, which must see each member's own answer")
    tracer, torchs, others = _Tracer(), NumbersDrawn(), python_states()
    before_torchs = torch.get_rng_state()
    try:
        copy = tracer.copied(template)
        before = {name: _attributes(module) for name, module in copy.named_modules()}
        with torchs:
            graph = tracer.trace(copy, _defaults(template))
        drawn = torchs.seen or any(get() != state for get, _, state in others)
    except CannotPack:
        raise
    except Exception as error:  # tracing runs the user's own code, so anything may come
        raise CannotPack(f"it cannot be traced ({type(error).__name__}: {error})") from error
    finally:
        for _, put, state in others:
            put(state)
        if torchs.seen:
            torch.set_rng_state(before_torchs)
    changed = [name for name, module in copy.named_modules() if before[name] != _attributes(module)]
    if changed:
        raise CannotPack(f"the forward of module {changed[0]!r} writes its own attributes")
    if drawn:
        raise CannotPack("it draws random numbers in its own code")
    vars(template).update({key: value for key, value in vars(copy).items() if key.startswith("_tensor_constant")})
    return Plan(graph, template, members)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, without those of nn.Module and fx."""
    held = {
        key: fingerprint(value)
        for key, value in vars(module).items()
        if key not in _OF_MODULE and not key.startswith("_tensor_constant")
    }
    return held | {"": tuple(module._modules)}


_OF_MODULE = frozenset(vars(nn.Module()))


def _defaults(network: nn.Module) -> dict[str, Any]:
    """The optional arguments of a forward, which are traced as they are."""
    parameters = inspect.signature(network.forward).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise CannotPack(f"its forward takes any number of arguments ({parameter})")
    return {p.name: p.default for p in parameters if p.default is not p.empty}


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


def _surroundings() -> tuple[Any, ...]:
    """Return the modes that change how torch's functions run."""
    kinds = ("cpu", "cuda")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, kinds)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.surroundings = _surroundings()
        self.code = OwnCode()
        self.proxies: dict[str, fx.Proxy] = {}

    def copied(self, network: nn.Module) -> nn.Module:
        """A copy of a network whose code this tracer follows."""
        return private_copy(network, self.call_module, lambda tensor: self.getattr("", tensor, self.proxies), self.code)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a `copied` network."""
        self.root, self.graph = root, fx.Graph(tracer_cls=type(self))
        self.submodule_paths = {module: name for name, module in root.named_modules()}
        self.tensor_attrs = {
            value: f"{name}.{key}" if name else key
            for module, name in self.submodule_paths.items()
            for key, value in vars(module).items()
            if isinstance(value, Tensor)
        }
        forward = self.code.copied(type(root).forward)
        function, args = self.create_args_for_root(forward, True, concrete_args)
        self.create_node("output", "output", (self.create_arg(function(*args)),), {})
        return self.graph

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _surroundings() != self.surroundings:
            raise CannotPack("its forward switches gradients or autocast on or off, which a trace does not keep")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        own = type(module).__module__.startswith("multitudes.") and ".models" not in type(module).__module__
        own = own and not getattr(type(module), "traceable", False)  # plain code over torch's own layers and functions
        own = own or isinstance(module, Stochastic)
        return own or type(module) in LAYERS or super().is_leaf_module(module, qualified_name)
