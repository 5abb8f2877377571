import math

import numpy as np
import pytest
import torch

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics import cases
from tests.metrics.cases import classes, logits

VOID = 255


def images(s=3, b=2, c=5, h=4, w=6, seed=0, void=0.2):
    """Logits `[S, B, C, H, W]` and labels, some of them void."""
    z, y = logits(s, b, c, h, w, seed=seed), classes(c, b, h, w, seed=seed + 1)
    return z, y.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(seed + 2)) >= void, VOID)


# Textbook computations, one pixel at a time ----------------------------------------------------------------


def pixels(p, y):
    """The true and the predicted class of every pixel that is not void."""
    rows, true = cases.pixels(p, y, VOID)
    return true.tolist(), [int(row.argmax()) for row in rows]


def text_confusion(true, predicted, c):
    counts = np.zeros((c, c))
    for i, j in zip(true, predicted, strict=True):
        counts[i, j] += 1
    return counts


def text_iou(true, predicted, c):
    pairs = list(zip(true, predicted, strict=True))
    union = sum(c in pair for pair in pairs)
    return sum(pair == (c, c) for pair in pairs) / union if union else math.nan


def text_class_iou(true, predicted, c):
    return [text_iou(true, predicted, k) for k in range(c)]


def text_mean_iou(true, predicted, c):
    found = set(true) | set(predicted)
    return np.mean([text_iou(true, predicted, k) for k in found]) if found else math.nan


def text_mean_class_accuracy(true, predicted, c):
    shares = [np.mean([j == k for i, j in zip(true, predicted, strict=True) if i == k]) for k in set(true)]
    return np.mean(shares) if shares else math.nan


SCORES = {
    "confusion": (metrics.confusion, text_confusion),
    "class IoU": (metrics.class_iou, text_class_iou),
    "mean IoU": (metrics.mean_iou, text_mean_iou),
    "class accuracy": (metrics.mean_class_accuracy, text_mean_class_accuracy),
}

CASES = {
    "random": images(),
    "one member": images(s=1),
    "two classes": images(c=2),
    "some classes absent": images(c=40),
    "one pixel": images(b=1, h=1, w=1, void=0),
    "all of one class": (images()[0], torch.full((2, 4, 6), 2)),
    "never void": images(void=0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("function, textbook", SCORES.values(), ids=SCORES)
def test_scores_equal_loops_over_rows(function, textbook, case):
    z, y = case
    mean = z.double().softmax(2).mean(0)
    expected = textbook(*pixels(mean, y), z.shape[2])
    np.testing.assert_allclose(function(Predictive(z), y, ignore=VOID).double(), expected, rtol=1e-12)
    np.testing.assert_allclose(function(mean, y, ignore=VOID).double(), expected, rtol=1e-12)


def test_classes_that_do_not_occur_are_left_out():
    true, predicted = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 1, 2]])
    p = torch.nn.functional.one_hot(predicted, 5).movedim(-1, 1).double()
    iou = metrics.class_iou(p, true)
    assert iou[:3].tolist() == [1, 0.5, 0] and iou[3:].isnan().all()
    assert float(metrics.mean_iou(p, true)) == 0.5  # class 2 was only predicted, and counts
    assert float(metrics.mean_class_accuracy(p, true)) == 0.75  # there it does not


def test_the_mean_over_the_dataset_is_not_the_mean_over_images():
    z, y = images(b=6)
    p = Predictive(z)
    metric = metrics.MeanIoU(5, ignore=VOID)
    each = []
    for i in range(6):
        metric.update(p[i], y[i : i + 1])
        each.append(float(metrics.mean_iou(p[i], y[i : i + 1], ignore=VOID)))
    assert float(metric.compute()) == pytest.approx(float(metrics.mean_iou(p, y, ignore=VOID)))
    assert float(metric.compute()) != pytest.approx(np.mean(each), abs=1e-3)


# Scores and calibration of pixels --------------------------------------------------------------------------
