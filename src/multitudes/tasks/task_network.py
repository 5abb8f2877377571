"""`TaskNetwork`: a network with a task, which sets its loss and the meaning of its predictions."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.networks.calls import Input, tensors_in
from multitudes.tasks import Criterion, Task, criterion_for, task_of, tasks_of
from multitudes.tasks.classes import check_class_axis, check_clear
from multitudes.tasks.criteria import weighted_by_row
from multitudes.tasks.huggingface_heads import head_task, predicts_next_tokens
from multitudes.tasks.predictive import Predictive
from multitudes.tasks.quantiles import check_levels


class TaskNetwork(nn.Module):
    """Base class with the task of a multitude, chosen or from its `network`."""

    network: nn.Module
    chosen_task: str | None = None
    _quantiles: tuple[float, ...] | None = None
    _next_tokens: bool | None = None
    _targets_checked = False
    _last: tuple[Any, TrainingLoss] | None = None

    @property
    @abstractmethod
    def template(self) -> nn.Module:
        """The network whose class, configuration and attributes represent the multitude."""

    @property
    def task(self) -> str:
        """The name of the task (see `Predictive`), by default that of the Hugging Face head or classification."""
        return self.known_task or "classification"

    @task.setter
    def task(self, task: str) -> None:
        self.chosen_task = task_of(task).name

    @property
    def reading(self) -> Task:
        """The task as an object, with its settings (see `multitudes.tasks`)."""
        return self._reading(self.task)

    def _reading(self, task: str) -> Task:
        return task_of(task, self.quantiles, self.next_tokens)

    @property
    def known_task(self) -> str | None:
        """The chosen task, or the task of the network's head, or None."""
        if self.chosen_task is not None or not isinstance(self.template, TaskNetwork):
            return self.chosen_task or head_task(self.template)
        return self.template.known_task

    @property
    def quantiles(self) -> tuple[float, ...] | None:
        """The levels of `task="quantiles"`, by default evenly spaced from 0.05 to 0.95; setting them sets the task."""
        return self._quantiles

    @quantiles.setter
    def quantiles(self, levels: Sequence[float]) -> None:
        self._quantiles = check_levels(levels)
        self.task = "quantiles"
        for inner in self._inner_networks():
            inner.quantiles = levels

    @property
    def next_tokens(self) -> bool:
        """True if position t of `task="tokens"` is trained and scored with the label at t + 1.

        The default is True for Hugging Face's causal language models, whose labels are the inputs. Set it to False if
        labels are already shifted, and to True for your own language model if they are not.
        """
        if self._next_tokens is not None or not isinstance(self.template, TaskNetwork):
            return predicts_next_tokens(self.template) if self._next_tokens is None else self._next_tokens
        return self.template.next_tokens

    @next_tokens.setter
    def next_tokens(self, shifted: bool) -> None:
        self._next_tokens = bool(shifted)
        for inner in self._inner_networks():
            inner.next_tokens = shifted

    def _inner_networks(self) -> list[TaskNetwork]:
        """Return the networks inside that have a task of their own."""
        inside = self.network if isinstance(self.network, nn.ModuleList) else [self.network]
        return [network for network in inside if isinstance(network, TaskNetwork)]

    def predictive_of(
        self, predictions: Tensor, x: Input, task: str | None = None, draws: Tensor | None = None
    ) -> Predictive:
        """Wrap predictions `[S, B, ...]` of inputs in a `Predictive`, by default of the network's task.

        Raise an error if no task is known and the shape of predictions is ambiguous.
        """
        task = task or self.known_task
        if task is None:
            check_class_axis(predictions, x)
            task = "classification"
        reading = self._reading(task)
        return Predictive(predictions, task, draws, None, reading.quantiles, reading.next_tokens)

    def _warn_of_copies(self, x: Input, y: Tensor, task: str | None) -> None:
        """Warn if the tokens to predict are the inputs, which a network learns by copying."""
        known = task or self.known_task
        if known is None or "next_tokens" not in task_of(known).settings or self.next_tokens:
            return
        for ids in tensors_in(x):
            fits = isinstance(y, Tensor) and (ids.dtype, ids.shape) == (y.dtype, y.shape) and not y.is_floating_point()
            if fits and bool(((ids == y) | (y == -100)).all()):
                warnings.warn(
                    "y holds the tokens of x, so the network learns to copy its input; if it should predict the next "
                    "token, set net.next_tokens = True",
                    stacklevel=3,
                )

    def _criterion(
        self, criterion: Criterion | None, task: str | None, predictions: Tensor, y: Tensor, averages: bool = False
    ) -> TrainingLoss:
        """Return the training loss; raise an error if the targets do not fit the task or the predictions.

        On a GPU, only the values of the first targets are checked, since that waits for the GPU.
        """
        objective = self._objective(criterion, task, averages)
        if not objective.is_known or torch.compiler.is_compiling():
            return objective  # a user's criterion checks its own targets
        if not objective.has_task:
            check_clear(predictions, y)
        values = criterion is None and not (isinstance(y, Tensor) and y.is_cuda and self._targets_checked)
        objective.reading.check_targets(predictions, objective.reading.aligned(y), values)
        if not self._targets_checked:
            self._targets_checked = True
        return objective

    def _objective(self, criterion: Criterion | None, task: str | None, averages: bool) -> TrainingLoss:
        """Return the criterion and the task; the default criterion is cached."""
        config = getattr(self.template, "config", None)
        head = getattr(config, "problem_type", None), getattr(config, "num_labels", None)
        key = task, averages, self.chosen_task, self._quantiles, self._next_tokens, head
        nested = isinstance(self.template, TaskNetwork)
        if criterion is None and self._last is not None and self._last[0] == key and not nested:
            return self._last[1]
        known = task or self.known_task
        chosen = criterion_for(known, criterion, averages)
        reading = self._reading(known or "classification")
        is_known = criterion is None or bool(tasks_of(criterion))
        means = is_known and reading.averages_rows(chosen)
        loss = partial(reading.loss if is_known else _own_loss, chosen)
        objective = TrainingLoss(loss, reading, known is not None, is_known, means)
        if criterion is None and not torch.compiler.is_compiling():
            self._last = key, objective
        return objective


@dataclass(frozen=True)
class TrainingLoss:
    """A training criterion with its task."""

    loss: Callable[..., Tensor]
    """A function `(prediction, y, weight=None) -> mean over the batch`."""
    reading: Task
    has_task: bool
    """True if the task was chosen or comes from the network's head."""
    is_known: bool
    """True for criteria of torch and the library."""
    averages_rows: bool
    """True if the criterion is the mean over rows."""


def member_losses(
    objective: TrainingLoss, predictions: Tensor, y: Tensor, weight: Tensor | None, joint: bool
) -> list[Tensor]:
    """Return the losses of members from their draws, `[M, D, B, ...]`, which are averaged.

    With `joint`, return one number if possible, in a single call: the mean over the rows of all members.
    """
    members, draws = predictions.shape[:2]
    if joint and draws == 1 and objective.averages_rows:
        weights = None if weight is None else weight.repeat(members, *[1] * (weight.dim() - 1))
        return [objective.loss(predictions.flatten(0, 2), y.repeat(members, *[1] * (y.dim() - 1)), weight=weights)]
    return [objective.loss(objective.reading.averaged(own), y, weight=weight) for own in predictions]


def _own_loss(criterion: Criterion, prediction: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    return criterion(prediction, y) if weight is None else weighted_by_row(criterion, prediction, y, weight)
