"""Measurements of trained networks from Park & Kim (2022): consistency, attacks, curvature, landscapes.

Each function takes one network and returns plain, rounded numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

import multitudes as mt
from multitudes.lab.data import Data, Loader, Part
from multitudes.landscape import filter_normalised, hessian_spectrum, plane, random_direction
from multitudes.metrics import (
    ECE,
    NLL,
    Accuracy,
    AttackSuccessRate,
    Consistency,
    CrossEntropyConsistency,
    RelativeConfidence,
)
from multitudes.shift import Attack, translated
from recipes.recipe import of_pixels, rounded

Making = Callable[..., Attack]
"""`(net, images, labels, seed=...) -> Attack`: an attack with its settings."""
ATTACK_ROWS = 125
"""Images attacked at a time; the gradient stores the feature maps of all draws."""
ROWS = 250
UNSEEN = 10**6
"""Seed offset, above the seeds of all attacks."""


# -- networks for images -----------------------------------------------------------------------------------


def on_images(net: mt.Multitude, data: Data, draws: int) -> mt.Multitude:
    """Convert the network to take images in [0, 1], with this many draws."""
    whole = mt.Multitude(of_pixels(net.network, data)).like(net).eval()
    whole.draws = draws
    return whole


def scores_of(net: mt.Multitude, part: Part, data: Data, draws: int) -> dict[str, float]:
    """Return NLL, accuracy and calibration error on a part of the data."""
    net.draws = draws
    batches = Loader(part, data, ROWS, next(net.parameters()).device, shuffle=False)
    found = mt.evaluate(net, batches, tasks=("scores", "calibration"), seed=0, progress=False)
    scores = {name: found[name] for name in ("nll", "accuracy", "ece")}
    return rounded(scores) | {"images": len(part), "draws": draws}


# -- consistency -------------------------------------------------------------------------------------------


def consistency_of(net: mt.Multitude, images: Tensor, labels: Tensor, steps: int) -> dict[str, float]:
    """Measure the consistency of predictions for images in [0, 1] that move pixel by pixel (eq. 37 to 39).

    Each image moves in its own direction, with reflected borders. Every frame has its own draws: constant masks would
    hide how much draws differ.
    """
    device = next(net.parameters()).device
    steady, entropy, confidence = Consistency(), CrossEntropyConsistency(), RelativeConfidence()
    for number, (x, y) in enumerate(zip(images.split(ROWS), labels.split(ROWS), strict=True)):
        frames = translated(x, steps, direction="random", seed=number)
        predictions = [net.predict(frame.to(device), seed=index).cpu() for index, frame in enumerate(frames)]
        steady.update(predictions)
        entropy.update(predictions)
        for p in predictions:
            confidence.update(p, y)
    values = {"consistency": steady, "cross_entropy": entropy, "relative_confidence": confidence}
    scores = {name: float(metric.compute()) for name, metric in values.items()}
    return rounded(scores) | {"images": len(images), "steps": steps, "draws": net.draws}


# -- attacks -----------------------------------------------------------------------------------------------


def attacks_on(
    net: mt.Multitude, attacker: mt.Multitude, images: Tensor, labels: Tensor, attacks: Mapping[str, Making]
) -> dict[str, dict[str, float]]:
    """Score the predictions of `net` for images in [0, 1], unchanged ("clean") and after each attack.

    Gradients are those of the mean over draws of `attacker`, the same network with possibly fewer draws. Predictions
    use draws that no attack has seen.
    """
    device = next(net.parameters()).device
    found = {name: (Accuracy(), NLL(), ECE(), AttackSuccessRate()) for name in ("clean", *attacks)}
    for number, (x, y) in enumerate(zip(images.split(ATTACK_ROWS), labels.split(ATTACK_ROWS), strict=True)):
        x = x.to(device)
        clean = net.predict(x, seed=UNSEEN + number).cpu()
        for name, (*scores, success) in found.items():
            after = clean
            if name in attacks:
                made = attacks[name](attacker, x, y.to(device), seed=number)
                after = net.predict(made.images, seed=UNSEEN + number).cpu()
            for score in scores:
                score.update(after, y)
            success.update(clean, after, y)
    names = ("accuracy", "nll", "ece", "success_rate")
    return {
        attack: rounded({name: float(metric.compute()) for name, metric in zip(names, metrics, strict=True)})
        for attack, metrics in found.items()
    }


# -- the loss landscape ------------------------------------------------------------------------------------


def spectrum_of(
    net: mt.Multitude, data: Data, batches: int, batch_size: int, iterations: int, weight_decay: float
) -> dict[str, Any]:
    """Return the largest Hessian eigenvalue of some augmented training batches (Algorithm 1), with weight decay.

    Each batch has its own draw, as in training. Batch norm uses its running statistics.
    """
    loader = Loader(data.train, data, batch_size, augment="standard")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "power iteration stopped early")  # the residuals show how early
        found = hessian_spectrum(
            net, loader, top=1, batches=batches, weight_decay=weight_decay, method="power", tolerance=0.05,
            max_iterations=iterations, draws=1, progress=False,
        )  # fmt: skip
    spectrum = {"largest": found.largest, "residuals": found.residuals[:, 0]}
    return rounded(spectrum) | {"batch_size": batch_size, "iterations": iterations}


def landscape_of(net: mt.Multitude, data: Data, images: int, points: int, span: float = 1.0) -> dict[str, Any]:
    """Return the training loss on a plane of two random filter-normalised directions, with a fresh draw per point."""
    device = next(net.parameters()).device
    x = data.preprocess(data.scaled(data.train.x[:images])).to(device)
    ways = [filter_normalised(random_direction(net.network, seed), net.network) for seed in (0, 1)]
    found = plane(
        net, (x, data.train.y[:images].to(device)), along=ways, points=points, span=span, seeds=[0], noise="fresh",
        progress=False,
    )  # fmt: skip
    return {
        "axis": rounded(found.axes[0]),
        "loss": rounded(found.loss[0]),
        "centre": rounded(float(found.scores.loss[0, 0])),
        "images": images,
    }
