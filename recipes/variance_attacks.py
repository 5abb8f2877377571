"""Iterative fast-sign attacks on dropout, deep ensembles, variance networks and ensembles of these, on CIFAR-10.

Neklyudov, Molchanov, Ashukha and Vetrov, *Variance networks: when expectation does not meet your expectations*, 2018:
Figure 2, and the CIFAR-10 rows of Table 1. The network is the VGG-like one of Zagoruyko (2015).

Each network is a piece, so several can be trained in parallel processes. The ensembles use these networks, and come
last:

    for piece in dropout-0 dropout-1 dropout-2 variance-0 variance-1 variance-2; do
        python -m recipes.variance_attacks --data-root DIR --only $piece &
    done; wait
    python -m recipes.variance_attacks --data-root DIR

`dropout-0` and `variance-0` are also attacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.lab.data import Data, Loader
from multitudes.methods.variance.layers import variance_layers
from multitudes.shift.attacks import Attack, iterative_fast_sign
from recipes.recipe import Recipe, accuracies, accuracy, loaded, of_pixels

EPOCHS = 60
"""Epochs at full scale; the recipe's cost is proportional to them and to the number of members."""
MEMBERS = 3
BATCH = 256
RATE = 1e-3
LOG_ALPHA_RATE = 4e-3
MEMORY = 0.99
"""Adam's beta2 for log alpha; 0.999 would lag behind (see `mt.variance`). With this and the rate, log alpha can pass
0 after 7 epochs, reach 4.5 after 16, and get to 15: by then the network is well trained."""
DRAWS = 10
"""Draws of a network, or of all members of an ensemble together."""
FINAL_DRAWS = 50
"""Draws for accuracies on the whole test part."""
STEP = 0.5 / 255
STEPS = 30
IMAGES = 1000
VARIANCE_LAYERS = ("features.40", "features.44", "features.48", "classifier.1")
"""The last three convolutions and the first dense layer."""
BETWEEN = ("features.43", "features.47")
"""Dropout between these convolutions, which the authors omit for variance layers."""


@dataclass(frozen=True)
class Scale:
    """Amount of work."""

    epochs: int
    batch: int
    rate: float
    width: int
    size: int
    limit: int | None
    draws: int
    steps: int
    images: int


def scale_of(recipe: Recipe) -> Scale:
    """Return the scale: all of CIFAR-10, or for smoke a narrow network and a few steps on small images."""
    if recipe.smoke:
        return Scale(4, 50, 3e-3, 16, 16, 2000, 5, 4, 40)
    return Scale(EPOCHS, BATCH, RATE, 64, 32, None, FINAL_DRAWS, STEPS, IMAGES)


# -- networks ----------------------------------------------------------------------------------------------


def plain(width: int) -> mt.Multitude:
    """Build the VGG-like network with training-only dropout, for deep ensembles and the deterministic procedure."""
    return mt.Multitude(mt.models.VGGLike(width=width))


def variance(width: int) -> mt.Multitude:
    """Build the network with four variance layers; the dropout before them stays on, as in the authors' code."""
    model = mt.models.VGGLike(width=width)
    for name in BETWEEN:
        model.set_submodule(name, nn.Identity())
    return mt.variance(mt.mc_dropout(model), list(VARIANCE_LAYERS), init="pretrained")


# -- measuring ---------------------------------------------------------------------------------------------


def targets(labels: Tensor, classes: int, seed: int = 0) -> Tensor:
    """Draw for each image a class other than its own, uniformly."""
    generator = torch.Generator().manual_seed(seed)
    return (labels + torch.randint(1, classes, labels.shape, generator=generator)) % classes


def attacked(net: mt.Multitude, data: Data, scale: Scale, draws: int | None, batch: int = 100) -> dict[str, Any]:
    """Compute Figure 2 for a network on images in [0, 1]: success rate and mean entropy after each step."""
    device = next(net.parameters()).device
    x, labels = data.scaled(data.test.x[: scale.images]), data.test.y[: scale.images]
    wanted = targets(labels, data.outputs)
    parts = [
        iterative_fast_sign(
            net, x[rows].to(device), wanted[rows].to(device), STEP, scale.steps,
            targeted=True, labels=labels[rows].to(device), draws=draws, seed=number,
        )
        for number, rows in enumerate(torch.arange(len(labels)).split(batch))
    ]  # fmt: skip
    attack = Attack.concat(parts)
    curves = {"success": attack.success_rate, "entropy": attack.entropy, "accuracy": attack.accuracy}
    return {name: [round(float(value), 5) for value in values] for name, values in curves.items()}


# -- pieces ------------------------------------------------------------------------------------------------


