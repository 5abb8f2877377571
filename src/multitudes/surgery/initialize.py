"""Reinitialize a network by each module's own rule; frozen tensors keep their values.

A user's constructor may draw weights with another deviation, start gains at zero, or set forget gates to one. The
layers' own rules would undo that. So the values of a given network are compared with those that its rules draw:
constants stay, and draws get the mean and deviation of the given values. A function that builds the network needs none
of this.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude
from multitudes.networks.copies import copied
from multitudes.networks.seeds import seeded
from multitudes.networks.settings import computing_hooks, override_attribute
from multitudes.surgery.select import within

RULES = ("reset_parameters", "_reset_parameters", "_init_weights")
_SAMPLE = 2**16
"""The maximum number of values of a parameter that are compared."""
_FEW = 16
"""A parameter with more repeated values is a table, not draws and constants."""
_POWER_ITERATIONS = 100
"""Iterations after which the spectral norm of a new weight is accurate."""


@torch.no_grad()
def reinitialize(
    network: nn.Module, own: Mapping[str, CustomInitialization] | None = None, only: Collection[str] | None = None
) -> nn.Module:
    """Reinitialize a network in place, or only the modules named by `only`; frozen parameters keep their values.

    `own` holds the parameters, by name, that their layers' rules do not initialize.
    """
    if isinstance(network, Members):
        for member in network.network:
            reinitialize(member, own, only)
        return network
    frozen = [(tensor, tensor.detach().clone()) for tensor in _frozen_tensors(network)]
    parameters = dict(network.named_parameters())
    custom = [(parameters[name], how, parameters[name].detach().clone()) for name, how in (own or {}).items()]
    _run_rules(network.network if isinstance(network, Multitude) else network, only)
    for parameter, how, before in custom:
        how.correct(parameter, before)
    for tensor, value in frozen:
        tensor.copy_(value)
    return network


def _frozen_tensors(network: nn.Module) -> list[Tensor]:
    """Return frozen parameters, and the buffers of modules whose parameters are all frozen."""
    tensors: dict[int, Tensor] = {id(p): p for p in network.parameters() if not p.requires_grad}
    for module in network.modules():
        if not _is_trained(module):
            tensors |= {id(buffer): buffer for buffer in module.buffers()}
    return list(tensors.values())


def _is_trained(module: nn.Module) -> bool:
    """Return whether a module has a trainable parameter, or no parameters."""
    parameters = list(module.parameters())
    return not parameters or any(p.requires_grad for p in parameters)


# -- rules -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _run_rules(network: nn.Module, only: Collection[str] | None = None) -> None:
    """Call the rules of all modules, or of those named by `only` and those inside, in place, inner ones first.

    Rules are `reset_parameters`, `_reset_parameters` and `_init_weights`. If `_init_weights` takes a module, it is
    called for each module inside, except in sub-models of Hugging Face models with rules of their own.
    """
    modules = dict(network.named_modules())
    chosen = {id(m) for name, m in modules.items() if only is None or any(within(name, each) for each in only)}
    nested = {id(inner) for m in modules.values() if is_hugging_face(m) for inner in m.modules() if inner is not m}
    for module in reversed(modules.values()):
        if id(module) in chosen:
            with _plain_weights(module) as plain:
                for rule in filter(None, (_rule(plain, name, 0) for name in RULES)):
                    # A rule that fails counts as no rule.
                    with suppress(RuntimeError, AttributeError, TypeError, LookupError):
                        rule()
        initialise = _rule(module, "_init_weights", 1)
        if initialise is None or (is_hugging_face(module) and id(module) in nested):
            continue
        with _unmarked(module):
            _initialise_each(module, initialise, chosen, is_hugging_face(module))


def is_hugging_face(module: nn.Module) -> bool:
    """Return whether a module is a Hugging Face model with its own configuration."""
    return hasattr(type(module), "base_model_prefix") and "config" in vars(module)


def _rule(module: nn.Module, name: str, arguments: int) -> Callable[..., Any] | None:
    """Return a module's method, if it requires exactly this many arguments."""
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


def _initialise_each(module: nn.Module, initialise: Callable[..., Any], chosen: set[int], by_own: bool) -> None:
    """Call an initializer for a module and all inside; with `by_own`, sub-models use their own if they have one."""
    for child in module.children():
        theirs = _rule(child, "_init_weights", 1) if by_own and is_hugging_face(child) else None
        _initialise_each(child, theirs or initialise, chosen, by_own)
    if id(module) in chosen:
        initialise(module)


