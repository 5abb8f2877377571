"""Scores of dense predictions: confusion of classes, IoU, accuracy by class.

A pixel is a row, so accuracy, NLL, Brier score and ECE over pixels are `accuracy`, `nll`, `brier` and `ece` with
`ignore`, and the consistency of a video is `consistency` with `masks`. Let `n_ij` be the number of pixels of true class
i and predicted class j in the whole dataset. Then

    IoU_c = n_cc / (sum_j n_cj + sum_i n_ic - n_cc),    accuracy_c = n_cc / sum_j n_cj.

Mean IoU is over the classes in the targets or the predictions, mean class accuracy over those in the targets.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from multitudes.metrics.class_inputs import Rows
from multitudes.metrics.declare import HIGHER, NEITHER, SEGMENTATION, metric


def _counts(rows: Rows) -> Tensor:
    """Rows -> count of true class i predicted as class j, `[C, C]` in float64."""
    return multiclass_confusion_matrix(rows.label, rows.target, rows.classes, validate_args=False).double()


def _iou(counts: Tensor) -> Tensor:
    """Counts `[C, C]` -> IoU of each class, `[C]` in float64; NaN for classes that do not occur."""
    return counts.diag() / (counts.sum(0) + counts.sum(1) - counts.diag())


_OF_CLASSES: dict[str, Any] = {"kind": SEGMENTATION, "shape": ("classes", "classes")}


@metric("Confusion", lambda counts: counts.long(), better=NEITHER, **_OF_CLASSES)
def confusion(rows: Rows) -> Tensor:
    """Count of true class i predicted as class j, in row i and column j, for `[B, C, ...]`.

    >>> import torch
    >>> image = torch.tensor([[[0.9, 0.8, 0.3, 0.1]], [[0.1, 0.2, 0.7, 0.9]]]).transpose(0, 1)  # [1, 2, 4]
    >>> confusion(image, torch.tensor([[0, 0, 0, 255]]), ignore=255)
    tensor([[2, 1],
            [0, 0]])
    """
    return _counts(rows)


@metric("ClassIoU", _iou, better=HIGHER, **_OF_CLASSES)
def class_iou(rows: Rows) -> Tensor:
    """Intersection over union of each class, `[C]`, for `[B, C, ...]`; NaN for classes that do not occur."""
    return _counts(rows)


@metric("MeanIoU", lambda counts: _iou(counts).nanmean(), better=HIGHER, group="scores", shifted=True, **_OF_CLASSES)
def mean_iou(rows: Rows) -> Tensor:
    """Mean over classes of intersection over union, for `[B, C, ...]`; classes that do not occur are left out.

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
    """Mean over classes of the accuracy on their pixels, for `[B, C, ...]`: rare classes count like frequent ones.

    >>> import torch
    >>> pixels = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    >>> round(float(mean_class_accuracy(pixels, torch.tensor([0, 0, 0, 1]))), 4)  # (2/3 + 1) / 2
    0.8333
    """
    return _counts(rows)
