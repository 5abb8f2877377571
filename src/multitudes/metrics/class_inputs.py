"""Inputs of classification metrics: predictions and classes, checked and arranged in rows.

`read_rows` handles all input formats. `regression_inputs.py` does the same for regression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor

from multitudes.tasks import TASKS, Task
from multitudes.tasks.predictive import Predictive

__all__ = ["Rows", "read_rows"]


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """N predictions and their classes: one row per input, or per pixel of dense predictions.

    Metrics of one batch share its rows: derived values are checked and computed once, in at least float32.
    """

    probs: Tensor
    """`[N, C]`, each row sums to 1."""
    target: Tensor
    """True classes, `[N]`."""
    predictive: Predictive | None = None
    """Members' predictions of the same rows, logits `[S, N, C]`; None if only probabilities were given."""
    task: str = "classification"
    """Task of the predictions before they were converted to rows of classes."""
    column: Tensor | None = None
    """Label of each row for `task="multilabel"`, `[N]`."""

    def __len__(self) -> int:
        """Return N, the number of rows."""
        return len(self.target)

    def __getitem__(self, index: slice | Tensor) -> Rows:
        """Return the rows of a slice or of a boolean mask `[N]`."""
        predictive = None if self.predictive is None else self.predictive[index]
        column = None if self.column is None else self.column[index]
        return Rows(self.probs[index], self.target[index], predictive, self.task, column)

    def __repr__(self) -> str:
        members = None if self.predictive is None else self.predictive.members
        return f"Rows(rows={len(self)}, classes={self.classes}, {members=})"

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return self.probs.shape[1]

    @cached_property
    def log_probs(self) -> Tensor:
        """Log of `probs`, `[N, C]`: exact despite underflow if logits were given, else -inf at 0."""
        return self.probs.log() if self.predictive is None else self.predictive.log_probs

    @cached_property
    def target_log_prob(self) -> Tensor:
        """Log-probability of the true class, `[N]`."""
        at = self.target[:, None]
        if self.predictive is None:
            return self.probs.gather(1, at)[:, 0].log()
        return self.log_probs.gather(1, at)[:, 0]

    @cached_property
    def label(self) -> Tensor:
        """Most probable class, `[N]`; the first one in a tie."""
        return self.probs.argmax(1)

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of `label`, `[N]`."""
        return self.probs.amax(1)

    @cached_property
    def correct(self) -> Tensor:
        """True where `label` is the true class, `[N]`."""
        return self.label == self.target

    def members(self, metric: str) -> Predictive:
        """Return `predictive`, or raise an error that `metric` needs it."""
        if self.predictive is None:
            raise ValueError(f"{metric} needs the members' predictions: pass a Predictive, got only probabilities")
        return self.predictive


Prediction = Predictive | Tensor | Rows


def read_rows(prediction: Prediction, target: Tensor | None = None, ignore: Ignore = None) -> Rows:
    """Check predictions and classes, and arrange them in rows.

    Each input, pixel, token or label is a row. Binary predictions and labels have the two classes no and yes. For a
    causal language model, position t has the target of t + 1.

    Args:
        prediction: `Predictive` of classes, logits `[S, B, C, ...]`, or probabilities `[B, C, ...]` that sum to 1
            over the classes (within 1e-4, or the rounding error of half precision), or `Rows`.
        target: True classes, integers `[B, ...]`; None for `Rows`.
        ignore: Target of the rows to leave out. Tokens with target -100 are always left out.

    Raises:
        ValueError: For invalid input, with the first bad value and its index.

    Example:
        >>> images = torch.tensor([[[0.5, 0.9]], [[0.5, 0.1]]]).transpose(0, 1)  # [1, 2, 2]: two pixels, two classes
        >>> rows = read_rows(images, torch.tensor([[1, 255]]), ignore=255)
        >>> rows, rows.probs, rows.target
        (Rows(rows=1, classes=2, members=None), tensor([[0.5000, 0.5000]]), tensor([1]))
    """
    check_ignore("ignore", ignore)
    if isinstance(prediction, Rows):
        if target is not None:
            raise ValueError(f"target must be None if prediction is {prediction!r}, which has targets already")
        return _without(prediction, ignore)
    task, several, ignored = "classification", False, [] if ignore is None else [ignore]
    if isinstance(prediction, Predictive):
        if not prediction.reading.classes:
            *others, last = (name for name, each in TASKS.items() if each.classes)
            raise ValueError(f"prediction must be of task {', '.join(others)} or {last}, got task {prediction.task}")
        task = prediction.task
        ignored += [] if prediction.reading.ignored is None else [prediction.reading.ignored]
        several = prediction.reading.several_labels
        if isinstance(target, Tensor):
            target = prediction.reading.targets_by_class(target, prediction.predictions.shape[1:])
        prediction = prediction.as_classes()
    shape = _check_prediction(prediction)
    classes = shape.pop(1)
    target = _check_target(target, shape, classes, ignored)
    if isinstance(prediction, Predictive):
        predictive = _flat_predictive(prediction)
        probs = predictive.probs
        tolerance = _tolerance(probs.dtype)
    else:
        predictive = None
        tolerance = _tolerance(prediction.dtype)
        probs = prediction.detach().to(torch.promote_types(prediction.dtype, torch.float32))
        probs = probs.movedim(1, -1).reshape(-1, classes)
    _check_probs(probs, shape, tolerance)
    if predictive is None:
        probs = probs.clamp(max=1)  # a mean of softmaxes can round to slightly more
    column = None
    if several:
        column = torch.arange(shape[1], device=probs.device).view(-1, *[1] * (len(shape) - 2)).expand(shape).flatten()
    rows = Rows(probs, target.to(probs.device).reshape(-1), predictive, task, column)
    for label in ignored:
        rows = _without(rows, label)
    return rows


def read_without_target(prediction: Prediction, target: Tensor | None = None, ignore: Ignore = None) -> Rows:
    """Read rows for metrics that need no true classes. Without a target, all classes are set to 0 and never used.

    Args:
        prediction: `Predictive` of classes, logits `[S, B, C, ...]`, or probabilities `[B, C, ...]`, or `Rows`.
        target: True classes `[B, ...]`, only needed for `ignore`.
        ignore: Target of the rows to leave out.
    """
    if target is None and isinstance(prediction, (Predictive, Tensor)):
        if ignore is not None:
            raise ValueError(f"target is needed to find the rows that ignore={ignore} leaves out, got None")
        target = torch.zeros(places(prediction), dtype=torch.long)
        if isinstance(prediction, Predictive):
            prediction = replace(prediction, next_tokens=False)  # every position counts
    return read_rows(prediction, target, ignore)


def places(prediction: Prediction) -> torch.Size:
    """Return the shape `[B, ...]` of separate predictions, or `[N]` for rows."""
    if isinstance(prediction, Rows):
        return prediction.target.shape
    if isinstance(prediction, Predictive):
        reading: Task = prediction.reading
        return reading.places(prediction.predictions.shape[1:])
    return prediction.shape[:1] + prediction.shape[2:]


def _without(rows: Rows, ignore: int | None) -> Rows:
    """Remove the rows whose target is `ignore`. Return the same object if there are none."""
    if ignore is None:
        return rows
    kept = rows.target != ignore
    return rows if bool(kept.all()) else rows[kept]


# Checks -------------------------------------------------------------------------------------------------


def check_ignore(name: str, label: int | None) -> None:
    """Raise ValueError unless it is an integer label or None."""
    if label is not None and (not isinstance(label, int) or isinstance(label, bool)):
        raise ValueError(f"{name} must be an integer label or None, got {label!r}")


Ignore = Annotated[int | None, check_ignore]
"""A label to leave out."""


def check_mask(name: str, mask: Any, shape: Sequence[int]) -> None:
    """Raise ValueError unless `mask` is a boolean tensor of this shape."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != tuple(shape):
        raise ValueError(f"{name} must be a boolean tensor {list(shape)}, got {kind_of(mask)}")


