"""Ensemble model patching: a few layers are each drawn from an ensemble of their own.

Chang, Yao, Williams-King and Lipson, *Ensemble model patching: a parameter-efficient variational Bayesian neural
network*, 2019. Every weight and bias is drawn from a mixture of K Gaussians (eq. 1),

    W_i = sum_k 1[Z_i = k] * (M_ik + sigma eps_ik),     b_j = sum_k 1[z_j = k] * (m_jk + sigma eps_jk).

The members of the family differ in how the assignments Z are drawn (Table 2, eq. 4 and 5):

    explicit ensemble   one z for the whole network
    EMP                 one z for each layer
    dropout             one z for each input unit of a layer, K = 2 components, the second fixed at zero
    DropConnect         one z for each weight, of the same two components
    ECMP                one z for each weight and bias

Ensemble model patching draws only a few cheap layers this way (norm layers, the output layer) and shares the rest of
the network. With priors N(0, 1/tau) on weights and N(0, 1/rho) on biases, the divergence is (eq. 6), up to a
constant,

    KL = sum_patched sum_k p_k (tau/2 |M_k|^2 + rho/2 |m_k|^2) + sum_shared (tau/2 |M|^2 + rho/2 |m|^2).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count, check_number
from multitudes.ensemble.multitude import Multitude, divergence
from multitudes.methods.patching.layers import (
    ASSIGNMENTS,
    BATCH_NORMS,
    KINDS,
    NORMS,
    RELAXATIONS,
    Mixing,
    Patch,
    PatchedBatchNorm,
    can_be_patched,
    is_affine_norm,
    is_other_norm,
)
from multitudes.methods.registry import Method, Settings
from multitudes.networks.calls import Input
from multitudes.networks.copies import copied
from multitudes.networks.trace import Call, record
from multitudes.surgery.affine import affine_layers, maps_of
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.observe import example_for, execution_order, note_reach
from multitudes.surgery.select import Factory, Selector, is_frozen, replace, select

PLACES = ("norm", "input", "output")
"""Words for `layers`, which can be joined by `+`."""

_SCOPES = {
    "network": "one for the whole network",
    "layer": "one for the layer",
    "row": "one for each input",
    "element": "one for each element",
}


@dataclass(frozen=True)
class Overhead:
    """Number of parameters before patching, and number of added ones."""

    before: int
    added: int

    @property
    def total(self) -> int:
        return self.before + self.added

    @property
    def ratio(self) -> float:
        return self.added / self.before


class Patched(Multitude):
    """A network with layers that are drawn from mixtures of components."""

    def ensemble_size(self) -> int:
        """Return the number of different networks that assignments can yield (Table 3)."""
        own = prod(patch.mixing.components ** patch.assignments() for patch in _patches(self.network))
        return own * prod(mixing.components for mixing in _shared_mixings(self.network))

    def overhead(self) -> Overhead:
        """Count the parameters that patching added (Table 3), including learned probabilities."""
        stacks = [stack for patch in _patches(self.network) for stack in (patch.weight, patch.bias)]
        added = sum(stack[1:].numel() for stack in stacks if stack is not None)
        added += sum(m.logits.numel() for m in self.network.modules() if isinstance(m, Mixing) and m.logits is not None)
        return Overhead(sum(p.numel() for p in self.parameters()) - added, added)


def _patches(network: nn.Module) -> list[Patch]:
    return [module for module in network.modules() if isinstance(module, Patch)]


def _shared_mixings(network: nn.Module) -> list[Mixing]:
    """Return the mixings that draw once for the whole network."""
    return list({id(p.mixing): p.mixing for p in _patches(network) if p.assignment == "network"}.values())


# -- conversion --------------------------------------------------------------------------------------------


def patched(
    model: nn.Module | Factory,
    components: int = 5,
    layers: Selector = "norm+output",
    cross: bool = False,
    **options: Any,
) -> Patched:
    """Convert a network by ensemble model patching (Chang et al., 2019): a few layers have K versions.

    Each draw picks one version of each patched layer, or of each weight: `W = sum_k 1[z = k] M_k`. All other layers and
    the running statistics of batch norms are shared.

    Args:
        model: The network, or a function that builds one. It is not changed.
        components: Number of versions (K).
        layers: `"norm"` for norm layers with gamma and beta, `"input"` or `"output"` for the first or last convolution
            or linear layer that runs, sums of these words, a selector, or None for all possible layers.
        cross: False picks a version per layer (EMP), true per weight and bias (ECMP).
        options: Further arguments of `family`.

    Returns:
        A multitude that draws: `net(x, draws=D)` is `[D, B, ...]`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> net = patched(model, components=5).eval()
        >>> net(torch.ones(4, 3), draws=10).shape
        torch.Size([10, 4, 2])
        >>> net.ensemble_size(), net.overhead().added
        (25, 136)
    """
    return family(model, components, "element" if cross else "layer", layers=layers, **options)


def family(
    model: nn.Module | Factory,
    components: int = 2,
    assignment: str = "layer",
    sigma: float = 0.0,
    *,
    zero_component: bool = False,
    layers: Selector = None,
    mixing: str | Sequence[float] = "uniform",
    relaxation: str = "straight-through",
    temperature: float = 1.0,
    weight_precision: float = 1.0,
    bias_precision: float = 1.0,
    init: str | None = None,
    heads: Selector = None,
    spread: float = 0.1,
    example: Input | None = None,
    task: str | None = None,
    seed: int | None = None,
) -> Patched:
    """Draw the weights of layers from mixtures of K Gaussians (Chang et al., 2019): the general form of `patched`.

    Eq. (1) is `W_i = sum_k 1[Z_i = k] (M_ik + sigma eps_ik)`. Dropout of rate p is `family(model, 2, "row",
    zero_component=True, mixing=[1 - p, p])`, without the factor 1 / (1 - p) of torch's dropout and with one mask for
    the whole batch. Expectations (`draws=0`) use the mean weights `sum_k p_k M_k`.

    Args:
        model: The network, or a function that builds one. It is not changed. Frozen layers are not patched.
        components: Number of components (K).
        assignment: Scope of one choice of component: the whole `"network"`, a `"layer"`, the weights of an input unit
            (`"row"`), or one weight (`"element"`). Unlike in `deep_ensemble`, networks share batch-norm statistics.
        sigma: Standard deviation of the components' noise.
        zero_component: Whether the last component is zero. In this case, and for rows, there is one bias.
        layers: The patched layers, as in `patched`; by default all possible layers, except norms if there is a zero
            component.
        mixing: Probabilities of the components: `"uniform"`, K numbers, or `"learned"` with logits for each layer.
        relaxation: Gradient of learned probabilities: `"straight-through"` for the drawn component with the gradient of
            its probability, `"weighted"` for a Gumbel-softmax average of the components.
        temperature: Temperature of the Gumbel-softmax.
        weight_precision: Precision of the prior over weights in `net.kl()` (tau).
        bias_precision: Precision of the prior over biases (rho).
        init: `"fresh"`, `"heads"` or `"pretrained"`, as in `deep_ensemble`. Components of a fresh network are
            initialized independently. Equal ones (of norms and pretrained layers) get noise that keeps their mean.
        heads: Selects the output layers that `init="heads"` resets.
        spread: Standard deviation of this noise, relative to the root mean square of the layer's weight.
        example: One batch of inputs to find the layers with; by default noise of the usual sizes is tried.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights.

    Returns:
        A multitude that draws: `net(x, draws=D)` is `[D, B, ...]`.

    Example:
        >>> net = family(nn.Linear(3, 2), 2, "element", zero_component=True, mixing=[0.9, 0.1])  # DropConnect
        >>> net.ensemble_size() == 2**6, net.overhead().added
        (True, 0)
    """
    start = Start(model, 1, init, heads, example=example, seed=seed)
    model = start.network
    check_count("components", components, 2)
    check_choice("assignment", assignment, ASSIGNMENTS)
    check_choice("relaxation", relaxation, RELAXATIONS)
    precisions: dict[str, Any] = {"weight_precision": weight_precision, "bias_precision": bias_precision}
    for name, value in {"sigma": sigma, "spread": spread, **precisions}.items():
        check_number(name, value, 0)
    check_number("temperature", temperature, 0, above=True)
    given = _probabilities(mixing, components)
    with start.seeded():
        chosen = chosen_layers(model, layers, zero_component, example)
        network, versions = _versions(model, chosen, components - bool(zero_component), start)

        def mixing_like(weight: Tensor) -> Mixing:
            return Mixing(components, given, relaxation, temperature, like=weight)

        shared = mixing_like(next(network.parameters())) if assignment == "network" else None
        converted: dict[str, nn.Module] = {}
        for name, own_versions in versions.items():
            kind = PatchedBatchNorm if type(own_versions[0]) in BATCH_NORMS else Patch
            own = mixing_like(own_versions[0].weight) if shared is None else shared
            patch = kind(own_versions, own, assignment, sigma, spread, shared is None or not converted)
            if not start.fresh or patch.has_equal_weights():
                patch.scatter()
            converted[name] = patch
    network = replace(network, converted)
    if shared is not None:
        shared.attach(network)
    net = Patched(network).like(start.given, task)
    others = [each for each in net.divergences if getattr(each, "func", None) is not patching_kl]
    net.divergences = (*others, partial(patching_kl, **precisions))  # replaces that of an earlier patching
    net.notes = start.summary_notes({name: f"{components} components, {_SCOPES[assignment]}" for name in converted})
    note_reach(net, model, converted, example, warn=False)  # small by design
    if isinstance(layers, str) and "norm" in layers.split("+"):
        warn_of_other_norms(model, converted)
    return net


def _versions(
    model: nn.Module, names: Sequence[str], count: int, start: Start
) -> tuple[nn.Module, dict[str, list[Any]]]:
    """Return the network to patch, and `count` versions of each named layer. Fresh networks are reset for each."""
    draws = count if any(maps_of(model.get_submodule(name)) for name in names) else 1
    versions: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(draws if start.fresh else 1):
        network = start.initialize(copied(start.next_network()))
        for name, layers in versions.items():
            layers.append(copied(network.get_submodule(name)))
    return network, {name: layers * (count // len(layers)) for name, layers in versions.items()}


# -- which layers ------------------------------------------------------------------------------------------


def chosen_layers(model: nn.Module, layers: Selector, zero_component: bool, example: Input | None) -> list[str]:
    """Return the names of the layers to patch."""

    def anywhere(_: str, layer: nn.Module) -> bool:
        # With a zero component, exclude norm layers: its zeros would drop whole channels.
        return _has_weight(layer) and not (zero_component and (type(layer) in NORMS or is_other_norm(layer)))

    words = layers.split("+") if isinstance(layers, str) else []
    if words and all(word in PLACES for word in words):
        names = _trained(model, [name for word in words for name in _place(model, word, example)])
    else:
        try:
            able = {name: m for name, m in model.named_modules() if can_be_patched(m) and (layers or _has_weight(m))}
            names = list(select(model, anywhere if layers is None else layers, able))
        except ValueError as error:
            raise ValueError(f"{error}; or layers is a sum of {', '.join(PLACES)}") from error
    if layers is None:
        names = _trained(model, names)
    for name in names:
        _check_layer(name, model.get_submodule(name))
    return list(dict.fromkeys(names))


def _trained(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Remove frozen layers; raise if all are frozen."""
    trained = [name for name in names if not is_frozen(model.get_submodule(name))]
    if not trained:
        raise ValueError(f"layers: all layers that can be patched are frozen: {', '.join(names)}")
    return trained