def train(recipe: Recipe, net: mt.Multitude, seed: int) -> dict[str, Any]:
    """Train with Adam at a linearly decaying rate, with random crops and flips."""
    data, scale, device = read(recipe), scale_of(recipe), recipe.device
    net.to(device)
    own = {"log_alpha": {"lr": LOG_ALPHA_RATE, "betas": (0.9, MEMORY)}} if variance_layers(net) else {}
    history = mt.fit(
        net, Loader(data.train, data, scale.batch, device, augment="standard", seed=seed, drop_last=True), scale.epochs,
        optimizer=torch.optim.Adam(net.parameter_groups(lr=scale.rate, **own), fused=True), schedule="linear",
        **recipe.fast, seed=seed,
    )  # fmt: skip
    return {
        "epochs": scale.epochs,
        "batch": scale.batch,
        "width": scale.width,
        "images": len(data.train),
        "draws": scale.draws,
        "attacked_images": scale.images,
        "log_alpha_rate": LOG_ALPHA_RATE,
        "memory": MEMORY,
        "train_seconds": round(sum(epoch.seconds for epoch in history), 1),
        "loss": [round(epoch.loss, 4) for epoch in history],
        "log_alpha": {name: round(layer.log_alphas().item(), 3) for name, layer in variance_layers(net).items()},
    }


def trained(
    recipe: Recipe, name: str, make: Callable[[int], mt.Multitude], seed: int
) -> tuple[mt.Multitude, dict[str, Any]]:
    """Train a network and save it for the ensembles; return it with a report of its training."""
    torch.manual_seed(seed)
    net = make(scale_of(recipe).width)
    result = train(recipe, net, seed)
    mt.save(net, recipe.networks / f"{name}-{seed}.safetensors")
    return net, result


def dropout_piece(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Run a network with dropout: deterministic, and as an ensemble of draws."""
    scale, data = scale_of(recipe), read(recipe)
    net, result = trained(recipe, "dropout", plain, seed)
    test = held_out(recipe)
    result["deterministic"] = accuracy(net, test, None)
    if seed == 0:
        drawing = mt.mc_dropout(net.network)
        result |= {"stochastic": accuracy(drawing, test, 1), "ensemble": accuracy(drawing, test, scale.draws)}
        result["attacks"] = {
            "dropout, deterministic": attacked(mt.Multitude(of_pixels(net.network, data)), data, scale, None),
            "dropout": attacked(mt.Multitude(of_pixels(drawing.network, data)), data, scale, DRAWS),
        }
    return result


def variance_piece(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Run a variance network by all three procedures, and attack it as an ensemble of draws."""
    scale, data = scale_of(recipe), read(recipe)
    net, result = trained(recipe, "variance", variance, seed)
    result |= accuracies(net, held_out(recipe), scale.draws)
    if seed == 0:
        seen = mt.Multitude(of_pixels(net.network, data))
        result["attacks"] = {"variance": attacked(seen, data, scale, DRAWS)}
    return result


def ensemble_piece(recipe: Recipe, kind: str, name: str) -> dict[str, Any]:
    """Run all networks of a kind as members of one ensemble."""
    pieces = [f"{kind}-{seed}" for seed in range(MEMBERS)]
    networks = [loaded(recipe.networks / f"{piece}.safetensors", piece).network for piece in pieces]
    scale, data = scale_of(recipe), read(recipe)
    draws = None if kind == "dropout" else max(1, DRAWS // MEMBERS)
    fused = mt.fuse(networks).to(recipe.device)
    seen = mt.fuse([of_pixels(network, data) for network in networks]).to(recipe.device)
    fused.runner = seen.runner = "loop"  # the same on every device, with one member's activations at a time
    return {
        "members": MEMBERS,
        "draws": draws,
        "attacked_images": scale.images,
        "ensemble": accuracy(fused, held_out(recipe), draws),
        "attacks": {name: attacked(seen, data, scale, draws)},
    }


def held_out(recipe: Recipe) -> Loader:
    """Return the whole test part, on the device."""
    data = read(recipe)
    return Loader(data.test, data, 250, recipe.device, shuffle=False)


def read(recipe: Recipe) -> Data:
    """Load CIFAR-10 with as few validation images as possible: nothing is selected by them."""
    scale = scale_of(recipe)
    return recipe.data("cifar10", validation=0.01, limit=scale.limit, size=None if scale.size == 32 else scale.size)


PIECES: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    **{f"dropout-{seed}": partial(dropout_piece, seed=seed) for seed in range(MEMBERS)},
    **{f"variance-{seed}": partial(variance_piece, seed=seed) for seed in range(MEMBERS)},
    "deep_ensemble": partial(ensemble_piece, kind="dropout", name="deep ensemble"),
    "variance_ensemble": partial(ensemble_piece, kind="variance", name="variance ensemble"),
}

if __name__ == "__main__":
    Recipe("variance_attacks", __doc__, PIECES).run()
