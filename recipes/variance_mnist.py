"""Variance networks on MNIST: accuracies, parameterizations, and the phase transition of LeNet-5.

Neklyudov, Molchanov, Ashukha and Vetrov, *Variance networks: when expectation does not meet your expectations*, 2018:
Tables 1 and 2, Figures 3 to 5, and the numbers of appendices B and D.

Each piece is one network, so several can be trained in parallel processes:

    for piece in dropout all layer neuron weight additive student zero phase; do
        python -m recipes.variance_mnist --data-root DIR --only $piece &
    done; wait

`dropout` and `all` (four variance layers) are for Table 1. `layer`, `neuron`, `weight` and `additive`, where only the
first dense layer is a variance layer, are for Table 2. `student` and `zero` are for the appendices. `phase` has a
smooth nonlinearity after that layer, and is for Figures 3 to 5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.lab.data import Data, Loader
from multitudes.lab.study.run.costs import parameters
from multitudes.methods.variance import transition
from multitudes.methods.variance.layers import variance_layers
from multitudes.methods.variance.transition import THRESHOLD
from multitudes.training.trainer import Progress
from recipes.recipe import Recipe, accuracies, accuracy

EPOCHS = 20
"""Epochs of networks expected to pass the transition, at full scale; the recipe's cost is proportional to it."""
SHORT = 10
"""Epochs of networks without a transition."""
LONG = 60
"""Epochs of the network with a smooth nonlinearity, whose transition comes later."""
SEED = 0
BATCH = 100
RATE = 2e-3
SHARED_RATE = 0.5
"""Learning rate of a log alpha shared by many weights. It has far to go, and its gradient is the sum over all."""
OWN_RATE = 5e-3
"""Learning rate of a single weight's log alpha or log sigma: the reachable distance equals the paper's."""
RECORDS = 20
"""Number of measurements during training."""
DRAWS = 100
RECORD_DRAWS = 20
KAPPA_IMAGES = 5000
SHARES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999)
"""Shares of weights to fix: Figure 5."""
FIRST_BIN, LAST_BIN, BINS = -25.0, 5.0, 60
"""Range and number of bins of the histograms of log10 |kappa|, Figure 3."""


@dataclass(frozen=True)
class Scale:
    """Amount of work."""

    epochs: int
    batch: int
    limit: int | None
    records: int
    draws: int
    kappa_images: int


def scale_of(recipe: Recipe, epochs: int) -> Scale:
    """Return the scale: all of MNIST, or for smoke a few steps on a subset."""
    if recipe.smoke:
        return Scale(4, 50, 1500, 1, 5, 100)
    return Scale(epochs, BATCH, None, RECORDS, DRAWS, KAPPA_IMAGES)


# -- networks ----------------------------------------------------------------------------------------------


def lenet(after: nn.Module) -> nn.Module:
    """Build LeNet-5 with batch norm after its first dense layer, as in the authors' code, followed by `after`."""
    model = mt.models.lenet5()
    model.set_submodule("relu3", nn.Sequential(nn.BatchNorm1d(model.fc1.out_features), after))
    return model


def dropout() -> mt.Multitude:
    """Build LeNet-5 with dropout of half the inputs of each dense layer."""
    return mt.mc_dropout(mt.models.lenet5(), p=0.5, layers=["fc1", "fc2"])


def variance(parameterization: str = "layer", layers: tuple[str, ...] = ("fc1",), kl: str = "approximate") -> Any:
    """Build a variance LeNet-5, with one parameterization for all random layers."""
    after = mt.layers.Absolute() if parameterization == "zero" else nn.ReLU()
    return mt.variance(lenet(after), list(layers), parameterization, kl=kl, seed=SEED)


