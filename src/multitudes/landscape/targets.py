"""Data with targets, and the loss that belongs to a network's task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.batches import Batches
from multitudes.core.calling import Input, tensors_in
from multitudes.core.multitude import Criterion, Multitude
from multitudes.core.tasks import TASKS, tasks_of

__all__ = ["shuffled", "task_and_criterion", "with_targets"]


def task_and_criterion(
    network: nn.Module, criterion: Criterion | None, averages: bool = False
) -> tuple[str, Criterion]:
    """The task, by which draws are averaged, and the loss.

    A multitude has a task, which a known criterion must not contradict. A plain network has none: its task is that of
    the criterion, classification by default. Where several draws are averaged (`averages`), a criterion that is not
    known needs a task that was set.

    >>> task_and_criterion(nn.Linear(2, 2), nn.MSELoss())[0], task_and_criterion(nn.Linear(2, 2), None)[0]
    ('regression', 'classification')
    """
    known = None if criterion is None else task_of(criterion)
    chosen = network.chosen_task if isinstance(network, Multitude) else known
    task = chosen or "classification"
    if known not in (None, task):
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise ValueError(
            f"criterion {name} is for task {known!r}, and network.task is {task!r}: set network.task = {known!r}"
        )
    if averages and criterion is not None and known is None and chosen is None:
        raise ValueError(
            "network must be a multitude with a task beside a criterion of your own, since draws are averaged by "
            f"task: set network.task to one of {', '.join(TASKS)}"
        )
    return task, TASKS[task] if criterion is None else criterion


def with_targets(data: Any, device: torch.device) -> list[tuple[Input, Tensor]]:
    """All batches of `data`, on a device; an error where targets are missing or inputs are not finite."""
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
    """Two tensors `(x, y)` in a random order, since batches are cut from them in order; other data as they are."""
    if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        return data
    x, y = data
    if len(x) != len(y) or not len(x):
        raise ValueError(f"data must have one target for each of 1 or more inputs, got {len(y)} for {len(x)}")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order.to(x.device)], y[order.to(y.device)]
