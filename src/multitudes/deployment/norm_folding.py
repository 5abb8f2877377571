"""Fold batch norms into the layer before or after them.

In evaluation a batch norm is `x * scale + shift` per channel. One run shows which layers produce exactly the norm's
input, or take exactly its output, while nothing else uses that tensor or their weights. A padded convolution cannot
absorb a norm before it, because the padding is not shifted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from multitudes.networks.trace import Trace, recording

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Folded:
    """Names of a norm and of the layer that absorbs it; `after`: the layer comes after the norm."""

    norm: str
    layer: str
    after: bool


def fold_norms(network: nn.Module, pairs: Iterable[Folded]) -> nn.Module:
    """Fold norms that `foldable` found, in place; return the network."""
    for pair in pairs:
        norm = network.get_submodule(pair.norm)
        _fold(network.get_submodule(pair.layer), norm, pair.after)
        for module in network.modules():
            for name, child in module._modules.items():
                if child is norm:
                    module._modules[name] = nn.Identity().train(norm.training)
    return network


@torch.no_grad()
def _fold(layer: Any, norm: Any, after: bool) -> None:
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    shift = shift if norm.bias is None else shift + norm.bias.double()
    weight = layer.weight.double()
    bias = 0.0 if layer.bias is None else layer.bias.double()
    if after:  # W (s x + t) + b = (W s) x + (W t + b)
        bias = bias + (weight * _by_input(layer, shift)).flatten(1).sum(1)
        weight = weight * _by_input(layer, scale)
    else:  # s (W x + b) + t
        bias = bias * scale + shift
        weight = weight * _by_output(layer, scale)
    layer.weight.copy_(weight)
    layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)


def _by_input(layer: Any, values: Tensor) -> Tensor:
    """Reshape values per input channel to broadcast with the weight, `[O, I / groups, 1, ...]`."""
    outputs, inputs = layer.weight.shape[:2]
    groups = getattr(layer, "groups", 1)
    own = values.view(groups, 1, inputs).expand(groups, outputs // groups, inputs).flatten(0, 1)
    return own.view(outputs, inputs, *[1] * (layer.weight.dim() - 2))


def _by_output(layer: Any, values: Tensor) -> Tensor:
    """Reshape values per output channel to broadcast with the weight, `[O, 1, ...]` or `[I, O / groups, ...]`."""
    ones = [1] * (layer.weight.dim() - 2)
    if not isinstance(layer, _TRANSPOSED):
        return values.view(-1, 1, *ones)
    inputs = layer.weight.shape[0] // layer.groups
    return values.view(layer.groups, 1, -1).expand(-1, inputs, -1).flatten(0, 1).unflatten(1, (-1, *ones))


# -- finding foldable norms --------------------------------------------------------------------------------


def foldable(network: nn.Module, run: Callable[[], Any]) -> list[Folded]:
    """Return the norms that can be folded, of a network in evaluation mode; `run` calls it."""
    names = {module: name for name, module in network.named_modules()}
    watched = [module for module in names if type(module) in (*_LAYERS, *_NORMS) and _is_plain(module)]
    if not any(type(module) in _NORMS for module in watched):
        return []
    with torch.no_grad(), recording(network, [names[module] for module in watched], functions=True) as trace:
        answer = run()
    seen = _TensorUses(trace, answer)
    uses = Counter(id(p) for module in network.modules() for p in module._parameters.values() if p is not None)
    pairs, taken = [], set()
    for norm in watched:
        fixed = type(norm) in _NORMS and not norm.training and norm.running_mean is not None
        if not fixed or len(seen.calls.get(norm, [])) != 1:
            continue
        for layer, after in seen.neighbors(norm):
            parameters = [*layer.parameters(), *norm.parameters(), *norm.buffers()]
            own = not any(uses[id(each)] > 1 or seen.uses[id(each)] > 1 for each in parameters)
            once = len(seen.calls[layer]) == 1 and norm not in taken
            if own and once and (not after or _can_absorb_before(layer, norm)):
                pairs.append(Folded(names[norm], names[layer], after))
                taken.add(norm)
    return pairs


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module has no hooks, which could read its output or compute its weights."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not any(getattr(module, hook) for hook in hooks)


def _can_absorb_before(layer: Any, norm: Any) -> bool:
    """Return whether a layer can absorb a norm of its input."""
    if isinstance(layer, nn.Linear):
        return bool(layer.in_features == norm.num_features)
    if not isinstance(layer, _CONVOLUTIONS) or layer.in_channels != norm.num_features:
        return False
    return layer.padding == "valid" or not any(layer.padding if isinstance(layer.padding, tuple) else (1,))


class _TensorUses:
    """Inputs and outputs of layers in one run, and how often functions used each tensor."""

    def __init__(self, trace: Trace, answer: Any) -> None:
        self.trace = trace  # keeps tensors alive, so that ids are unique
        used = [tensor for use in trace.functions for tensor in use.tensors]
        self.uses = Counter(id(tensor) for tensor in [*used, *tree_leaves(answer)])
        self.calls: dict[nn.Module, list[tuple[Any, Any]]] = {}
        for call in trace.ended:
            one = len(call.args) == 1 and isinstance(call.args[0], Tensor) and isinstance(call.output, Tensor)
            self.calls.setdefault(call.module, []).append((call.args[0], call.output) if one else (None, None))

    def neighbors(self, norm: nn.Module) -> Iterable[tuple[nn.Module, bool]]:
        """Yield the layer that produced a norm's input, and the only layer that used its output, if there are any."""
        taken, given = self.calls[norm][0]
        for after, between in ((False, taken), (True, given)):
            for layer, calls in self.calls.items():
                other = calls[0][0 if after else 1]
                if type(layer) not in _LAYERS or other is None or other is not between:
                    continue
                same = between.dim() == next(layer.parameters()).dim()  # both have channels in dim 1
                if same and self.uses[id(between)] == 1:
                    yield layer, after
