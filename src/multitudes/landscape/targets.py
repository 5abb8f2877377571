"""Data with targets, and the loss of a network's task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.networks.calls import Input, tensors_in
from multitudes.tasks import Criterion, Task, criterion_for, task_of, tasks_of
from multitudes.tasks.classes import check_clear
from multitudes.training.batches import Batches


@dataclass(frozen=True, repr=False)
class TaskLoss:
    """Loss of predictions by a known criterion of a task, as in `net.loss`."""

    criterion: Criterion
    task: Task
    known: bool = True
    """True if the task was set or follows from the network; otherwise targets must clearly be classes."""

    def __call__(self, prediction: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predictions `[B, ...]` for targets `[B, ...]`."""
        if not self.known:
            check_clear(prediction.unsqueeze(0), y)
        return self.task.loss(self.criterion, prediction, y)

    def __repr__(self) -> str:
        criterion = getattr(self.criterion, "__qualname__", repr(self.criterion))
        return f"{criterion} of {self.task}"  # the same in every process


def count_targets(criterion: Criterion, y: Tensor) -> int:
    """Count the targets that a mean loss is over, without those that cross entropy ignores."""
    if not isinstance(criterion, TaskLoss) or criterion.criterion is not F.cross_entropy or y.is_floating_point():
        return y.numel()
    return int((criterion.task.aligned(y) != -100).sum())


def task_and_criterion(
    network: nn.Module, criterion: Criterion | None, averages: bool = False
) -> tuple[str, Criterion]:
    """Return the task, which determines how draws are averaged, and the loss.

    A multitude has a task, and a known criterion must match it. A plain network has the task of its head, else of the
    criterion; the default is classification. If several draws are averaged (`averages`), a custom criterion requires a
    task to be set.

    >>> task_and_criterion(nn.Linear(2, 2), nn.MSELoss())[0], task_and_criterion(nn.Linear(2, 2), None)[0]
    ('regression', 'classification')
    """
    known = () if criterion is None else tasks_of(criterion)
    net = network if isinstance(network, Multitude) else Multitude(network)
    chosen = net.known_task
    if chosen is None and known and network is not net and known != tasks_of(F.cross_entropy):
        chosen = known[0]
    task = chosen or "classification"
    if criterion is not None and not known and (chosen or not averages):
        return task, criterion
    try:
        found = criterion_for(chosen, criterion, averages)
    except ValueError as error:  # its message names an argument that the analyses do not have
        raise ValueError(str(error).replace("pass task=", "set task=").replace("task=", "network.task=")) from error
    return task, TaskLoss(found, task_of(task, net.quantiles, net.next_tokens), chosen is not None)


def with_targets(data: Any, device: torch.device) -> list[tuple[Input, Tensor]]:
    """Return all batches of `data` on a device; raise if targets are missing or inputs are not finite."""
    if data is None:
        raise ValueError("data must be (inputs, targets) or an iterable of such batches, got None")
    batches: list[tuple[Input, Tensor]] = []
    for index, (x, y) in enumerate(Batches(data).on(device)):
        if y is None:
            raise ValueError(f"data must have targets, as (x, y) or batches of them; batch {index} has none")
        for tensor in tensors_in(x):
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"data must be finite; batch {index} has NaN or infinite inputs")
        batches.append((x, y))
    return batches


def shuffled(data: Any, seed: int) -> Any:
    """Shuffle two tensors `(x, y)`, since batches are split from them in order; return other data unchanged."""
    if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        return data
    x, y = data
    if len(x) != len(y) or not len(x):
        raise ValueError(f"data must have one target for each of 1 or more inputs, got {len(y)} for {len(x)}")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order.to(x.device)], y[order.to(y.device)]
