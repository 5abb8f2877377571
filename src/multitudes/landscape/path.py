"""Paths of low loss between two optima: `tunnel` and `curve`.

Fort and Jastrzebski, *Large scale structure of neural network loss landscapes*, 2019, start on the straight line
between two optima and walk down the training loss, each point in the hyperplane normal to the line (`tunnel`):

    w(t) = a + t (b - a) + d_t,    d_t normal to b - a.

Points that walk alone may end in valleys of their own, with a ridge between two of them. So here the lines that join
them walk down together, each step from a random place of each line; `between=False` is the paper's way.

Garipov et al., *Loss surfaces, mode connectivity, and fast ensembling of DNNs*, 2018, train one bend theta, for t drawn
uniformly for each batch (`curve`):

    Bezier     w(t) = (1 - t)^2 a + 2 t (1 - t) theta + t^2 b
    polygon    w(t) = 2 (t theta + (1/2 - t) a)  up to t = 1/2,    2 ((t - 1/2) b + (1 - t) theta)  after.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, appendix A, follow such a path by
loss, accuracy and agreement with its ends (Fig. S2).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.core.batches import Batches
from multitudes.core.calling import Input, call_with, input_errors
from multitudes.core.checks import check_count, check_number, check_seed
from multitudes.core.multitude import Criterion
from multitudes.core.progress import ProgressBar
from multitudes.core.seeding import seeded
from multitudes.landscape.figures import COLOURS, DASHES, figure, graph_objects
from multitudes.landscape.weights import Gauge, Scores, Solution, measured, single_network, state_of
from multitudes.training.recorder import State, flat_state, unflattened

__all__ = ["Path", "curve", "tunnel"]

KINDS = ("bezier", "polygon")


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
    kind: str

    @property
    def barrier(self) -> float:
        """How far the loss rises above that of the worse end."""
        return _barrier(self.scores.loss)

    @property
    def linear_barrier(self) -> float:
        """How far it rises on the straight line."""
        return _barrier(self.linear.loss)

    def __repr__(self) -> str:
        return f"Path({self.kind}, points={len(self.t)}, barrier={self.barrier:.4g}, linear={self.linear_barrier:.4g})"

    def state(self, index: int, network: nn.Module) -> State:
        """The weights of a point by name, for `network.load_state_dict(..., strict=False)`."""
        return unflattened(self.weights[index], network)

    def plot(self, what: str = "loss") -> Any:
        """A Plotly figure of the loss, the accuracy or the agreement along the path, and along the line."""
        found = {self.kind: measured(self.scores, what), "linear": measured(self.linear, what)}
        fig, go = figure(f"{what.capitalize()} between two optima", "t", what), graph_objects()
        for index, (name, values) in enumerate(found.items()):
            for end, column in enumerate([values] if values.dim() == 1 else values.T):
                label = name if values.dim() == 1 else f"{name}, with {'ab'[end]}"
                line = {"color": COLOURS[index], "dash": DASHES[end]}
                fig.add_trace(go.Scatter(x=self.t.tolist(), y=column.tolist(), name=label, line=line))
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
        criterion: `(prediction, target) -> mean over the batch`, by default cross entropy.
        evaluation: data to measure the path on, by default the training data.
        batch_norm: data to recompute batch-norm statistics on, at each point, by default the training data.
        progress: whether to show progress on stderr; by default on a terminal, after two seconds.

    >>> a, b = nn.Linear(2, 3), nn.Linear(2, 3)
    >>> path = tunnel(a, a, b, (torch.randn(9, 2), torch.randint(3, (9,))), points=5, steps=2)
    >>> path.weights.shape, path.scores.agreement[0, 0]
    (torch.Size([9, 9]), tensor(1., dtype=torch.float64))
    """
    _check_points(points)
    work = _Work(network, a, b, data, criterion, evaluation, batch_norm, seed)
    start, end = work.vectors
    way = (end - start) / (end - start).norm()
    bases = [torch.lerp(start, end, at / (points - 1)) for at in range(1, points - 1)]
    moves = [torch.zeros_like(start).requires_grad_() for _ in bases]

    def moved(index: int) -> Tensor:
        if index in (0, points - 1):
            return end if index else start
        step = moves[index - 1]
        return bases[index - 1] + step - (step @ way) * way

    def descend(x: Input, y: Tensor) -> None:
        if between:
            for index, share in enumerate(torch.rand(points - 1).tolist()):
                work.loss(torch.lerp(moved(index), moved(index + 1), share), x, y).backward()
        else:
            for index in range(1, points - 1):
                work.loss(moved(index), x, y).backward()

    work.minimise(moves, descend, steps, lr, progress)
    return work.path(_with_middles(torch.stack([moved(index).detach() for index in range(points)])), "tunnel")


