"""How good dense predictions are: confusion of classes, IoU, accuracy by class, and consistency frame by frame.

A pixel is a row like any other, so overall pixel accuracy, NLL, Brier score and ECE over pixels are `accuracy`, `nll`,
`brier` and `ece` with `ignore`, and the consistency of a whole video is `consistency` with `masks`. What is added here
looks at classes, and at videos that come one frame at a time. With the pixels of true class i and predicted class j
counted as `n_ij`,

    IoU_c = n_cc / (sum_j n_cj + sum_i n_ic - n_cc),    accuracy_c = n_cc / sum_j n_cj.

As usual for CamVid, the counts are those of the whole dataset, not of each image; mean IoU is a mean over the classes
that occur, in the truth or in the predictions, and mean class accuracy over those that occur in the truth. A class
that does not has NaN of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from multitudes.core.checks import check_count
from multitudes.core.predictive import Predictive
from multitudes.metrics.inputs import (
    Prediction,
    Rows,
    check_classes,
    check_mask,
    places,
    read_rows,
    read_without_target,
)
from multitudes.metrics.robustness import consistency_update
from multitudes.metrics.streaming import RowsMetric, SumsMetric

__all__ = [
    "ClassIoU",
    "Confusion",
    "MeanClassAccuracy",
    "MeanIoU",
    "TemporalConsistency",
    "class_iou",
    "confusion",
    "mean_class_accuracy",
    "mean_iou",
]

# Confusion ----------------------------------------------------------------------------------------------


def confusion_update(rows: Rows) -> Tensor:
    """Rows -> how often true class i was predicted as class j, `[C, C]` in float64."""
    return multiclass_confusion_matrix(rows.label, rows.target, rows.classes, validate_args=False).double()


def confusion_compute(counts: Tensor) -> Tensor:
    """The counts as whole numbers, `[C, C]`."""
    return counts.long()


def confusion(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """How often true class i was predicted as class j, in row i and column j, of `[B, C, ...]`.

    >>> import torch
    >>> image = torch.tensor([[[0.9, 0.8, 0.3, 0.1]], [[0.1, 0.2, 0.7, 0.9]]]).transpose(0, 1)  # [1, 2, 4]
    >>> confusion(image, torch.tensor([[0, 0, 0, 255]]), ignore=255)
    tensor([[2, 1],
            [0, 0]])
    """
    return confusion_compute(confusion_update(read_rows(prediction, target, ignore)))


class Confusion(RowsMetric):
    """`confusion`, streaming; it needs the number of `classes` first, so that all processes have the same sums."""

    higher_is_better: bool | None = None

    def __init__(self, classes: int, ignore: int | None = None, **kwargs: Any) -> None:
        super().__init__(ignore, shape=(check_count("classes", classes), classes), **kwargs)
        self.classes = classes

    def _sums(self, rows: Rows) -> Tensor:
        check_classes(rows, self.classes)
        return confusion_update(rows)

    def compute(self) -> Tensor:
        """The counts over all rows so far, `[C, C]`."""
        return confusion_compute(self.sums)


# IoU and accuracy by class ------------------------------------------------------------------------------

class_iou_update = mean_iou_update = mean_class_accuracy_update = confusion_update


def class_iou_compute(counts: Tensor) -> Tensor:
    """Counts `[C, C]` -> IoU of each class, `[C]` in float64; NaN for those that do not occur."""
    return counts.diag() / (counts.sum(0) + counts.sum(1) - counts.diag())


def mean_iou_compute(counts: Tensor) -> Tensor:
    """Counts `[C, C]` -> the mean IoU of the classes that occur, a float64 scalar; NaN without rows."""
    return class_iou_compute(counts).nanmean()


def mean_class_accuracy_compute(counts: Tensor) -> Tensor:
    """Counts `[C, C]` -> the mean accuracy of the true classes that occur, a float64 scalar; NaN without rows."""
    return (counts.diag() / counts.sum(1)).nanmean()


def class_iou(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """Intersection over union of each class, `[C]`, of `[B, C, ...]`; NaN for classes that do not occur."""
    return class_iou_compute(class_iou_update(read_rows(prediction, target, ignore)))


def mean_iou(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """The mean over classes of intersection over union, of `[B, C, ...]`; classes that do not occur are left out.

    >>> import torch
    >>> pixels = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.3, 0.7, 0.0], [0.1, 0.9, 0.0]])
    >>> y = torch.tensor([0, 0, 0, 1])
    >>> class_iou(pixels, y).float()
    tensor([0.6667, 0.5000,    nan])
    >>> round(float(mean_iou(pixels, y)), 4)
    0.5833
    """
    return mean_iou_compute(mean_iou_update(read_rows(prediction, target, ignore)))


def mean_class_accuracy(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """The mean over classes of the share of their pixels that is right, of `[B, C, ...]`, so that rare ones count.

    >>> import torch
    >>> pixels = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    >>> round(float(mean_class_accuracy(pixels, torch.tensor([0, 0, 0, 1]))), 4)  # (2/3 + 1) / 2
    0.8333
    """
    return mean_class_accuracy_compute(mean_class_accuracy_update(read_rows(prediction, target, ignore)))


class ClassIoU(Confusion):
    """`class_iou`, streaming."""

    higher_is_better = True

    def compute(self) -> Tensor:
        """IoU of each class over all rows so far, `[C]`."""
        return class_iou_compute(self.sums)


class MeanIoU(Confusion):
    """`mean_iou`, streaming."""

    higher_is_better = True

    def compute(self) -> Tensor:
        """The mean over all rows so far."""
        return mean_iou_compute(self.sums)


class MeanClassAccuracy(Confusion):
    """`mean_class_accuracy`, streaming."""

    higher_is_better = True

    def compute(self) -> Tensor:
        """The mean over all rows so far."""
        return mean_class_accuracy_compute(self.sums)


# Videos, frame by frame ---------------------------------------------------------------------------------


class TemporalConsistency(SumsMetric):
    """`consistency`, fed frame by frame; `new_sequence()` between videos, whose frames are no neighbours.

    >>> import torch
    >>> metric = TemporalConsistency()
    >>> for p in torch.tensor([[0.9, 0.9], [0.8, 0.2], [0.7, 0.1]]):  # three frames of two pixels: one of four flips
    ...     metric.update(torch.stack([p, 1 - p])[None])
    >>> float(metric.compute())
    0.75
    """

    full_state_update = True  # so that `forward`, too, compares a frame with the one before
    higher_is_better = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.new_sequence()

    def new_sequence(self) -> None:
        """Begin another video: the next frame has none before it."""
        self._last: Tensor | None = None

    def update(self, prediction: Predictive | Tensor, mask: Tensor | None = None) -> None:
        """Add the next frame of B videos, logits `[S, B, C, ...]` or probabilities `[B, C, ...]`.

        A boolean `mask [B, ...]` is true where a pixel counts, such as `target != 255`; it has to in both frames.
        """
        if isinstance(prediction, Rows):  # of which some may have been left out
            raise ValueError(f"prediction must be a Predictive or probabilities of a whole frame, got {prediction!r}")
        labels = read_without_target(prediction).label.view(places(prediction))
        if mask is not None:
            check_mask("mask", mask, labels.shape)
            labels = labels.where(mask.to(labels.device), -1)
        if self._last is not None:
            self._add(self._step(self._last.to(labels.device), labels))
        self._last = labels

    def _step(self, before: Tensor, after: Tensor) -> Tensor:
        if before.shape != after.shape:
            raise ValueError(
                f"prediction must have the size of the frame before, {list(before.shape)}, got {list(after.shape)}; "
                "new_sequence() begins another video"
            )
        seen = (before >= 0) & (after >= 0)
        return consistency_update(before[seen], after[seen])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.new_sequence()
