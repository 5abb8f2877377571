import math
import warnings

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics.functional.classification

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics import metric_cases
from tests.metrics.metric_cases import classes, logits

VOID = 255


def images(s=3, b=2, c=5, h=4, w=6, seed=0, void=0.2):
    """Logits `[S, B, C, H, W]` and labels, some of them void."""
    z, y = logits(s, b, c, h, w, seed=seed), classes(c, b, h, w, seed=seed + 1)
    return z, y.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(seed + 2)) >= void, VOID)


# Textbook computations, one pixel at a time ----------------------------------------------------------------


def pixels(p, y):
    """The true and the predicted class of every pixel that is not void."""
    rows, true = metric_cases.pixels(p, y, VOID)
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
def test_scores_are_the_textbooks(function, textbook, case):
    z, y = case
    mean = z.double().softmax(2).mean(0)
    expected = textbook(*pixels(mean, y), z.shape[2])
    np.testing.assert_allclose(function(Predictive(z), y, ignore=VOID).double(), expected, rtol=1e-12)
    np.testing.assert_allclose(function(mean, y, ignore=VOID).double(), expected, rtol=1e-12)


def test_perfect_and_hopeless_predictions():
    y = classes(4, 2, 3, 5)
    p = torch.nn.functional.one_hot(y, 4).movedim(-1, 1).double()
    assert metrics.mean_iou(p, y) == metrics.mean_class_accuracy(p, y) == 1
    assert metrics.mean_iou(p.roll(1, 1), y) == metrics.mean_class_accuracy(p.roll(1, 1), y) == 0


def test_a_single_class_is_always_right():
    p, y = torch.ones(2, 1, 3, 3), torch.zeros(2, 3, 3, dtype=torch.long)
    assert metrics.confusion(p, y).tolist() == [[18]]
    assert metrics.mean_iou(p, y) == metrics.mean_class_accuracy(p, y) == 1


def test_classes_are_left_out_of_the_mean_where_they_do_not_occur():
    true, predicted = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 1, 2]])
    p = torch.nn.functional.one_hot(predicted, 5).movedim(-1, 1).double()
    iou = metrics.class_iou(p, true)
    assert iou[:3].tolist() == [1, 0.5, 0] and iou[3:].isnan().all()
    assert float(metrics.mean_iou(p, true)) == 0.5  # class 2 was only predicted, and counts
    assert float(metrics.mean_class_accuracy(p, true)) == 0.75  # there it does not


@pytest.mark.parametrize("c", [2, 5, 40])
def test_scikit_learn_and_torchmetrics_agree(c):
    z, y = images(c=c)
    p = Predictive(z)
    true, predicted = pixels(p.probs, y)
    counts = sklearn.metrics.confusion_matrix(true, predicted, labels=range(c))
    assert np.array_equal(metrics.confusion(p, y, ignore=VOID).numpy(), counts)
    found = sorted(set(true) | set(predicted))
    jaccard = sklearn.metrics.jaccard_score(true, predicted, labels=found, average="macro")
    mean_iou = float(metrics.mean_iou(p, y, ignore=VOID))
    assert mean_iou == pytest.approx(jaccard)
    theirs = torchmetrics.functional.classification.multiclass_jaccard_index(p.label, y, c, ignore_index=VOID)
    assert mean_iou == pytest.approx(float(theirs), rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about classes that were only predicted
        balanced = sklearn.metrics.balanced_accuracy_score(true, predicted)
    assert float(metrics.mean_class_accuracy(p, y, ignore=VOID)) == pytest.approx(balanced)


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


def test_accuracy_nll_and_ece_of_pixels_leave_the_void_out():
    z, y = images()
    mean = z.double().softmax(2).mean(0)
    hits, losses, sure = [], [], []
    for b, i, j in (y != VOID).nonzero().tolist():
        p, label = mean[b, :, i, j].numpy(), int(y[b, i, j])
        hits.append(p.argmax() == label)
        losses.append(-math.log(p[label]))
        sure.append(p.max())
    assert float(metrics.accuracy(Predictive(z), y, ignore=VOID)) == pytest.approx(np.mean(hits))
    assert float(metrics.nll(Predictive(z), y, ignore=VOID)) == pytest.approx(np.mean(losses), rel=1e-6)
    gaps = np.zeros(15)
    for hit, p in zip(hits, sure, strict=True):
        gaps[math.ceil(p * 15) - 1] += hit - p
    expected = np.abs(gaps).sum() / len(hits)
    assert float(metrics.ece(Predictive(z), y, ignore=VOID)) == pytest.approx(expected, rel=1e-5)
