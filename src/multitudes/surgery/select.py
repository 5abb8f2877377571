"""Select a network's layers and replace them in a copy; check the first arguments of methods."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from multitudes.ensemble.multitude import Multitude, plain
from multitudes.networks.copies import copied

Selector = None | str | Sequence[str] | Callable[[str, nn.Module], bool]
"""A choice of layers: None for a method's default, a regular expression for the whole qualified name, a list of names
or dotted suffixes, or a function of `(name, module)`."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PRODUCTS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
"""Layers that multiply their input by a weight matrix or kernel."""


def within(name: str, outer: str) -> bool:
    """Return whether a module, by name, is `outer` or inside it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


# -- select and replace ----------------------------------------------------------------------------------


def select(
    model: nn.Module,
    layers: Selector,
    kinds: tuple[type[nn.Module], ...] | Mapping[str, nn.Module],
    argument: str = "layers",
) -> dict[str, nn.Module]:
    """Return the layers that `layers` selects among those of some classes, or among given ones, by qualified name.

    Errors call the selector `argument`.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> list(select(model, None, (nn.Linear,)))
    ['0', '2']
    >>> list(select(model, "[1-9]", (nn.Linear,)))
    ['2']
    """
    if isinstance(kinds, tuple):
        able = {name: module for name, module in model.named_modules() if type(module) in kinds}
    else:
        able = dict(kinds)
    if not able:
        there = sorted({type(m).__name__ for m in model.modules() if any(True for _ in m.parameters(recurse=False))})
        has = f"it has {', '.join(there)}" if there else "it has no parameters"
        raise ValueError(f"model ({type(model).__name__}) has no layer that can be converted: {has}")
    if layers is None:
        return able
    if isinstance(layers, str):
        try:
            pattern = re.compile(layers)
        except re.error as error:
            raise ValueError(f"{argument}={layers!r} is not a regular expression: {error}") from error
        chosen = {name: module for name, module in able.items() if pattern.fullmatch(name)}
    elif callable(layers):
        try:
            chosen = {name: module for name, module in able.items() if layers(name, module)}
        except TypeError as error:
            raise ValueError(f"{argument} must be a function of (name, module), got one that fails: {error}") from error
    elif isinstance(layers, Iterable):
        chosen = _listed(model, able, list(layers), argument)
    else:
        raise ValueError(
            f"{argument} must be None, a regular expression, a list of names or a function, got {layers!r}"
        )
    if not chosen:
        given = "a function" if callable(layers) else repr(layers)
        raise ValueError(f"{argument}={given} selects nothing; it could select: {', '.join(able)}")
    return chosen


def _listed(model: nn.Module, able: dict[str, nn.Module], wanted: list[str], argument: str) -> dict[str, nn.Module]:
    def named(names: Iterable[str], want: str) -> list[str]:
        return [name for name in names if name == want or name.endswith(f".{want}")]

    for want in wanted:
        if named(able, want):
            continue
        others = named((name for name, _ in model.named_modules()), want)
        if others:
            kind = type(model.get_submodule(others[0])).__name__
            raise ValueError(
                f"{argument}: layer {others[0]!r} is a {kind}, which this method cannot convert; "
                f"it can convert: {', '.join(able)}"
            )
        raise ValueError(f"{argument}: no layer is named {want!r}; there are: {', '.join(able)}")
    chosen = {name for want in wanted for name in named(able, want)}
    return {name: module for name, module in able.items() if name in chosen}


def replace(model: nn.Module, replacements: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of `model` with replaced layers, by name, in their former training mode.

    A layer that the network uses in several places is replaced in all of them.
    """
    check_untied(model, replacements, replacements)
    memo: dict[int, Any] = {}
    for name, new in replacements.items():
        old = model.get_submodule(name)
        memo[id(old)] = new.train(old.training)
    replaced = copied(model, memo)
    for module in replaced.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # Turn off the fast path in evaluation, which does not call the layers.
            module.activation_relu_or_gelu = 0
    return replaced


def check_untied(model: nn.Module, names: Iterable[str], new: Mapping[str, nn.Module] | None = None) -> None:
    """Raise an error if replacing layers, by `new` if known, would split a weight that two layers share."""
    new = new or {}
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for name in names:
        for parameter in model.get_submodule(name).parameters():
            tied = sorted(owners[id(parameter)])
            instead = [new[owner] for owner in tied if owner in new]
            if len(tied) > 1 and not (len(instead) == len(tied) and _share(instead)):
                raise ValueError(
                    f"layers {' and '.join(map(repr, tied))} share a weight, so {name!r} cannot be replaced"
                )


def _share(layers: Sequence[nn.Module]) -> bool:
    """Return whether layers have a common parameter."""
    return bool(set.intersection(*[{id(parameter) for parameter in layer.parameters()} for layer in layers]))


def plain_layer(
    kind: type[nn.Module], layer: nn.Module, weight: Tensor, bias: Tensor | None, omit: Sequence[str] = ()
) -> nn.Module:
    """Build a layer of torch's class `kind` with these weights and the settings, except `omit`, of `layer`."""
    plain = kind.__new__(kind)
    nn.Module.__init__(plain)
    own = {*vars(plain), *omit, "draw", "expects"}
    vars(plain).update(copy.deepcopy({key: value for key, value in vars(layer).items() if key not in own}))
    plain.register_parameter("weight", nn.Parameter(weight.detach().clone()))
    plain.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
    for name, buffer in layer._buffers.items():
        plain.register_buffer(name, None if buffer is None else buffer.clone())
    return plain.train(layer.training)


# -- arguments ---------------------------------------------------------------------------------------------


Factory = Callable[[], nn.Module]
"""A builder of a network: a function without arguments, or a class that needs none."""


def build_network(model: nn.Module | Factory) -> nn.Module:
    """Return the network, or one that the factory builds."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise ValueError(f"model must be an nn.Module, or a function that builds one, got {type(model).__name__}")
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise ValueError(f"model is a function that builds a network, so it must take no arguments: {error}") from error
    except ValueError:  # functions in C have no signature
        pass
    network = model()
    if not isinstance(network, nn.Module):
        raise ValueError(f"model must build an nn.Module, got a function that returns a {type(network).__name__}")
    return network


def is_frozen(layer: nn.Module) -> bool:
    """Return whether a layer has frozen parameters, which conversions keep."""
    return any(not parameter.requires_grad for parameter in layer.parameters())


def check_model(model: nn.Module, nested: bool = False) -> nn.Module:
    """Return a network after checking it; for a multitude that only draws, return its network."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, or a function that builds one, got {type(model).__name__}")
    if isinstance(plain(model), Multitude) and not nested:
        raise ValueError(
            f"model is a multitude of members already ({type(model).__name__} of {model.members} members): apply this "
            "method to the network, before making members of it"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape yet: run the network once before converting it")
    return plain(model)
