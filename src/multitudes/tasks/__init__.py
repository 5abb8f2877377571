"""Tasks: the meaning of predictions, one object per task. Imports `base` and `networks`.

`TASKS` is the registry, and only `task_of` turns names into tasks. A task defines how to average draws, its criterion,
its class axis, and the quantities, metrics and calibrations that exist.

To add a task:

1. Add a file here with a class that derives from `ClassTask` (logits of classes) or `ValueTask` (numbers) and has a
   `name`. `criteria` holds its losses, the default first. Override what differs: `_needs` and `check_targets` for the
   shapes that fit, `_averaged` to average draws, `means_and_variances` (or `by_class` and `own_form`) for quantities;
   `metrics`, `scalings`, `scores`, `outputs` and `likelihood` list what applies.
2. Add a row to `TASKS`.
3. Add a test that trains, predicts, evaluates, calibrates and exports a network, compared with closed forms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import nn

from multitudes.networks.calls import InputError
from multitudes.tasks.classes import Binary, Classification, Multilabel, Tokens
from multitudes.tasks.criteria import Criterion, is_any, unwrap
from multitudes.tasks.gaussian import Gaussian
from multitudes.tasks.quantiles import Quantiles
from multitudes.tasks.regression import Regression
from multitudes.tasks.task import Task

__all__ = ["TASKS", "Criterion", "Task", "criterion_for", "join_tasks", "task_of", "tasks_of"]

TASKS: dict[str, Task] = {
    "classification": Classification(),
    "tokens": Tokens(),
    "binary": Binary(),
    "multilabel": Multilabel(),
    "regression": Regression(),
    "gaussian": Gaussian(),
    "quantiles": Quantiles(),
}
"""All tasks by name."""


def task_of(name: str, quantiles: Sequence[float] | None = None, next_tokens: bool = False) -> Task:
    """Return the task with a name, with the settings that it supports.

    >>> task_of("tokens", quantiles=None, next_tokens=True)
    Tokens(next_tokens=True)
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    task, given = TASKS[name], {"quantiles": quantiles, "next_tokens": next_tokens}
    return type(task)(**{setting: given[setting] for setting in task.settings})


def tasks_of(criterion: Criterion) -> tuple[str, ...]:
    """Return the names of the tasks of a criterion; none if it is unknown."""
    return tuple(name for name, task in TASKS.items() if is_any(criterion, task.criteria))


def join_tasks(tasks: Sequence[str], sign: str = "") -> str:
    """Format names of tasks for an error: `'binary' or 'multilabel'`."""
    return " or ".join(f"{sign}{task!r}" for task in tasks)


def criterion_for(
    task: str | None, criterion: Criterion | None, averages: bool = False, way_out: str = "pass task="
) -> Criterion:
    """Return the training criterion: the given one, or the task's default.

    Args:
        task: the chosen task; None stands for classification.
        criterion: a function of (prediction, target). Raise an error if it is known and for another task.
        averages: whether several draws are averaged, which depends on the task, so that an unknown criterion needs one.
        way_out: how the advice in error messages starts.

    >>> criterion_for("regression", None).__name__
    'mse_loss'
    >>> criterion_for(None, F.mse_loss)
    Traceback (most recent call last):
    multitudes.networks.calls.InputError: criterion mse_loss is for task 'regression', and the task is ...
    """
    chosen = task_of(task or "classification")
    if criterion is None:
        return chosen.criterion
    if not callable(criterion):
        raise InputError(f"criterion must be a function of (prediction, target), got {criterion!r}")
    known = tasks_of(criterion)
    name = getattr(unwrap(criterion), "__name__", type(criterion).__name__)
    if known and chosen.name not in known:
        raise InputError(
            f"criterion {name} is for task {join_tasks(known)}, and the task is {chosen.name!r}: "
            f"{join_tasks(known, way_out)}"
        )
    if is_any(criterion, (F.binary_cross_entropy, nn.BCELoss)):
        raise InputError(
            f"criterion {name} takes probabilities, and a network must return logits: "
            "remove the sigmoid, and pass nn.BCEWithLogitsLoss()"
        )
    if not known and task is None and averages:
        raise InputError(
            "a criterion of your own needs a task if draws are averaged, since probabilities and values are averaged "
            f"differently: {way_out}, one of {', '.join(TASKS)}"
        )
    return criterion
