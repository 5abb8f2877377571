"""Variance networks: layers that can store what they learn in the variances of their weights alone.

Neklyudov, Molchanov, Ashukha and Vetrov, *Variance networks: when expectation does not meet your expectations*,
2018. The weights of a layer are drawn from one of

    q(w_ij) = N(mu_ij, alpha mu_ij^2)      one alpha per layer, per output unit, or per weight (17-19)
    q(w_ij) = N(mu_ij, sigma_ij^2)         additive (20)
    q(w_ij) = N(0, sigma_ij^2)             zero-centered (12)

and the layer's output by local reparameterization (21-24), with separate noise for each example and position:

    b = A * mu + eps sqrt(A^2 * sigma^2),  eps ~ N(0, 1).

The objective is the evidence lower bound, with the log-uniform prior p(w) ~ 1/|w| or Student's t. The divergence from
the former falls as alpha grows, so alpha rises until the expectations of the weights carry no information. `transition`
measures this phase transition.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_number
from multitudes.ensemble.multitude import Multitude, divergence
from multitudes.methods.registry import Method, Settings, Training, by
from multitudes.methods.variance.layers import KLS, LAYERS, VarianceLayer, check_options, variance_layers
from multitudes.networks.copies import copied
from multitudes.surgery.affine import affine_layers, is_computed, kind_of, maps_of
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.observe import note_reach, unconverted_kinds
from multitudes.surgery.select import Factory, Selector, is_frozen, replace, select
from multitudes.training.optimizers import can_fuse

# -- conversion --------------------------------------------------------------------------------------------


def variance(
    model: nn.Module | Factory,
    layers: Selector = None,
    parameterization: str = "layer",
    *,
    log_alpha: float = -5.0,
    kl: str = "approximate",
    nu: float = 1e-16,
    init: str | None = None,
    heads: Selector = None,
    task: str | None = None,
    seed: int | None = None,
) -> Multitude:
    """Build a variance network (Neklyudov et al., 2018): the weights of layers are Gaussian, `N(mu, alpha mu^2)`.

    Train with `net.loss(x, y, dataset_size=N)` and a higher learning rate for alpha,
    `net.parameter_groups(lr=3e-3, log_alpha=0.1)`. The phase transition is clearest with batch norm after the layer.
    The gradient of the divergence in log alpha falls as 1 / alpha. Adam's second moment still contains the larger past
    gradients, so in the long run log alpha rises by at most (1 - beta2) / 2 = 0.0005 per step at any learning rate. For
    few steps, lower beta2: `log_alpha={"lr": 0.01, "betas": (0.9, 0.99)}`.

    Args:
        model: The network, or a function that builds one. It is not changed.
        layers: Selects the linear layers and convolutions that get random weights; by default all that are trained,
            except the last. Selected frozen layers keep their weights as expectations.
        parameterization: One alpha per `"layer"`, `"neuron"` or `"weight"`; `"additive"` for a separate variance per
            weight; `"zero"` for expectations of zero, usually with the nonlinearity `Absolute()` after the layer.
        log_alpha: Start of log alpha. `"additive"` noise starts about as large.
        kl: Divergence from the log-uniform prior, `"approximate"` (eq. 10) or `"stochastic"` (eq. 9), or `"student"`
            for Student's t as the prior.
        nu: Degrees of freedom of Student's t.
        init: `"fresh"` (default); `"pretrained"` to use the model's weights as expectations, or as sigmas of
            zero-centered layers; or `"heads"` to reset the output layers also.
        heads: Selects the output layers that `init="heads"` resets.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights.

    Returns:
        A multitude that draws: `net(x, draws=D)` is `[D, B, ...]`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> net = variance(model)
        >>> net.network[0]
        VarianceLinear(in_features=3, out_features=8, bias=True, parameterization='layer')
        >>> net.eval()(torch.ones(5, 3), draws=50).shape
        torch.Size([50, 5, 2])
    """
    start = Start(model, 1, init, heads, seed=seed)
    network = start.network
    check_options(parameterization, log_alpha, kl, nu)
    able = {name: layer for name, layer in affine_layers(network).items() if _class_for(layer) is not None}
    chosen = select(network, layers, able)
    last = list(affine_layers(network))[-1:] if layers is None else []
    if layers is None:
        chosen = _all_but_last(network, chosen, last[0])
    frozen = [name for name, layer in chosen.items() if is_frozen(layer)]
    if frozen and parameterization == "zero":  # otherwise the weights can be the expectations
        raise ValueError(f"layers: {frozen[0]!r} is frozen, but a zero-centered layer cannot keep its weights")
    hooked = [name for name, layer in chosen.items() if layer._forward_hooks or layer._forward_pre_hooks]
    if hooked:
        raise ValueError(f"layers: {hooked[0]!r} has forward hooks, which would be lost: remove them first")
    options: dict[str, Any] = {"parameterization": parameterization, "log_alpha": log_alpha, "kl": kl, "nu": nu}
    with start.seeded():
        network = start.initialize(copied(network))
        converted = {}
        for name, layer in chosen.items():
            kind = _class_for(layer)
            assert kind is not None
            converted[name] = kind.of(_as_linear(network.get_submodule(name)), **options)
        if start.fresh:
            for variance_layer in converted.values():
                variance_layer.reset_spread()
    net = Multitude(replace(network, converted)).like(start.given, task)
    if variance_kl not in net.divergences:  # it covers all such layers
        net.divergences += (variance_kl,)
    net.notes = start.summary_notes(
        {name: f"random weights, parameterization {parameterization!r}" for name in converted}
    )
    note_reach(net, start.network, converted, on_purpose=last, warn=layers is None)
    return net


def _class_for(layer: nn.Module) -> type[VarianceLayer] | None:
    """Return the variance layer class for a layer; None if there is none, or the layer's weight is parametrised."""
    return None if is_computed(layer) else LAYERS.get(kind_of(layer) or nn.Linear)


