"""How far the networks of a method are apart: the diversity-accuracy plane, a map of functions, a plane of losses."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from multitudes.landscape.accuracy_diversity import lower_limit, normalised, upper_limit
from multitudes.report.html import Section, plotted, section, text
from multitudes.report.quality import axes
from multitudes.report.results import Results
from multitudes.report.style import Style, View, legend, plot

__all__ = ["diversity", "function_map", "loss_plane"]

MOST_SOLUTIONS, MOST_ROWS = 320, 500
"""On the map."""


def _members(results: Results, method: str) -> list[tuple[int, Tensor, Tensor]]:
    """For each seed the members' probabilities `[S, N, C]` and the classes `[N]`, where they were kept."""
    found = []
    for outcome in results.of(method):
        members, target = outcome.array("members"), outcome.array("target")
        if members is not None and target is not None:
            found.append((outcome.seed, torch.from_numpy(members).float(), torch.from_numpy(target)))
    return found


# -- diversity ---------------------------------------------------------------------------------------------


def diversity(results: Results) -> Section | None:
    """Normalised diversity of members to the first of their run, against accuracy, with Fort et al.'s limits."""
    traces: list[dict[str, Any]] = []
    references: list[float] = []
    faultless = 0
    methods = results.methods if results.task == "classification" else []
    for at, method in enumerate(methods):
        groups = _groups(_members(results, method))
        points = [
            (name, *_point(labels, group[0][1], target)) for group in groups for name, labels, target in group[1:]
        ]
        faultless += sum(math.isinf(point[2]) for point in points)
        points = [point for point in points if math.isfinite(point[2])]
        if not points:
            continue
        references += [float((group[0][1] == group[0][2]).double().mean()) for group in groups]
        names, x, y = zip(*points, strict=True)
        hover = "<b>%{text}</b><br>accuracy %{x:.2%}<br>diversity %{y:.2f}<extra></extra>"
        labels = [f"{plotted(method)}, {name}" for name in names]
        traces.append(
            {"type": "scatter", "mode": "markers", "meta": at, "x": x, "y": y, "text": labels, "hovertemplate": hover,
             "marker": {**Style(at).marker(9), "opacity": 0.8}}
        )  # fmt: skip
    if not traces:
        return None
    # Near an accuracy of 1 the upper limit leaves for infinity; the points shall be seen.
    top = max(max(value for trace in traces for value in trace["y"]), 0.1)
    traces = _limits(traces, sum(references) / len(references), len(results.classes)) + traces
    layout = axes(
        "accuracy of a member", "disagreement ÷ error", xaxis={"tickformat": ".1%"}, yaxis={"range": [0, 1.4 * top]}
    )
    shown = [results.methods[trace["meta"]] for trace in traces if "meta" in trace]
    return section(
        "diversity",
        "Are the members different?",
        plot(
            "plot-diversity", "Diversity of the members of each method against their accuracy, with limits",
            View(traces, layout), below=legend(results.methods, shown),
            caption="Each point is a member beside the first of its run; of a method that has only one, its runs "
            "beside each other. Upper curve: networks that know nothing of each other. Lower: one network, perturbed. "
            "Disagreement is divided by the member's error (Fort et al., 2019)."
            + (f" {faultless} members make no error, and are not shown." if faultless else ""),
        ),
    )  # fmt: skip


Labels = tuple[str, Tensor, Tensor]


def _groups(members: list[tuple[int, Tensor, Tensor]]) -> list[list[Labels]]:
    """The labels of members that are compared: those of one run, or where runs have one each, those of all runs."""
    groups = [
        [(f"seed {seed}, member {number}", each.argmax(1), target) for number, each in enumerate(probs)]
        for seed, probs, target in members
    ]
    if all(len(group) == 1 for group in groups):
        groups = [[one for group in groups for one in group]]
    return [group for group in groups if len(group) > 1 and all(len(one[1]) == len(group[0][1]) for one in group)]


def _point(labels: Tensor, reference: Tensor, target: Tensor) -> tuple[float, float]:
    accuracy = (labels == target).double().mean()
    return float(accuracy), float(normalised((labels != reference).double().mean(), accuracy))


