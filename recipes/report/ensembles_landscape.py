"""Page section on deep ensembles and the loss landscape: Fort, Hu and Lakshminarayanan (2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from multitudes.landscape import DiversityPlane, FunctionMap, Path, Plane, Similarity
from multitudes.landscape.ensemble_growth import Growth
from multitudes.landscape.weight_space.directions import Frame
from multitudes.landscape.weight_space.weight_scores import Scores
from recipes.landscape_shift import UnderCorruption
from recipes.report.landscape_claims import NAMES, NEAR, PAPER_SVHN, claims, middle_of, near, on_path
from recipes.report.raw import MISSING, Raw, Section, number, percent, spread, table
from recipes.tunnel_to_origin import Stitched

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PAPER_ACCURACY = 0.71
"""Test accuracy of MediumCNN (section 3)."""


def section(raw: Raw) -> Section:
    """Write all measurements, piece by piece."""
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
    """List the differences from the paper, based on the available pieces."""
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
    """Embed a figure."""
    return f"![{what}](ensembles_landscape/{name}.svg)"


def tell_train(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Report the accuracy of the runs."""
    rows = [["test accuracy, %", percent(PAPER_ACCURACY, 0), spread(piece["accuracy"], 1, 100)]]
    return "**The runs** (section 3)\n\n" + table(["", "paper", "ours"], rows)


def tell_similarity(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Report Fig. 2 (a, b) and 3."""
    cosine, apart, divergence = (torch.tensor(piece["along"][key]) for key in ("cosine", "disagreement", "divergence"))
    labels = tuple(f"checkpoint {at}" for at in range(len(cosine)))
    figures["trajectory"] = Similarity(labels, ("run 0",) * len(labels), labels, cosine, apart, divergence).plot()
    rows = [
        [title, *(number(piece[key][matrix]) for matrix in ("cosine", "disagreement", "divergence"))]
        for title, key in (("two checkpoints of one run", "within_runs"), ("of two runs", "between_runs"))
    ]
    head = ["", "cosine of weights", "disagreement of labels", "JS divergence"]
    title = f"**Similarity of the last {piece['last']} checkpoints, mean over pairs** (Fig. 2, 3)"
    return "\n\n".join([title, table(head, rows), shown("trajectory", "Similarity along the trajectory of one run")])


def tell_tsne(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Report Fig. 2 (c) and 4."""
    labels = tuple(f"{run}, {kind}" for run, kind in zip(piece["runs"], piece["kinds"], strict=True))
    points = torch.tensor(piece["points"])
    figures["map"] = FunctionMap(labels, tuple(piece["runs"]), tuple(piece["kinds"]), points).plot()
    return "**Three runs and their subspaces in function space** (Fig. 2c, 4)\n\n" + shown(
        "map", "t-SNE of the predictions of checkpoints and draws"
    )


def tell_planes(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Report Fig. 5."""
    axes = tuple(torch.tensor(axis) for axis in piece["axes"])
    loss, accuracy, agreement = (torch.tensor(piece[key]) for key in ("loss", "accuracy", "agreement"))
    unknown = Scores(torch.zeros(2, 1))
    alone = Frame(torch.zeros(2), torch.eye(2))  # only the plane is known: the rest of weight space was not saved
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
    """Report Fig. S2 and S3."""
    t, way, line, under = torch.tensor(piece["t"]), piece["tunnel"], piece["linear"], piece["stitched"]
    scores = {
        name: Scores(torch.column_stack([torch.tensor(one[key]) for key in ("loss", "accuracy", "agreement")]))
        for name, one in (("scores", way), ("linear", line))
    }
    figures["tunnel"] = Path(t=t, weights=torch.zeros(len(t), 0), **scores).plot()
    parts = {key: torch.tensor(under[key]) for key in ("x", "y", "loss", "accuracy", "agreement", "share")}
    stitched = Stitched(**parts, knots=tuple(under["knots"]))
    figures["tunnel_agreement"] = stitched.plot("agreement").update_layout(showlegend=False)
    (accuracies, agreements), alone = on_path(under), piece["alone"]
    rises = (piece["linear_barrier"], alone["barrier"], piece["barrier"])
    rows = [
        ["largest rise of the training loss", *map(number, rises)],
        ["least training accuracy, %", *(percent(min(one["accuracy"])) for one in (line, alone, way))],
        ["training accuracy in the middle, %", *(percent(middle_of(one["accuracy"])) for one in (line, alone, way))],
        ["least test accuracy, %", MISSING, MISSING, percent(min(accuracies))],
        ["test labels of the middle that are an end's, at most", MISSING, MISSING, number(max(middle_of(agreements)))],
    ]
    return "\n\n".join(
        [
            "**A tunnel of low loss between two runs** (Fig. S2, S3)",
            "Measured at the points of the path and in the middle between each two. Points that walk down to lower "
            "loss one by one, as in the paper, are in a valley each (their training loss rises by "
            f"{number(valleys(alone))} at most), but there may be ridges between two of them. In the tunnel it is the "
            "lines between points that walk down.",
            table(["", "straight line", "points one by one", "tunnel"], rows),
            shown("tunnel", "Training loss along the tunnel and along the line"),
            shown("tunnel_agreement", "Agreement with one end, from the tunnel to the origin"),
        ]
    )


def valleys(alone: Mapping[str, Any]) -> float:
    """Return the rise of the loss at a path's points, every other place of it, above the worse end's."""
    losses: list[float] = alone["loss"][::2]
    return max(losses) - max(losses[0], losses[-1])


def tell_diversity(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Report Fig. 6."""
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


def tell_subspaces(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Report Fig. 8, and the diversity of the draws."""
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
    """Report Fig. 9, and SVHN."""
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


def tell_reach(piece: Mapping[str, Any], figures: dict[str, Figure]) -> str:
    """Report why random draws differ less than the paper's."""
    rows = [
        [number(length, 0), percent(accuracy), number(divergence)]
        for length, accuracy, divergence in zip(piece["lengths"], piece["accuracy"], piece["svhn"], strict=True)
    ]
    return (
        "**How far random draws must go.** The run that they surround is "
        f"{number(piece['norm'], 0)} away from the origin, and the paper's draws go 10 away from it at most. Nothing "
        f"is rejected here; the paper's JS divergence on SVHN is {number(PAPER_SVHN['random'])}.\n\n"
        + table(["at most so far", "their own accuracy, %", "JS, SVHN"], rows)
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
    "reach": tell_reach,
}
