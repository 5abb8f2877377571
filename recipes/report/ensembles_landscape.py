"""What the page says about deep ensembles and the loss landscape: Fort, Hu and Lakshminarayanan (2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multitudes.landscape import DiversityPlane, FunctionMap, Path, Plane, Similarity, Stitched
from multitudes.landscape.directions import Frame
from multitudes.landscape.diversity_plane import normalised
from multitudes.landscape.growth import Growth, UnderCorruption
from multitudes.landscape.weights import Scores
from recipes.report.raw import MISSING, Claim, Raw, Section, number, percent, spread, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PAPER_ACCURACY = 0.71
"""Test accuracy of MediumCNN (section 3)."""

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
"""Draws that keep this share of the reference's accuracy are compared with independent runs."""


def section(raw: Raw) -> Section:
    """Everything that was measured, piece by piece."""
    figures: dict[str, Figure] = {}
    parts = [INTRODUCTION, scaled_down(raw)]
    for piece, tell in TELLERS.items():
        if piece in raw:
            parts.append(tell(raw[piece], figures))
    return Section("Deep ensembles: a loss landscape perspective", "\n\n".join(parts), claims(raw), figures)


INTRODUCTION = """\
S. Fort, H. Hu, B. Lakshminarayanan: *Deep Ensembles: A Loss Landscape Perspective*, 2019. Runs of MediumCNN on CIFAR-10
from different initialisations (Adam at 0.0016, halved after each quarter of the training, batches of 128, dropout 0.1,
no augmentation, no batch norm), their trajectories, and subspaces around their ends. The paper gives most results as
figures without numbers; where it gives numbers, they stand beside ours."""


def scaled_down(raw: Raw) -> str:
    """What differs from the paper, as far as pieces tell."""
    trained, shifted = raw["train"], raw["shift"]
    lines = [
        "- All networks come from one set of runs; there is no second one to tell chance from effect.",
        "- Runs are trained side by side: they see the same batches in the same order, and differ by initialisation "
        "and dropout. In the paper the order differs too. Training is in bfloat16 where it is on a GPU.",
        "- The paper shows Fig. 2 and 4 for SmallCNN; here all figures are of one network.",
        "- Some training images are held out to reject inaccurate random draws (below 0.65, or below nine tenths of "
        "the runs' own accuracy if that is less). The low-rank Gaussian has 5 directions; the paper says 4 and 5.",
    ]
    if trained:
        lines.insert(
            0,
            f"- {len(trained['accuracy'])} runs of `{trained['network']}` ({trained['parameters']:,} parameters), "
            f"{trained['epochs']} epochs, {trained['images']:,} training and {trained['test_images']:,} test images.",
        )
    if shifted:
        lines.append(
            f"- CIFAR-10-C is made anew, by the library's corruptions ({len(shifted['corruptions'])} kinds) of "
            f"{shifted['images']:,} test images. SVHN is re-derived: {shifted['svhn_images']:,} crops made from the "
            "official full images, which differ slightly from the official crops."
        )
    return "\n".join(["**What differs from the paper**", "", *lines])


# -- the pieces --------------------------------------------------------------------------------------------


def shown(name: str, what: str) -> str:
    """A figure in the text."""
    return f"![{what}](ensembles_landscape/{name}.svg)"