def _limits(traces: list[dict[str, Any]], reference: float, classes: int) -> list[dict[str, Any]]:
    """Both limits over the accuracies that are there; none for a reference that is no better than chance."""
    seen = [value for trace in traces for value in trace["x"]]
    low, high = min(seen), min(max(seen), 1 - 1e-3)
    room = max(0.1 * (high - low), 0.002)
    accuracy = torch.linspace(max(low - room, 0), min(high + room, 1 - 1e-3), 80, dtype=torch.float64)
    if reference * max(classes, 1) <= 1 or classes < 2:
        return []
    limits = {"knowing nothing of each other": upper_limit, "one network, perturbed": lower_limit}
    return [
        {"type": "scatter", "mode": "lines", "x": accuracy.tolist(), "hoverinfo": "text", "text": name,
         "y": normalised(limit(accuracy, reference, classes), accuracy).tolist(),
         "line": {"color": "var(--quiet)", "width": 1.5, "dash": "dash" if limit is upper_limit else "dot"}}
        for name, limit in limits.items()
    ]  # fmt: skip


# -- the map -----------------------------------------------------------------------------------------------


def function_map(results: Results) -> Section | None:
    """Members as points of the plane, near each other where they predict alike (t-SNE); needs scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        return None
    each = max(1, MOST_SOLUTIONS // len(results.outcomes))
    solutions = [
        (at, f"{plotted(method)}, seed {seed}, member {number}", probs[:MOST_ROWS].flatten())
        for at, method in enumerate(results.methods)
        for seed, members, _ in _members(results, method)
        for number, probs in enumerate(members[:each])
    ]
    solutions = [one for one in solutions if one[2].numel() == solutions[0][2].numel()]
    if len(solutions) < 5:
        return None
    placed = _placed(torch.stack([vector for _, _, vector in solutions]))
    traces = []
    for at in dict.fromkeys(at for at, _, _ in solutions):
        own = [index for index, one in enumerate(solutions) if one[0] == at]
        traces.append(
            {"type": "scatter", "mode": "markers", "meta": at, "marker": {**Style(at).marker(9), "opacity": 0.8},
             "x": placed[own, 0].tolist(), "y": placed[own, 1].tolist(), "text": [solutions[index][1] for index in own],
             "hovertemplate": "%{text}<extra></extra>"}
        )  # fmt: skip
    bare = {"showticklabels": False, "showgrid": False}
    shown = [results.methods[trace["meta"]] for trace in traces]
    return section(
        "map",
        "A map of the functions",
        plot(
            "plot-map", "Map of the members of all methods, near each other where they predict alike",
            View(traces, axes("", "", xaxis=bare, yaxis=bare)), below=legend(results.methods, shown),
            caption="Each point is one network; those that predict alike lie near each other (t-SNE of what they "
            "predict). Members in one heap are one function; directions and distances far apart mean nothing.",
        ),
    )  # fmt: skip


def _placed(vectors: Tensor) -> Any:
    """Vectors `[S, D]` as points `[S, 2]`, always the same ones."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    tsne = TSNE(perplexity=min(30.0, (len(vectors) - 1) / 3), init="pca", random_state=0)
    with threadpool_limits(1):  # several threads mostly wait for each other here, and may add up in another order
        return tsne.fit_transform(vectors.numpy())


# -- losses ------------------------------------------------------------------------------------------------


def loss_plane(results: Results) -> Section | None:
    """The loss on a plane through networks, where the run has one."""
    plane = results.landscape.get("plane")
    if not plane:
        return None
    points = plane.get("points", [])
    heights = {
        "type": "contour", "x": plane["x"], "y": plane["y"], "colorscale": "Viridis",
        # Far out the loss is a hundred times that of the valleys, which only a logarithm shows.
        "z": [[math.log10(max(loss, 1e-12)) for loss in row] for row in plane["loss"]],
        "contours": {"coloring": "heatmap"}, "line": {"width": 0.5}, "ncontours": 24,
        "colorbar": {"title": {"text": "log10 loss"}, "thickness": 12},
        "customdata": plane["loss"], "hovertemplate": "loss %{customdata:.3f}<extra></extra>",
    }  # fmt: skip
    networks = {
        "type": "scatter", "mode": "markers+text", "x": [point["x"] for point in points],
        "y": [point["y"] for point in points], "text": [plotted(point["name"]) for point in points],
        "textposition": "top center", "textfont": {"color": "#ffffff"}, "hoverinfo": "skip",
        "marker": {"color": "#ffffff", "line": {"color": "#000000", "width": 2}, "size": 12, "symbol": "star"},
    }  # fmt: skip
    where = "; ".join(f"{point['name']} {float(point['loss']):.3f}" for point in points)
    same = {"scaleanchor": "x", "constrain": "domain"}
    layout = axes("", "", xaxis={"constrain": "domain"}, yaxis=same)
    return section(
        "plane",
        "The loss landscape",
        plot(
            "plot-plane", f"Loss on a plane through networks: {where}", View([heights, networks], layout),
            caption=f"The loss on a plane through the networks, the stars. Ridges between them keep them apart. Their "
            f"losses: {text(where)}.",
        ),
    )  # fmt: skip
