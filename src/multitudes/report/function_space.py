"""How different networks are: diversity against accuracy, a map of function space, the loss landscape."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from multitudes.landscape.accuracy_diversity import lower_limit, normalised, upper_limit
from multitudes.report.results import Results
from multitudes.report.style import REFERENCE, Style, Trace, View, axes, plotly_text

__all__ = ["diversity", "function_map", "loss_landscape"]

MOST_SOLUTIONS, MOST_ROWS = 320, 500
"""On the map."""

Seed = tuple[int, Tensor, Tensor]
"""A seed, its members' probabilities `[S, N, C]` (or values `[S, N]`), and the targets `[N]`."""


def _members(results: Results, method: str) -> list[Seed]:
    """Of the seeds whose members were kept."""
    found = [(outcome.seed, outcome.tensors("members", "target")) for outcome in results.of(method)]
    return [(seed, tensors[0], tensors[1]) for seed, tensors in found if tensors is not None]


# -- diversity ---------------------------------------------------------------------------------------------


def diversity(results: Results) -> dict[str, Any]:
    """Normalised diversity of members to the first of their run, against accuracy, with Fort et al.'s limits."""
    traces: list[Trace] = []
    references: list[float] = []
    faultless = 0
    for at, method in enumerate(results.methods if results.task == "classification" else []):
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
        traces.append(_points(at, x, y, [f"{plotly_text(method)}, {name}" for name in names], hover))
    if not traces:
        return {}
    # Near an accuracy of 1 the upper limit goes to infinity; the points must stay visible.
    top = max(max(value for trace in traces for value in trace["y"]), 0.1)
    traces = _limits(traces, sum(references) / len(references), len(results.classes)) + traces
    xaxis, yaxis = {"tickformat": ".1%"}, {"range": [0, 1.4 * top]}
    layout = axes("accuracy of a member", "disagreement ÷ error", xaxis=xaxis, yaxis=yaxis)
    return {"views": [View(traces, layout)], "faultless": faultless}


def _points(at: int, x: Any, y: Any, text: list[str], hover: str) -> Trace:
    """Networks of a method."""
    marker = Style(at).marker(9, opacity=0.8)
    trace = {"type": "scatter", "mode": "markers", "meta": at, "x": list(x), "y": list(y), "marker": marker}
    return {**trace, "text": text, "hovertemplate": hover}


Labels = tuple[str, Tensor, Tensor]
"""The name of a member, the classes that it predicts `[N]`, and the targets `[N]`."""


def _groups(members: list[Seed]) -> list[list[Labels]]:
    """The members that are compared: those of one run, or where runs have one each, those of all runs."""
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


def _limits(traces: list[Trace], reference: float, classes: int) -> list[Trace]:
    """Both limits over the accuracies that are there; none for a reference that is no better than chance."""
    seen = [value for trace in traces for value in trace["x"]]
    low, high = min(seen), min(max(seen), 1 - 1e-3)
    room = max(0.1 * (high - low), 0.002)
    accuracy = torch.linspace(max(low - room, 0), min(high + room, 1 - 1e-3), 80, dtype=torch.float64)
    if reference * max(classes, 1) <= 1 or classes < 2:
        return []
    limits = [("independent networks", upper_limit, "dash"), ("one network, perturbed", lower_limit, "dot")]
    return [
        {"type": "scatter", "mode": "lines", "x": accuracy.tolist(), "hoverinfo": "text", "text": name,
         "y": normalised(limit(accuracy, reference, classes), accuracy).tolist(), "line": {**REFERENCE, "dash": dash}}
        for name, limit, dash in limits
    ]  # fmt: skip


# -- the map -----------------------------------------------------------------------------------------------


def function_map(results: Results) -> dict[str, Any]:
    """Members as points of the plane, near each other where they predict alike (t-SNE); needs scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        return {}
    each = max(1, MOST_SOLUTIONS // len(results.outcomes))
    solutions = [
        (at, f"{plotly_text(method)}, seed {seed}, member {number}", probs[:MOST_ROWS].flatten().float())
        for at, method in enumerate(results.methods)
        for seed, members, _ in _members(results, method)
        for number, probs in enumerate(members[:each])
    ]
    solutions = [one for one in solutions if one[2].numel() == solutions[0][2].numel()]
    if len(solutions) < 5:
        return {}
    placed = _placed(torch.stack([vector for _, _, vector in solutions])).tolist()
    traces = []
    for at in dict.fromkeys(at for at, _, _ in solutions):
        own = [(*place, text) for place, (method, text, _) in zip(placed, solutions, strict=True) if method == at]
        x, y, texts = zip(*own, strict=True)
        traces.append(_points(at, x, y, list(texts), "%{text}<extra></extra>"))
    bare = {"showticklabels": False, "showgrid": False}
    return {"views": [View(traces, axes("", "", xaxis=bare, yaxis=bare))]}


def _placed(vectors: Tensor) -> Any:
    """Vectors `[S, D]` as points `[S, 2]`, repeatable."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    tsne = TSNE(perplexity=min(30.0, (len(vectors) - 1) / 3), init="pca", random_state=0)
    with threadpool_limits(1):  # several threads mostly wait for each other here, and may add up in another order
        return tsne.fit_transform(vectors.numpy())


# -- loss landscape ----------------------------------------------------------------------------------------


def loss_landscape(results: Results) -> dict[str, Any]:
    """The loss on a plane through networks, where the run has one."""
    plane = results.landscape.get("plane")
    if not plane:
        return {}
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
        "y": [point["y"] for point in points], "text": [plotly_text(point["name"]) for point in points],
        "textposition": "top center", "textfont": {"color": "#ffffff"}, "hoverinfo": "skip",
        "marker": {"color": "#ffffff", "line": {"color": "#000000", "width": 2}, "size": 12, "symbol": "star"},
    }  # fmt: skip
    layout = axes("", "", xaxis={"constrain": "domain"}, yaxis={"scaleanchor": "x", "constrain": "domain"})
    losses = "; ".join(f"{point['name']} {float(point['loss']):.3f}" for point in points)
    return {"views": [View([heights, networks], layout)], "losses": losses}