def tell_train(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """How accurate the runs are."""
    rows = [["test accuracy, %", percent(PAPER_ACCURACY, 0), spread(piece["accuracy"], 1, 100)]]
    return "**The runs** (section 3)\n\n" + table(["", "paper", "ours"], rows)


def tell_similarity(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Fig. 2 (a, b) and 3."""
    along = {matrix: torch.tensor(values) for matrix, values in piece["along"].items()}
    labels = tuple(f"checkpoint {at}" for at in range(len(along["cosine"])))
    figures["trajectory"] = Similarity(labels, ("run 0",) * len(labels), labels, **along).plot()
    rows = [
        [title, *(number(piece[key][matrix]) for matrix in ("cosine", "disagreement", "divergence"))]
        for title, key in (("two checkpoints of one run", "within_runs"), ("of two runs", "between_runs"))
    ]
    head = ["", "cosine of weights", "disagreement of labels", "JS divergence"]
    title = f"**Similarity of the last {piece['last']} checkpoints, mean over pairs** (Fig. 2, 3)"
    return "\n\n".join([title, table(head, rows), shown("trajectory", "Similarity along the trajectory of one run")])


def tell_tsne(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Fig. 2 (c) and 4."""
    labels = tuple(f"{run}, {kind}" for run, kind in zip(piece["runs"], piece["kinds"], strict=True))
    points = torch.tensor(piece["points"])
    figures["map"] = FunctionMap(labels, tuple(piece["runs"]), tuple(piece["kinds"]), points).plot()
    return "**Three runs and their subspaces in function space** (Fig. 2c, 4)\n\n" + shown(
        "map", "t-SNE of the predictions of checkpoints and draws"
    )


def tell_planes(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Fig. 5."""
    axes = tuple(torch.tensor(axis) for axis in piece["axes"])
    loss, accuracy, agreement = (torch.tensor(piece[key]) for key in ("loss", "accuracy", "agreement"))
    unknown = Scores(torch.zeros(2), None, None)
    alone = Frame(torch.zeros(2), torch.eye(2))  # the plane by itself, as the rest of weight space is not kept
    at = torch.tensor(piece["coordinates"])
    found = Plane(axes, loss, accuracy, agreement, ("run 0", "run 1"), at, unknown, alone)
    ways = {f"way of {name}": torch.tensor(way) for name, way in piece["paths"].items() if name != "diagonal"}
    drawn = {"x": [x for x, _ in piece["paths"]["diagonal"]], "y": [y for _, y in piece["paths"]["diagonal"]]}
    for name, what in (("plane", "accuracy"), ("plane_agreement", "agreement")):
        fig = found.plot(what, paths=ways)
        figures[name] = fig.add_scatter(**drawn, mode="markers", name="diagonal Gaussian of run 0")
    return "\n\n".join(
        [
            f"**The plane through the origin and two optima, on {piece['images']:,} test images** (Fig. 5, S1)",
            shown("plane", "Accuracy on the plane"),
            shown("plane_agreement", "Agreement with run 0 on the plane"),
        ]
    )


def tell_tunnel(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Fig. S2 and S3."""
    t, way, line, under = torch.tensor(piece["t"]), piece["tunnel"], piece["linear"], piece["stitched"]
    scores = {
        name: Scores(*(torch.tensor(one[key]) for key in ("loss", "accuracy", "agreement")))
        for name, one in (("scores", way), ("linear", line))
    }
    figures["tunnel"] = Path(t=t, weights=torch.zeros(len(t), 0), **scores, kind="tunnel").plot()
    parts = {key: torch.tensor(under[key]) for key in ("x", "y", "loss", "accuracy", "agreement", "share")}
    stitched = Stitched(**parts, knots=tuple(under["knots"]))
    figures["tunnel_agreement"] = stitched.plot("agreement").update_layout(showlegend=False)
    accuracies, agreements = on_path(under)
    rows = [
        ["largest rise of the training loss", number(piece["linear_barrier"]), number(piece["barrier"])],
        ["least training accuracy, %", percent(min(line["accuracy"])), percent(min(way["accuracy"]))],
        ["training accuracy in the middle, %", *(percent(middle_of(one["accuracy"])) for one in (line, way))],
        ["least test accuracy, %", MISSING, percent(min(accuracies))],
        ["test labels of the middle that are an end's, at most", MISSING, number(max(middle_of(agreements)))],
    ]
    return "\n\n".join(
        [
            "**A tunnel of low loss between two runs** (Fig. S2, S3)",
            table(["", "straight line", "tunnel"], rows),
            shown("tunnel", "Training loss along the tunnel and along the line"),
            shown("tunnel_agreement", "Agreement with one end, from the tunnel to the origin"),
        ]
    )


def on_path(under: Mapping[str, Any]) -> tuple[list[float], list[list[float]]]:
    """Test accuracy at the places of a stitched landscape that are on the path, and agreement with both ends."""
    at = min(range(len(under["share"])), key=lambda index: abs(under["share"][index] - 1))
    first, second = under["agreement"]
    accuracies = [row[at] for row in under["accuracy"]]
    return accuracies, [[one[at], other[at]] for one, other in zip(first, second, strict=True)]


def middle_of(values: Sequence[Any]) -> Any:
    """What is in the middle of a path."""
    return values[len(values) // 2]


def tell_diversity(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Fig. 6."""
    runs, kinds = tuple(piece["runs"]), tuple(piece["kinds"])
    labels = tuple(f"{run}, {kind} {index}" for index, (run, kind) in enumerate(zip(runs, kinds, strict=True)))
    accuracy, disagreement = (torch.tensor(piece[key], dtype=torch.float64) for key in ("accuracy", "disagreement"))
    at = piece["reference"]
    own = labels[at], float(accuracy[at]), piece["classes"], piece["exponents"]
    figures["diversity"] = DiversityPlane(labels, runs, kinds, accuracy, disagreement, *own).plot()
    rows = [
        [NAMES.get(kind, kind), str(len(group)), number(float(group.mean()))] for kind, group in near(piece).items()
    ]
    head = ["", "solutions", "disagreement / (1 - accuracy)"]
    title = f"**Diversity for the accuracy: solutions that keep {percent(NEAR, 0)} % of the reference's** (Fig. 6)"
    return "\n\n".join([title, table(head, rows), shown("diversity", "The diversity-accuracy plane, with its limits")])


def near(piece: Mapping[str, Any]) -> dict[str, Tensor]:
    """The normalised diversity of solutions that are nearly as accurate as the reference, by kind."""
    accuracy, disagreement = (torch.tensor(piece[key], dtype=torch.float64) for key in ("accuracy", "disagreement"))
    diversity, least = normalised(disagreement, accuracy), NEAR * accuracy[piece["reference"]]
    home = piece["runs"][piece["reference"]]
    kinds = ["other runs" if run != home else kind for run, kind in zip(piece["runs"], piece["kinds"], strict=True)]
    return {
        kind: diversity[[at for at, own in enumerate(kinds) if own == kind and accuracy[at] >= least]]
        for kind in dict.fromkeys(kinds)
        if kind != "optimum"
    }


def tell_subspaces(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Fig. 8, and how diverse the draws are."""
    kinds = tuple(piece["accuracy"])
    parts = [torch.tensor(list(piece[key].values())) for key in ("accuracy", "brier", "divergence")]
    runs = tuple(f"run {run}" for run in range(parts[0].shape[1]))
    figures["growth"] = Growth(tuple(NAMES.get(kind, kind) for kind in kinds), runs, *parts).plot()
    rows = [
        [
            NAMES.get(kind, kind),
            *(percent(piece["accuracy"][kind][at]) for at in (0, -1)),
            *(number(piece[score][kind][at]) for score in ("nll", "brier") for at in (0, -1)),
        ]
        for kind in kinds
    ]
    many = f"{len(runs)} runs"
    head = ["", "accuracy, 1 run, %", many, "NLL, 1 run", many, "Brier, 1 run", many]
    drawn = [
        [NAMES.get(kind, kind), number(of["disagreement"]), number(of["divergence"]), percent(of["accuracy"])]
        for kind, of in piece["diversity"].items()
    ]
    return "\n\n".join(
        [
            f"**Ensembles, subspaces, and both: {piece['draws']} draws a run, {piece['test_images']:,} test images** "
            "(Fig. 8)",
            table(head, rows),
            shown("growth", "Accuracy as ensembles grow"),
            f"**How much {piece['samples']} solutions of a kind differ** (of one run: mean over runs). Of the random "
            f"draws, {piece['centres']} were rejected so often that the run itself was taken.",
            table(["", "disagreement", "JS divergence", "their own accuracy, %"], drawn),
        ]
    )


def tell_shift(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Fig. 9, and SVHN."""
    methods, severities = list(piece["methods"]), piece["severities"]
    parts = [torch.tensor(piece[key]).unsqueeze(1) for key in ("accuracy", "brier", "divergence")]
    names = tuple(NAMES.get(method, method) for method in methods)
    figures["corruption"] = UnderCorruption(names, ("mean",), tuple(severities), *parts).plot()
    ends = (0, len(severities) - 1)
    rows = [
        [
            name,
            str(piece["methods"][method]),
            *(percent(piece["accuracy"][at][end]) for end in ends),
            *(number(piece[score][at][end]) for score in ("brier", "divergence") for end in ends),
            number(PAPER_SVHN.get(method)),
            number(piece["svhn"][method]),
        ]
        for at, (method, name) in enumerate(zip(methods, names, strict=True))
    ]
    worst = f"severity {severities[-1]}"
    head = ["", "solutions", "accuracy, clean, %", worst, "Brier, clean", worst, "JS, clean", worst]
    return "\n\n".join(
        [
            "**Under corruption, mean over its kinds** (Fig. 9), **and the JS divergence on SVHN** (section 5). "
            "Divergences compare only where there are as many solutions.",
            table([*head, "JS, SVHN, paper", "JS, SVHN, ours"], rows),
            shown("corruption", "Accuracy, Brier score and JS divergence by severity"),
        ]
    )


TELLERS = {
    "train": tell_train,
    "similarity": tell_similarity,
    "tsne": tell_tsne,
    "planes": tell_planes,
    "tunnel": tell_tunnel,
    "diversity": tell_diversity,
    "subspaces": tell_subspaces,
    "shift": tell_shift,
}


# -- claims ------------------------------------------------------------------------------------------------


def claims(raw: Raw) -> list[Claim]:
    """What the paper says, and whether our numbers say so too; the docstring of each judge is its claim."""
    found = []
    for judge, *names in JUDGES:
        pieces = [raw[name] for name in names]
        holds, numbers = (None, "") if None in pieces else judge(*pieces)
        found.append(Claim(str(judge.__doc__), holds, numbers))
    return found


def listed(values: Mapping[str, float]) -> str:
    """Numbers by name, in one line."""
    return ", ".join(f"{NAMES.get(name, name)} {number(value)}" for name, value in values.items())


def apart(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """Two runs end further apart than two late checkpoints of a run, as weights and as functions."""
    within, between = piece["within_runs"], piece["between_runs"]
    told = [f"{key} {number(between[key])} against {number(within[key])}" for key in ("cosine", "disagreement")]
    return between["cosine"] < within["cosine"] and between["disagreement"] > within["disagreement"], ", ".join(told)


def independent_differ(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """Independent runs differ more than the draws of any subspace, in labels and in probabilities."""
    scores = piece["diversity"]
    others = [of for kind, of in scores.items() if kind != "independent"]
    holds = [scores["independent"][key] > max(of[key] for of in others) for key in ("disagreement", "divergence")]
    return all(holds), "JS divergence: " + listed({kind: of["divergence"] for kind, of in scores.items()})


def better_trade_off(piece: Mapping[str, Any]) -> tuple[bool | None, str]:
    """Other runs differ more, for their accuracy, than all draws that keep nine tenths of the reference's accuracy."""
    groups = near(piece)
    runs = groups.pop("other runs", torch.zeros(0))
    rest = {kind: float(group.max()) for kind, group in groups.items() if len(group)}
    if not len(runs) or not rest:
        return None, ""
    told = f"least diverse run {number(float(runs.min()))}; the most diverse: {listed(rest)}"
    return float(runs.min()) > max(rest.values()), told


def complementary(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """Ensembles of each subspace beat the plain ensemble and that subspace alone, in accuracy or in NLL."""
    accuracy, nll = piece["accuracy"], piece["nll"]
    holds = [
        accuracy[kind][-1] > max(accuracy[kind][0], accuracy["baseline"][-1])
        or nll[kind][-1] < min(nll[kind][0], nll["baseline"][-1])
        for kind in SUBSPACES
    ]
    kinds = ("baseline", *SUBSPACES)
    told = [f"{NAMES[kind]} {percent(accuracy[kind][-1])} %, NLL {number(nll[kind][-1])}" for kind in kinds]
    return all(holds), "ensembles of all runs: " + "; ".join(told)


def ensembles_first(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """The plain ensemble beats every subspace of one run, in accuracy and in NLL."""
    accuracy, nll = piece["accuracy"], piece["nll"]
    best = accuracy["baseline"][-1], nll["baseline"][-1]
    holds = [best[0] > accuracy[kind][0] and best[1] < nll[kind][0] for kind in SUBSPACES]
    return all(holds), "NLL: " + listed({"independent": best[1]} | {kind: nll[kind][0] for kind in SUBSPACES})


def on_svhn(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """On SVHN, independent runs have the highest JS divergence."""
    ours = {kind: piece["svhn"][kind] for kind in ("independent", "trajectory", *SUBSPACES)}
    return all(ours["independent"] > value for kind, value in ours.items() if kind != "independent"), listed(ours)


def svhn_order(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """On SVHN, random draws and the trajectory come before the low-rank Gaussian, and that before the diagonal one."""
    ours = {kind: piece["svhn"][kind] for kind in ("trajectory", "random", "low_rank", "diagonal")}
    holds = min(ours["trajectory"], ours["random"]) > ours["low_rank"] > ours["diagonal"]
    return holds, f"{listed(ours)} (paper: {listed({kind: PAPER_SVHN[kind] for kind in ours})})"


def under_shift(piece: Mapping[str, Any]) -> tuple[bool, str]:
    """The lead of independent runs over every subspace in JS divergence grows from clean to most corrupted images."""
    by_method = dict(zip(piece["methods"], piece["divergence"], strict=True))
    runs = by_method["independent"]
    kinds = ("trajectory", *SUBSPACES)
    leads = {kind: (runs[0] - by_method[kind][0], runs[-1] - by_method[kind][-1]) for kind in kinds}
    told = [f"{NAMES[kind]} {number(clean)} to {number(worst)}" for kind, (clean, worst) in leads.items()]
    return all(worst > clean for clean, worst in leads.values()), "lead over " + ", ".join(told)


def tunnelled(piece: Mapping[str, Any], similar: Mapping[str, Any]) -> tuple[bool, str]:
    """In a tunnel the loss rises by less than half of a line's; its middle is another function than either end."""
    agreements = on_path(piece["stitched"])[1]
    middle, alike = max(middle_of(agreements)), 1 - similar["within_runs"]["disagreement"]
    rises = f"rise {number(piece['barrier'])} against {number(piece['linear_barrier'])}"
    told = f"{rises}; agreement with an end {number(middle)}, of two late checkpoints of a run {number(alike)}"
    return piece["barrier"] < piece["linear_barrier"] / 2 and middle < alike, told


JUDGES: tuple[tuple[Any, ...], ...] = (
    (apart, "similarity"),
    (independent_differ, "subspaces"),
    (better_trade_off, "diversity"),
    (complementary, "subspaces"),
    (ensembles_first, "subspaces"),
    (on_svhn, "shift"),
    (svhn_order, "shift"),
    (under_shift, "shift"),
    (tunnelled, "tunnel", "similarity"),
)
"""Each with the pieces that it reads."""
