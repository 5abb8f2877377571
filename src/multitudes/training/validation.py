"""Validation: the score of the joint prediction on held-out data, and the best weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.networks.calls import Input, input_errors, plain_attention
from multitudes.networks.seeds import mixed, seeded
from multitudes.networks.trace import unmoved
from multitudes.tasks import Task
from multitudes.tasks.criteria import spread
from multitudes.tasks.predictive import Predictive
from multitudes.training.objective import batches_from
from multitudes.training.recorder import tensors_of

STOP_BY = ("score", "error")
"""Scores to validate by: the score of the network's task, or the error of its mean prediction."""

Prepare = Callable[[Any, str], tuple[Input, Tensor, Tensor | None]]
"""`(batch, its name for errors) -> (x, y, weight)`, on the network's device."""


def validation_scores(p: Predictive, y: Tensor, weight: Tensor, stop_by: str = "score") -> tuple[Tensor, Tensor]:
    """Return the score of each target, lower is better, and its weight, in the same shape; 0 for ignored targets.

    By task: the negative log of the members' mean probability of the class, or of yes or no; the negative log density
    of the members' mixture ("gaussian"); the squared error of their mean ("regression"); the pinball loss of their mean
    quantiles. By `"error"`, the squared error of the mean for all tasks with values. `weight` is `[B]`, or has y's
    shape.

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
    return losses, spread(weight, losses)


class Validation:
    """Batches to score a network on, with the same order and the same draws each time."""

    def __init__(self, batches: Iterable[Any], stop_by: str = "score", patience: int | None = None) -> None:
        self.batches = list(batches) if isinstance(batches, Iterator) else batches
        self.stop_by, self.patience = stop_by, patience

    def check(self, net: Multitude, prepare: Prepare) -> None:
        """Raise an error before the training if there is no batch, or the first one cannot be scored."""
        with seeded(0):
            first = next(batches_from(self.batches), None)
        if first is None:
            raise ValueError("validation must hold at least one batch, got none")
        prepare_for(net, prepare(first, "batch 0 of validation")[0])
        self._sums(net, lambda: [first], prepare)

    def score(self, net: Multitude, prepare: Prepare, ended: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean score of all targets; None if `ended` returns True between batches.

        For `"error"` on values, return the root of the mean.
        """
        sums = self._sums(net, lambda: batches_from(self.batches), prepare, ended)
        if sums is None:
            return None
        if not sums[1]:
            raise ValueError("validation must hold at least one target that counts, got weights of 0 for all")
        mean = sums[0] / sums[1]
        return math.sqrt(mean) if self.stop_by == "error" and not net.reading.classes else mean

    def _sums(
        self,
        net: Multitude,
        batches: Callable[[], Iterable[Any]],
        prepare: Prepare,
        ended: Callable[[], bool] = lambda: False,
    ) -> tuple[float, float] | None:
        """Return the sum of the scores times weights, and the sum of the weights."""
        total = count = 0.0
        with unmoved(net.network, ()), seeded(0):
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
    """Prepare a network for its first run, and keep the result."""
    with input_errors(x), plain_attention():
        net.settle(x)


def copied_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Copy a network's weights and buffers."""
    return {name: value.detach().clone() for name, value in tensors_of(net.state_dict()).items()}


def restore(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore the values that `copied_tensors` copied, in the network's own tensors."""
    now = net.state_dict()
    for name, value in tensors.items():
        if now[name].shape != value.shape:  # the network's own code has replaced this buffer
            path, _, last = name.rpartition(".")
            net.get_submodule(path)._buffers[last] = value.to(now[name].device, copy=True)
    net.load_state_dict(tensors, strict=False)
