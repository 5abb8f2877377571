"""Find the output layers of a network: those that no other layer with weights follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from multitudes.networks.calls import Input, evaluating, input_errors, map_tensors, prediction_in, split_call
from multitudes.networks.settings import override_attribute
from multitudes.networks.stochastic import expecting
from multitudes.networks.trace import hooked, preserve_state
from multitudes.surgery.observe import example_for
from multitudes.surgery.select import Selector, select


def output_layers(network: nn.Module, heads: Selector = None, example: Input | None = None) -> list[str]:
    """Return the names of the output layers: those that `heads` selects, or those that a run on `example` finds.

    In a Hugging Face model they are the layers next to its base model. The default example is noise of a shape that
    fits.
    """
    if heads is not None:
        kinds = tuple({type(m) for name, m in network.named_modules() if name and any(True for _ in m.parameters())})
        names = [name for name in select(network, heads, kinds, "heads") if name]
    else:
        names = _beside_base_model(network) or _found(network, example)
    _check(network, names)
    return names


def _beside_base_model(network: nn.Module) -> list[str]:
    """Return the children with weights next to a Hugging Face model's base model, also in a wrapper."""
    children = {name: child for name, child in network.named_children() if any(True for _ in child.parameters())}
    if not hasattr(type(network), "base_model_prefix") and len(children) == 1 and not network._parameters:
        return [f"{name}.{inner}" for name, child in children.items() for inner in _beside_base_model(child)]
    base = getattr(network, str(getattr(network, "base_model_prefix", "")), None)
    if not isinstance(base, nn.Module) or base is network:
        return []
    return [name for name, child in children.items() if child is not base]


def _found(network: nn.Module, example: Input | None) -> list[str]:
    try:
        x = example_for(network, example)
        with input_errors(x):
            return _observed(network, x)
    except ValueError as error:
        raise ValueError(
            f"cannot find the output layers of model ({type(network).__name__}): {error}; name them by heads="
        ) from error


def final_layers(network: nn.Module, example: Input) -> list[str]:
    """Return the names of the layers whose weights reach the prediction without another layer in between."""
    return _observed(network, example, lambda answer: _outputs(prediction_in(answer, network)))


def _observed(network: nn.Module, example: Input, read: Callable[[Any], Tensor | None] | None = None) -> list[str]:
    """Return the layers whose weights reach the output, or `read` of it, without another layer in between.

    The inputs of layers with weights are detached, so that the output's gradient only reaches the last layers. A shared
    weight belongs to the layer that runs last.
    """
    owned = {name: _own_weights(m) for name, m in network.named_modules() if "parametrizations" not in name.split(".")}
    owners = [name for name, own in owned.items() if own]
    weights = {p: name for name in reversed(owners) for p in reversed(owned[name])}
    frozen = [p for p in network.parameters() if not p.requires_grad and (p.is_floating_point() or p.is_complex())]

    def cut(name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        weights.update(dict.fromkeys(owned[name], name))
        return map_tensors(Tensor.detach, args), map_tensors(Tensor.detach, kwargs)

    with (
        evaluating(network),
        preserve_state(network, example),
        expecting(network),
        torch.enable_grad(),
        override_attribute(frozen, "requires_grad", True),
    ):
        args, kwargs = split_call(network, example)
        with hooked(network, owners, enter=cut):
            outputs = (read or _outputs)(network(*args, **kwargs))
        gradients = torch.autograd.grad(outputs, list(weights), allow_unused=True) if outputs is not None else ()
    found = [name for name, gradient in zip(weights.values(), gradients, strict=False) if gradient is not None]
    if not found:
        raise ValueError("no gradient of its output reaches a weight")
    if "" in found:
        raise ValueError("a parameter outside of all layers makes its output")
    return sorted(set(found), key=owners.index)


def _own_weights(layer: nn.Module) -> list[nn.Parameter]:
    """Return a layer's own parameters of rank 2 or more, including those that compute its weights."""
    own = list(layer.parameters(recurse=False))
    if parametrize.is_parametrized(layer):
        own += list(layer.get_submodule("parametrizations").parameters())
    return [parameter for parameter in own if parameter.dim() > 1]


def _outputs(output: Any) -> Tensor | None:
    """Return the sum of a network's outputs, or of its `logits`; None if it has no gradient."""
    output = getattr(output, "logits", output)
    if isinstance(output, Tensor):
        return (torch.view_as_real(output) if output.is_complex() else output).sum() if output.requires_grad else None
    each = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    sums = [one for one in map(_outputs, each) if one is not None]
    return torch.stack(sums).sum() if sums else None


def _check(network: nn.Module, names: list[str]) -> None:
    """Raise an error if the heads are all frozen, or share a parameter with another layer."""
    inside = {id(p): p for name in names for p in network.get_submodule(name).parameters()}
    if not any(p.requires_grad for p in inside.values()):
        raise ValueError(f"heads must have trainable weights, and those of {', '.join(map(repr, names))} are frozen")
    modules = {id(m) for name in names for m in network.get_submodule(name).modules()}
    for name, module in network.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(module) not in modules and id(parameter) in inside:
                raise ValueError(
                    f"heads: {', '.join(map(repr, names))} would get new weights, and so would {own!r} of layer "
                    f"{name!r}, which shares them: name other layers by heads="
                )
