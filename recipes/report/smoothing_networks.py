"""Page section on networks with spatial smoothing, beyond their scores: `recipes/smoothing.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipes.report import smoothing_figures as figures
from recipes.report.raw import MISSING, Raw, mean_of, number, percent, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

METHODS = {
    "single": "single network",
    "smooth": "single network + Smooth",
    "mc_dropout": "MC dropout",
    "smooth_dropout": "MC dropout + Smooth",
}
HEADS = {"mlp": "MLP", "gap": "GAP", "smooth": "GAP + Smooth"}

PAPER_CONSISTENCY = {
    "single": (97.9, 1.03),
    "smooth": (98.2, 1.16),
    "mc_dropout": (98.2, 1.29),
    "smooth_dropout": (98.4, 1.34),
}
"""Table E.3, ResNet-18 on CIFAR-10-P: consistency in percent, and CEC in hundredths."""

PAPER_ATTACKS = {
    "single": ((28.3, 62.9), (7.5, 90.1)),
    "smooth": ((30.3, 60.5), (9.0, 88.2)),
    "mc_dropout": ((30.3, 59.8), (12.2, 83.7)),
    "smooth_dropout": ((32.6, 57.4), (13.7, 82.1)),
}
"""Table E.2, ResNet-50 on ImageNet: accuracy and attack success rate in percent, after FGSM and after PGD."""

PAPER_HEADS = {"mlp": (0.0076, 1.040, 74.8, 9.55), "gap": (0.0124, 0.841, 77.5, 2.92)}
"""Table C.1, ResNet-18 with MC dropout on CIFAR-100: training NLL, then NLL, accuracy and ECE on test images."""


def measured(raw: Raw, made: dict[str, Figure]) -> list[str]:
    """Report the available pieces."""
    parts = []
    if "consistency" in raw:
        parts.append(_consistency(raw["consistency"]))
    if "attacks" in raw:
        parts.append(_attacks(raw["attacks"]))
    heads = {head: raw[f"train_{head}"] for head in HEADS if f"train_{head}" in raw}
    if heads:
        parts.append(_heads(heads))
    if "hessian" in raw:
        parts.append(_hessian(raw["hessian"], made))
    if "planes" in raw:
        parts.append(_planes(raw["planes"], made))
    return parts


# -- the study's networks ----------------------------------------------------------------------------------

CONSISTENCY = """\
### Consistency (Table E.3)

ResNet-18 on {images} test images that move {steps} times by a pixel, each in a random direction, mirrored at
the border. The paper uses the longer sequences of CIFAR-10-P, which are not available. CEC is the cross-entropy between
the predictions for neighbouring frames, the sum over classes of eq. 38, and increases with uncertainty."""


def _consistency(result: Mapping[str, Any]) -> str:
    rows = []
    for method, paper in PAPER_CONSISTENCY.items():
        own = result.get(method, {})
        draws = own.get("draws", MISSING) if "dropout" in method else 1
        shares = [own.get("consistency"), own.get("cross_entropy"), own.get("relative_confidence")]
        ours = [percent(share, 2) for share in shares]
        rows.append([METHODS[method], str(draws), *ours, number(paper[0], 1), number(paper[1], 2)])
    header = ["", "N", "consistency %", "CEC x 100", "relative confidence %", "paper: consistency %", "CEC x 100"]
    about = next(iter(result.values()))
    return f"{CONSISTENCY.format(**about)}\n\n{table(header, rows)}"


ATTACKS = """\
### Attacks (Table E.2)

Accuracy / attack success rate, in percent, of ResNet-18 on {images} test images, by the radius of the attack. Its
gradient is that of the mean over {gradient_draws} draws, with new draws in each of the {pgd_steps} steps of PGD. The
predictions are means over {draws} other draws. The paper attacks ResNet-50 on ImageNet, and reports neither the radius
nor the number of draws."""


def _attacks(result: Mapping[str, Any]) -> str:
    kinds = [kind for method in METHODS for kind in result.get(method, {}) if kind != "clean"]
    kinds = list(dict.fromkeys(kinds))
    rows = []
    for method, paper in PAPER_ATTACKS.items():
        own = result.get(method, {})
        ours = [percent(own.get("clean", {}).get("accuracy")), *(_pair(own.get(kind, {})) for kind in kinds)]
        rows.append([METHODS[method], *ours, *(f"{accuracy:.1f} / {rate:.1f}" for accuracy, rate in paper)])
    names = [f"{name.upper()} {level}/255" for name, _, level in (kind.partition("-") for kind in kinds)]
    header = ["", "none", *names, "paper: FGSM", "paper: PGD"]
    return f"{ATTACKS.format(**result['about'])}\n\n{table(header, rows)}"


def _pair(scores: Mapping[str, Any]) -> str:
    return f"{percent(scores.get('accuracy'))} / {percent(scores.get('success_rate'))}"


# -- heads -------------------------------------------------------------------------------------------------

TRAINED = """\
### Classifier heads (Table 1, Table C.1)