def curve(
    network: nn.Module,
    a: Solution,
    b: Solution,
    data: Any,
    *,
    kind: str = "bezier",
    points: int = 21,
    steps: int = 600,
    lr: float = 0.01,
    weight_decay: float = 0.0,
    seed: int = 0,
    criterion: Criterion | None = None,
    evaluation: Any = None,
    batch_norm: Any = None,
    progress: bool | None = None,
) -> Path:
    """A curve with one trained bend between two optima; arguments as `tunnel` has them.

    Args:
        network, a, b, data, points, lr, seed, criterion, evaluation, batch_norm, progress: see `tunnel`.
        kind: `"bezier"` or `"polygon"`.
        steps: how many batches the bend learns from, each at its own t.
        weight_decay: of the weights w(t), added to the loss as `weight_decay / 2 |w(t)|^2`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    _check_points(points)
    check_number("weight_decay", weight_decay, 0)
    work = _Work(network, a, b, data, criterion, evaluation, batch_norm, seed)
    start, end = work.vectors
    bend = ((start + end) / 2).requires_grad_()

    def descend(x: Input, y: Tensor) -> None:
        weights = _on_curve(kind, float(torch.rand(())), start, bend, end)
        (work.loss(weights, x, y) + weight_decay / 2 * weights.square().sum()).backward()

    work.minimise([bend], descend, steps, lr, progress)
    between = [_on_curve(kind, at / (points - 1), start, bend.detach(), end) for at in range(1, points - 1)]
    return work.path(torch.stack([start, *between, end]), kind)


def _check_points(points: int) -> None:
    if check_count("points", points) < 3:
        raise ValueError(f"points must be 3 or more, two ends and something between, got {points}")


def _with_middles(weights: Tensor) -> Tensor:
    """Points `[T, P]` and the middles between them, `[2 T - 1, P]`."""
    middles = torch.lerp(weights[:-1], weights[1:], 0.5)
    return torch.cat([torch.stack([weights[:-1], middles], 1).flatten(0, 1), weights[-1:]])


def _on_curve(kind: str, t: float, a: Tensor, bend: Tensor, b: Tensor) -> Tensor:
    """`w(t) [P]`."""
    if kind == "bezier":
        return (1 - t) ** 2 * a + 2 * t * (1 - t) * bend + t**2 * b
    return 2 * (t * bend + (0.5 - t) * a) if t <= 0.5 else 2 * ((t - 0.5) * b + (1 - t) * bend)


# -- what the paths have in common ---------------------------------------------------------------------------


class _Work:
    """Two solutions of a network, training data, and the loss that a path between them descends."""

    def __init__(
        self,
        network: nn.Module,
        a: Solution,
        b: Solution,
        data: Any,
        criterion: Criterion | None,
        evaluation: Any,
        batch_norm: Any,
        seed: int,
    ) -> None:
        check_seed(seed)
        alone = single_network(network)
        self.ends = {"a": state_of(a, alone, "a"), "b": state_of(b, alone, "b")}
        first, last = (flat_state(state, alone) for state in self.ends.values())
        if torch.equal(first, last):
            raise ValueError("a and b have the same weights, so that there is no way between them")
        data = _kept(data, seed)
        self.gauge = Gauge(
            network, data if evaluation is None else evaluation, criterion, data if batch_norm is None else batch_norm
        )
        self.gauge.settle(self.ends)
        self.vectors = first.to(self.gauge.device), last.to(self.gauge.device)
        self.model = copy.deepcopy(self.gauge.model).train()
        self.criterion = F.cross_entropy if criterion is None else criterion
        self.batches, self.seed = Batches(data), seed

    def loss(self, weights: Tensor, x: Input, y: Tensor) -> Tensor:
        """The training loss at weights `[P]`."""
        with input_errors(x):
            return self.criterion(call_with(self.model, unflattened(weights, self.model), x), y)

    def minimise(
        self,
        parameters: list[Tensor],
        descend: Callable[[Input, Tensor], None],
        steps: int,
        lr: float,
        progress: bool | None,
    ) -> None:
        """Adam on what `descend` gives gradients to, for `steps` batches."""
        check_count("steps", steps)
        check_number("lr", lr, 0, above=True)
        optimizer = torch.optim.Adam(parameters, lr=lr)
        bar = ProgressBar(steps, progress, "steps")
        try:
            with seeded(self.seed), torch.enable_grad():
                for step, (x, y) in zip(range(steps), self._forever(), strict=False):
                    optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
                    optimizer.zero_grad()
                    descend(x, y)
                    optimizer.step()
                    bar.update(step + 1)
        finally:
            bar.clear()

    def _forever(self) -> Iterator[tuple[Input, Tensor]]:
        while True:
            for x, y in self.batches.on(self.gauge.device):
                if y is None:
                    raise ValueError("data must have targets, as (x, y) or batches of them")
                yield x, y

    def path(self, weights: Tensor, kind: str) -> Path:
        """The path through `weights [T, P]`, measured; the ends as they were given."""
        first, last = self.vectors
        t = torch.linspace(0, 1, len(weights), dtype=torch.float64)
        line = torch.stack([torch.lerp(first.double(), last.double(), float(at)) for at in t])
        weights = weights.detach().cpu()
        return Path(t, weights, self._scores(weights), self._scores(line.cpu()), kind)

    def _scores(self, weights: Tensor) -> Scores:
        ends = self.gauge.given(list(self.ends.values()))
        between = self.gauge.measure_all(weights[1:-1], False)
        return Scores.concat([ends.at(0), between, ends.at(1)])


def _kept(data: Any, seed: int) -> Any:
    """Tensors in a random order, since they are cut into batches as they come; an iterator as a list."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        if len(x) == len(y):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            return x[order.to(x.device)], y[order.to(y.device)]
    return list(data) if isinstance(data, Iterator) else data


def _barrier(loss: Tensor) -> float:
    return float(loss.max() - torch.maximum(loss[0], loss[-1]))
