"""Validation: score the joint prediction on held-out data, and restore the best weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.networks.calls import Input, input_errors, plain_attention
from multitudes.networks.seeds import mixed, seeded
from multitudes.networks.trace import preserve_state
from multitudes.tasks import Task
from multitudes.tasks.criteria import expand_weight
from multitudes.tasks.predictive import Predictive
from multitudes.training.objective import batches_from
from multitudes.training.recorder import tensors_of

STOP_BY = ("score", "error")
"""The score of the network's task, or the error of its mean prediction."""

Prepare = Callable[[Any, str], tuple[Input, Tensor, Tensor | None]]
"""`(batch, name in errors) -> (x, y, weight)`, on the network's device."""


def validation_scores(p: Predictive, y: Tensor, weight: Tensor, stop_by: str = "score") -> tuple[Tensor, Tensor]:
    """Return a score (lower is better) and a weight per target; both are 0 for ignored targets.

    Scores are the negative log of the members' mean probability or density, the squared error of their mean
    (`"regression"`, or any values with `"error"`), or the pinball loss of their mean quantiles. `weight` is `[B]` or
    has the shape of y.

    >>> p = Predictive(torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]]]))
    >>> validation_scores(p, torch.tensor([1]), torch.ones(1))  # log 2
    (tensor([0.6931]), tensor([1.]))
    """
    reading: Task = p.reading
    reading.check_targets(p.predictions, reading.aligned(y))
    if reading.classes or stop_by == "score":
        return reading.validation_losses(p.predictions, p.together, y, weight)
    if y.shape != p.mean.shape:
        raise ValueError(f"y must have the means' shape {list(p.mean.shape)}, got {list(y.shape)}")
    losses = (p.mean - y).square()
    return losses, expand_weight(weight, losses)


class Validation:
    """Batches to score a network on, in the same order and with the same draws each time."""

    def __init__(self, batches: Iterable[Any], stop_by: str = "score", patience: int | None = None) -> None:
        self.batches = list(batches) if isinstance(batches, Iterator) else batches
        self.stop_by, self.patience = stop_by, patience

    def check(self, net: Multitude, prepare: Prepare) -> None:
        """Score the first batch before the training, so that errors appear early."""
        with seeded(0):
            first = next(batches_from(self.batches), None)
        if first is None:
            raise ValueError("validation must hold at least one batch, got none")
        prepare_for(net, prepare(first, "batch 0 of validation")[0])
        self._sums(net, lambda: [first], prepare)

    def score(self, net: Multitude, prepare: Prepare, ended: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean score of all targets, or for `"error"` its root; None if `ended` returns True in between."""
        sums = self._sums(net, lambda: batches_from(self.batches), prepare, ended)
        if sums is None:
            return None
        if not sums[1]:
            raise ValueError("validation must have at least one target with a weight above 0, got weights of 0 only")
        mean = sums[0] / sums[1]
        return math.sqrt(mean) if self.stop_by == "error" and not net.reading.classes else mean

    def _sums(
        self,
        net: Multitude,
        batches: Callable[[], Iterable[Any]],
        prepare: Prepare,
        ended: Callable[[], bool] = lambda: False,
    ) -> tuple[float, float] | None:
        """Return the sum of weight times score, and the sum of weights."""
        total = count = 0.0
        with preserve_state(net.network, ()), seeded(0):
            for number, batch in enumerate(batches()):
                what = f"batch {number} of validation"
                x, y, weight = prepare(batch, what)
                try:
                    p = net.predict(x, net.task, seed=mixed(0, number))
                    one = torch.ones(len(p), device=y.device) if weight is None else weight
                    losses, weights = validation_scores(p, y, one, self.stop_by)
                except ValueError as error:
                    raise ValueError(f"{what}: {error}") from error
                total, count = total + float((losses * weights).sum()), count + float(weights.sum())
                if ended():
                    return None
        return total, count


def prepare_for(net: Multitude, x: Input) -> None:
    """Run a network's one-time preparation on its first input."""
    with input_errors(x), plain_attention():
        net.prepare_run(x)


def copied_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Copy a network's weights and buffers."""
    return {name: value.detach().clone() for name, value in tensors_of(net.state_dict()).items()}


def restore(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write the values from `copied_tensors` back into the network's tensors."""
    now = net.state_dict()
    for name, value in tensors.items():
        if now[name].shape != value.shape:  # the network's code replaced this buffer
            path, _, last = name.rpartition(".")
            net.get_submodule(path)._buffers[last] = value.to(now[name].device, copy=True)
    net.load_state_dict(tensors, strict=False)
