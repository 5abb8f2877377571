"""Class weights, for example to balance rare and common classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from multitudes.ensemble.multitude import Multitude
from multitudes.networks.calls import Input, split_batch
from multitudes.networks.seeds import seeded
from multitudes.networks.trace import preserve_state
from multitudes.tasks import TASKS, Task, join_tasks
from multitudes.tasks.criteria import expand_weight
from multitudes.training.objective import batches_from
from multitudes.training.validation import prepare_for


class ClassWeights:
    """One weight per class.

    >>> from multitudes.tasks import task_of
    >>> ClassWeights(torch.tensor([1.0, 3.0]), task_of("classification")).of(torch.tensor([0, 1, 1]))
    tensor([1., 3., 3.])
    """

    def __init__(self, weights: Tensor, task: Task, counted: bool = False) -> None:
        self.weights, self.task = weights, task
        self.counted = counted  # True if counted from data, where classes may be missing
        self.checked = counted

    def of(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return a weight per target, in the shape of y: that of its class times that of its row, `weight [B]`."""
        weights = self.weights.to(y.device)
        if self.task.single_logit:  # a probability mixes the weights of both classes
            own = torch.lerp(weights[0], weights[1], y.to(weights.dtype))
        elif y.is_floating_point():
            raise ValueError(
                f"class_weight needs classes as targets, got probabilities of shape {list(y.shape)}: pass row weights "
                "instead, in batches (x, y, weight)"
            )
        else:
            own = self._by_class(weights, y.long())
        return own if weight is None else own * expand_weight(weight, own)

    def _by_class(self, weights: Tensor, y: Tensor) -> Tensor:
        y = torch.where(y < 0, 0, y)  # ignored targets have no loss
        if self.counted:
            return torch.where(y < len(weights), weights[y.clamp(max=len(weights) - 1)], 1.0)
        if not y.is_cuda and y.numel() and int(y.max()) >= len(weights):
            raise ValueError(
                f"class_weight must hold one number for each class, got {len(weights)}, but y contains {int(y.max())}"
            )
        return weights[y]

    def check(self, net: Multitude, x: Input) -> None:
        """Check the network's number of classes, on the first input only."""
        if self.checked:
            return
        self.checked = True
        prepare_for(net, x)
        with preserve_state(net.network, ()), seeded(0):
            found = net.predict(x, net.task, seed=0)
        classes = found.reading.class_count(found.predictions.shape[1:])
        if classes != len(self.weights):
            raise ValueError(
                f"class_weight must hold one number for each of the {classes} classes, got {len(self.weights)}"
            )


def class_weights_of(given: Any, net: Multitude, data: Any) -> ClassWeights | None:
    """Return the class weights for `fit(class_weight=given)`."""
    if given is None:
        return None
    task = net.reading
    if not _weighs(task):
        known = join_tasks([name for name, each in TASKS.items() if _weighs(each)])
        raise ValueError(
            f"class_weight needs task {known}, got task {task.name!r}: pass row weights instead, in batches "
            "(x, y, weight)"
        )
    if isinstance(given, str) and given == "balanced":
        return ClassWeights(balanced(_count_targets(data, task)), task, counted=not task.single_logit)
    numbers = given.tolist() if isinstance(given, Tensor) else given
    listed = isinstance(numbers, Sequence) and not isinstance(numbers, str) and len(numbers) > 0
    real = listed and all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)
    if not real or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise ValueError(
            f"class_weight must be None, 'balanced', or one finite number, 0 or more, for each class, got {given!r}"
        )
    return ClassWeights(torch.tensor([float(number) for number in numbers]), task)


def _weighs(task: Task) -> bool:
    """Return whether each target is one class."""
    return task.classes and not task.several_labels


def balanced(counts: Tensor) -> Tensor:
    """Return the weights `n / (classes * count)`; 1 for classes without targets.

    King & Zeng, *Logistic Regression in Rare Events Data* (2001).

    >>> balanced(torch.tensor([1, 3]))
    tensor([2.0000, 0.6667])
    """
    weights = counts.sum() / ((counts > 0).sum() * counts.double())
    return torch.where(counts > 0, weights, 1.0).float()


def _count_targets(data: Any, task: Task) -> Tensor:
    """Count the targets of each class, in one pass over the data."""
    if isinstance(data, Iterator):
        raise ValueError(
            f"class_weight='balanced' iterates data before the training, but a {type(data).__name__} can be iterated "
            "only once: pass a list, or one number for each class"
        )
    counts = torch.zeros(2 if task.single_logit else 0, dtype=torch.int64)
    with seeded(0):
        for number, batch in enumerate(batches_from(data)):
            y = split_batch(batch)[1]
            if y is None:
                raise ValueError(f"batch {number} of data must have targets, (x, y), got an input alone")
            if y.is_floating_point() and not task.single_logit:
                shape = list(y.shape)
                raise ValueError(
                    f"class_weight='balanced' needs classes as targets, got probabilities of shape {shape}"
                )
            classes = (y >= 0.5).long() if task.single_logit else task.aligned(y).long()
            found = torch.bincount(classes[classes >= 0].cpu(), minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
    return counts
