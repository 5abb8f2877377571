"""Scores of dense predictions: confusion of classes, IoU, accuracy by class, and consistency frame by frame.

A pixel is a row, so accuracy, NLL, Brier score and ECE over pixels are `accuracy`, `nll`, `brier` and `ece` with
`ignore`, and the consistency of a whole video is `consistency` with `masks`. With the pixels of true class i and
predicted class j counted as `n_ij` over the whole dataset,

    IoU_c = n_cc / (sum_j n_cj + sum_i n_ic - n_cc),    accuracy_c = n_cc / sum_j n_cj.

Mean IoU is over the classes that occur in the truth or in the predictions, mean class accuracy over those in the truth.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from multitudes.core.tasks.predictive import Predictive
from multitudes.metrics.declare import HIGHER, NEITHER, SEGMENTATION, metric
from multitudes.metrics.inputs import Rows, check_mask, places, read_without_target
from multitudes.metrics.streaming import SumsMetric, mean_of, total_of

__all__ = ["TemporalConsistency"]

# Confusion of classes -----------------------------------------------------------------------------------


def _counts(rows: Rows) -> Tensor:
    """Rows -> how often true class i was predicted as class j, `[C, C]` in float64."""
    return multiclass_confusion_matrix(rows.label, rows.target, rows.classes, validate_args=False).double()


def _iou(counts: Tensor) -> Tensor:
    """Counts `[C, C]` -> IoU of each class, `[C]` in float64; NaN for those that do not occur."""
    return counts.diag() / (counts.sum(0) + counts.sum(1) - counts.diag())


_OF_CLASSES: dict[str, Any] = {"kind": SEGMENTATION, "shape": ("classes", "classes")}


@metric("Confusion", lambda counts: counts.long(), better=NEITHER, **_OF_CLASSES)
def confusion(rows: Rows) -> Tensor:
    """How often true class i was predicted as class j, in row i and column j, of `[B, C, ...]`.

    >>> import torch
    >>> image = torch.tensor([[[0.9, 0.8, 0.3, 0.1]], [[0.1, 0.2, 0.7, 0.9]]]).transpose(0, 1)  # [1, 2, 4]
    >>> confusion(image, torch.tensor([[0, 0, 0, 255]]), ignore=255)
    tensor([[2, 1],
            [0, 0]])
    """
    return _counts(rows)


@metric("ClassIoU", _iou, better=HIGHER, **_OF_CLASSES)
def class_iou(rows: Rows) -> Tensor:
    """Intersection over union of each class, `[C]`, of `[B, C, ...]`; NaN for classes that do not occur."""
    return _counts(rows)


@metric("MeanIoU", lambda counts: _iou(counts).nanmean(), better=HIGHER, group="scores", shifted=True, **_OF_CLASSES)
def mean_iou(rows: Rows) -> Tensor:
    """The mean over classes of intersection over union, of `[B, C, ...]`; classes that do not occur are left out.

    >>> import torch
    >>> pixels = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.3, 0.7, 0.0], [0.1, 0.9, 0.0]])
    >>> y = torch.tensor([0, 0, 0, 1])
    >>> class_iou(pixels, y).float()
    tensor([0.6667, 0.5000,    nan])
    >>> round(float(mean_iou(pixels, y)), 4)
    0.5833
    """
    return _counts(rows)


@metric("MeanClassAccuracy", lambda counts: (counts.diag() / counts.sum(1)).nanmean(), better=HIGHER, **_OF_CLASSES)
def mean_class_accuracy(rows: Rows) -> Tensor:
    """The mean over classes of the share of their pixels that is right, of `[B, C, ...]`, so that rare ones count.

    >>> import torch
    >>> pixels = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    >>> round(float(mean_class_accuracy(pixels, torch.tensor([0, 0, 0, 1]))), 4)  # (2/3 + 1) / 2
    0.8333
    """
    return _counts(rows)


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
        before = labels if self._last is None else self._last.to(labels.device)
        if before.shape != labels.shape:
            raise ValueError(
                f"prediction must have the size of the frame before, {list(before.shape)}, got {list(labels.shape)}; "
                "new_sequence() begins another video"
            )
        if self._last is not None:
            seen = (before >= 0) & (labels >= 0)
            self._add(total_of(before[seen] == labels[seen]))
        self._last = labels

    def compute(self) -> Tensor:
        """The share over all steps so far, a float64 scalar; NaN if there were none."""
        return mean_of(self._all())

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.new_sequence()
