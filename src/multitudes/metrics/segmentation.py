"""Scores of dense predictions: confusion of classes, IoU, accuracy by class.

Each pixel is a row, so `accuracy`, `nll`, `brier` and `ece` with `ignore` are those of pixels, and `consistency` with
`masks` is that of a video. Let `n_ij` be the number of pixels of true class i and predicted class j in the whole
dataset. Then

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
    """Count the rows of true class i and predicted class j, `[C, C]` in float64."""
    return multiclass_confusion_matrix(rows.label, rows.target, rows.classes, validate_args=False).double()


def _iou(counts: Tensor) -> Tensor:
    """Map counts `[C, C]` to the IoU of each class, `[C]`; NaN for classes that do not occur."""
    return counts.diag() / (counts.sum(0) + counts.sum(1) - counts.diag())


_OF_CLASSES: dict[str, Any] = {"kind": SEGMENTATION, "shape": ("classes", "classes")}


@metric("Confusion", lambda counts: counts.long(), better=NEITHER, **_OF_CLASSES)
def confusion(rows: Rows) -> Tensor:
    """Number of rows of true class i and predicted class j, at `[i, j]` of `[C, C]`.

    >>> import torch
    >>> image = torch.tensor([[[0.9, 0.8, 0.3, 0.1]], [[0.1, 0.2, 0.7, 0.9]]]).transpose(0, 1)  # [1, 2, 4]
    >>> confusion(image, torch.tensor([[0, 0, 0, 255]]), ignore=255)
    tensor([[2, 1],
            [0, 0]])
    """
    return _counts(rows)


@metric("ClassIoU", _iou, better=HIGHER, **_OF_CLASSES)
def class_iou(rows: Rows) -> Tensor:
    """Intersection over union of each class, `[C]`; NaN for classes that do not occur."""
    return _counts(rows)


@metric("MeanIoU", lambda counts: _iou(counts).nanmean(), better=HIGHER, group="scores", shifted=True, **_OF_CLASSES)
def mean_iou(rows: Rows) -> Tensor:
    """Mean over classes of intersection over union; classes that do not occur are left out.

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
    """Mean over classes of the accuracy on their pixels: rare classes count like frequent ones.

    >>> import torch
    >>> pixels = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    >>> round(float(mean_class_accuracy(pixels, torch.tensor([0, 0, 0, 1]))), 4)  # (2/3 + 1) / 2
    0.8333
    """
    return _counts(rows)