def _as_linear(layer: Any) -> nn.Module:
    """Return torch's own layers as they are, and others (Hugging Face's `Conv1D`) as an equivalent linear layer."""
    if kind_of(layer) is not None:
        return layer
    (affine,) = maps_of(layer)
    inputs, outputs = affine.widths(layer.weight.shape)
    bias = getattr(layer, "bias", None)
    linear = nn.utils.skip_init(
        nn.Linear, inputs, outputs, bias is not None, device=layer.weight.device, dtype=layer.weight.dtype
    )
    weight = layer.weight.detach()
    weight = weight.T.contiguous() if affine.inputs == 0 else weight.clone()
    linear.weight, linear.bias = nn.Parameter(weight, layer.weight.requires_grad), copy.deepcopy(bias)
    others = {key: value for key, value in vars(layer).items() if key not in vars(linear)}
    vars(linear).update(copy.deepcopy(others))
    return linear.train(layer.training)


def _all_but_last(model: nn.Module, chosen: dict[str, nn.Module], last: str) -> dict[str, nn.Module]:
    hidden = {name: layer for name, layer in chosen.items() if name != last}
    if not hidden:
        others = unconverted_kinds(model, chosen)
        but = f"; these kinds of layers cannot be converted: {others}" if others else ""
        raise ValueError(f"model ({type(model).__name__}) has only one layer: layers=[{last!r}] converts it{but}")
    trained = {name: layer for name, layer in hidden.items() if not is_frozen(layer)}
    if not trained:
        raise ValueError(f"all layers of model ({type(model).__name__}) but the last, {last!r}, are frozen")
    return trained


# -- objective ---------------------------------------------------------------------------------------------


@divergence
def variance_kl(network: nn.Module, kind: str | None = None, nu: float | None = None) -> Tensor:
    """Return the divergence of all variance layers' weights from their prior.

    Args:
        network: The network with variance layers.
        kind: Overrides the layers' `kl`.
        nu: Overrides the layers' `nu`.
    """
    if kind is not None:
        check_choice("kind", kind, KLS)
    if nu is not None:
        check_number("nu", nu, 0, above=True)
    return torch.stack([layer.kl(kind, nu) for layer in variance_layers(network).values()]).sum()


# -- for studies -------------------------------------------------------------------------------------------


def _train(net: Multitude, training: Training, settings: Settings) -> Training:
    """Use Adam, with a separate learning rate for log alpha if given, and `epochs_factor` times the epochs.

    If the noise grows faster than the network learns, training fails; at a lower rate the noise hardly moves.
    """
    check_number("epochs_factor", settings["epochs_factor"], 0, above=True)
    lr = settings["lr"]
    if lr is None:
        lr = training.get("lr") if training.get("optimizer") in ("adam", "adamw") else None
    lr = 1e-3 if lr is None else lr
    alpha = settings["log_alpha_lr"]
    groups = net.parameter_groups(lr=lr) if alpha is None else net.parameter_groups(lr=lr, log_alpha=alpha)
    optimizer = torch.optim.Adam(groups, fused=can_fuse(net.parameters()) or None)
    epochs = max(1, round(settings["epochs_factor"] * training["epochs"]))
    return {**training, "epochs": epochs, "optimizer": optimizer, "lr": None}


ROWS = (
    Method(
        "variance", by(variance),
        {"layers": None, "parameterization": "layer", "log_alpha": -5.0, "kl": "approximate", "lr": None,
         "log_alpha_lr": None, "epochs_factor": 1.0},
        "One more parameter per layer. Training with twice the multiply-adds. One forward per draw.",
        "Pick it for diverse draws of high variance, or for a sparse network.",
        place=100, train=_train,
    ),
)  # fmt: skip
