"""What the page says about spatial smoothing on CIFAR-10: Park & Kim (2022)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipes.report import smoothing_figures as figures
from recipes.report.raw import Claim, Raw, Section, mean_of, number, percent, spread, table
from recipes.report.smoothing_networks import HEADS, METHODS, measured

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["section", "smallest"]

NETWORKS = {"resnet18": "ResNet-18", "vgg16": "VGG-16"}

PAPER_SCORES = {
    "resnet18": {
        "single": (0.182, 95.2, 2.75),
        "smooth": (0.173, 95.4, 2.31),
        "mc_dropout": (0.157, 95.2, 1.14),
        "smooth_dropout": (0.144, 95.5, 1.04),
    },
    "vgg16": {
        "single": (0.401, 93.1, 3.80),
        "smooth": (0.376, 93.2, 5.49),
        "mc_dropout": (0.238, 92.6, 3.55),
        "smooth_dropout": (0.197, 93.3, 0.68),
    },
}
"""Table E.1, CIFAR-10: NLL, accuracy and ECE in percent; it has VGG-19 there, and VGG-16 for CIFAR-100 alone."""

HANDFUL = 5

Seeds = list[dict[str, Any]]
Found = dict[str, Seeds]
"""The results of each method, one a seed."""


def section(raw: Raw, resnet18: Raw, vgg16: Raw) -> Section:
    """The two studies, and what was measured of networks beside them."""
    studies = {"resnet18": _found(resnet18), "vgg16": _found(vgg16)}
    made: dict[str, Figure] = {}
    parts = [INTRODUCTION, _settings(studies)]
    parts += [_scores(network, found) for network, found in studies.items() if any(found.values())]
    parts += [_sizes(studies, made), _corruptions(studies, made)]
    parts += measured(raw, made)
    text = "\n\n".join(part for part in parts if part)
    return Section("Spatial smoothing: ResNet-18 and VGG-16 on CIFAR-10", text, _claims(studies, raw), made)


INTRODUCTION = """\
N. Park, S. Kim: *Blurs Behave Like Ensembles: Spatial Smoothings to Improve Accuracy, Uncertainty, and Robustness*,
2022. A box blur of bounded feature maps (`mt.smooth`, tau = 10, maps that grow by a pixel as in the authors' code)
before each down-sampling, in plain networks and in networks with MC dropout (rate 0.3, in ResNet-18 before the last
convolution of each block, in VGG-16 after each ReLU). Most of the paper's figures are of CIFAR-100, and have no numbers
in the text; its tables for CIFAR-10 stand beside ours."""


# -- reading -----------------------------------------------------------------------------------------------


def _found(raw: Raw) -> Found:
    return {method: list(raw.matching(f"{method}-").values()) for method in METHODS}


def _score(seeds: Seeds, name: str) -> list[float | None]:
    return [result["scores"].get(name) for result in seeds]


def _by_size(seeds: Seeds, name: str) -> dict[int, float]:
    """The mean over seeds for each ensemble size."""
    found: dict[int, list[float]] = {}
    for result in seeds:
        for size, value in zip(result["by_size"]["sizes"], result["by_size"].get(name, []), strict=False):
            found.setdefault(size, []).append(value)
    return {size: statistics.fmean(values) for size, values in sorted(found.items())}


def smallest(curve: Mapping[int, float], goal: float) -> int | None:
    """The fewest draws whose NLL is at or below the goal.

    >>> smallest({1: 0.3, 2: 0.2, 5: 0.1}, 0.2)
    2
    """
    return min((size for size, value in curve.items() if value <= goal), default=None)


# -- the studies -------------------------------------------------------------------------------------------


SETTINGS = """\
What is not as in the paper: {epochs} epochs (the paper: 200) of 49,000 images (50,000) in batches of {batch_size}
(128), at a rate of {lr:g} (0.1) that falls along a schedule of the kind {schedule} (in steps), in {precision}; {seeds}
of each kind (3). MC dropout makes {draws} draws (50), and the ECE has {bins} bins (10 in the authors' code)."""


def _settings(studies: Mapping[str, Found]) -> str:
    results = [result for found in studies.values() for seeds in found.values() for result in seeds]
    if not results:
        return "The two studies have not been run."
    training, evaluation = dict(results[0]["config"]["training"]), results[0]["config"]["evaluation"]
    if not isinstance(training["schedule"], str):
        training["schedule"] = training["schedule"]["name"]
    most = max(len(each) for found in studies.values() for each in found.values())
    seeds = "one training" if most == 1 else f"{most} trainings"
    return SETTINGS.format(**training, seeds=seeds, draws=evaluation["draws"], bins=evaluation.get("bins", 15))


def _scores(network: str, found: Found) -> str:
    rows = []
    for method, seeds in found.items():
        nll, accuracy, ece = PAPER_SCORES[network][method]
        ours = [
            spread(_score(seeds, "nll")),
            spread(_score(seeds, "accuracy"), 1, 100),
            spread(_score(seeds, "ece"), 2, 100),
        ]
        rows.append([METHODS[method], *ours, number(nll), number(accuracy, 1), number(ece, 2)])
    header = ["", "NLL", "accuracy %", "ECE %", "paper: NLL", "accuracy %", "ECE %"]
    note = "\n\nThe paper's numbers are those of VGG-19." if network == "vgg16" else ""
    return f"### {NETWORKS[network]} (Table E.1)\n\n{table(header, rows)}{note}"


def _sizes(studies: Mapping[str, Found], made: dict[str, Figure]) -> str:
    """Fig. 3: scores against the number of draws."""
    curves = {
        NETWORKS[network]: {
            METHODS[method]: {name: _by_size(seeds, name) for name in ("nll", "accuracy", "ece")}
            for method, seeds in found.items()
            if seeds
        }
        for network, found in studies.items()
        if any(found.values())
    }
    if not curves:
        return ""
    made["by_size"] = figures.by_size(curves)
    sizes = sorted({size for each in curves.values() for curve in each.values() for size in curve["nll"]})
    rows = [
        [f"{network}, {method}", *(number(curve["nll"].get(size)) for size in sizes)]
        for network, methods in curves.items()
        for method, curve in methods.items()
        if "dropout" in method
    ]
    head = "### Scores by ensemble size (Fig. 3)\n\nThe NLL for each number of draws, the mean over groups of so many:"
    shown = "![NLL, accuracy and ECE against the number of draws](smoothing/by_size.svg)"
    return f"{head}\n\n{table(['draws', *map(str, sizes)], rows)}\n\n{shown}"


def _corruptions(studies: Mapping[str, Found], made: dict[str, Figure]) -> str:
    """Fig. 9 and E.2, by severity."""
    curves: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for network, found in studies.items():
        for method, seeds in found.items():
            own = {name: _by_severity(seeds, name) for name in ("nll", "accuracy", "ece")}
            if own["nll"]:
                curves.setdefault(NETWORKS[network], {})[METHODS[method]] = own
    if not curves:
        return ""
    made["corruptions"] = figures.by_severity(curves)
    levels = sorted({level for each in curves.values() for curve in each.values() for level in curve["nll"]})
    rows = [
        [f"{network}, {method}", *(number(curve["nll"].get(level)) for level in levels)]
        for network, methods in curves.items()
        for method, curve in methods.items()
    ]
    options = next(r for found in studies.values() for seeds in found.values() for r in seeds)["config"]["evaluation"]
    head = (
        "### Corrupted images (Fig. 9, Fig. E.2)\n\nThe mean NLL over the corruptions of each severity, on "
        f"{options.get('shift_limit') or 'all'} test images, with {options.get('shift_draws') or options.get('draws')} "
        "draws of MC dropout.\nThe paper shows means over severities by ensemble size, relative to AlexNet's."
    )
    shown = "![NLL, accuracy and ECE by severity](smoothing/corruptions.svg)"
    return f"{head}\n\n{table(['severity', *map(str, levels)], rows)}\n\n{shown}"


def _by_severity(seeds: Seeds, name: str) -> dict[int, float]:
    means = {level: mean_of(_score(seeds, f"shift/mean/{level}/{name}")) for level in range(1, 6)}
    return {level: value for level, value in means.items() if value is not None}


# -- claims ------------------------------------------------------------------------------------------------


def _claims(studies: Mapping[str, Found], raw: Raw) -> list[Claim]:
    claims = [claim for network, found in studies.items() for claim in _few_draws(NETWORKS[network], found)]
    claims.append(_steadier(raw["consistency"]))
    claims.append(_flatter(raw["hessian"]))
    return claims


def _few_draws(network: str, found: Found) -> list[Claim]:
    plain, smoothed = (_by_size(found[method], "nll") for method in ("mc_dropout", "smooth_dropout"))
    most = max(plain, default=50)
    two = f"{network}: MC dropout with smoothing has with 2 draws an NLL at or below that of {most} draws without it"
    few = f"{network}: MC dropout with smoothing has it with a handful of draws, at most {HANDFUL}"
    if not plain or not smoothed:
        return [Claim(two, None), Claim(few, None)]
    goal, at_two, fewest = plain[most], smoothed.get(2), smallest(smoothed, plain[most])
    told = f"{number(goal, 4)} with {most} draws and no smoothing"
    return [
        Claim(two, None if at_two is None else at_two <= goal, f"{number(at_two, 4)}, and {told}"),
        Claim(few, fewest is not None and fewest <= HANDFUL, f"the fewest that do: {fewest or 'none'}; {told}"),
    ]


def _steadier(result: Mapping[str, Any] | None) -> Claim:
    text = "ResNet-18: smoothing makes answers more consistent while images move, with MC dropout and without"
    values = {method: (result or {}).get(method, {}).get("consistency") for method in METHODS}
    if any(value is None for value in values.values()):
        return Claim(text, None)
    told = ", ".join(f"{METHODS[method]} {percent(value, 2)} %" for method, value in values.items())
    return Claim(text, values["smooth"] > values["single"] and values["smooth_dropout"] > values["mc_dropout"], told)


def _flatter(result: Mapping[str, Any] | None) -> Claim:
    text = "The largest Hessian eigenvalues fall from an MLP to GAP to GAP with smoothing, by their medians"
    medians = {head: statistics.median(own["largest"]) for head, own in (result or {}).items()}
    if set(medians) != set(HEADS):
        return Claim(text, None)
    told = ", ".join(f"{HEADS[head]} {number(medians[head], 2)}" for head in HEADS)
    return Claim(text, medians["mlp"] > medians["gap"] > medians["smooth"], told)
