"""Claims of Park and Kim (2022) about spatial smoothing, checked with the numbers of our networks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from recipes.report.raw import Claim, Raw, mean_of, number, percent
from recipes.report.smoothing_networks import HEADS, METHODS

NETWORKS = {"resnet18": "ResNet-18", "vgg16": "VGG-16"}
PAIRS = (("single", "smooth"), ("mc_dropout", "smooth_dropout"))
"""Each network, and the same with smoothing."""
HANDFUL = 5

Seeds = list[dict[str, Any]]
Found = dict[str, Seeds]
"""Results of each method, one per seed."""


# -- reading -----------------------------------------------------------------------------------------------


def found_in(raw: Raw) -> Found:
    """Return the results of a study by method."""
    return {method: list(raw.matching(f"{method}-").values()) for method in METHODS}


def score(seeds: Seeds, name: str) -> list[float | None]:
    """Return a score of each seed."""
    return [result["scores"].get(name) for result in seeds]


def by_size(seeds: Seeds, name: str) -> dict[int, float]:
    """Return the mean over seeds for each ensemble size."""
    found: dict[int, list[float]] = {}
    for result in seeds:
        for size, value in zip(result["by_size"]["sizes"], result["by_size"].get(name, []), strict=False):
            found.setdefault(size, []).append(value)
    return {size: statistics.fmean(values) for size, values in sorted(found.items())}


def smallest(curve: Mapping[int, float], goal: float) -> int | None:
    """Return the fewest draws whose NLL is at or below the goal.

    >>> smallest({1: 0.3, 2: 0.2, 5: 0.1}, 0.2)
    2
    """
    return min((size for size, value in curve.items() if value <= goal), default=None)


def by_severity(seeds: Seeds, name: str) -> dict[int, float]:
    """Return a score on corrupted images, averaged over seeds, by severity."""
    means = {level: mean_of(score(seeds, f"shift/mean/{level}/{name}")) for level in range(1, 6)}
    return {level: value for level, value in means.items() if value is not None}


# -- claims ------------------------------------------------------------------------------------------------


def claims(studies: Mapping[str, Found], raw: Raw) -> list[Claim]:
    """Check the claims for both networks, and those about further measurements of ResNet-18."""
    found = []
    for key, own in studies.items():
        network = NETWORKS[key]
        found += [*_few_draws(network, own), *_better(network, own), _firmer(network, own)]
    return [*found, _steadier(raw["consistency"]), _safer(raw["attacks"]), _flatter(raw["hessian"])]


def _few_draws(network: str, found: Found) -> list[Claim]:
    plain, smoothed = (by_size(found[method], "nll") for method in ("mc_dropout", "smooth_dropout"))
    most = max(plain, default=50)
    two = f"{network}: MC dropout with smoothing reaches with 2 draws the NLL of {most} draws without smoothing"
    few = f"{network}: MC dropout with smoothing reaches this NLL with a handful of draws, at most {HANDFUL}"
    if not plain or not smoothed:
        return [Claim(two, None), Claim(few, None)]
    goal, at_two, fewest = plain[most], smoothed.get(2), smallest(smoothed, plain[most])
    summary = f"{number(goal, 4)} with {most} draws and no smoothing"
    return [
        Claim(two, None if at_two is None else at_two <= goal, f"{number(at_two, 4)}, and {summary}"),
        Claim(few, fewest is not None and fewest <= HANDFUL, f"fewest draws: {fewest or 'none'}; {summary}"),
    ]


def _better(network: str, found: Found) -> list[Claim]:
    """Check Table E.1: each score by itself."""
    nll, right, ece = (
        {method: mean_of(score(found[method], name)) for method in METHODS} for name in ("nll", "accuracy", "ece")
    )
    wrong = {method: None if value is None else 1 - value for method, value in right.items()}
    text = f"{network}: smoothing lowers the {{}}, with MC dropout and without"
    return [
        _lower(text.format("NLL"), nll),
        _lower(text.format("error"), wrong, _share),
        _lower(text.format("ECE"), ece, _share),
    ]


def _share(value: float) -> str:
    return f"{percent(value, 2)} %"


def _firmer(network: str, found: Found) -> Claim:
    """Check Fig. 9."""
    means = {method: mean_of(by_severity(found[method], "nll").values()) for method in METHODS}
    return _lower(f"{network}: smoothing lowers the NLL on corrupted images, with MC dropout and without", means)


def _lower(text: str, values: Mapping[str, float | None], summary: Callable[[float], str] = number) -> Claim:
    """Check that smoothing lowers both values."""
    known = {method: value for method, value in values.items() if value is not None}
    if len(known) < len(METHODS):
        return Claim(text, None)
    holds = all(known[smoothed] < known[plain] for plain, smoothed in PAIRS)
    return Claim(text, holds, ", ".join(f"{METHODS[method]} {summary(known[method])}" for method in METHODS))


def _steadier(result: Mapping[str, Any] | None) -> Claim:
    text = "ResNet-18: smoothing makes predictions more consistent while images move, with MC dropout and without"
    values = {method: (result or {}).get(method, {}).get("consistency") for method in METHODS}
    if any(value is None for value in values.values()):
        return Claim(text, None)
    summary = ", ".join(f"{METHODS[method]} {_share(value)}" for method, value in values.items())
    return Claim(text, all(values[smoothed] > values[plain] for plain, smoothed in PAIRS), summary)


def _safer(result: Mapping[str, Any] | None) -> Claim:
    """Check Table E.2."""
    means = {}
    for method in METHODS:
        own = (result or {}).get(method, {})
        means[method] = mean_of(scores["success_rate"] for attack, scores in own.items() if attack != "clean")
    text = "ResNet-18: attacks succeed less often with smoothing (their mean), with MC dropout and without"
    return _lower(text, means, _share)


def _flatter(result: Mapping[str, Any] | None) -> Claim:
    text = "The largest Hessian eigenvalues fall from an MLP to GAP to GAP with smoothing, by their medians"
    medians = {head: statistics.median(own["largest"]) for head, own in (result or {}).items()}
    if set(medians) != set(HEADS):
        return Claim(text, None)
    summary = ", ".join(f"{HEADS[head]} {number(medians[head], 2)}" for head in HEADS)
    return Claim(text, medians["mlp"] > medians["gap"] > medians["smooth"], summary)