def optimizer(net: mt.Multitude) -> torch.optim.Optimizer:
    """Build Adam, with separate learning rates for the variance parameters."""
    own: dict[str, float] = {}
    for layer in variance_layers(net).values():
        if layer.parameterization in ("layer", "neuron"):
            own["log_alpha"] = SHARED_RATE
        elif layer.parameterization == "weight":
            own["log_alpha"] = OWN_RATE
        elif layer.parameterization == "additive":
            own["log_sigma"] = OWN_RATE
    return torch.optim.Adam(net.parameter_groups(lr=RATE, **own), fused=True)


# -- measuring ---------------------------------------------------------------------------------------------


@torch.no_grad()
def elbo(net: mt.Multitude, loader: Loader, draws: int = 5) -> float:
    """Return the evidence lower bound of a part, eq. (1): its expected log-likelihood minus the divergence."""
    total = 0.0
    for number, (x, y) in enumerate(loader):
        log_probs = net.predict(x, draws=draws, seed=number).member_log_probs
        total -= float(F.nll_loss(log_probs.mean(0), y, reduction="sum"))
    return round(total - float(net.kl()), 2)


def log_alphas(net: mt.Multitude) -> dict[str, list[float]]:
    """Return the minimum, mean and maximum log alpha of each variance layer with expectations."""
    found = {}
    for name, layer in variance_layers(net).items():
        if layer.parameterization != "zero":
            values = layer.log_alphas().detach()
            found[name] = [round(float(value), 3) for value in (values.min(), values.mean(), values.max())]
    return found


def centred(net: mt.Multitude) -> mt.Multitude:
    """Set the first dense layer's expectations to 0 and keep its variances, eq. (11)."""
    new = copy.deepcopy(net)
    old: Any = net.network.fc1
    layer = mt.layers.VarianceLinear.of(old.expected(), parameterization="zero")
    layer.sigma.data = old.variance().sqrt().detach()
    new.network.fc1 = layer
    return new


# -- training ----------------------------------------------------------------------------------------------


def train(
    net: mt.Multitude,
    data: Data,
    scale: Scale,
    device: torch.device,
    measure: Callable[[mt.Multitude], dict[str, Any]] = lambda net: {},
) -> dict[str, Any]:
    """Train a network, with measurements at some epochs; return all measurements."""
    net.to(device)
    test = Loader(data.test, data, 500, device, shuffle=False)
    at = record_epochs(scale.epochs, scale.records)
    curve: list[dict[str, Any]] = []

    def record(progress: Progress) -> None:
        if progress.epoch_ended and progress.epoch in at:
            scores = accuracies(net, test, min(scale.draws, RECORD_DRAWS))
            curve.append({"epoch": progress.epoch, **scores, "log_alpha": log_alphas(net), **measure(net)})

    loader = Loader(data.train, data, scale.batch, device, seed=SEED, drop_last=True)
    history = mt.fit(
        net, loader, scale.epochs, optimizer=optimizer(net), schedule="linear", callbacks=[record], seed=SEED
    )
    whole = Loader(data.train, data, 2000, device, shuffle=False)
    return {
        "epochs": scale.epochs,
        "batch": scale.batch,
        "rates": [RATE, SHARED_RATE, OWN_RATE],
        "images": len(data.train),
        "draws": scale.draws,
        "parameters": parameters(net),
        "train_seconds": round(sum(epoch.seconds for epoch in history), 1),
        **accuracies(net, test, scale.draws),
        "elbo": elbo(net, whole) if net.divergences else None,
        "log_alpha": log_alphas(net),
        "curve": curve,
    }


def record_epochs(epochs: int, records: int) -> set[int]:
    """Return this many epochs, denser at the start, where more happens; the last one is included.

    >>> sorted(record_epochs(80, 8))
    [1, 5, 11, 20, 31, 45, 61, 80]
    """
    return {max(1, round(epochs * (number / records) ** 2)) for number in range(1, records + 1)}


