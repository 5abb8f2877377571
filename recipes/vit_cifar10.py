"""A vision transformer on CIFAR-10, trained from scratch: single, Packed, heads, Laplace and a deep ensemble.

This experiment is not from a paper; it compares methods on a transformer. The network is a ViT-S/4 (Dosovitskiy et al.,
2021; width 384, six heads, patches of 4 x 4) of six blocks. SVHN is out-of-distribution.

The four members of the deep ensemble share no weights, and are trained like single networks. So they also are the
single networks of four seeds, and the basis of the Laplace approximations: `deep` comes first.

    python -m recipes.vit_cifar10 --data-root DIR
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import multitudes as mt
from multitudes.lab.data import Data, Loader
from multitudes.lab.study.run import costs
from multitudes.lab.study.run.costs import in_turns
from recipes.recipe import Recipe, loaded

MEMBERS, HEADS, ALPHA = 4, 8, 2
DRAWS = 32
"""Draws of the last layer for a Laplace approximation of one network; an ensemble's members share this number."""
SCORES = ("accuracy", "nll", "brier", "ece", "ood/svhn/max_probability/auroc", "ood/svhn/entropy/auroc")


@dataclass(frozen=True)
class Scale:
    """Amount of work."""

    width: int
    depth: int
    heads: int
    epochs: int
    batch: int
    warmup: int
    limit: int | None


def scale_of(recipe: Recipe) -> Scale:
    """Return the scale: all of CIFAR-10, or for smoke a small network and a few steps."""
    return Scale(24, 2, 4, 2, 50, 0, 200) if recipe.smoke else Scale(384, 6, 6, 40, 512, 5, None)


def model(scale: Scale) -> mt.models.ViT:
    """Build the network for every method."""
    return mt.models.vit(width=scale.width, depth=scale.depth, heads=scale.heads)


def convert(name: str, scale: Scale) -> mt.Multitude:
    """Convert the network for a piece."""
    network = model(scale)
    if name == "deep":
        return mt.deep_ensemble(network, MEMBERS, init="fresh")
    if name == "packed":
        return mt.packed(network, MEMBERS, ALPHA, init="fresh", example=torch.randn(2, 3, 32, 32))
    return mt.heads(network, HEADS, init="fresh")


def read(recipe: Recipe) -> Data:
    """Load CIFAR-10 with SVHN's test images, and a few validation images for the prior of Laplace."""
    return recipe.data("cifar10", validation=0.02, limit=scale_of(recipe).limit, ood=[recipe.data_root / "svhn"])


# -- training and measuring --------------------------------------------------------------------------------


def training(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `fit`: AdamW, a cosine schedule, mixed precision on a GPU."""
    scale = scale_of(recipe)
    on_gpu = recipe.device.type == "cuda"
    return {
        "epochs": scale.epochs, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05, "warmup": scale.warmup,
        "clip": 1.0, "precision": recipe.fast["precision"], "compile": on_gpu,
    }  # fmt: skip


def trained(recipe: Recipe, name: str) -> dict[str, Any]:
    """Train the network of a piece, save it, and measure it."""
    data, scale = read(recipe), scale_of(recipe)
    torch.manual_seed(0)
    net = convert(name, scale).to(recipe.device)
    batches = Loader(data.train, data, scale.batch, recipe.device, augment="standard", seed=0, drop_last=True)
    history = mt.fit(net, batches, **training(recipe), seed=0)
    mt.save(net.eval(), recipe.networks / f"{name}.safetensors")
    about = {
        "images": len(data.train), "epochs": scale.epochs, "batch": scale.batch, "depth": scale.depth,
        "train_seconds": sum(epoch.seconds for epoch in history), "loss": [epoch.loss for epoch in history],
    }  # fmt: skip
    return about | {"scores": measured(recipe, net)}


def measured(recipe: Recipe, net: nn.Module, **options: Any) -> dict[str, float]:
    """Score a network on all test images, with SVHN as out-of-distribution data."""
    data = read(recipe)
    ood = {name: data.preprocess(data.scaled(x)) for name, x in data.ood.items()}
    result = mt.evaluate(
        net, Loader(data.test, data, 500, recipe.device, shuffle=False), ood=ood, progress=False, **options
    )
    return {name: result[name] for name in SCORES}


def single_piece(recipe: Recipe) -> dict[str, Any]:
    """Score each member of the deep ensemble by itself."""
    return {"scores": _listed([measured(recipe, network) for network in _members(recipe)])}


def laplace_piece(recipe: Recipe) -> dict[str, Any]:
    """Score Laplace approximations of these networks' last layers: one by one, and as a mixture."""
    approximated = [laplace(recipe, network) for network in _members(recipe)]
    whole = laplace(recipe, _deep(recipe))
    return {
        "draws": DRAWS,
        "scores": _listed([measured(recipe, net, draws=DRAWS, seed=0) for net in approximated]),
        "mixture": measured(recipe, whole, draws=DRAWS // MEMBERS, seed=0),
    }


def laplace(recipe: Recipe, network: nn.Module) -> mt.Multitude:
    """Approximate with one pass over the unaugmented training images; held-out images select the prior."""
    data = read(recipe)
    train, held_out = (Loader(part, data, 500, recipe.device, shuffle=False) for part in (data.train, data.validation))
    return mt.laplace(network, train, prior="validation", validation=held_out)


def costs_piece(recipe: Recipe) -> dict[str, Any]:
    """Measure parameters, multiply-adds, and times relative to a single network, not compiled."""
    data, scale, device = read(recipe), scale_of(recipe), recipe.device
    torch.manual_seed(0)
    nets = {
        "single": mt.Multitude(model(scale)),
        **{name: convert(name, scale) for name in ("packed", "heads", "deep")},
    }
    nets = {name: net.to(device).eval() for name, net in nets.items()}
    approximated = laplace(recipe, nets["single"].network)
    x, y = next(iter(Loader(data.train, data, scale.batch, device, seed=0)))
    how = {key: value for key, value in training(recipe).items() if key not in ("epochs", "warmup", "compile")}
    steps = {name: costs.TrainingStep(net, x, y, lambda net: how) for name, net in nets.items()}
    predicting = {
        name: costs.TimedPrediction(net, x, len(x)) for name, net in (nets | {"laplace": approximated}).items()
    }
    found = {
        "training": in_turns({name: step.seconds for name, step in steps.items()}, "single"),
        "inference": in_turns({name: each.seconds for name, each in predicting.items()}, "single"),
    }
    return {
        "batch": len(x),
        "parameters": {name: costs.parameters(net) for name, net in nets.items()},
        "multiply_adds": {name: costs.multiply_adds(net, x) for name, net in nets.items()},
        **{what: {name: vars(ratio) for name, ratio in ratios.items()} for what, ratios in found.items()},
    }


def _deep(recipe: Recipe) -> mt.Members:
    net = loaded(recipe.networks / "deep.safetensors", "deep").to(recipe.device)
    assert isinstance(net, mt.Members)
    return net


def _members(recipe: Recipe) -> list[nn.Module]:
    whole = _deep(recipe)
    return [whole.member(index) for index in range(whole.members)]


def _listed(scores: list[dict[str, float]]) -> Mapping[str, list[float]]:
    return {name: [each[name] for each in scores] for name in scores[0]}


PIECES: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    "deep": partial(trained, name="deep"),
    "packed": partial(trained, name="packed"),
    "heads": partial(trained, name="heads"),
    "single": single_piece,
    "laplace": laplace_piece,
    "costs": costs_piece,
}

if __name__ == "__main__":
    Recipe("vit_cifar10", __doc__, PIECES).run()