def _has_weight(layer: nn.Module) -> bool:
    return layer._parameters.get("weight") is not None


def _place(model: nn.Module, word: str, example: Input | None) -> list[str]:
    """Return the layers that `norm`, `input` or `output` selects."""
    if word == "norm":
        names = _norms(model, example)
        if names:
            return names
        raise ValueError(
            f"layers: 'norm' selects nothing, since model ({type(model).__name__}) has no norm layer with a weight "
            f"({', '.join(kind.__name__ for kind in NORMS)}): pass a sum of {', '.join(PLACES)}, or a selector"
        )
    able = [name for name, layer in affine_layers(model).items() if can_be_patched(layer)]
    able += [name for name, layer in model.named_modules() if isinstance(layer, Patch) and layer.map is not None]
    order = execution_order(model, example_for(model, example), able)
    if not order:
        raise ValueError(f"layers: {word!r} selects nothing: model ({type(model).__name__}) has no layer to patch")
    return [order[0 if word == "input" else -1]]


def _norms(model: nn.Module, example: Input | None) -> list[str]:
    """Return the norms with a weight: torch's, and others that are affine in it on an example."""
    known = [name for name, layer in model.named_modules() if type(layer) in NORMS and _has_weight(layer)]
    others = {name: layer for name, layer in model.named_modules() if is_other_norm(layer)}
    seen: dict[str, Call] = {}
    try:
        for call in record(model, example_for(model, example), others).calls if others else ():
            seen.setdefault(call.name, call)
    except (RuntimeError, ValueError):  # without an example these are not patched; `warn_of_other_norms` warns
        pass
    affine = {name for name, own in seen.items() if is_affine_norm(others[name], own.args, own.kwargs)}
    return [name for name, _ in model.named_modules() if name in known or name in affine]


