"""Page section on spatial smoothing on CIFAR-10: Park & Kim (2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from recipes.report import smoothing_figures as figures
from recipes.report.raw import Raw, Section, number, spread, table
from recipes.report.smoothing_claims import NETWORKS, Found, Seeds, by_severity, by_size, claims, found_in, score
from recipes.report.smoothing_networks import METHODS, measured

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
"""Table E.1, CIFAR-10: NLL, accuracy and ECE in percent; it has VGG-19 there, and VGG-16 only for CIFAR-100."""


def section(raw: Raw, resnet18: Raw, vgg16: Raw) -> Section:
    """Report the two studies, and further measurements of networks."""
    studies = {"resnet18": found_in(resnet18), "vgg16": found_in(vgg16)}
    made: dict[str, Figure] = {}
    parts = [INTRODUCTION, _settings(studies)]
    parts += [_scores(network, found) for network, found in studies.items() if any(found.values())]
    parts += [_sizes(studies, made), _corruptions(studies, made)]
    parts += measured(raw, made)
    text = "\n\n".join(part for part in parts if part)
    return Section("Spatial smoothing: ResNet-18 and VGG-16 on CIFAR-10", text, claims(studies, raw), made)


INTRODUCTION = """\
N. Park, S. Kim: *Blurs Behave Like Ensembles: Spatial Smoothings to Improve Accuracy, Uncertainty, and Robustness*,
2022. A box blur of bounded feature maps (`mt.smooth`, tau = 10, maps that grow by a pixel as in the authors' code)
before each down-sampling, in plain networks and in networks with MC dropout (rate 0.3, in ResNet-18 before the last
convolution of each block, in VGG-16 after each ReLU). Most figures of the paper are for CIFAR-100, without
numbers in the text; its tables for CIFAR-10 are shown with ours."""


# -- the studies -------------------------------------------------------------------------------------------


SETTINGS = """\
Differences from the paper: {epochs} epochs (the paper: 200) of 49,000 images (50,000) in batches of {batch_size}
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
            spread(score(seeds, "nll")),
            spread(score(seeds, "accuracy"), 1, 100),
            spread(score(seeds, "ece"), 2, 100),
            spread([result["losses"][-1] for result in seeds]),
        ]
        rows.append([METHODS[method], *ours, number(nll), number(accuracy, 1), number(ece, 2)])
    header = ["", "NLL", "accuracy %", "ECE %", "training loss", "paper: NLL", "accuracy %", "ECE %"]
    note = " The paper's numbers are those of VGG-19." if network == "vgg16" else ""
    return (
        f"### {NETWORKS[network]} (Table E.1)\n\n{table(header, rows)}\n\nThe training loss is that of the last "
        f"epoch, on augmented images with dropout. If it is far from 0, the network is underfitted.{note}"
    )


Curves = dict[str, dict[str, dict[str, dict[int, float]]]]
"""Mean over seeds for each size or severity, by network, method and score."""


def _curves(studies: Mapping[str, Found], by: Callable[[Seeds, str], dict[int, float]]) -> Curves:
    """Collect the measured curves."""
    found: Curves = {}
    for network, methods in studies.items():
        for method, seeds in methods.items():
            own = {name: by(seeds, name) for name in ("nll", "accuracy", "ece")}
            if own["nll"]:
                found.setdefault(NETWORKS[network], {})[METHODS[method]] = own
    return found


def _nll_table(curves: Curves, head: str, chosen: str = "") -> str:
    """Tabulate the NLL by size or severity, for methods whose names contain `chosen`."""
    places = sorted({place for each in curves.values() for curve in each.values() for place in curve["nll"]})
    rows = [
        [f"{network}, {method}", *(number(curve["nll"].get(place)) for place in places)]
        for network, methods in curves.items()
        for method, curve in methods.items()
        if chosen in method
    ]
    return table([head, *map(str, places)], rows)


def _sizes(studies: Mapping[str, Found], made: dict[str, Figure]) -> str:
    """Report Fig. 3: scores against the number of draws."""
    curves = _curves(studies, by_size)
    if not curves:
        return ""
    made["by_size"] = figures.by_size(curves)
    head = "### Scores by ensemble size (Fig. 3)\n\nThe NLL for each number of draws, the mean over groups of so many:"
    shown = "![NLL, accuracy and ECE against the number of draws](smoothing/by_size.svg)"
    return f"{head}\n\n{_nll_table(curves, 'draws', 'dropout')}\n\n{shown}"


def _corruptions(studies: Mapping[str, Found], made: dict[str, Figure]) -> str:
    """Report Fig. 9 and E.2: scores by severity."""
    curves = _curves(studies, by_severity)
    if not curves:
        return ""
    made["corruptions"] = figures.by_severity(curves)
    options = next(r for found in studies.values() for seeds in found.values() for r in seeds)["config"]["evaluation"]
    head = (
        "### Corrupted images (Fig. 9, Fig. E.2)\n\nThe mean NLL over the corruptions of each severity, on "
        f"{options.get('shift_limit') or 'all'} test images, with {options.get('shift_draws') or options.get('draws')} "
        "draws of MC dropout.\nThe paper shows means over severities by ensemble size, relative to AlexNet's."
    )
    shown = "![NLL, accuracy and ECE by severity](smoothing/corruptions.svg)"
    return f"{head}\n\n{_nll_table(curves, 'severity')}\n\n{shown}"
