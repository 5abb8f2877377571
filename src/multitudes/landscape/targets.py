"""Data with targets, and criteria of tasks."""

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
class TaskCriterion:
    """A criterion with the checks and layouts of a task, as in `net.loss`."""

    criterion: Criterion
    task: Task
    known: bool = True
    """True if the network has a task; otherwise targets must clearly be classes."""

    def __call__(self, prediction: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predictions `[B, ...]`."""
        if not self.known:
            check_clear(prediction.unsqueeze(0), y)
        return self.task.loss(self.criterion, prediction, y)

    def __repr__(self) -> str:
        criterion = getattr(self.criterion, "__qualname__", repr(self.criterion))
        return f"{criterion} of {self.task}"  # equal in every process, for fingerprints


def count_targets(criterion: Criterion, y: Tensor) -> int:
    """Count the targets, without those that cross entropy ignores."""
    if not isinstance(criterion, TaskCriterion) or criterion.criterion is not F.cross_entropy or y.is_floating_point():
        return y.numel()
    return int((criterion.task.aligned(y) != -100).sum())


def task_and_criterion(
    network: nn.Module, criterion: Criterion | None, averages: bool = False
) -> tuple[str, Criterion]:
    """Return the task, which determines how draws are averaged, and the criterion.

    A multitude has a task, and a known criterion must match it. A plain network has the task of its head, or else of
    the criterion; the default is classification. Averaging several draws (`averages`) with a custom criterion requires
    a task.

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
    found = criterion_for(chosen, criterion, averages, way_out="set network.task=")
    return task, TaskCriterion(found, task_of(task, net.quantiles, net.next_tokens), chosen is not None)


def with_targets(data: Any, device: torch.device) -> list[tuple[Input, Tensor]]:
    """Return all batches of `data` on a device; raise without targets or for inputs that are not finite."""
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
    """Shuffle a pair of tensors `(x, y)`; return other data unchanged."""
    if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        return data
    x, y = data
    if len(x) != len(y) or not len(x):
        raise ValueError(f"data must hold inputs, each with one target, got {len(x)} inputs and {len(y)} targets")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order.to(x.device)], y[order.to(y.device)]
