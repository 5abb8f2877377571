"""Loss, accuracy and agreement with solutions on a line or plane through weight space.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, use planes through the origin and
two optima (Fig. 5, S1). Garipov et al., *Loss surfaces, mode connectivity, and fast ensembling of DNNs*, 2018, use
planes through three solutions, with coordinates by Gram-Schmidt:

    u = w_b - w_a,    v = (w_c - w_a) - <w_c - w_a, u> / |u|^2 u,    P(x, y) = w_a + x u/|u| + y v/|v|.

Li et al., *Visualizing the loss landscape of neural nets*, 2018, use planes around one solution, along two random
directions. Park and Kim, *Blurs behave like ensembles*, 2022, show such landscapes of a network that draws for several
seeds (Fig. C.2).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_number, check_seed
from multitudes.base.progress import ProgressBar
from multitudes.landscape.cache import Cache, fingerprint
from multitudes.landscape.figures import SYMBOLS, add_line, coloured, figure
from multitudes.landscape.weight_space.directions import Frame, check_direction
from multitudes.landscape.weight_space.weight_scores import (
    Noise,
    Scores,
    Solution,
    WeightScorer,
    measured,
    single_network,
    state_of,
)
from multitudes.networks.stochastic import stochastic_layers
from multitudes.tasks import Criterion
from multitudes.training.recorder import Checkpoints, State, Trajectory, flat_state


@dataclass(frozen=True, eq=False, repr=False)
class Plane:
    """Landscape on a line `[X]` or a plane `[X, Y]`, with R solutions; on the CPU.

    With L seeds, `loss`, `accuracy`, `agreement` and `scores` have a first axis of L landscapes.
    """

    axes: tuple[Tensor, ...]
    """Coordinates of the grid along each direction: `[X]`, or `[X]` and `[Y]`."""
    loss: Tensor
    """`[X, Y]`, float64."""
    accuracy: Tensor | None
    """`[X, Y]`; None if the targets are not classes."""
    agreement: Tensor | None
    """Fraction of inputs with the same label as a solution, `[R, X, Y]`."""
    solutions: tuple[str, ...]
    coordinates: Tensor
    """Coordinates of the solutions, projected to the plane, `[R, 1]` or `[R, 2]`."""
    scores: Scores
    """Scores of the solutions: `loss [R]`, `accuracy [R]`, `agreement [R, R]`."""
    frame: Frame
    seeds: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        shape, names = "x".join(str(len(axis)) for axis in self.axes), ", ".join(self.solutions)
        return f"Plane({shape}, solutions=({names}), loss={self.loss.min():.4g} to {self.loss.max():.4g})"

    def project(self, checkpoints: Checkpoints, network: nn.Module) -> Tensor:
        """Project the checkpoints of a trajectory to the plane: `[T, 1]` or `[T, 2]`."""
        states = Trajectory.of(checkpoints, network).states
        return self.frame.project(torch.stack([flat_state(state, network) for state in states]))

    def plot(
        self, what: str = "loss", *, solution: int = 0, landscape: int = 0, paths: Mapping[str, Tensor] | None = None
    ) -> Any:
        """Plot one measure with Plotly.

        Args:
            what: "loss" (on a plane its logarithm), "accuracy" or "agreement".
            solution: Index of the solution for agreement.
            landscape: Index of the seed.
            paths: Trajectories by name, from `project`.
        """
        values = self._chosen(what, solution, landscape)
        title = f"{what} with {self.solutions[solution]}" if what == "agreement" else what
        if len(self.axes) == 1:
            return self._line(values, title)
        fig = figure(title.capitalize(), "first direction", "second direction")
        x, y = (axis.tolist() for axis in self.axes)
        shown, scale = coloured(values, what)
        fig.add_contour(x=x, y=y, z=shown.T.tolist(), contours={"showlines": False}, ncontours=40, **scale)
        for index, (name, path) in enumerate((paths or {}).items()):
            add_line(fig, path[:, 0], path[:, 1], name, index, index)
        for index, (name, (at_x, at_y)) in enumerate(zip(self.solutions, self.coordinates.tolist(), strict=True)):
            marker = {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 12, "color": "white", "line": {"width": 2}}
            fig.add_scatter(x=[at_x], y=[at_y], name=name, mode="markers", marker=marker)
        return fig.update_layout(legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"})  # covers no solution

    def _line(self, values: Tensor, title: str) -> Any:
        fig = figure(title.capitalize(), "along the line", title)
        add_line(fig, self.axes[0], values, title)
        for name, (at,) in zip(self.solutions, self.coordinates.tolist(), strict=True):
            fig.add_vline(x=at, line={"dash": "dot"}, annotation_text=name)
        return fig

    def _chosen(self, what: str, solution: int, landscape: int) -> Tensor:
        """Return one measure of one landscape, `[X]` or `[X, Y]`."""
        values = measured(self, what)
        landscapes = 1 if self.seeds is None else len(self.seeds)
        for name, index, count in (("solution", solution, len(self.solutions)), ("landscape", landscape, landscapes)):
            if not isinstance(index, int) or not 0 <= index < count:
                raise ValueError(f"{name} must be from 0 to {count - 1}, got {index!r}")
        values = values if self.seeds is None else values[landscape]
        return values[solution] if what == "agreement" else values


def plane(
    network: nn.Module,
    data: Any,
    *,
    through: Sequence[Solution] | None = None,
    along: Sequence[Tensor] | None = None,
    radial: Sequence[Solution] | None = None,
    points: int = 25,
    margin: float = 0.25,
    span: float | tuple[float, float] = 1.0,
    solutions: Mapping[str, Solution] | None = None,
    criterion: Criterion | None = None,
    batch_norm: Any = None,
    seeds: Sequence[int] | None = None,
    draws: int = 1,
    noise: str = "fixed",
    folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    at_once: int | None = None,
) -> Plane:
    """Score a network on a line or plane of weights, in evaluation mode. Arguments are not changed.

    Exactly one of `through`, `along` and `radial` defines the plane. Solutions are scored individually, grid points
    several at a time, so that two runs may differ by rounding.

    Args:
        network: A network, or a multitude that draws.
        data: `(x, y)` or an iterable of batches, which is iterated once and cached.
        through: Three solutions (networks or state dicts), or two for a line. Coordinates are distances from the first
            one; the first direction is towards the second one.
        along: One or two directions `[P]` from the weights of the network, see `random_direction`. Coordinates are
            multiples of them.
        radial: Two solutions, for the plane through them and the origin.
        points: Number of grid points in each direction.
        margin: Extension of the grid beyond the solutions on each side, as a fraction of their extent.
        span: Extent of the grid for `along`: from -span to span, or a pair (start, end).
        solutions: Solutions by name to measure agreement with. Default: those of the plane, or the network.
        criterion: `(prediction, target) -> mean over the batch`. Default: that of the task, or cross entropy.
        batch_norm: Data to recompute batch-norm statistics at each grid point. Without it, solutions must have equal
            statistics.
        seeds: Seeds of a network that draws, one landscape per seed. Default: expectations.
        draws: Number of draws to average for each point.
        noise: "fixed" uses the same random numbers at all points of a landscape, "fresh" different ones.
        folder: Folder for caching scores, written every few seconds; an interrupted call resumes from it.
        progress: Show progress on stderr. Default: on a terminal, after two seconds.
        at_once: Number of points to score at once; fewer need less memory.

    Returns:
        Scores on the grid and of the solutions, with `plot()`.
    Example:
        >>> a, b, c = (nn.Linear(2, 3) for _ in range(3))
        >>> x, y = torch.randn(8, 2), torch.randint(3, (8,))
        >>> landscape = plane(a, (x, y), through=(a, b, c), points=5)
        >>> landscape.loss.shape, landscape.agreement.shape
        (torch.Size([5, 5]), torch.Size([3, 5, 5]))
        >>> landscape.scores.loss[1] == nn.functional.cross_entropy(b(x), y)
        tensor(True)
    """
    alone = single_network(network)
    check_count("points", points)
    check_number("margin", margin, 0)
    draw_indices = _checked_seeds(alone, seeds, draws, noise)
    frame, ends, given = _position(alone, through, along, radial)
    states = given if solutions is None else {n: state_of(s, alone, f"solutions[{n!r}]") for n, s in solutions.items()}
    if not states:
        raise ValueError("solutions must hold at least one solution, by name, got none")
    scorer = WeightScorer(network, data, criterion, batch_norm, at_once, draws)
    if along is None:
        scorer.take_buffers(given)
    axes = _ticks(frame, ends, points, margin) if along is None else _steps(span, points, frame.axes)
    coordinates = frame.project(torch.stack([flat_state(state, alone) for state in states.values()]))
    grid = torch.cartesian_prod(*axes).view(-1, frame.axes)
    shape = (len(draw_indices), len(grid), 2 + len(states) if scorer.classes else 1)
    cache = Cache(shape)
    if folder is not None:
        given_to = (frame.origin, frame.directions, grid, list(states.items()), scorer.identity(), seeds, draws, noise)
        cache = Cache(shape, folder, fingerprint(*given_to))
    # Computing weights on the CPU would take longer than scoring on a GPU. Other devices may lack float64.
    near = frame.to(scorer.device) if scorer.device.type == "cuda" else frame
    given_scores = []
    bar = ProgressBar(cache.done.numel(), progress, "points")
    try:
        with cache:
            for number, draw_index in enumerate(draw_indices):
                given_scores.append(scorer.score_solutions(list(states.values()), draw_index).table)
                for chunk in cache.missing(number, scorer.at_once):
                    noises = None if draw_index is None else [_at(draw_index, at, noise) for at in chunk.tolist()]
                    cache.add(number, chunk, scorer.score(near.weights(grid[chunk]), noises))
                    bar.update(int(cache.done.sum()))
    finally:
        bar.clear()
    own, on_grid = torch.stack(given_scores), cache.table.unflatten(1, [len(axis) for axis in axes]).movedim(-1, 1)
    if seeds is None:
        own, on_grid = own[0], on_grid[0]
    at = -1 - len(axes)  # the axis of the scores
    return Plane(
        axes,
        on_grid.select(at, 0),
        on_grid.select(at, 1) if scorer.classes else None,
        on_grid.narrow(at, 2, len(states)) if scorer.classes else None,
        tuple(states),
        coordinates,
        Scores(own),
        frame,
        None if seeds is None else tuple(seeds),
    )


# -- position of the plane ---------------------------------------------------------------------------------


def _position(
    network: nn.Module,
    through: Sequence[Solution] | None,
    along: Sequence[Tensor] | None,
    radial: Sequence[Solution] | None,
) -> tuple[Frame, list[Tensor], dict[str, State]]:
    """Return the frame, the points that define it, and the solutions among them by name."""
    chosen = {n: v for n, v in (("through", through), ("along", along), ("radial", radial)) if v is not None}
    if len(chosen) != 1:
        raise ValueError(f"pass one of through, along and radial, got {' and '.join(chosen) or 'none'}")
    ((name, values),) = chosen.items()
    counts = {"through": (2, 3), "along": (1, 2), "radial": (2,)}[name]
    if not isinstance(values, Sequence) or len(values) not in counts:
        got = len(values) if isinstance(values, Sequence) else type(values).__name__
        what = "directions" if name == "along" else "solutions"
        raise ValueError(f"{name} must hold {' or '.join(map(str, counts))} {what}, got {got}")
    if along is not None:
        for index, direction in enumerate(along):
            check_direction(f"along[{index}]", direction, network)
        own = state_of(network, network, "network")
        origin = flat_state(own, network)
        return Frame.along(origin, along), [origin], {"centre": own}
    points = through or radial or ()
    given = {"abc"[index]: state_of(one, network, f"{name}[{index}]") for index, one in enumerate(points)}
    vectors = {letter: flat_state(state, network) for letter, state in given.items()}
    if name == "radial":
        vectors = {"the origin": torch.zeros_like(vectors["a"])} | vectors
    return Frame.through(list(vectors.values()), list(vectors)), list(vectors.values()), given


def _ticks(frame: Frame, points: Sequence[Tensor], count: int, margin: float) -> tuple[Tensor, ...]:
    """Return the coordinates of a grid around the points for each axis."""
    at = frame.project(torch.stack([point.double() for point in points]))
    low, high = at.amin(0), at.amax(0)
    extra = margin * (high - low)
    return tuple(
        torch.linspace(float(start), float(end), count, dtype=torch.float64)
        for start, end in zip(low - extra, high + extra, strict=True)
    )


def _steps(span: float | tuple[float, float], count: int, axes: int) -> tuple[Tensor, ...]:
    low, high = span if isinstance(span, tuple) and len(span) == 2 else (None, span)
    check_number("span", high, float("-inf") if low is not None else 0, above=True)
    start = -high if low is None else low
    if not start < high:
        raise ValueError(f"span must be a number above 0, or two numbers in order, got {span!r}")
    return (torch.linspace(start, high, count, dtype=torch.float64),) * axes


# -- noise -------------------------------------------------------------------------------------------------


def _checked_seeds(network: nn.Module, seeds: Sequence[int] | None, draws: int, noise: str) -> Sequence[Noise | None]:
    """Return the noise of each landscape; None for expectations."""
    check_count("draws", draws)
    if noise not in ("fixed", "fresh"):
        raise ValueError(f"noise must be 'fixed' or 'fresh', got {noise!r}")
    if seeds is None:
        return [None]
    if isinstance(seeds, int) or not len(seeds):
        raise ValueError(f"seeds must hold one seed or more, got {seeds!r}")
    for seed in seeds:
        check_seed(seed)
    if not stochastic_layers(network):
        raise ValueError(f"seeds={tuple(seeds)!r} require a layer that draws, and the network has none")
    return [Noise(seed, draws) for seed in seeds]


def _at(noise: Noise, point: int, kind: str) -> Noise:
    """Return the noise of a grid point: that of the landscape, or other draws of the same seed."""
    return noise if kind == "fixed" else Noise(noise.seed, noise.draws, noise.draws * (point + 1))