def check_finite(name: str, values: Tensor) -> None:
    """Raise ValueError where a value is NaN or infinite."""
    good = values.isfinite()
    if not bool(good.all()):
        at = (~good).nonzero()[0].tolist()
        raise ValueError(f"{name} must hold finite values, got {float(values[tuple(at)])} at index {at}")


def kind_of(value: Any) -> str:
    """Describe a value for an error: dtype and shape of a tensor, else its type."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_prediction(prediction: Predictive | Tensor) -> list[int]:
    """Check the prediction, and return the shape of its probabilities, `[B, C, ...]`."""
    if isinstance(prediction, Predictive):
        return list(prediction.predictions.shape[1:])
    if not isinstance(prediction, Tensor) or not prediction.is_floating_point():
        kind = getattr(prediction, "dtype", type(prediction).__name__)
        raise ValueError(f"prediction must be a Predictive or a floating-point tensor of probabilities, got {kind}")
    if prediction.ndim < 2 or prediction.shape[1] < 1:
        raise ValueError(f"prediction must be probabilities [B, classes, ...], got shape {list(prediction.shape)}")
    return list(prediction.shape)


def _check_target(target: Tensor | None, shape: list[int], classes: int, ignored: Sequence[int]) -> Tensor:
    """Return `target` as int64, or raise unless it holds classes in the shape `[B, ...]`."""
    kind = getattr(target, "dtype", type(target).__name__)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex() or kind == torch.bool:
        raise ValueError(f"target must be an integer tensor of classes {shape}, got {kind}")
    if list(target.shape) != shape:
        raise ValueError(f"target must have the prediction's shape without classes, {shape}, got {list(target.shape)}")
    target = target.long()  # unsigned labels would wrap around when compared with a negative `ignore`
    bad = (target < 0) | (target >= classes)
    for label in ignored:
        bad &= target != label
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        other = f", or be the ignored {' or '.join(map(str, ignored))}" if ignored else ""
        raise ValueError(
            f"target must lie within 0 and {classes - 1}{other}, got {int(target[tuple(index)])} at index {index}"
        )
    return target


def _check_probs(probs: Tensor, shape: list[int], tolerance: float) -> None:
    """Raise ValueError unless the rows `[N, C]` are probabilities; `shape` is `[B, ...]`, with B * ... = N."""
    good = (probs >= 0) & (probs <= 1 + tolerance)  # False for NaN
    if not bool(good.all()):
        row, column = (~good).nonzero()[0].tolist()
        value = float(probs[row, column])
        batch, *place = _unravel(row, shape)
        hint = "" if math.isnan(value) else "; a softmax over dim 1 turns logits into probabilities"
        raise ValueError(
            f"prediction must hold probabilities within 0 and 1, got {value:.6g} "
            f"at index {[batch, column, *place]}{hint}"
        )
    totals = probs.sum(1, dtype=torch.float64)
    good = (totals - 1).abs() <= tolerance
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise ValueError(
            f"prediction must add up to 1 over the classes in dim 1, got a sum of {float(totals[row]):.6g} "
            f"at index {_unravel(row, shape)} of {shape}"
        )


def _tolerance(dtype: torch.dtype) -> float:
    """Return how far rounding can move a sum of probabilities from 1."""
    return max(1e-4, 4 * torch.finfo(dtype).eps)


def _unravel(number: int, shape: Sequence[int]) -> list[int]:
    """Return the index of element `number` in a tensor of this shape, in row-major order."""
    return [int(index) for index in torch.unravel_index(torch.tensor(number), tuple(shape))]


def _flat_predictive(predictive: Predictive) -> Predictive:
    """Flatten logits `[S, B, C, ...]` to `[S, N, C]`."""
    logits = predictive.predictions
    if logits.ndim == 3 and not logits.requires_grad:
        return predictive
    # Metrics compute without gradients. A Predictive caches results, so do not fill the cache of the user's.
    return replace(predictive, predictions=logits.detach().movedim(2, -1).flatten(1, -2), draws=None)
