"""Page section on a vision transformer: quality and cost of each method on CIFAR-10."""

from __future__ import annotations

import statistics
from typing import Any

from recipes.report.raw import MISSING, Claim, Raw, Section, number, percent, spread, table

METHODS = {
    "single": "single network",
    "laplace": "Laplace on its last layer",
    "heads": "eight heads",
    "packed": "Packed-(2, 4, 1)",
    "deep": "deep ensemble of four",
    "mixture": "Laplace on the deep ensemble",
}
COLUMNS = {
    "accuracy %": ("accuracy", 100, 2),
    "NLL": ("nll", 1, 3),
    "Brier": ("brier", 1, 3),
    "ECE": ("ece", 1, 3),
    "AUROC %, max. probability": ("ood/svhn/max_probability/auroc", 100, 1),
    "AUROC %, entropy": ("ood/svhn/entropy/auroc", 100, 1),
}
"""Score, factor and number of digits of each column."""
PRICES = ("single", "laplace", "heads", "packed", "deep")

Scores = dict[str, list[float]]


def section(raw: Raw) -> Section:
    """Write scores and costs of all methods, and the verdicts."""
    found = {method: scores for method in METHODS if (scores := scores_of(raw, method))}
    about = {name: MISSING for name in ("depth", "images", "epochs", "batch")} | (raw["deep"] or {})
    text = f"""Methods on a transformer trained from scratch; this is not from a paper. The network is a ViT-S/4 of
{about["depth"]} blocks (width 384, six heads, patches of 4 x 4), trained on {about["images"]} images of CIFAR-10 for
{about["epochs"]} epochs in batches of {about["batch"]} by AdamW, with random crops and flips, in mixed precision. SVHN
is out-of-distribution. The members of the deep ensemble are the single networks: mean and deviation are over these
four. Laplace approximations use them, with one pass over the training images, priors chosen on a thousand held-out
images, and 32 draws. Other methods have one run each.

{quality(found)}

Forty epochs are few for a transformer on so few images. The narrow members of the Packed-Ensemble learn faster than the
wide networks at the same rate, so its lead over the deep ensemble may not hold for longer training. Laplace changes
little, because networks that are trained briefly are hardly overconfident.

Costs are multiples of the single network, not compiled, measured alternately in one process with batches of
{_batch(raw)}; training in bfloat16, inference in float32:

{prices(raw)}
"""
    return Section("A vision transformer on CIFAR-10", text, claims(found))


def scores_of(raw: Raw, method: str) -> Scores | None:
    """Return lists with one number per seed; None if not measured."""
    result = raw["laplace" if method == "mixture" else method]
    if result is None:
        return None
    scores: dict[str, Any] = result["mixture" if method == "mixture" else "scores"]
    return {name: value if isinstance(value, list) else [value] for name, value in scores.items()}


def quality(found: dict[str, Scores]) -> str:
    """Tabulate one row per method."""
    rows = [
        [METHODS[method], *(spread(scores[name], digits, factor) for name, factor, digits in COLUMNS.values())]
        for method, scores in found.items()
    ]
    return table(["method", *COLUMNS], rows)


def prices(raw: Raw) -> str:
    """Tabulate parameters, multiply-adds and times, relative to the single network's."""
    costs = raw["costs"]
    if costs is None:
        return MISSING

    def ratio(what: str, method: str) -> str:
        own = costs[what].get(method)
        if own is None:
            return MISSING
        return number(own["ratio"] if isinstance(own, dict) else own / costs[what]["single"], 2)

    kinds = {"parameters": "parameters", "mult-adds": "multiply_adds", "training": "training", "inference": "inference"}
    rows = [[METHODS[method], *(ratio(what, method) for what in kinds.values())] for method in PRICES]
    return table(["method", *kinds], rows)


def _batch(raw: Raw) -> str:
    return MISSING if raw["costs"] is None else str(raw["costs"]["batch"])


def claims(found: dict[str, Scores]) -> list[Claim]:
    """Check the general claims of the methods."""
    mean = {method: {name: statistics.fmean(values) for name, values in own.items()} for method, own in found.items()}

    def summary(name: str, say: Any, *methods: str) -> str:
        return ", ".join(f"{METHODS[method]} {say(mean[method][name])}" for method in methods)

    wanted = {
        "Packed-(2, 4, 1) is ahead of the single ViT in accuracy and NLL": ("packed", "single"),
        "The deep ensemble of ViTs is ahead of the single one in accuracy, NLL and ECE": ("deep", "single"),
        "Laplace on the last layer of a ViT lowers its NLL and keeps its accuracy within 0.2 points": (
            "laplace",
            "single",
        ),
    }
    results = []
    for text, (one, other) in wanted.items():
        if one not in mean or other not in mean:
            results.append(Claim(text, None))
            continue
        a, b = mean[one], mean[other]
        right = a["accuracy"] > b["accuracy"] if one != "laplace" else a["accuracy"] > b["accuracy"] - 0.002
        holds = right and a["nll"] < b["nll"] and (one != "deep" or a["ece"] < b["ece"])
        numbers = f"accuracy %: {summary('accuracy', percent, one, other)}; NLL: {summary('nll', number, one, other)}"
        results.append(Claim(text, holds, numbers))
    return results
