"""The diversity-accuracy plane: disagreement of solutions with a reference, given their accuracy.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, section 4.3 and appendix D.
The reference f* has accuracy a*, another solution f has accuracy a. d is the fraction of inputs on which their labels
differ, and `d / (1 - a)` is the normalised diversity. With C classes, the disagreement has the limits

    upper    (1 - a*) a + (1 - a) a* + (1 - a*)(1 - a)(C - 2) / (C - 1)     f has independent labels
    lower    (C - 1)(a* - a) / (C a* - 1)                                   f flips labels of f* at random.

If correct labels flip with probability p, and wrong ones with probability p^e,

    a(p) = a* (1 - p) + (1 - a*) p^e / (C - 1),    d(p) = a* p + (1 - a*) p^e.

`e = 1` is the lower limit. The paper swaps the left sides of equations (3) and (4) of the appendix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_number
from multitudes.landscape.figures import add_line, add_points, figure
from multitudes.landscape.solutions import Labelled, read_solutions
from multitudes.metrics.class_inputs import read_rows

# -- limits ------------------------------------------------------------------------------------------------


def upper_limit(accuracy: Tensor, reference: float, classes: int) -> Tensor:
    """Return the disagreement of independent labels, in the shape of `accuracy` (appendix D.1).

    >>> upper_limit(torch.tensor([0.5, 1.0]), reference=0.5, classes=2)
    tensor([0.5000, 0.5000])
    """
    _check_plane(reference, classes)
    both_wrong = (1 - reference) * (1 - accuracy)
    return (1 - reference) * accuracy + (1 - accuracy) * reference + both_wrong * (classes - 2) / (classes - 1)


def lower_limit(accuracy: Tensor, reference: float, classes: int) -> Tensor:
    """Return the disagreement of randomly flipped labels of the reference, in the shape of `accuracy` (appendix D.2).

    The limit is 0 above the accuracy of the reference.

    >>> lower_limit(torch.tensor([0.4, 0.8, 0.9]), reference=0.8, classes=5)
    tensor([0.5333, 0.0000, 0.0000])
    """
    _check_plane(reference, classes, above_chance=True)
    return (classes - 1) * (reference - accuracy).clamp(min=0) / (classes * reference - 1)


def family(flips: Tensor, exponent: float, reference: float, classes: int) -> tuple[Tensor, Tensor]:
    """Return accuracy and disagreement for flip probabilities, each in the shape of `flips` (appendix D.3).

    Correct labels flip with probability `flips`, wrong ones with `flips**exponent`.
    >>> family(torch.tensor([0.0, 0.25]), exponent=0.5, reference=0.8, classes=5)
    (tensor([0.8000, 0.6250]), tensor([0.0000, 0.3000]))
    """
    _check_plane(reference, classes)
    check_number("exponent", exponent, 0)
    wrong = flips**exponent if exponent else torch.ones_like(flips)
    return _accuracy_and_disagreement(flips, wrong, reference, classes)


def normalised(disagreement: Tensor, accuracy: Tensor) -> Tensor:
    """Return `d / (1 - a)` for the accuracy a of the solution; 0 if the labels are equal.

    >>> normalised(torch.tensor([0.0, 0.1, 0.1]), torch.tensor([1.0, 0.8, 1.0]))
    tensor([0.0000, 0.5000,    inf])
    """
    return torch.where(disagreement == 0, 0.0, disagreement / (1 - accuracy))


def _accuracy_and_disagreement(right: Tensor, wrong: Tensor, reference: float, classes: int) -> tuple[Tensor, Tensor]:
    accuracy = reference * (1 - right) + (1 - reference) * wrong / (classes - 1)
    return accuracy, reference * right + (1 - reference) * wrong


def _check_plane(reference: float, classes: int, above_chance: bool = False) -> None:
    if check_count("classes", classes) < 2:
        raise ValueError(f"classes must be 2 or more, got {classes}")
    check_number("reference", reference, 0, high=1)
    if above_chance and reference * classes <= 1:
        raise ValueError(f"reference must be an accuracy above chance (1/{classes}), got {reference!r}")


# -- the fit -----------------------------------------------------------------------------------------------


def fit_exponent(accuracy: Tensor, disagreement: Tensor, reference: float, classes: int) -> float:
    """Fit the exponent e in [0.01, 100] to solutions `[S]`, by least squares of distances in the plane (Fig. S6).
    >>> a, d = family(torch.linspace(0.01, 0.5, 20), exponent=0.22, reference=0.7, classes=10)
    >>> round(fit_exponent(a, d, reference=0.7, classes=10), 3)
    0.22
    """
    _check_plane(reference, classes)
    if reference == 1:
        raise ValueError("reference must be below 1: the exponent describes how wrong labels flip")
    if not bool(disagreement.any()):
        raise ValueError("disagreement must be above 0 for some solution: the reference lies on every curve")
    points = torch.stack([accuracy, disagreement], 1).double()
    low, high = -2.0, 2.0  # powers of ten
    while high - low > 1e-5:
        exponents = torch.linspace(low, high, 17, dtype=torch.float64)
        distances = [_distance(points, 10.0 ** float(power), reference, classes) for power in exponents]
        best, step = float(exponents[distances.index(min(distances))]), (high - low) / 16
        low, high = max(low, best - step), min(high, best + step)
    return float(10.0 ** ((low + high) / 2))


def _distance(points: Tensor, exponent: float, reference: float, classes: int) -> float:
    """Return the sum of squared distances of points `[S, 2]` to the curve of an exponent."""
    steps = torch.linspace(0, 1, 513, dtype=torch.float64, device=points.device)
    # Evenly space the larger probability, so that no segment of the curve is long.
    right, wrong = (steps ** (1 / exponent), steps) if exponent < 1 else (steps, steps**exponent)
    curve = torch.stack(_accuracy_and_disagreement(right, wrong, reference, classes), 1)
    start, step = curve[:-1], curve.diff(dim=0)
    offset = points[:, None] - start
    along = ((offset * step).sum(2) / step.square().sum(1).clamp(min=1e-300)).clamp(0, 1)
    return float((offset - along[..., None] * step).square().sum(2).amin(1).sum())


# -- the plane ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class DiversityPlane(Labelled):
    """Accuracy of S solutions and disagreement with a reference, `[S]` each, float64 on the CPU."""

    accuracy: Tensor
    disagreement: Tensor
    reference: str
    """Label of the reference solution."""
    reference_accuracy: float
    classes: int
    exponents: Mapping[str, float]
    """Fitted exponent e of each kind of solutions in the run of the reference."""

    @property
    def diversity(self) -> Tensor:
        """Normalised diversity `disagreement / (1 - accuracy)`."""
        return normalised(self.disagreement, self.accuracy)

    def limits(self, points: int = 200) -> tuple[Tensor, Tensor, Tensor]:
        """Return accuracies from chance to the best, and lower and upper limits of normalised diversity."""
        check_count("points", points)
        best = min(float(self.accuracy.max()), 1 - 1e-6)
        accuracy = torch.linspace(1 / self.classes, best, points, dtype=torch.float64)
        limits = [limit(accuracy, self.reference_accuracy, self.classes) for limit in (lower_limit, upper_limit)]
        return accuracy, normalised(limits[0], accuracy), normalised(limits[1], accuracy)

    def plot(self) -> Any:
        """Plot normalised diversity against accuracy, the limits, and the fitted curves (Fig. 6, 7, S6)."""
        fig = figure("Diversity and accuracy", "accuracy", "disagreement / (1 - accuracy)")
        accuracy, lower, upper = self.limits()
        for name, limit in (("lower limit", lower), ("upper limit", upper)):
            dash = 1 if limit is upper else 2
            add_line(fig, accuracy, limit, name, dash=dash, mode="lines", line_color="black")
        at = self.labels.index(self.reference)
        groups: dict[str, list[int]] = {}
        for (run, kind), members in self.groups().items():
            name = kind if run == self.runs[at] else f"other runs, {kind}"
            groups.setdefault(name, []).extend(index for index in members if index != at)
        for number, (name, group) in enumerate((name, group) for name, group in groups.items() if group):
            labels = [self.labels[index] for index in group]
            add_points(fig, self.accuracy[group], self.diversity[group], name, number, number, text=labels)
            if name in self.exponents:
                self._add_curve(fig, name, number, float(self.accuracy[group].min()))
        star = {"color": "green", "symbol": "star", "size": 14}
        name = f"reference: {self.reference}"
        fig.add_scatter(x=[self.reference_accuracy], y=[0.0], mode="markers", marker=star, name=name)
        least, most = float(self.accuracy.min()), float(self.accuracy.max())
        margin = max(0.02, 0.2 * (most - least))  # the limits extend to chance, where there are no solutions
        return fig.update_xaxes(range=[max(0.0, least - margin), min(1.0, most + margin)])

    def _add_curve(self, fig: Any, kind: str, colour: int, least: float) -> None:
        exponent = self.exponents[kind]
        flips = torch.linspace(0, 1, 400, dtype=torch.float64) ** max(1.0, 1 / exponent)
        accuracy, disagreement = family(flips, exponent, self.reference_accuracy, self.classes)
        shown = accuracy >= least
        x, y = accuracy[shown], normalised(disagreement, accuracy)[shown]
        add_line(fig, x, y, f"{kind}: e = {exponent:.2f}", colour, mode="lines", line_width=1)


def diversity_plane(
    solutions: Any,
    data: Any = None,
    *,
    reference: str | None = None,
    model: nn.Module | None = None,
    draws: int = 10,
    seed: int = 0,
) -> DiversityPlane:
    """Compute accuracy of solutions and their diversity to a reference, with limits and fits (Fig. 6, 7, S6).

    Args:
        solutions: See `read_solutions`. Typically independent runs, and checkpoints and subspaces of the first one.
        data: Inputs and classes, `(x, y)` or batches of them.
        reference: Label of the reference. Default: the last solution of the first kind in the first run, for example
            its last checkpoint.
        model, draws, seed: See `read_solutions`.

    Returns:
        Accuracy and disagreement of each solution; limits, fits and `plot()`.
    Example:
        >>> nets = {"ref": nn.Linear(2, 2, bias=False), "other": nn.Linear(2, 2, bias=False)}
        >>> for net, weight in zip(nets.values(), ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.9, 0.0]]), strict=True):
        ...     _ = net.weight.data.copy_(torch.tensor(weight))
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.5], [0.5, 1.0]])
        >>> plane = diversity_plane(nets, (x, torch.tensor([0, 1, 0, 0])))
        >>> plane.accuracy.tolist(), plane.disagreement.tolist(), plane.diversity.tolist()
        ([0.75, 0.75], [0.0, 0.5], [0.0, 2.0])
    """
    read = read_solutions(solutions, data, model=model, draws=draws, seed=seed)
    rows = read_rows(read.predictive, read.classes())
    groups = read.groups()
    index = groups[read.runs[0], read.kinds[0]][-1] if reference is None else read.index(reference)
    labels = rows.members("diversity_plane").predictions.argmax(2)
    accuracy = (labels == rows.target).double().mean(1)
    disagreement = (labels != labels[index]).double().mean(1)
    own = float(accuracy[index])
    _check_plane(own, rows.classes, above_chance=True)
    exponents = {}
    for kind in dict.fromkeys(read.kinds):
        of_kind = groups.get((read.runs[index], kind), [])
        if own < 1 and bool(disagreement[of_kind].any()):
            exponents[kind] = fit_exponent(accuracy[of_kind], disagreement[of_kind], own, rows.classes)
    return DiversityPlane(*read.places, accuracy, disagreement, read.labels[index], own, rows.classes, exponents)