ResNet-18 with MC dropout and three heads: an MLP behind the last feature maps, global average pooling (GAP), and GAP in
a network with smoothing. All have the same training of {epochs} epochs, and are scored with {draws} draws on {seen}
training images, not augmented, and {images} test images. The hidden layers of the MLP have fewer units than the 4096 of
VGG, to make the Hessian and the landscape affordable. The paper's numbers are for CIFAR-100 after 200 epochs."""


def _heads(heads: Mapping[str, Any]) -> str:
    rows = []
    for head, own in heads.items():
        train, test, paper = own["train"], own["test"], PAPER_HEADS.get(head, (None,) * 4)
        ours = [number(own["parameters"] / 1e6, 1), number(train["nll"], 4)]
        ours += [number(test["nll"]), percent(test["accuracy"]), percent(test["ece"], 2)]
        theirs = [number(value, digits) for value, digits in zip(paper, (4, 3, 1, 2), strict=True)]
        rows.append([HEADS[head], *ours, *theirs])
    scores = ["NLL", "accuracy %", "ECE %"]
    header = ["", "parameters, M", "training NLL", *scores, "paper: training NLL", *scores]
    one = next(iter(heads.values()))
    about = {"epochs": one["epochs"], "seen": one["train"]["images"], **one["test"]}
    return f"{TRAINED.format(**about)}\n\n{table(header, rows)}"


HESSIAN = """\
### Hessian max eigenvalue spectra (Fig. 8)

The largest eigenvalue of the Hessian of the loss, with weight decay and one draw, on each of some augmented training
batches of {batch_size}, by at most {iterations} steps of power iteration (Algorithm 1). The residual
bounds the distance to an exact eigenvalue. Eigenvalues depend on the progress of the training, which differs between
the heads: see their training NLL."""


def _hessian(result: Mapping[str, Any], made: dict[str, Figure]) -> str:
    rows = []
    for head, own in result.items():
        values, residuals = own["largest"], own["residuals"]
        rough = max((r / abs(value) for r, value in zip(residuals, values, strict=True) if value), default=None)
        summary = [number(pick(values), 2) for pick in (statistics.median, min, max)]
        rows.append([HEADS[head], str(len(values)), *summary, percent(rough, 0)])
    made["hessian"] = figures.spectra({HEADS[head]: own["largest"] for head, own in result.items()})
    header = ["", "batches", "median", "least", "largest", "worst residual, % of its eigenvalue"]
    shown = "![The largest Hessian eigenvalues, by head](smoothing/hessian.svg)"
    return f"{HESSIAN.format(**next(iter(result.values())))}\n\n{table(header, rows)}\n\n{shown}"


PLANES = """\
### Loss landscapes (Fig. 7)

The NLL of {images} training images on a plane of two random directions with the norms of the network's filters, at
{points} x {points} points, each with one fresh draw. Roughness is the mean absolute second difference of log10 NLL
between neighbouring points."""


def _planes(result: Mapping[str, Any], made: dict[str, Figure]) -> str:
    made["planes"] = figures.planes({HEADS[head]: own for head, own in result.items()})
    rows = []
    for head, own in result.items():
        mean = mean_of(value for line in own["loss"] for value in line)
        rough = roughness(figures.logarithms(own["loss"]))
        rows.append([HEADS[head], number(own["centre"]), number(mean), number(rough)])
    one = next(iter(result.values()))
    header = ["", "NLL at the centre", "mean over the plane", "roughness"]
    shown = "![Loss landscapes, by head](smoothing/planes.svg)"
    return f"{PLANES.format(points=len(one['axis']), **one)}\n\n{table(header, rows)}\n\n{shown}"


def roughness(values: list[list[float | None]]) -> float | None:
    """Return the roughness of a landscape: the mean absolute second difference along both axes.

    >>> roughness([[0.0, 1.0, 4.0], [0.0, 1.0, 4.0], [0.0, 1.0, 4.0]])
    1.0
    """
    lines = [*values, *map(list, zip(*values, strict=True))]
    bends = [
        abs(after - 2 * at + before)
        for line in lines
        for before, at, after in zip(line, line[1:], line[2:], strict=False)
        if before is not None and at is not None and after is not None
    ]
    return statistics.fmean(bends) if bends else None
