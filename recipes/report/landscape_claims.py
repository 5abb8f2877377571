"""Claims of Fort, Hu and Lakshminarayanan (2019), checked with the numbers of our runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from multitudes.landscape.accuracy_diversity import normalised
from recipes.report.raw import Claim, Raw, number, percent

PAPER_SVHN = {"independent": 0.384, "trajectory": 0.153, "random": 0.155, "low_rank": 0.087, "diagonal": 0.034}
"""Jensen-Shannon divergence of 5 samples on SVHN (section 5, text)."""

NAMES = {
    "baseline": "one run",
    "independent": "independent runs",
    "trajectory": "within a trajectory",
    "random": "random subspace",
    "diagonal": "diagonal Gaussian",
    "low_rank": "low-rank Gaussian",
    "dropout": "dropout of weights",
    "mc dropout": "MC dropout",
    "weight averaging": "weight averaging",
    "independent + random": "independent runs, random subspaces",
    "independent + low_rank": "independent runs, low-rank Gaussians",
}
SUBSPACES = ("random", "diagonal", "low_rank", "mc dropout")
NEAR = 0.9
"""Minimum accuracy of draws for the comparison with independent runs, relative to the reference."""


# -- values from the pieces ---------------------------------------------------------------------------------


def on_path(under: Mapping[str, Any]) -> tuple[list[float], list[list[float]]]:
    """Return test accuracies on the path of a stitched landscape, and agreements with both ends."""
    at = min(range(len(under["share"])), key=lambda index: abs(under["share"][index] - 1))
    first, second = under["agreement"]
    accuracies = [row[at] for row in under["accuracy"]]
    return accuracies, [[one[at], other[at]] for one, other in zip(first, second, strict=True)]


def middle_of(values: Sequence[Any]) -> Any:
    """Return the middle value of a path."""
    return values[len(values) // 2]


def near(piece: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the normalised diversity of solutions nearly as accurate as the reference, by kind."""
    accuracy, disagreement = (torch.tensor(piece[key], dtype=torch.float64) for key in ("accuracy", "disagreement"))
    diversity, least = normalised(disagreement, accuracy), NEAR * accuracy[piece["reference"]]
    home = piece["runs"][piece["reference"]]
    kinds = ["other runs" if run != home else kind for run, kind in zip(piece["runs"], piece["kinds"], strict=True)]
    return {
        kind: diversity[[at for at, own in enumerate(kinds) if own == kind and accuracy[at] >= least]]
        for kind in dict.fromkeys(kinds)
        if kind != "optimum"
    }


# -- claims ------------------------------------------------------------------------------------------------


def claims(raw: Raw) -> list[Claim]:
    """Check the claims of the paper; the docstring of each judge is its claim."""
    found = []
    for judge, *names in JUDGES:
        pieces = [raw[name] for name in names]
        holds, numbers = (None, "") if None in pieces else judge(*pieces)
        found.append(Claim(str(judge.__doc__), holds, numbers))
    return found


def listed(values: Mapping[str, float]) -> str:
    """Format numbers by name, in one line."""
    return ", ".join(f"{NAMES.get(name, name)} {number(value)}" for name, value in values.items())


