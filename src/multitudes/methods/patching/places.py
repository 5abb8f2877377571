"""Which layers are patched: the usual places, or those that a selector selects."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from torch import nn

from multitudes.core.calling import Input
from multitudes.core.trace import Call, record
from multitudes.methods.patching.layers import NORMS, PATCHES, PatchedConv, PatchedLinear
from multitudes.methods.patching.wrapped import PatchedWrapped, PatchedWrappedNorm, is_affine_norm, patch_for
from multitudes.surgery.affine import affine_layers
from multitudes.surgery.layers import Selector, is_frozen, select
from multitudes.surgery.observe import example_for, executed

PLACES = ("norm", "input", "output")


def chosen_layers(model: nn.Module, layers: Selector, zero_component: bool, example: Input | None) -> list[str]:
    """The names of the layers to patch."""
    words = layers.split("+") if isinstance(layers, str) else []
    if words and all(word in PLACES for word in words):
        names = _trained(model, [name for word in words for name in _place(model, word, example)])
    else:
        try:
            able = {name: layer for name, layer in model.named_modules() if patch_for(layer) and _has_weight(layer)}
            able |= {name: layer for name, layer in model.named_modules() if type(layer) in PATCHES and layers}
            names = list(select(model, _anywhere(zero_component) if layers is None else layers, able))
        except ValueError as error:
            raise ValueError(f"{error}; or layers is a sum of {', '.join(PLACES)}") from error
    if layers is None:
        names = _trained(model, names)
    for name in names:
        _check_layer(name, model.get_submodule(name))
    return list(dict.fromkeys(names))


def _trained(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Without the frozen layers, which keep their weights."""
    trained = [name for name in names if not is_frozen(model.get_submodule(name))]
    if not trained:
        raise ValueError(f"layers: all that could be patched are frozen: {', '.join(names)}")
    return trained


def _anywhere(zero_component: bool) -> Callable[[str, nn.Module], bool]:
    """Every layer with a weight; beside a zero component, no norm layer, for its zeros would drop whole channels."""
    return lambda name, layer: _has_weight(layer) and not (zero_component and is_norm(layer))


def _has_weight(layer: nn.Module) -> bool:
    return layer._parameters.get("weight") is not None


def _place(model: nn.Module, word: str, example: Input | None) -> list[str]:
    """The layers that `norm`, `input` or `output` means."""
    if word == "norm":
        names = _norms(model, example)
        if names:
            return names
        raise ValueError(
            f"layers: 'norm' finds no norm layer with a weight ({', '.join(kind.__name__ for kind in NORMS)}) in the "
            f"model ({type(model).__name__}); layers is a sum of {', '.join(PLACES)}, or selects layers"
        )
    able = [name for name, layer in affine_layers(model).items() if patch_for(layer)]
    order = executed(model, example_for(model, example), (*able, PatchedLinear, PatchedConv, PatchedWrapped))
    if not order:
        raise ValueError(f"layers: {word!r} finds no convolution or linear layer in the model ({type(model).__name__})")
    return [order[0 if word == "input" else -1]]


def is_norm(layer: nn.Module) -> bool:
    """Return whether a layer is a norm that can be patched, by its class or by its name and parameters."""
    return type(layer) in NORMS or patch_for(layer) is PatchedWrappedNorm


def _norms(model: nn.Module, example: Input | None) -> list[str]:
    """The norms with a weight: torch's own, and others that are seen to be affine in it on an example."""
    known = [name for name, layer in model.named_modules() if type(layer) in NORMS and _has_weight(layer)]
    others = {name: m for name, m in model.named_modules() if patch_for(m) is PatchedWrappedNorm and name not in known}
    seen: dict[str, Call] = {}
    try:
        for call in record(model, example_for(model, example), others).calls if others else ():
            seen.setdefault(call.name, call)
    except (RuntimeError, ValueError):  # without an example, they stay as they are, which is warned of
        pass
    affine = {name for name, own in seen.items() if is_affine_norm(others[name], own.args, own.kwargs)}
    return [name for name, _ in model.named_modules() if name in known or name in affine]


def warn_of_other_norms(model: nn.Module, patched: Collection[str]) -> None:
    """Warn of norms with trained parameters that were asked for and cannot be patched."""
    called = {
        name: module
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and any(p.requires_grad for p in module.parameters(recurse=False))
    }
    left = Counter(type(module).__name__ for name, module in called.items() if name not in patched)
    if left:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in left.items())
        reached = len(called) - sum(left.values())
        warnings.warn(f"{reached} of {len(called)} norm layers are patched; left out are {kinds}", stacklevel=3)


def _check_layer(name: str, layer: nn.Module) -> None:
    if patch_for(layer) is None:
        raise ValueError(
            f"layers: layer {name!r} is a {type(layer).__name__}, which cannot be patched; "
            f"these can: {', '.join(kind.__name__ for kind in PATCHES)}"
        )
    if not _has_weight(layer):
        raise ValueError(f"layers: layer {name!r} ({type(layer).__name__}) has no weight of its own to patch")
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise ValueError(f"layers: layer {name!r} has forward hooks, which patching would lose; remove them first")
    if is_frozen(layer):
        raise ValueError(f"layers: layer {name!r} is frozen, and its components would be other weights")
