"""Ensemble model patching: a few layers, each drawn from its own ensemble.

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

_DRAWN = {
    "network": "one for the whole network",
    "layer": "one for the layer",
    "row": "one for each input",
    "element": "one for each element",
}


@dataclass(frozen=True)
class Overhead:
    """Numbers of parameters that a network had, and that were added."""

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
        """Return the number of different networks that the assignments can make (Table 3)."""
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
    """Convert a network by ensemble model patching (EMP): each draw picks one of `components` versions of each layer.

    With `cross` (ECMP) it picks the version of each weight and bias separately. `layers` selects the patched layers:
    norm layers with gamma and beta (`"norm"`), the first or last convolution or linear layer that runs (`"input"`,
    `"output"`), sums of these, a selector, or None for all possible layers. A batch norm's running statistics are
    shared. The other arguments are those of `family`.

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
    """Return a copy of `model` whose layers are drawn from mixtures of `components` by the general eq. (1).

    `assignment` is the scope of one choice of component: the whole `"network"`, a `"layer"`, the weights of one
    input unit (`"row"`), or a single weight (`"element"`). `sigma` is the components' noise. With `zero_component` the
    last component is zero; then, and for rows, there is one bias. `layers` is as in `patched`; by default all possible
    layers, except norm layers if there is a zero component. Dropout of rate p is

        family(model, 2, "row", zero_component=True, mixing=[1 - p, p]),

    without the scaling by 1 / (1 - p) of torch's dropout, and with one mask for a whole batch. The networks of an
    explicit ensemble (`"network"`) share their batch norms' running statistics, unlike those of `deep_ensemble`.

    `mixing` gives the probabilities: `"uniform"`, K numbers, or `"learned"`, with logits for each layer. Learned ones
    get gradients by a relaxation: the drawn component with the gradient of its probability
    (`"straight-through"`), or an average of the components weighted by a Gumbel-softmax at `temperature`
    (`"weighted"`). Expectations (`draws=0`) use the mixture's mean weights, `sum_k p_k M_k`.

    Components start different. In a fresh network (see `deep_ensemble` for `init` and `heads`) they are initialised
    independently, by the network's own rules. If that gives equal components, as in norm layers, and in pretrained
    networks, normal noise is added with deviation `spread` times the root mean square of the layer's weight; the
    components' mean stays the layer. Frozen layers keep their weights and are not patched. `weight_precision` and
    `bias_precision` are the precisions of the priors in `net.kl()`, the paper's tau and rho. `example` is one batch of
    inputs to find the input and output layers with; without it, noise of the usual sizes is tried.

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
            if not start.fresh or patch.alike():
                patch.scatter()
            converted[name] = patch
    network = replace(network, converted)
    if shared is not None:
        shared.attach(network)
    net = Patched(network).like(start.given, task)
    others = [each for each in net.divergences if getattr(each, "func", None) is not patching_kl]
    net.divergences = (*others, partial(patching_kl, **precisions))  # replaces that of an earlier patching
    net.notes = start.summary_notes({name: f"{components} components, {_DRAWN[assignment]}" for name in converted})
    note_reach(net, model, converted, example, warn=False)  # small by design
    if isinstance(layers, str) and "norm" in layers.split("+"):
        warn_of_other_norms(model, converted)
    return net


def _versions(
    model: nn.Module, names: Sequence[str], count: int, start: Start
) -> tuple[nn.Module, dict[str, list[Any]]]:
    """Return the network to patch, and `count` versions of each named layer.

    A fresh network is initialised anew for each version.
    """
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
    """Remove frozen layers; raise if none is left."""
    trained = [name for name in names if not is_frozen(model.get_submodule(name))]
    if not trained:
        raise ValueError(f"layers: all that could be patched are frozen: {', '.join(names)}")
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
            f"layers: 'norm' finds no norm layer with a weight ({', '.join(kind.__name__ for kind in NORMS)}) in the "
            f"model ({type(model).__name__}); layers is a sum of {', '.join(PLACES)}, or selects layers"
        )
    able = [name for name, layer in affine_layers(model).items() if can_be_patched(layer)]
    able += [name for name, layer in model.named_modules() if isinstance(layer, Patch) and layer.map is not None]
    order = execution_order(model, example_for(model, example), able)
    if not order:
        raise ValueError(f"layers: {word!r} finds no convolution or linear layer in the model ({type(model).__name__})")
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
        warnings.warn(f"{reached} of {len(called)} norm layers are patched; left out are {kinds}", stacklevel=3)


def _check_layer(name: str, layer: nn.Module) -> None:
    if not can_be_patched(layer):
        raise ValueError(
            f"layers: layer {name!r} is a {type(layer).__name__}, which cannot be patched; "
            f"these can: {', '.join(kind.__name__ for kind in KINDS)}"
        )
    if not _has_weight(layer):
        raise ValueError(f"layers: layer {name!r} ({type(layer).__name__}) has no weight of its own to patch")
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise ValueError(f"layers: layer {name!r} has forward hooks, which patching would lose; remove them first")
    if is_frozen(layer):
        raise ValueError(f"layers: layer {name!r} is frozen, and its components would be other weights")


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
            f"mixing must be 'uniform', 'learned', or {components} numbers above 0 that sum to 1, one for each "
            f"component, got {mixing!r}"
        )
    return given


# -- objective ---------------------------------------------------------------------------------------------


@divergence
def patching_kl(network: nn.Module, weight_precision: float = 1.0, bias_precision: float = 1.0) -> Tensor:
    """Return the divergence of a patched network from its prior, eq. (6), up to a constant.

    The shared terms cover all other parameters with "weight" or "bias" in their name. If probabilities are learned, the
    entropy of the assignments is not constant, and `sum_k p_k log p_k` is added for each.
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
_COSTS = "Some copies of small layers, norms and the output; a forward a draw."
ROWS = (
    Method(
        "patched", _build, _SETTINGS, _COSTS,
        "Pick it when the network has batch norm, which dropout harms.",
        place=80,
    ),
    Method(
        "cross_patched", partial(_build, cross=True), _SETTINGS, _COSTS,
        "Pick it in place of patched when draws must differ more finely, weight by weight.",
        place=90,
    ),
)  # fmt: skip
