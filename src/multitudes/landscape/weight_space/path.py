"""Low-loss paths between two optima.

Fort and Jastrzebski, *Large scale structure of neural network loss landscapes*, 2019, start on the straight line
between two optima and minimise the training loss of each point in the hyperplane normal to the line:

    w(t) = a + t (b - a) + d_t,    d_t normal to b - a.

By default the loss is minimised at random places of the segments between points, so that no barrier remains between two
points; `between=False` is the procedure of the paper. Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape
perspective*, 2019, appendix A, plot loss, accuracy and agreement along a path (Fig. S2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_number, check_seed
from multitudes.base.progress import ProgressBar
from multitudes.landscape.figures import add_line, figure
from multitudes.landscape.targets import shuffled
from multitudes.landscape.weight_space.weight_scores import (
    Scores,
    Solution,
    WeightScorer,
    measured,
    single_network,
    state_of,
)
from multitudes.networks.calls import Input, call_with, input_errors
from multitudes.networks.copies import copied
from multitudes.networks.seeds import seeded
from multitudes.tasks import Criterion
from multitudes.training.batches import Batches
from multitudes.training.recorder import State, flat_state, unflattened


@dataclass(frozen=True, eq=False, repr=False)
class Path:
    """T points on a path between two solutions, and T points on the straight line; on the CPU."""

    t: Tensor
    """Position of each point from 0 to 1, `[T]`."""
    weights: Tensor
    """Weights `[T, P]`; the first and last are those of the solutions."""
    scores: Scores
    """`loss [T]`, `accuracy [T]` and `agreement [T, 2]` with the two ends."""
    linear: Scores
    """Scores of the straight line."""

    @property
    def barrier(self) -> float:
        """Maximum loss minus the loss of the worse end."""
        return _barrier(self.scores.loss)

    @property
    def linear_barrier(self) -> float:
        """Maximum loss on the straight line minus the loss of the worse end."""
        return _barrier(self.linear.loss)

    def __repr__(self) -> str:
        return f"Path(points={len(self.t)}, barrier={self.barrier:.4g}, linear={self.linear_barrier:.4g})"

    def state(self, index: int, network: nn.Module) -> State:
        """Return the weights of a point by name, for `network.load_state_dict(..., strict=False)`."""
        return unflattened(self.weights[index], network)

    def plot(self, what: str = "loss") -> Any:
        """Plot "loss", "accuracy" or "agreement" along the path and the straight line."""
        found = {"tunnel": measured(self.scores, what), "linear": measured(self.linear, what)}
        fig = figure(f"{what.capitalize()} between two optima", "t", what)
        for index, (name, values) in enumerate(found.items()):
            for end, column in enumerate([values] if values.dim() == 1 else values.T):
                label = name if values.dim() == 1 else f"{name}, with {'ab'[end]}"
                add_line(fig, self.t, column, label, colour=index, dash=end)
        return fig


def tunnel(
    network: nn.Module,
    a: Solution,
    b: Solution,
    data: Any,
    *,
    points: int = 9,
    steps: int = 200,
    lr: float = 0.01,
    between: bool = True,
    seed: int = 0,
    criterion: Criterion | None = None,
    evaluation: Any = None,
    batch_norm: Any = None,
    progress: bool | None = None,
) -> Path:
    """Find a low-loss path between two optima, by moving points of the straight line orthogonally to it.

    Args:
        network: A network, or a multitude that draws, of which expectations are evaluated. It is not changed.
        a: First optimum, a network or state dict.
        b: Second optimum.
        data: Training data, `(x, y)` or an iterable of batches.
        points: Number of points on the path, including the ends. Scores are for these and the midpoints between them.
        steps: Number of training steps, by Adam with a cosine schedule.
        lr: Initial learning rate.
        between: Minimise the loss on the segments between points instead of at the points.
        seed: Seed of the order of data, the places between points, and the draws in training.
        criterion: `(prediction, target) -> mean over the batch`. Default: that of the task, or cross entropy.
        evaluation: Data to score the path on. Default: the training data.
        batch_norm: Data to recompute batch-norm statistics at each point. Default: the training data.
        progress: Show progress on stderr. Default: on a terminal, after two seconds.

    Returns:
        Weights and scores along the path, with `plot()`.
    Example:
        >>> a, b = nn.Linear(2, 3), nn.Linear(2, 3)
        >>> path = tunnel(a, a, b, (torch.randn(9, 2), torch.randint(3, (9,))), points=5, steps=2)
        >>> path.weights.shape, path.scores.agreement[0, 0]
        (torch.Size([9, 9]), tensor(1., dtype=torch.float64))
    """
    if check_count("points", points) < 3:
        raise ValueError(f"points must be 3 or more (two ends and a point between them), got {points}")
    check_count("steps", steps)
    check_number("lr", lr, 0, above=True)
    check_seed(seed)
    alone = single_network(network)
    ends = {"a": state_of(a, alone, "a"), "b": state_of(b, alone, "b")}
    start, end = (flat_state(state, alone) for state in ends.values())
    if torch.equal(start, end):
        raise ValueError("a and b must have different weights")
    data = list(data) if isinstance(data, Iterator) else shuffled(data, seed)
    scorer = WeightScorer(
        network, data if evaluation is None else evaluation, criterion, data if batch_norm is None else batch_norm
    )
    scorer.take_buffers(ends)
    model = copied(scorer.model).train()
    start, end = start.to(scorer.device), end.to(scorer.device)
    direction = (end - start) / (end - start).norm()
    bases = [torch.lerp(start, end, at / (points - 1)) for at in range(1, points - 1)]
    moves = [torch.zeros_like(start).requires_grad_() for _ in bases]

    def point(index: int) -> Tensor:
        if index in (0, points - 1):
            return end if index else start
        move = moves[index - 1]
        return bases[index - 1] + move - (move @ direction) * direction

    def places() -> Iterator[Tensor]:
        if not between:
            yield from map(point, range(1, points - 1))
            return
        for index, share in enumerate(torch.rand(points - 1).tolist()):
            yield torch.lerp(point(index), point(index + 1), share)

    optimizer = torch.optim.Adam(moves, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    bar = ProgressBar(steps, progress, "steps")
    try:
        with seeded(seed), torch.enable_grad():
            for step, (x, y) in zip(range(steps), _forever(Batches(data), scorer.device), strict=False):
                optimizer.zero_grad()
                for weights in places():
                    with input_errors(x):
                        loss = scorer.criterion(call_with(model, unflattened(weights, model), x), y)
                    loss.backward()
                optimizer.step()
                schedule.step()
                bar.update(step + 1)
    finally:
        bar.clear()
    corners = torch.stack([point(index).detach() for index in range(points)])
    halves = [torch.lerp(corners[at // 2], corners[-(-at // 2)], 0.5) for at in range(2 * points - 1)]
    weights = torch.stack(halves).cpu()  # points and midpoints
    t = torch.linspace(0, 1, len(weights), dtype=torch.float64)
    line = torch.stack([torch.lerp(start.double(), end.double(), float(at)) for at in t]).cpu()
    first, last = scorer.score_solutions(list(ends.values())).table.split(1)
    between_ends = (scorer.score_all(way[1:-1]).table for way in (weights, line))
    scores, linear = (Scores(torch.cat([first, inner, last])) for inner in between_ends)
    return Path(t, weights, scores, linear)


def _forever(batches: Batches, device: torch.device) -> Iterator[tuple[Input, Tensor]]:
    """Yield the batches in a loop; a loader may shuffle them each time."""
    while True:
        for x, y in batches.on(device):
            if y is None:
                raise ValueError("data must have targets, as (x, y) or batches of them")
            yield x, y


def _barrier(loss: Tensor) -> float:
    return float(loss.max() - torch.maximum(loss[0], loss[-1]))