def piece(make: Callable[[], mt.Multitude], epochs: int) -> Callable[[Recipe], dict[str, Any]]:
    """Return a piece's work: train this network for this many epochs at full scale."""

    def work(recipe: Recipe) -> dict[str, Any]:
        scale = scale_of(recipe, epochs)
        data = read(recipe, scale)
        torch.manual_seed(SEED)
        net = make()
        result = train(net, data, scale, recipe.device)
        if log_alphas(net):
            test = Loader(data.test, data, 500, recipe.device, shuffle=False)
            result["centred"] = accuracy(centred(net), test, scale.draws)
        return result

    return work


def read(recipe: Recipe, scale: Scale) -> Data:
    """Load MNIST with as few validation images as possible: nothing is selected by them."""
    return recipe.data("mnist", validation=0.01, limit=scale.limit)


# -- the phase transition ----------------------------------------------------------------------------------


def phase(recipe: Recipe) -> dict[str, Any]:
    """Measure kappa while training a network with a smooth nonlinearity, then sparsify it by kappa."""
    scale = scale_of(recipe, LONG)
    data = read(recipe, scale)
    net = mt.variance(lenet(nn.Softplus()), ["fc1"], seed=SEED)
    x, y = next(iter(Loader(data.train, data, scale.kappa_images, recipe.device, shuffle=False)))
    whole = len(data.train) / len(y)

    def look(net: mt.Multitude) -> dict[str, Any]:
        found = transition.kappa(net, x, y, batch_size=1000)["fc1"] * whole
        above = transition.phase(net, THRESHOLD / whole)["fc1"].share
        return {"kappa": histogram(found), "above": round(above * found.numel())}

    result = train(net, data, scale, recipe.device, look)
    test = Loader(data.test, data, 500, recipe.device, shuffle=False)
    kappas = transition.kappa(net, x, y, batch_size=1000)["fc1"]
    return result | {
        "centred": accuracy(centred(net), test, scale.draws),
        "kappa_images": len(y),
        "weights": kappas.numel(),
        "bins": [FIRST_BIN, LAST_BIN, BINS],
        "sparse": [sparse(net, threshold_of(kappas, share), whole, test, scale.draws) for share in SHARES],
    }


def histogram(kappas: Tensor) -> list[int]:
    """Count weights by log10 |kappa|; the outer bins include everything beyond."""
    logs = kappas.abs().clamp(min=10**FIRST_BIN).log10().clamp(FIRST_BIN, LAST_BIN)
    return [int(count) for count in torch.histc(logs.float().cpu(), BINS, FIRST_BIN, LAST_BIN)]


def threshold_of(kappas: Tensor, share: float) -> float:
    """Return the threshold below which this share of the weights lies."""
    ordered = kappas.abs().flatten().sort().values
    return float(ordered[round(share * (len(ordered) - 1))])


def sparse(net: mt.Multitude, threshold: float, whole: float, test: Loader, draws: int) -> dict[str, float]:
    """Measure the ensemble with all weights of |kappa| below a threshold fixed to 0 or to their expectations."""
    found = {"threshold": float(f"{threshold * whole:.4g}")}
    for to in ("zero", "mean"):
        fixed = transition.sparsify(net, threshold, to)
        found |= {"fixed": round(fixed.fixed, 5), to: accuracy(fixed.net, test, draws)}
    return found


ALL = ("conv1", "conv2", "fc1", "fc2")
PIECES: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    "dropout": piece(dropout, SHORT),
    "all": piece(lambda: variance(layers=ALL), EPOCHS),
    "layer": piece(lambda: variance("layer"), EPOCHS),
    "neuron": piece(lambda: variance("neuron"), EPOCHS),
    "weight": piece(lambda: variance("weight"), EPOCHS),
    "additive": piece(lambda: variance("additive"), EPOCHS),
    "student": piece(lambda: variance("layer", kl="student"), EPOCHS),
    "zero": piece(lambda: variance("zero"), SHORT),
    "phase": phase,
}

if __name__ == "__main__":
    Recipe("variance_mnist", __doc__, PIECES).run()
