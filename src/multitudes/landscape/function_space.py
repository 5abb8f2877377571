"""Distances between solutions in weight space and in function space.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, section 4. For two solutions
theta_1 and theta_2, with `f` the label that a network predicts,

    cosine          theta_1 . theta_2 / (|theta_1| |theta_2|)
    disagreement    1/N sum_n [f(x_n; theta_1) != f(x_n; theta_2)].

The map of functions is a t-SNE of the softmax outputs or means of each solution, as one vector (Fig. 2 to 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_number, check_seed, needed
from multitudes.landscape.figures import SCALE, add_points, figure, subplots
from multitudes.landscape.solutions import Labelled, read_solutions
from multitudes.metrics.divergences import pairwise_js
from multitudes.metrics.diversity import cosine_similarity, pairwise_disagreement
from multitudes.tasks.predictive import Predictive

MATRICES = ("cosine", "disagreement", "divergence")


# -- matrices ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Similarity(Labelled):
    """Pairwise similarity of S solutions: three matrices `[S, S]`, float64 on the CPU.

    For predicted numbers, disagreement is the root mean square difference of means. For Gaussians, divergence is the
    mean Kullback-Leibler divergence of both directions; for other predicted numbers it is NaN.
    """

    cosine: Tensor
    """Cosine of the angle between weights; NaN between networks with different tensors."""
    disagreement: Tensor
    """Fraction of inputs on which the labels differ."""
    divergence: Tensor
    """Jensen-Shannon divergence of the probabilities in nats, mean over inputs."""
    differ: str = "disagreement of labels"
    """Title of the disagreement."""

    def mean(self, matrix: str = "disagreement", *, same_run: bool, kind: str | None = None) -> float:
        """Return the mean of a matrix over pairs of different solutions; NaN without pairs.

        Args:
            matrix: "cosine", "disagreement" or "divergence".
            same_run: Use pairs of the same run (True) or of different runs (False).
            kind: Use only solutions of this kind.
        """
        check_choice("matrix", matrix, MATRICES)
        if kind is not None:
            check_choice("kind", kind, sorted(set(self.kinds)))
        names = list(dict.fromkeys(self.runs))
        run = torch.tensor([names.index(name) for name in self.runs])
        chosen = torch.tensor([kind is None or own == kind for own in self.kinds])
        pairs = ((run == run[:, None]) == same_run) & chosen & chosen[:, None]
        pairs &= ~torch.eye(len(run), dtype=torch.bool)
        return float(getattr(self, matrix)[pairs].mean())

    def plot(self) -> Any:
        """Plot the cosines of weights and the disagreement of functions side by side (Fig. 3)."""
        fig, names = subplots("Similarity of solutions", "cosine of weights", self.differ), list(self.labels)
        for column, values in enumerate((self.cosine, self.disagreement), start=1):
            bar = {"x": 0.45 if column == 1 else 1.0, "thickness": 12}
            fig.add_heatmap(z=values.tolist(), x=names, y=names, colorscale=SCALE, colorbar=bar, row=1, col=column)
        fig.update_xaxes(showticklabels=len(self.labels) <= 12)
        fig.update_yaxes(showticklabels=False, autorange="reversed")
        return fig.update_yaxes(showticklabels=len(self.labels) <= 12, col=1)  # both have the same rows


def similarity(
    solutions: Any, data: Any = None, *, model: nn.Module | None = None, draws: int = 10, seed: int = 0
) -> Similarity:
    """Compare weights and predictions of solutions (Fig. 2, 3).

    Args:
        solutions: Checkpoints, networks, members or draws, by run; see `read_solutions`.
        data: Inputs, `(x, y)` or an iterable of batches.
        model, draws, seed: See `read_solutions`.

    Returns:
        Pairwise matrices, with `plot()`.
    Example:
        >>> left, right = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        >>> _ = left.weight.data.copy_(torch.eye(2)), right.weight.data.copy_(2 * torch.eye(2).flip(0))
        >>> s = similarity({"left": left, "right": right}, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
        >>> s.cosine[0, 1].item(), round(s.disagreement[0, 1].item(), 4)  # at a right angle; (0, 0) is class 0 for both
        (0.0, 0.6667)
    """
    read = read_solutions(solutions, data, model=model, draws=draws, seed=seed)
    cosines = _cosines(read.networks)
    if not read.predictive.reading.classes:
        return Similarity(*read.places, cosines, *_value_distances(read.predictive), "RMS difference of means")
    return Similarity(*read.places, cosines, pairwise_disagreement(read.predictive), pairwise_js(read.predictive))


def _value_distances(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Return the root mean square difference of means and the symmetric divergence of predicted numbers, `[S, S]`."""
    means, variances = (part.double().flatten(1) for part in predictive.member_means_and_variances)
    if not predictive.reading.predicts_noise:
        variances = torch.full_like(means, torch.nan)
    squares = (means[:, None] - means).square()
    ratio = variances[:, None] / variances
    divergence = (ratio + 1 / ratio - 2 + squares / variances[:, None] + squares / variances) / 4
    return squares.mean(2).sqrt(), divergence.mean(2)


def _cosines(networks: tuple[nn.Module, ...]) -> Tensor:
    """Return cosines `[S, S]` between networks with the same tensors, NaN between others."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, network in enumerate(networks):
        state = network.state_dict()
        shapes = tuple((name, value.shape) for name, value in state.items() if isinstance(value, Tensor))
        groups.setdefault(shapes, []).append(index)
    cosines = torch.full((len(networks), len(networks)), torch.nan, dtype=torch.float64)
    for group in groups.values():
        at = torch.tensor(group)
        cosines[at[:, None], at] = cosine_similarity([networks[index] for index in group])
    return cosines


# -- the map -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class FunctionMap(Labelled):
    """Map of solutions: `points [S, 2]` that are close if predictions are close."""

    points: Tensor

    def plot(self) -> Any:
        """Plot the map, with a colour per run and a symbol per kind (Fig. 2c, 4)."""
        fig = figure("Solutions in function space (t-SNE of predictions)")
        runs, kinds = list(dict.fromkeys(self.runs)), list(dict.fromkeys(self.kinds))
        for (run, kind), group in self.groups().items():
            name, labels = run if len(kinds) == 1 else f"{run}, {kind}", [self.labels[index] for index in group]
            x, y = self.points[group].T
            add_points(fig, x, y, name, runs.index(run), kinds.index(kind), marker_size=9, text=labels)
        return fig.update_xaxes(showticklabels=False).update_yaxes(showticklabels=False)


def function_map(
    solutions: Any,
    data: Any = None,
    *,
    perplexity: float | None = None,
    model: nn.Module | None = None,
    draws: int = 10,
    seed: int = 0,
) -> FunctionMap:
    """Compute a t-SNE of the predicted probabilities or means, one vector per solution (Fig. 2c, 4).

    Args:
        solutions: Three or more solutions, see `read_solutions`.
        data: Inputs, `(x, y)` or an iterable of batches.
        perplexity: Approximate number of neighbours, below the number of solutions. Default: 30, or a third of the
            other solutions if that is less.
        model: Network for state dicts.
        draws: Number of draws from a network that draws.
        seed: Seed of the draws and of t-SNE.

    Returns:
        One point per solution, with `plot()`.
    """
    manifold = needed("sklearn.manifold", "landscape", "a map of functions")
    check_seed(seed)
    if perplexity is not None:
        check_number("perplexity", perplexity, 0, above=True)
    read = read_solutions(solutions, data, model=model, draws=draws, seed=seed)
    if len(read) < 3:
        raise ValueError(f"solutions must hold 3 or more for a map, got {len(read)}")
    if perplexity is None:
        perplexity = min(30.0, (len(read) - 1) / 3)
    if perplexity >= len(read):
        raise ValueError(f"perplexity must be below the number of solutions, {len(read)}, got {perplexity:g}")
    tsne = manifold.TSNE(perplexity=perplexity, init="pca", random_state=seed % 2**32)
    points = tsne.fit_transform(read.predictive.member_values.flatten(1).numpy())  # [S, N * C * ...]
    return FunctionMap(*read.places, torch.from_numpy(points))
