"""Initialise a network anew: each layer, and each network, by its own rule; what is frozen is kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from multitudes.core.copying import copied
from multitudes.core.members import Members
from multitudes.core.multitude import Multitude
from multitudes.core.seeding import seeded
from multitudes.core.settings import computing_hooks
from multitudes.surgery.constructed import Own, compared
from multitudes.surgery.layers import within

__all__ = ["Judgement", "frozen_tensors", "is_hugging_face", "judged", "plain_weights", "redraw", "run_rules"]

_RULES = ("reset_parameters", "_reset_parameters", "_init_weights")


@torch.no_grad()
def redraw(network: nn.Module, own: Mapping[str, Own] | None = None, only: Collection[str] | None = None) -> nn.Module:
    """Initialise a network anew, in place, from torch's random state: all of it, or the modules named by `only`.

    Frozen parameters keep their values. `own` says of parameters, by name, how they were initialised by other code than
    their layers', and they are drawn in that way, or kept.
    """
    if isinstance(network, Members):
        for member in network.network:
            redraw(member, own, only)
        return network
    kept = [(tensor, tensor.detach().clone()) for tensor in frozen_tensors(network)]
    parameters = dict(network.named_parameters())
    custom = [(parameters[name], how, parameters[name].detach().clone()) for name, how in (own or {}).items()]
    run_rules(network.network if isinstance(network, Multitude) else network, only)
    for parameter, how, before in custom:
        how.settle(parameter, before)
    for tensor, value in kept:
        tensor.copy_(value)
    return network


def frozen_tensors(network: nn.Module) -> list[Tensor]:
    """The parameters that are not trained, and the buffers of modules all of whose parameters are not."""
    tensors: dict[int, Tensor] = {id(p): p for p in network.parameters() if not p.requires_grad}
    for module in network.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            tensors |= {id(buffer): buffer for buffer in module.buffers()}
    return list(tensors.values())


@torch.no_grad()
def run_rules(network: nn.Module, only: Collection[str] | None = None) -> None:
    """Let modules initialise themselves, in place, inner ones first: all of them, or those named and what is in them.

    A module's rule is its `reset_parameters`, its `_reset_parameters`, or an `_init_weights`, which is called for each
    of the modules inside it where it takes one. A Hugging Face model initialises its own sub-models by their own rules.
    """
    modules = dict(network.named_modules())
    chosen = {id(m) for name, m in modules.items() if only is None or any(within(name, each) for each in only)}
    nested = {id(inner) for m in modules.values() if is_hugging_face(m) for inner in m.modules() if inner is not m}
    for module in reversed(modules.values()):
        if id(module) in chosen:
            for rule in filter(None, (_rule(module, name, 0) for name in _RULES)):
                _try(module, rule)
        initialise = _rule(module, "_init_weights", 1)
        if initialise is None or (is_hugging_face(module) and id(module) in nested):
            continue
        with _unmarked(module):
            _initialise_each(module, initialise, chosen, is_hugging_face(module))


def is_hugging_face(module: nn.Module) -> bool:
    """Return whether a module is a model of Hugging Face's, with a configuration of its own."""
    return hasattr(type(module), "base_model_prefix") and "config" in vars(module)


def _rule(module: nn.Module, name: str, arguments: int) -> Callable[..., Any] | None:
    """A module's method, where it can be called with so many arguments; it is none's rule where it needs others."""
    method = getattr(module, name, None)
    if not callable(method):
        return None
    try:
        signature = inspect.signature(method)
        signature.bind(*[None] * arguments)
    except (TypeError, ValueError):
        return None
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind in (0, 1)]
    return method if len(needed) == arguments else None


def _try(module: nn.Module, rule: Callable[[], Any]) -> None:
    """Call a rule; where it fails, what it has not drawn stays as it was, and is reported like what has no rule."""
    with plain_weights(module):
        try:
            rule()
        except (RuntimeError, AttributeError, TypeError, LookupError):
            return


def _initialise_each(module: nn.Module, initialise: Callable[..., Any], chosen: set[int], by_own: bool) -> None:
    """Call an initialiser for a module and all inside; with `by_own`, sub-models that have one use theirs."""
    for child in module.children():
        theirs = _rule(child, "_init_weights", 1) if by_own and is_hugging_face(child) else None
        _initialise_each(child, theirs or initialise, chosen, by_own)
    if id(module) in chosen:
        initialise(module)


@contextmanager
def _unmarked(module: nn.Module) -> Iterator[None]:
    """Hugging Face skips what it has marked as initialised; take the marks off for a while."""
    mark = "_is_hf_initialized"
    marked = [t for t in [*module.modules(), *module.parameters(), *module.buffers()] if mark in vars(t)]
    before = [getattr(t, mark) for t in marked]
    for t in marked:
        delattr(t, mark)
    try:
        yield
    finally:
        for t, value in zip(marked, before, strict=True):
            setattr(t, mark, value)


# -- what the rules are for --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """Return the parameters that a network's own rules cannot, or should not, draw anew."""

    own: dict[str, Own]
    """Those that other code has initialised, by name, and how; those without a rule are kept."""
    unruled: list[str]
    """The names of those without a rule."""
    trained: str | None
    """Why the network looks trained, in words; None where it does not."""