def warn_of_other_norms(model: nn.Module, patched: Collection[str]) -> None:
    """Warn of selected norms with trained parameters that cannot be patched."""
    called = {
        name: module
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and any(p.requires_grad for p in module.parameters(recurse=False))
    }
    left = Counter(type(module).__name__ for name, module in called.items() if name not in patched)
    if left:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in left.items())
        reached = len(called) - sum(left.values())
        warnings.warn(f"{reached} of {len(called)} norm layers are patched, but not {kinds}", stacklevel=3)


def _check_layer(name: str, layer: nn.Module) -> None:
    if not can_be_patched(layer):
        raise ValueError(
            f"layers: layer {name!r} is a {type(layer).__name__}, which cannot be patched; "
            f"these can: {', '.join(kind.__name__ for kind in KINDS)}"
        )
    if not _has_weight(layer):
        raise ValueError(f"layers: layer {name!r} ({type(layer).__name__}) has no weight to patch")
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise ValueError(f"layers: layer {name!r} has forward hooks, which patching would lose: remove them first")
    if is_frozen(layer):
        raise ValueError(f"layers: layer {name!r} is frozen, but patching changes weights")


# -- arguments ---------------------------------------------------------------------------------------------


def _probabilities(mixing: str | Sequence[float], components: int) -> list[float] | None:
    """Return the components' probabilities, or None if they are learned."""
    if isinstance(mixing, str) and mixing in ("uniform", "learned"):
        return [1 / components] * components if mixing == "uniform" else None
    try:
        given = [float(p) for p in mixing]
    except (TypeError, ValueError):
        given = []
    if len(given) != components or not min(given) > 0 or not isclose(sum(given), 1, abs_tol=1e-6):
        raise ValueError(
            f"mixing must be 'uniform', 'learned', or {components} numbers above 0 that sum to 1, got {mixing!r}"
        )
    return given


