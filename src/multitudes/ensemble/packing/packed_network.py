"""A network whose own code runs once for all members, with their channels side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from multitudes.ensemble.packing.packed_values import (
    CannotPack,
    Many,
    PackingState,
    Stacked,
    Value,
    dispatch,
    run_under_vmap,
)
from multitudes.ensemble.packing.rules import DROPOUTS, LAYERS
from multitudes.networks.architecture import stackable
from multitudes.networks.calls import Input, chosen_output, part_of, split_call
from multitudes.networks.random_functions import draws_by
from multitudes.networks.stochastic import as_member, stochastic_layers
from multitudes.networks.trace import preserve_attributes, writing_modules


def gains_channels_last(network: nn.Module) -> bool:
    """Return whether a CPU should keep feature maps channels-last, where max pooling is several times faster.

    In training, torch's batch norm is less exact in that layout: its error was 5e-5 of the output instead of 3e-7.
    """
    modules = list(network.modules())
    inexact = any(isinstance(module, _BatchNorm) and module.training for module in modules)
    return any(isinstance(module, nn.MaxPool2d) for module in modules) and not inexact


class PackedNetwork:
    """One network that computes all members; `packed(tensors, x)` returns `[M, B, ...]`.

    `network` is a copy for this use only. Each of its parameters and buffers is replaced by a `Stacked` value, whose
    tensor `[M, ...]` every call gets by name. The network's own Python code runs in every call, and each torch function
    that it calls computes all members.
    """

    def __init__(self, network: nn.Module, members: int) -> None:
        self.network = network
        self.state = PackingState(members, gains_channels_last(network))
        self.weights = _replaced_weights(network, self.state)
        self.writing = writing_modules(network)
        drawing = stochastic_layers(network)
        self.draws = bool(drawing)
        self.watched = self.draws or any(map(_may_draw, network.modules()))
        for module in network.modules():
            rule = LAYERS.get(type(module))
            if rule is not None and not getattr(module, "return_indices", False):
                vars(module)["forward"] = partial(_by_rule, rule, module.forward)
            elif not self.watched and (rule := DROPOUTS.get(type(module))) is not None:
                vars(module)["forward"] = partial(_dropped, module, rule, module.forward, self.state)
        for layer in drawing:
            for kind in ("normal", "uniform"):
                vars(layer)[kind] = partial(_numbers, getattr(layer, kind), self.state)

    def __call__(self, tensors: Mapping[str, Tensor], x: Input) -> Tensor:
        for name, weight in self.weights.items():
            weight.tensor = tensors[name]
        self.state.gradients = torch.is_grad_enabled()
        members = self.state.members
        own_draws = as_member(self.network, torch.arange(members), members) if self.draws else nullcontext()
        own_noise = _Noise(self.state) if self.watched else nullcontext()
        args, kwargs = split_call(self.network, x)
        restored = preserve_attributes(self.writing) if self.writing else nullcontext()
        try:
            with own_noise, own_draws, restored as written:
                answer = self._prediction(self.network(*args, **kwargs))
        finally:
            for weight in self.weights.values():
                del weight.tensor
        if written:
            raise CannotPack(f"the forward of module {min(written)[0]!r} writes its own attributes")
        return answer

    def _prediction(self, answer: Any) -> Tensor:
        chosen = chosen_output(self.network)
        if chosen is not None:
            alone = isinstance(answer, Many) and not callable(chosen)
            part = part_of(answer.tensor if alone else answer, chosen)
            answer = answer if alone else part
        elif isinstance(answer, Mapping) or hasattr(answer, "logits"):
            answer = answer["logits"] if isinstance(answer, Mapping) else answer.logits
        if isinstance(answer, Tensor):  # the same for every member, since no weights were used
            return answer.expand(self.state.members, *answer.shape)
        if not isinstance(answer, Many):
            raise CannotPack(f"it returns a {type(answer).__name__}")
        return answer.stacked()


def _replaced_weights(network: nn.Module, state: PackingState) -> dict[str, Stacked]:
    """Replace a network's tensors by stacked values; return these by name."""
    weights: dict[str, Stacked] = {}
    for path, module in network.named_modules():
        for registry in (module._parameters, module._buffers):
            for name in [name for name, tensor in registry.items() if tensor is not None and stackable(tensor)]:
                weight = Stacked(registry.pop(name), state)
                vars(module)[name] = weights[f"{path}.{name}" if path else name] = weight
    return weights


# -- layers that bypass torch's dispatch, which takes longer than their computation ------------------------


def _by_rule(rule: Callable[..., Any], forward: Callable[[Any], Any], value: Value) -> Any:
    result = rule(forward, value) if isinstance(value, Many) else NotImplemented
    return forward(value) if result is NotImplemented else result


def _dropped(
    layer: nn.Module, rule: Callable[..., Any], forward: Callable[[Any], Any], state: PackingState, value: Value
) -> Any:
    """Draw dropout noise for each member, also for a shared value."""
    if not layer.training:
        return value
    if isinstance(value, Tensor):
        value = Stacked(value.expand(state.members, *value.shape), state)
    return _by_rule(rule, forward, value)


# -- random numbers ----------------------------------------------------------------------------------------


class _Noise(TorchFunctionMode):
    """Draw numbers for each member when the network's own code draws, for example by `torch.rand(x.shape)`."""

    def __init__(self, state: PackingState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Many) for kind in types):
            return dispatch(function, *args, **kwargs)
        if draws_by(function) is not None and kwargs.get("generator") is None:
            return run_under_vmap(self.state, function, *args, **kwargs)
        return function(*args, **kwargs)


def _numbers(own: Callable[..., Any], state: PackingState, shape: Sequence[int], like: Any) -> Many:
    """Draw random numbers of all members, `[M, *shape]`."""
    numbers = own(shape, like)
    return numbers if isinstance(numbers, Many) else Stacked(numbers, state)


def _may_draw(module: nn.Module) -> bool:
    """Return whether a module's code may draw: a foreign class, or a torch layer that draws and has no rule here."""
    foreign = not type(module).__module__.startswith(("torch.nn.", "multitudes.models.", "multitudes.ensemble."))
    return foreign or (isinstance(module, (nn.modules.dropout._DropoutNd, nn.RReLU)) and type(module) not in DROPOUTS)