@contextmanager
def _unmarked(module: nn.Module) -> Iterator[None]:
    """Remove Hugging Face's marks of initialized modules for the duration of a `with`."""
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


@contextmanager
def _plain_weights(layer: Any) -> Iterator[Any]:
    """Yield a layer over the same tensors with plain weights; afterwards set the tensors that compute the weights.

    Torch computes weights by parametrizations, or by the older hooks. Without computed weights, yield the layer itself.
    """
    hooks = computing_hooks(layer)
    parametrized = list(layer.parametrizations) if parametrize.is_parametrized(layer) else []
    before = {name: getattr(layer, name).detach() for name in (*parametrized, *hooks)}
    if not before:
        yield layer
        return
    kind: Any = type(layer).__bases__[0] if parametrized else type(layer)
    plain = kind.__new__(kind)
    vars(plain).update({name: value for name, value in vars(layer).items() if name not in before})
    vars(plain).update(
        _parameters=layer._parameters | {name: nn.Parameter(value.clone()) for name, value in before.items()},
        _modules={name: module for name, module in layer._modules.items() if name != "parametrizations"},
    )
    yield plain
    for name, value in before.items():
        drawn = plain._parameters[name].detach()
        if not torch.equal(drawn, value):
            _compute_by_hook(layer, hooks[name], drawn) if name in hooks else _set_parametrized(layer, name, drawn)


def _set_parametrized(layer: Any, name: str, value: Tensor) -> None:
    parametrizations = layer.parametrizations[name]
    try:
        setattr(layer, name, value)
    except (NotImplementedError, RuntimeError):  # without an inverse, use the plain weight as the original
        original = getattr(parametrizations, "original", None)
        if original is not None and original.shape == value.shape:
            original.copy_(value)
    spectral = [each for each in parametrizations if hasattr(each, "n_power_iterations")]
    with override_attribute(spectral, "training", True):
        for _ in range(_POWER_ITERATIONS if spectral else 0):
            getattr(layer, name)


def _compute_by_hook(layer: nn.Module, hook: Any, value: Tensor) -> None:
    name = getattr(hook, "name", getattr(hook, "_tensor_name", ""))
    layer.get_parameter(f"{name}_v" if isinstance(hook, WeightNorm) else f"{name}_orig").copy_(value)
    if isinstance(hook, WeightNorm):
        layer.get_parameter(f"{name}_g").copy_(torch.norm_except_dim(value, 2, hook.dim))
    for _ in range(_POWER_ITERATIONS if isinstance(hook, SpectralNorm) else 0):
        hook.compute_weight(layer, True)
    hook(layer, ())


# -- initialization by other code --------------------------------------------------------------------------


@dataclass(frozen=True)
class CustomInitialization:
    """The initialization of a parameter that does not follow its layer's rule."""

    reason: str
    kept: bool = False
    """True if it keeps its value."""
    exact: bool = False
    """True if it starts exactly as the user's code initializes it."""
    constants: tuple[complex, ...] = ()
    """Values that stay; the rule draws the others, which are then scaled and shifted."""
    scale: float = 1.0
    shift: complex = 0.0

    def correct(self, parameter: Tensor, before: Tensor) -> None:
        """Correct the values that the layer's rule has drawn, in place."""
        if self.kept:
            parameter.copy_(before)
            return
        stays = (before == parameter) | _among(before, self.constants)  # rules set constants too, such as padding
        parameter.copy_(torch.where(stays, before, parameter * self.scale + self.shift))


@torch.no_grad()
def compare_with_rules(network: nn.Module) -> tuple[dict[str, CustomInitialization], str | None]:
    """Compare a network with a copy that its rules have reinitialized; restore random states.

    Return the parameters, by name, that do not follow their layers' rules, and the reason why the network looks
    trained, or None. If it looks trained, its values do not show how they were initialized, and only rules count.
    """
    if any(parameter.is_meta for parameter in network.parameters()):  # no values to compare
        return {}, None
    if isinstance(network, Members):
        return compare_with_rules(network._member(0))
    network = network.network if isinstance(network, Multitude) else network
    other = copied(network)
    for parameter in other.parameters():
        parameter.copy_(_moved(parameter))  # to find the values that no rule sets
    with seeded(0):
        _run_rules(other)
    own, pairs = {}, {}
    for (name, given), drawn in zip(network.named_parameters(), other.parameters(), strict=True):
        if given.requires_grad and torch.equal(_moved(given), drawn):
            own[name] = CustomInitialization("no rule initializes it", kept=True)
        elif given.requires_grad:
            pairs[name] = given.detach(), drawn.detach()
    trained = _looks_trained(network, pairs)
    if trained is None:
        own |= {name: how for name, pair in pairs.items() if (how := _compared(*pair)) is not None}
    return own, trained


