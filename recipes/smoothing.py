"""Spatial smoothing on CIFAR-10: further measurements of the networks of a study.

    multitudes compare recipes/smoothing_resnet18.toml --data-root DIR [--scale smoke]
    python -m recipes.smoothing --data-root DIR [--scale smoke] [--only consistency,attacks] [--out runs/smoothing]

Park & Kim, *Blurs behave like ensembles: spatial smoothings to improve accuracy, uncertainty, and robustness*, 2022.
`consistency` (Table E.3) and `attacks` (Table E.2) measure the four networks of the study, whose folder is next to OUT:
a plain ResNet-18, one with smoothing, one with MC dropout, and one with both.

`hessian` (Fig. 8) and `planes` (Fig. 7) compare classifier heads, as the paper does, on ResNet-18 with MC dropout:
`train_mlp` trains one with an MLP behind the last feature maps, `train_gap` with global average pooling, and
`train_smooth` with global average pooling and smoothing. All three have the same training, much shorter than in the
paper.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import multitudes as mt
from multitudes.lab.data import Data, Loader, Part
from multitudes.lab.study.run.costs import parameters
from multitudes.lab.study.spec.assignment import data_of
from multitudes.shift import Attack, fgsm, pgd
from recipes import smoothing_measures as measures
from recipes.recipe import Recipe, loaded, rounded

STUDY = "smoothing_resnet18"
METHODS = ("single", "smooth", "mc_dropout", "smooth_dropout")
HEADS = ("mlp", "gap", "smooth")
SEED = 0
VALIDATION = 0.02
"""The study's value, so that its networks and those trained here use the same images."""

DROPOUT = 0.3
TAU = 10.0
WEIGHT_DECAY = 5e-4
PIXEL = 1 / 255
FGSM, PGD = (1, 2, 4), (1, 2)
"""Radii of the attacks, in pixel levels of 256."""


@dataclass(frozen=True)
class Amounts:
    """Amount of work for each measurement."""

    limit: int | None
    """Maximum images per part."""
    draws: int
    """Draws per prediction."""
    moving: int
    """Images for measuring consistency, and their number of shifts."""
    steps: int
    attacked: int
    """Attacked images, draws per gradient, and steps of PGD."""
    gradient_draws: int
    pgd_steps: int
    epochs: int
    batch_size: int
    scored: int
    """Training images for scoring a head, and draws of its scores."""
    scored_draws: int
    hidden: int
    """Units of the MLP's hidden layers."""
    minibatches: int
    minibatch: int
    iterations: int
    plane_images: int
    plane_points: int


AMOUNTS = {
    "smoke": Amounts(
        limit=200, draws=5, moving=60, steps=2, attacked=40, gradient_draws=2, pgd_steps=2, epochs=2, batch_size=50,
        scored=100, scored_draws=2, hidden=16, minibatches=2, minibatch=32, iterations=5, plane_images=64,
        plane_points=3,
    ),
    "full": Amounts(
        limit=None, draws=50, moving=2000, steps=4, attacked=1000, gradient_draws=5, pgd_steps=10, epochs=60,
        batch_size=500, scored=5000, scored_draws=10, hidden=512, minibatches=12, minibatch=128, iterations=30,
        plane_images=1000, plane_points=13,
    ),
}  # fmt: skip


# -- data and networks -------------------------------------------------------------------------------------


def cifar10(recipe: Recipe) -> Data:
    """Load the data."""
    return recipe.data("cifar10", validation=VALIDATION, limit=AMOUNTS[recipe.scale].limit)


@cache
def _read_of_study(recipe: Recipe, job: Path) -> Data:
    config = json.loads((job / "config.json").read_text("utf-8"))
    data = cifar10(recipe)
    if config["data"].get("fingerprint") == data.fingerprint:
        return data
    return data_of(config["data"], job)  # other splits, or with out-of-distribution images


def studied(recipe: Recipe, method: str) -> tuple[mt.Multitude, Data]:
    """Load a network trained by the study, and its data."""
    run = recipe.out.parent / (f"{STUDY}-smoke" if recipe.smoke else STUDY)
    job = run / "jobs" / f"{method}-{SEED}"
    if not (job / "model.safetensors").is_file():
        command = f"multitudes compare recipes/{STUDY}.toml --data-root {recipe.data_root} --out {run}"
        raise ValueError(
            f"{str(job)!r} has no trained network: run `{command}{' --scale smoke' if recipe.smoke else ''}` first"
        )
    data = _read_of_study(recipe, run / "jobs" / f"{METHODS[0]}-{SEED}")
    recipe.saw("cifar10", data.fingerprint)
    return loaded(job / "model.safetensors", job.name).to(recipe.device).eval(), data


