"""Paths of low loss between two optima: `tunnel`.

Fort and Jastrzebski, *Large scale structure of neural network loss landscapes*, 2019, start on the straight line
between two optima and minimise the training loss, each point in the hyperplane normal to the line:

    w(t) = a + t (b - a) + d_t,    d_t normal to b - a.

Here the loss on the lines that join the points is minimised, each step at a random place of each line, so that no ridge
is left between two points; `between=False` is the paper's procedure. Fort, Hu and Lakshminarayanan, *Deep ensembles: a
loss landscape perspective*, 2019, appendix A, follow such a path by loss, accuracy and agreement (Fig. S2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.batches import Batches
from multitudes.core.calling import Input, call_with, input_errors
from multitudes.core.checks import check_count, check_number, check_seed
from multitudes.core.copying import copied
from multitudes.core.progress import ProgressBar
from multitudes.core.seeding import seeded
from multitudes.core.tasks import Criterion
from multitudes.landscape.figures import add_line, figure
from multitudes.landscape.targets import shuffled
from multitudes.landscape.weights import Scores, Solution, WeightScorer, measured, single_network, state_of
from multitudes.training.recorder import State, flat_state, unflattened


@dataclass(frozen=True, eq=False, repr=False)
class Path:
    """T points from one solution to another, and as many on the straight line between them; on the CPU."""

    t: Tensor
    """How far each point is, from 0 to 1, `[T]`."""
    weights: Tensor
    """`[T, P]`; the first and last are the solutions' own."""
    scores: Scores
    """`loss [T]`, `accuracy [T]` and `agreement [T, 2]`, with the two ends."""
    linear: Scores
    """The same for the straight line."""

    @property
    def barrier(self) -> float:
        """How far the loss rises above that of the worse end."""
        return _barrier(self.scores.loss)

    @property
    def linear_barrier(self) -> float:
        """How far it rises on the straight line."""
        return _barrier(self.linear.loss)

    def __repr__(self) -> str:
        return f"Path(points={len(self.t)}, barrier={self.barrier:.4g}, linear={self.linear_barrier:.4g})"

    def state(self, index: int, network: nn.Module) -> State:
        """The weights of a point by name, for `network.load_state_dict(..., strict=False)`."""
        return unflattened(self.weights[index], network)

    def plot(self, what: str = "loss") -> Any:
        """A Plotly figure of the loss, the accuracy or the agreement along the path, and along the line."""
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
    """A low-loss tunnel between two optima: points of the line, moved to lower loss at a right angle to it.

    Args:
        network: one network, or a multitude that draws, which is measured by its expectations. It is left as it was.
        a, b: the optima, networks or state dicts.
        data: training data, `(x, y)` or an iterable of batches.
        points: how many points the path joins, its ends included. It is measured at these, and in the middle between
            each two.
        steps: how many batches each point learns from, by Adam, the learning rate falling to 0 by a cosine.
        lr: the learning rate.
        between: whether the loss on the lines between points is what falls, rather than that of each point alone.
        seed: of the order of the data, of the places between points, and of what the network draws in training.
        criterion: `(prediction, target) -> mean over the batch`, by default that of the network's task, or cross
            entropy.
        evaluation: data to measure the path on, by default the training data.
        batch_norm: data to recompute batch-norm statistics on, at each point, by default the training data.
        progress: whether to show progress on stderr; by default on a terminal, after two seconds.

    >>> a, b = nn.Linear(2, 3), nn.Linear(2, 3)
    >>> path = tunnel(a, a, b, (torch.randn(9, 2), torch.randint(3, (9,))), points=5, steps=2)
    >>> path.weights.shape, path.scores.agreement[0, 0]
    (torch.Size([9, 9]), tensor(1., dtype=torch.float64))
    """
    if check_count("points", points) < 3:
        raise ValueError(f"points must be 3 or more, two ends and something between, got {points}")
    check_count("steps", steps)
    check_number("lr", lr, 0, above=True)
    check_seed(seed)
    alone = single_network(network)
    ends = {"a": state_of(a, alone, "a"), "b": state_of(b, alone, "b")}
    start, end = (flat_state(state, alone) for state in ends.values())
    if torch.equal(start, end):
        raise ValueError("a and b have the same weights, so that there is no line between them")
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
    weights = torch.stack(halves).cpu()  # the points, and the middles between them
    t = torch.linspace(0, 1, len(weights), dtype=torch.float64)
    line = torch.stack([torch.lerp(start.double(), end.double(), float(at)) for at in t]).cpu()
    first, last = scorer.score_solutions(list(ends.values())).table.split(1)
    between_ends = (scorer.score_all(way[1:-1]).table for way in (weights, line))
    scores, linear = (Scores(torch.cat([first, inner, last])) for inner in between_ends)
    return Path(t, weights, scores, linear)


def _forever(batches: Batches, device: torch.device) -> Iterator[tuple[Input, Tensor]]:
    """The batches, again and again; a loader may shuffle them anew each time."""
    while True:
        for x, y in batches.on(device):
            if y is None:
                raise ValueError("data must have targets, as (x, y) or batches of them")
            yield x, y


def _barrier(loss: Tensor) -> float:
    return float(loss.max() - torch.maximum(loss[0], loss[-1]))
