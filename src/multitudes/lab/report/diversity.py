"""Differences between networks: diversity against accuracy, a map of function space, the loss landscape."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from multitudes.lab.report.chart import Axis, Field, Series, View
from multitudes.lab.report.run_results import Results
from multitudes.lab.study.results.result_rows import TARGETS
from multitudes.landscape.accuracy_diversity import lower_limit, normalised, upper_limit

MOST_SOLUTIONS, MOST_ROWS = 320, 500
"""Limits of the map."""

Seed = tuple[int, Tensor, Tensor]
"""A seed, its members' probabilities `[S, N, C]` (or values `[S, N]`), and the targets `[N]`."""


def _members(results: Results, method: str) -> list[Seed]:
    """Return the seeds whose members were saved, on the same test rows."""
    found = [(outcome.seed, outcome.tensors("members", "target")) for outcome in results.comparable(method)]
    return [(seed, *tensors) for seed, tensors in found if tensors is not None]  # type: ignore[misc]


# -- diversity ---------------------------------------------------------------------------------------------


def diversity(results: Results) -> dict[str, Any]:
    """Plot members' normalised diversity to their run's first one against accuracy, with Fort et al.'s limits."""
    series: list[Series] = []
    references: list[float] = []
    faultless = 0
    for at, method in enumerate(results.methods if TARGETS[results.task].classes else []):
        groups = _groups(_members(results, method))
        points = []
        for (_, reference, _), *others in groups:
            for name, labels, target in others:
                accuracy = (labels == target).double().mean()
                apart = normalised((labels != reference).double().mean(), accuracy)
                points.append((name, float(accuracy), float(apart)))
        faultless += sum(math.isinf(apart) for _, _, apart in points)
        if points := [point for point in points if math.isfinite(point[2])]:
            references += [float((group[0][1] == group[0][2]).double().mean()) for group in groups]
            _, x, y = zip(*points, strict=True)
            tips = [f"{name}: accuracy {100 * right:.2f} %, diversity {apart:.2f}" for name, right, apart in points]
            series.append(Series(x, y, at, line=False, marks=True, tips=tips))
    if not series:
        return {}
    # The upper limit diverges near an accuracy of 1; keep the points visible.
    top = 1.4 * max(max(value for each in series for value in each.y), 0.1)
    limits = _limits(series, sum(references) / len(references), len(results.classes))
    x_axis, y_axis = Axis("accuracy of a member", percent=True), Axis("disagreement ÷ error", low=0, high=top)
    return {"views": [View([*limits, *series], x_axis, y_axis)], "faultless": faultless}


Labels = tuple[str, Tensor, Tensor]
"""Name of a member, its predicted classes `[N]`, and the targets `[N]`."""


def _groups(members: list[Seed]) -> list[list[Labels]]:
    """Return the groups of members to compare: those of a run, or of all runs if each has one member."""
    groups = [
        [(f"seed {seed}, member {number}", each.argmax(1), target) for number, each in enumerate(probs)]
        for seed, probs, target in members
    ]
    if all(len(group) == 1 for group in groups):
        groups = [[one for group in groups for one in group]]
    return [group for group in groups if len(group) > 1 and all(len(one[1]) == len(group[0][1]) for one in group)]


def _limits(series: list[Series], reference: float, classes: int) -> list[Series]:
    """Return both limits over the observed accuracies; empty if the reference is no better than chance."""
    if classes < 2 or reference * classes <= 1:
        return []
    seen = [value for each in series for value in each.x]
    low, high = min(seen), min(max(seen), 1 - 1e-3)
    room = max(0.1 * (high - low), 0.002)
    accuracy = torch.linspace(max(low - room, 0), min(high + room, 1 - 1e-3), 80, dtype=torch.float64)
    found = []
    for name, limit in (("independent networks", upper_limit), ("one network, perturbed", lower_limit)):
        y = normalised(limit(accuracy, reference, classes), accuracy).tolist()
        found.append(Series(accuracy.tolist(), y, tips=[name] * len(y)))
    return found


# -- the map -----------------------------------------------------------------------------------------------


def function_map(results: Results) -> dict[str, Any]:
    """Map members to the plane by their predictions (t-SNE); needs scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        return {}
    each = max(1, MOST_SOLUTIONS // len(results.outcomes))
    solutions = [
        (at, f"seed {seed}, member {number}", probs[:MOST_ROWS].flatten().float())
        for at, method in enumerate(results.methods)
        for seed, members, _ in _members(results, method)
        for number, probs in enumerate(members[:each])
    ]
    solutions = [one for one in solutions if one[2].numel() == solutions[0][2].numel()]
    if len(solutions) < 5:
        return {}
    placed = _embed(torch.stack([vector for _, _, vector in solutions])).tolist()
    series = []
    for at in dict.fromkeys(at for at, _, _ in solutions):
        own = [(*place, text) for place, (method, text, _) in zip(placed, solutions, strict=True) if method == at]
        x, y, tips = zip(*own, strict=True)
        series.append(Series(x, y, at, line=False, marks=True, tips=tips))
    return {"views": [View(series, Axis(bare=True), Axis(bare=True))]}


def _embed(vectors: Tensor) -> Any:
    """Embed vectors `[S, D]` as points `[S, 2]`, reproducibly."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    tsne = TSNE(perplexity=min(30.0, (len(vectors) - 1) / 3), init="pca", random_state=0)
    with threadpool_limits(1):  # more threads are no faster here and may change the summation order
        return tsne.fit_transform(vectors.numpy())


# -- loss landscape ----------------------------------------------------------------------------------------


def loss_landscape(results: Results) -> dict[str, Any]:
    """Plot the loss on a plane through networks, if the run has one."""
    plane = results.landscape.get("plane")
    if not plane:
        return {}
    points = plane.get("points", [])
    x, y, names = ([point[key] for point in points] for key in ("x", "y", "name"))
    losses = [f"{float(point['loss']):.3f}" for point in points]
    tips = [f"{name}: loss {loss}" for name, loss in zip(names, losses, strict=True)]
    networks = Series(x, y, line=False, marks=True, tips=tips, labels=list(map(str, names)))
    field = Field(plane["x"], plane["y"], _heights(plane["loss"]), "log10 loss")
    view = View([networks], Axis(bare=True), Axis(bare=True), field=field)
    return {"views": [view], "losses": "; ".join(map(" ".join, zip(map(str, names), losses, strict=True)))}


def _heights(losses: list[list[float | None]]) -> list[list[float]]:
    """Return log10 of losses, which span orders of magnitude. Non-finite ones get the highest value.

    >>> _heights([[0.1, 100.0], [None, float("nan")]])
    [[-1.0, 2.0], [2.0, 2.0]]
    """
    known = torch.tensor([[math.nan if loss is None else loss for loss in row] for row in losses], dtype=torch.float64)
    finite = known.isfinite()
    highest = float(known[finite].max()) if finite.any() else 1.0
    return torch.where(finite, known, highest).clamp(min=1e-12).log10().tolist()