def headed(recipe: Recipe, head: str) -> mt.Multitude:
    """Load a network trained by an earlier piece."""
    return loaded(recipe.networks / f"{head}.safetensors", f"train_{head}").to(recipe.device).eval()


def build(head: str, smoke: bool, hidden: int) -> mt.Multitude:
    """Build a new network with one of `HEADS` and MC dropout before the last convolution of each block."""
    network: nn.Module = mt.models.CifarResNet(8, width=8) if smoke else mt.models.resnet18()
    if head == "mlp":
        network = mt.head(network, "mlp", hidden=hidden, dropout=0.5)
    elif head == "smooth":
        network = mt.smooth(network, tau=TAU, growing=True)
    return mt.mc_dropout(network, DROPOUT, "block")


# -- pieces: the networks of the study ---------------------------------------------------------------------


def consistency(recipe: Recipe) -> dict[str, Any]:
    """Measure the consistency of predictions while images move."""
    amounts, found = AMOUNTS[recipe.scale], {}
    for method in METHODS:
        net, data = studied(recipe, method)
        images, labels = data.scaled(data.test.x[: amounts.moving]), data.test.y[: amounts.moving]
        found[method] = measures.consistency_of(
            measures.on_images(net, data, amounts.draws), images, labels, amounts.steps
        )
    return found


def attacks(recipe: Recipe) -> dict[str, Any]:
    """Measure scores under attacks with several radii, in pixel levels."""
    a, found = AMOUNTS[recipe.scale], {}
    kinds: dict[str, Callable[..., Attack]] = {f"fgsm-{level}": partial(fgsm, epsilon=level * PIXEL) for level in FGSM}
    kinds |= {f"pgd-{level}": partial(pgd, epsilon=level * PIXEL, steps=a.pgd_steps) for level in PGD}
    for method in METHODS:
        net, data = studied(recipe, method)
        images, labels = data.scaled(data.test.x[: a.attacked]), data.test.y[: a.attacked]
        net_of_pixels, attacker = (measures.on_images(net, data, draws) for draws in (a.draws, a.gradient_draws))
        found[method] = measures.attacks_on(net_of_pixels, attacker, images, labels, kinds)
    about = {"images": a.attacked, "gradient_draws": a.gradient_draws, "draws": a.draws, "pgd_steps": a.pgd_steps}
    return {"about": about, **found}


# -- pieces: classifier heads ------------------------------------------------------------------------------


def train(head: str, recipe: Recipe) -> dict[str, Any]:
    """Train a network with this head, save it, and score it on training and test images."""
    amounts, data = AMOUNTS[recipe.scale], cifar10(recipe)
    torch.manual_seed(SEED)
    net = build(head, recipe.smoke, amounts.hidden).to(recipe.device)
    loader = Loader(data.train, data, amounts.batch_size, recipe.device, augment="standard", seed=SEED)
    history = mt.fit(
        net, loader, amounts.epochs, optimizer="sgd", lr=0.1, weight_decay=WEIGHT_DECAY, schedule="cosine", warmup=1,
        **recipe.fast, compile=recipe.device.type == "cuda", seed=SEED, progress=False,
    )  # fmt: skip
    mt.save(net, recipe.networks / f"{head}.safetensors")
    seen = Part(data.train.x[: amounts.scored], data.train.y[: amounts.scored])
    return {
        "parameters": parameters(net),
        "epochs": amounts.epochs,
        "loss": rounded([epoch.loss for epoch in history]),
        "train": measures.scores_of(net, seen, data, amounts.scored_draws),
        "test": measures.scores_of(net, data.test, data, amounts.scored_draws),
    }


def hessian(recipe: Recipe) -> dict[str, Any]:
    """Measure the Hessian max eigenvalue spectra of the heads, on the same mini-batches."""
    a = AMOUNTS[recipe.scale]
    measured = partial(
        measures.spectrum_of, data=cifar10(recipe), batches=a.minibatches, batch_size=a.minibatch,
        iterations=a.iterations, weight_decay=WEIGHT_DECAY,
    )  # fmt: skip
    return {head: measured(headed(recipe, head)) for head in HEADS}


def planes(recipe: Recipe) -> dict[str, Any]:
    """Measure the loss landscapes of the heads, on the same images."""
    a = AMOUNTS[recipe.scale]
    measured = partial(measures.landscape_of, data=cifar10(recipe), images=a.plane_images, points=a.plane_points)
    return {head: measured(headed(recipe, head)) for head in HEADS}


PIECES: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    "consistency": consistency,
    "attacks": attacks,
    **{f"train_{head}": partial(train, head) for head in HEADS},
    "hessian": hessian,
    "planes": planes,
}

if __name__ == "__main__":
    Recipe("smoothing", __doc__, PIECES).run()