# -- objective ---------------------------------------------------------------------------------------------


@divergence
def patching_kl(network: nn.Module, weight_precision: float = 1.0, bias_precision: float = 1.0) -> Tensor:
    """Return the divergence of a patched network from its prior, eq. (6), up to a constant.

    The shared terms cover all other parameters with "weight" or "bias" in their name. If probabilities are learned, the
    entropy of the assignments is not constant, so `sum_k p_k log p_k` is added for each.

    Args:
        network: The network with patched layers.
        weight_precision: Precision of the prior over weights (tau).
        bias_precision: Precision of the prior over biases (rho).
    """
    tau, rho = weight_precision, bias_precision
    check_number("weight_precision", tau, 0)
    check_number("bias_precision", rho, 0)
    terms: list[Tensor] = []
    patched_names: dict[str, None] = {}
    for name, module in network.named_modules():
        if isinstance(module, Patch):
            p = module.mixing.probabilities(module.weight)
            terms.append(tau / 2 * _squares(module.weight, p))
            if module.bias is not None:
                terms.append(rho / 2 * _squares(module.bias, p if len(module.bias) > 1 else torch.ones_like(p)))
            terms.append(module.assignments() * _negative_entropy(module.mixing))
            patched_names |= {f"{name}.{own}" if name else own: None for own in ("weight", "bias")}
    terms += [_negative_entropy(mixing) for mixing in _shared_mixings(network)]
    for name, parameter in network.named_parameters():
        own = name.rpartition(".")[2]
        if name not in patched_names and ("weight" in own or "bias" in own):
            terms.append((rho if "bias" in own else tau) / 2 * parameter.square().sum())
    return sum(terms, torch.zeros(()))


def _squares(stack: Tensor, p: Tensor) -> Tensor:
    """`sum_k p_k |M_k|^2`."""
    return (p[: len(stack)] * stack.square().flatten(1).sum(1)).sum()


def _negative_entropy(mixing: Mixing) -> Tensor:
    """Return `sum_k p_k log p_k` of learned probabilities, or 0 for fixed ones, whose entropy is constant."""
    if mixing.logits is None:
        return torch.zeros(())
    log_p = mixing.logits.log_softmax(0)
    return (log_p.exp() * log_p).sum()


def _build(network: nn.Module, example: Tensor, settings: Settings, seed: int, cross: bool = False) -> Multitude:
    """Patch the norm and output layers by default; without norm layers, the output layer alone."""
    layers = settings["layers"]
    if layers is None:
        layers = "norm+output" if any(isinstance(layer, NORMS) for layer in network.modules()) else "output"
    return patched(network, **{**settings, "layers": layers}, cross=cross, example=example, seed=seed)


_SETTINGS = {"components": 5, "layers": None, "weight_precision": 1.0, "bias_precision": 1.0, "spread": 0.1}
_COSTS = "Copies of small layers: norms and the output layer. One forward per draw."
ROWS = (
    Method(
        "patched", _build, _SETTINGS, _COSTS,
        "Pick it if the network has batch norm, which does not combine well with dropout.",
        place=80,
    ),
    Method(
        "cross_patched", partial(_build, cross=True), _SETTINGS, _COSTS,
        "Pick it instead of patched if single weights, not whole layers, should vary between draws.",
        place=90,
    ),
)  # fmt: skip