@torch.no_grad()
def judged(network: nn.Module) -> Judgement:
    """Compare a network with what its rules make of a copy. Random states are left as they were.

    Where it looks trained, its values say nothing of how they were initialised, and only rules are left to follow.
    """
    if any(parameter.is_meta for parameter in network.parameters()):  # which has no values to compare
        return Judgement({}, [], None)
    if isinstance(network, Members):
        return judged(network._member(0))
    network = network.network if isinstance(network, Multitude) else network
    other = copied(network)
    for parameter in other.parameters():
        parameter.copy_(_moved(parameter))  # so that what no rule sets can be told from what it sets as it was
    with seeded(0):
        run_rules(other)
    pairs = {
        name: (given.detach(), drawn.detach())
        for (name, given), drawn in zip(network.named_parameters(), other.parameters(), strict=True)
        if given.requires_grad
    }
    unruled = [name for name, (given, drawn) in pairs.items() if torch.equal(_moved(given), drawn)]
    own = {name: Own("no rule draws it anew", kept=True) for name in unruled}
    trained = _looks_trained(network, {name: pair for name, pair in pairs.items() if name not in own})
    if trained is None:
        found = {name: compared(*pair) for name, pair in pairs.items() if name not in own}
        own |= {name: how for name, how in found.items() if how is not None}
    return Judgement(own, unruled, trained)


def _moved(parameter: Tensor) -> Tensor:
    """Values that no rule gives."""
    return parameter + (0.7310585 if parameter.is_floating_point() or parameter.is_complex() else 1)


def _is_trained(module: nn.Module) -> bool:
    """Return whether some of its parameters are not frozen, or it has none."""
    parameters = list(module.parameters())
    return not parameters or any(p.requires_grad for p in parameters)


def _looks_trained(network: nn.Module, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> str | None:
    trained = {name: m for name, m in network.named_modules() if _is_trained(m)}
    for module in trained.values():
        source = getattr(getattr(module, "config", None), "_name_or_path", None)
        if isinstance(source, str) and source:
            return f"its weights come from {source!r}"
    for name, module in trained.items():
        mean, batches = getattr(module, "running_mean", None), getattr(module, "num_batches_tracked", None)
        # A few batches may have been run to see shapes.
        if isinstance(mean, Tensor) and bool(mean.any()) and not (isinstance(batches, Tensor) and 0 < batches <= 10):
            return f"layer {name!r} has seen data"
    for name, (given, drawn) in pairs.items():
        owner = type(network.get_submodule(name.rpartition(".")[0])).__module__
        varies = bool((given != given.flatten()[0]).any()) if given.numel() else False
        if varies and bool((drawn == drawn.flatten()[0]).all()) and not owner.startswith("multitudes."):
            return f"{name!r} varies, and starts constant"
    return None


# -- weights that are computed from others -------------------------------------------------------------------


_POWER_ITERATIONS = 100
"""After which the spectral norm of a new weight is known well enough to evaluate with."""


@contextmanager
def plain_weights(layer: nn.Module) -> Iterator[None]:
    """Inside, a layer has plain weights, for its own code to draw; after, what they are computed from is set by them.

    Layers that compute none of their weights are left alone.
    """
    with ExitStack() as stack:
        if parametrize.is_parametrized(layer):
            stack.enter_context(_unparametrized(layer))
        for name, hook in computing_hooks(layer).items():
            stack.enter_context(_unhooked(layer, name, hook))
        yield


@contextmanager
def _unparametrized(layer: Any) -> Iterator[None]:
    own = type(layer)
    values = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
    layer.__class__ = own.__bases__[0]  # in which the weights are parameters, not properties
    layer._parameters.update({name: nn.Parameter(value) for name, value in values.items()})
    try:
        yield
    finally:
        values = {name: layer._parameters.pop(name).detach() for name in values}
        layer.__class__ = own
    for name, value in values.items():
        _set_parametrized(layer, name, value)


@torch.no_grad()
def _set_parametrized(layer: Any, name: str, value: Tensor) -> None:
    parametrizations = layer.parametrizations[name]
    try:
        setattr(layer, name, value)
    except (NotImplementedError, RuntimeError):  # without an inverse, what is computed from starts as the plain weight
        original = getattr(parametrizations, "original", None)
        if original is not None and original.shape == value.shape:
            original.copy_(value)
    spectral = [each for each in parametrizations if hasattr(each, "n_power_iterations")]
    modes = [each.training for each in spectral]
    for each in spectral:
        each.train()
    for _ in range(_POWER_ITERATIONS if spectral else 0):
        getattr(layer, name)
    for each, mode in zip(spectral, modes, strict=True):
        each.train(mode)


@contextmanager
def _unhooked(layer: nn.Module, name: str, hook: Any) -> Iterator[None]:
    """As `_unparametrized`, for the hooks that torch used before it had parametrisations."""
    of = layer.get_parameter(f"{name}_v" if isinstance(hook, WeightNorm) else f"{name}_orig")
    vars(layer).pop(name, None)
    layer._parameters[name] = nn.Parameter(of.detach().clone())
    try:
        yield
    finally:
        value = layer._parameters.pop(name)
        assert value is not None
        with torch.no_grad():
            of.copy_(value)
            if isinstance(hook, WeightNorm):
                layer.get_parameter(f"{name}_g").copy_(torch.norm_except_dim(value, 2, hook.dim))
            _recompute(layer, hook)


def _recompute(layer: nn.Module, hook: Any) -> None:
    mode = layer.training
    layer.training = True  # in which a spectral norm makes power iterations
    for _ in range(_POWER_ITERATIONS if isinstance(hook, SpectralNorm) else 1):
        hook(layer, ())
    layer.training = mode