def _moved(parameter: Tensor) -> Tensor:
    """Return values that no rule draws."""
    return parameter + (0.7310585 if parameter.is_floating_point() or parameter.is_complex() else 1)


def _looks_trained(network: nn.Module, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> str | None:
    for name, module in network.named_modules():
        if not _is_trained(module):
            continue
        source = getattr(getattr(module, "config", None), "_name_or_path", None)
        if isinstance(source, str) and source:
            return f"its weights come from {source!r}"
        mean, batches = getattr(module, "running_mean", None), getattr(module, "num_batches_tracked", None)
        # A few batches may have run to infer shapes.
        if isinstance(mean, Tensor) and bool(mean.any()) and not (isinstance(batches, Tensor) and 0 < batches <= 10):
            return f"layer {name!r} has running statistics of data"
    for name, (given, drawn) in pairs.items():
        owner = type(network.get_submodule(name.rpartition(".")[0])).__module__
        if not _constant(given) and _constant(drawn) and not owner.startswith("multitudes."):
            return f"{name!r} varies, and its layer starts it constant"
    return None


def _compared(given: Tensor, drawn: Tensor) -> CustomInitialization | None:
    """Return how a given parameter differs from its layer's rule; None if the rule may have drawn it."""
    if torch.equal(given, drawn):
        return None
    if _constant(given):
        number = given.flatten()[0].item()
        # A single number that a rule has drawn has more digits than a constant in code.
        written = given.numel() > 1 or f"{number:.3g}" == f"{number:.7g}"
        return CustomInitialization("one constant", kept=True, exact=True) if written else None
    if _constant(drawn):  # the rule sets a constant, so training has changed it
        return None
    zeros = int((given == 0).sum()) > max(3, 2 * int((drawn == 0).sum()))  # padding, in a table of any size
    step = given.numel() // _SAMPLE | 1  # odd, to visit all columns
    given, drawn = given.flatten()[::step], drawn.flatten()[::step]
    constants = tuple(dict.fromkeys([*_repeated(given, drawn), *([0.0] if zeros else [])]))
    if len(constants) > _FEW or (stays := _among(given, constants)).all():
        return CustomInitialization("constants, no independent draws", kept=True)
    exact = torch.promote_types(given.dtype, torch.float64)
    found = _other_distribution(given[~stays].to(exact), drawn[~stays].to(exact))
    if found is not None:
        scale, shift = found
        return CustomInitialization(
            f"{scale:.3g} times the deviation of its layer's own", False, False, constants, scale, shift
        )
    return CustomInitialization("some constants, which stay", exact=True, constants=constants) if constants else None


def _other_distribution(given: Tensor, drawn: Tensor) -> tuple[float, complex] | None:
    """Return the scale and shift that give draws the given deviation and mean; None if these hardly differ."""
    count = len(given)
    if count < 8:
        return None
    scale = (given.std() / drawn.std().clamp(min=1e-30)).item()
    distance = abs(given.mean() - drawn.mean()) / torch.maximum(given.std(), drawn.std()).clamp(min=1e-30)
    # At least five standard errors, and in large tensors more than a fifth.
    if abs(math.log(max(scale, 1e-30))) > max(0.22, 5 / math.sqrt(count)) or (
        distance.item() > max(0.1, 6 * math.sqrt(2 / count))
    ):
        return scale, (given.mean() - scale * drawn.mean()).item()
    return None


def _repeated(given: Tensor, drawn: Tensor) -> list[float]:
    """Return the values that occur more often than among draws."""
    if given.is_complex():
        return []
    most = int(drawn.unique(return_counts=True)[1].max())
    values, counts = given.unique(return_counts=True)
    return [value.item() for value in values[counts >= max(3, 2 * most + 1)]]


def _among(tensor: Tensor, constants: Iterable[complex]) -> Tensor:
    found = torch.zeros_like(tensor, dtype=torch.bool)
    for constant in constants:
        found |= tensor == constant
    return found


def _constant(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or bool((tensor == tensor.flatten()[0]).all())