def runs_differ(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """The ends of two runs differ more than two late checkpoints of a run, in weights and in predictions."""
    within, between = piece["within_runs"], piece["between_runs"]
    summary = [f"{key} {number(between[key])} against {number(within[key])}" for key in ("cosine", "disagreement")]
    return between["cosine"] < within["cosine"] and between["disagreement"] > within["disagreement"], ", ".join(summary)


def independent_differ(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """Independent runs differ more than draws from any subspace, in labels and in probabilities."""
    scores = piece["diversity"]
    others = [of for kind, of in scores.items() if kind != "independent"]
    holds = [scores["independent"][key] > max(of[key] for of in others) for key in ("disagreement", "divergence")]
    return all(holds), "JS divergence: " + listed({kind: of["divergence"] for kind, of in scores.items()})


def better_trade_off(piece: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Other runs are more diverse for their accuracy than draws with nine tenths of the reference's accuracy."""
    groups = near(piece)
    runs = groups.pop("other runs", torch.zeros(0))
    rest = {kind: float(group.max()) for kind, group in groups.items() if len(group)}
    if not len(runs) or not rest:
        return None, ""
    summary = f"least diverse run {number(float(runs.min()))}; the most diverse: {listed(rest)}"
    return float(runs.min()) > max(rest.values()), summary


def complementary(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """Ensembles of each subspace are better than the plain ensemble and than one subspace, in accuracy or NLL."""
    accuracy, nll = piece["accuracy"], piece["nll"]
    holds = [
        accuracy[kind][-1] > max(accuracy[kind][0], accuracy["baseline"][-1])
        or nll[kind][-1] < min(nll[kind][0], nll["baseline"][-1])
        for kind in SUBSPACES
    ]
    kinds = ("baseline", *SUBSPACES)
    summary = [f"{NAMES[kind]} {percent(accuracy[kind][-1])} %, NLL {number(nll[kind][-1])}" for kind in kinds]
    return all(holds), "ensembles of all runs: " + "; ".join(summary)


def ensembles_first(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """The plain ensemble is better than every subspace of one run, in accuracy and NLL."""
    accuracy, nll = piece["accuracy"], piece["nll"]
    best = accuracy["baseline"][-1], nll["baseline"][-1]
    holds = [best[0] > accuracy[kind][0] and best[1] < nll[kind][0] for kind in SUBSPACES]
    return all(holds), "NLL: " + listed({"independent": best[1]} | {kind: nll[kind][0] for kind in SUBSPACES})


def on_svhn(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """On SVHN, independent runs have the highest JS divergence."""
    ours = {kind: piece["svhn"][kind] for kind in ("independent", "trajectory", *SUBSPACES)}
    return all(ours["independent"] > value for kind, value in ours.items() if kind != "independent"), listed(ours)


def svhn_order(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """On SVHN, random draws and the trajectory diverge more than the low-rank, then the diagonal Gaussian."""
    ours = {kind: piece["svhn"][kind] for kind in ("trajectory", "random", "low_rank", "diagonal")}
    holds = min(ours["trajectory"], ours["random"]) > ours["low_rank"] > ours["diagonal"]
    return holds, f"{listed(ours)} (paper: {listed({kind: PAPER_SVHN[kind] for kind in ours})})"


def under_shift(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """The JS divergence of independent runs, relative to every subspace, grows from clean to corrupted images."""
    by_method = dict(zip(piece["methods"], piece["divergence"], strict=True))
    runs = by_method["independent"]
    kinds = ("trajectory", *SUBSPACES)
    leads = {kind: (runs[0] - by_method[kind][0], runs[-1] - by_method[kind][-1]) for kind in kinds}
    summary = [f"{NAMES[kind]} {number(clean)} to {number(worst)}" for kind, (clean, worst) in leads.items()]
    return all(worst > clean for clean, worst in leads.values()), "lead over " + ", ".join(summary)


def tunnelled(piece: Mapping[str, Any], similar: Mapping[str, Any]) -> tuple[bool, str]:
    """A tunnel has less than half the barrier of the straight line, and its middle is a different function."""
    agreements = on_path(piece["stitched"])[1]
    middle, checkpoints = max(middle_of(agreements)), 1 - similar["within_runs"]["disagreement"]
    rises = f"rise {number(piece['barrier'])} against {number(piece['linear_barrier'])}"
    summary = f"{rises}; agreement with an end {number(middle)}, of two late checkpoints of a run {number(checkpoints)}"
    return piece["barrier"] < piece["linear_barrier"] / 2 and middle < checkpoints, summary


JUDGES: tuple[tuple[Any, ...], ...] = (
    (runs_differ, "similarity"),
    (independent_differ, "subspaces"),
    (better_trade_off, "diversity"),
    (complementary, "subspaces"),
    (ensembles_first, "subspaces"),
    (on_svhn, "shift"),
    (svhn_order, "shift"),
    (under_shift, "shift"),
    (tunnelled, "tunnel", "similarity"),
)
"""Judges with the pieces that they use."""
