"""Metrics agree with torchmetrics and scikit-learn, and with closed forms."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
import torchmetrics.functional as tm

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.cases import heads, members, points, random_case
from tests.metrics.test_segmentation import VOID, images, pixels


def test_calibration_errors_agree_with_torchmetrics() -> None:
    p, y = random_case(n=500, c=5)
    for bins in (10, 15, 20):
        for ours, norm in ((metrics.ece, "l1"), (metrics.mce, "max")):
            theirs = tm.classification.multiclass_calibration_error(p, y, num_classes=5, n_bins=bins, norm=norm)
            assert float(ours(p, y, bins=bins)) == pytest.approx(float(theirs), abs=1e-5)


def test_scores_agree_with_scikit_learn() -> None:
    p, y = random_case(n=200, c=5)
    q = p.double().numpy()
    q /= q.sum(1, keepdims=True)
    assert float(metrics.nll(p, y)) == pytest.approx(sklearn.metrics.log_loss(y, q, labels=range(5)), rel=1e-6)
    assert float(metrics.accuracy(p, y)) == pytest.approx(sklearn.metrics.accuracy_score(y, q.argmax(1)))
    top = sklearn.metrics.top_k_accuracy_score(y, q, k=3, labels=range(5))
    assert float(metrics.topk_accuracy(p, y, k=3)) == pytest.approx(top)
    p, y = random_case(n=200, c=2)
    second = sklearn.metrics.brier_score_loss(y, p[:, 1].numpy())
    assert float(metrics.brier(p, y)) == pytest.approx(2 * second, rel=1e-6)


def test_errors_of_values_agree_with_torchmetrics() -> None:
    p, y = heads(d=3)
    theirs = tm.mean_squared_error(p.mean, y, squared=False)
    assert float(metrics.rmse(p, y)) == pytest.approx(float(theirs), rel=1e-6)
    p, y = points(s=1)  # the CRPS of a single point is its absolute error
    assert float(metrics.crps(p, y)) == pytest.approx(float(tm.mean_absolute_error(p.mean, y)), rel=1e-6)


def test_crps_of_one_gaussian_has_gneitings_closed_form() -> None:
    p, y = heads(s=1)
    mu, var = members(p)
    sigma, norm = np.sqrt(var[0]), scipy.stats.norm
    z = (y.double().numpy()[:, 0] - mu[0]) / sigma
    expected = sigma * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert float(metrics.crps(p, y)) == pytest.approx(expected.mean(), rel=1e-9)


@pytest.mark.parametrize("c", [2, 40])
def test_dense_scores_agree_with_scikit_learn_and_torchmetrics(c: int) -> None:
    z, y = images(c=c)
    p = Predictive(z)
    true, predicted = pixels(p.probs, y)
    counts = sklearn.metrics.confusion_matrix(true, predicted, labels=range(c))
    assert np.array_equal(metrics.confusion(p, y, ignore=VOID).numpy(), counts)
    found = sorted(set(true) | set(predicted))
    jaccard = sklearn.metrics.jaccard_score(true, predicted, labels=found, average="macro")
    mean_iou = float(metrics.mean_iou(p, y, ignore=VOID))
    assert mean_iou == pytest.approx(jaccard)
    theirs = tm.classification.multiclass_jaccard_index(p.label, y, c, ignore_index=VOID)
    assert mean_iou == pytest.approx(float(theirs), rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about classes that were only predicted
        balanced = sklearn.metrics.balanced_accuracy_score(true, predicted)
    assert float(metrics.mean_class_accuracy(p, y, ignore=VOID)) == pytest.approx(balanced)


@pytest.mark.parametrize("function", [metrics.nll, metrics.brier])
def test_proper_scores_of_the_ensemble_are_never_worse_than_the_mean_of_its_members(function) -> None:
    for seed in range(10):
        z = 2 * torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(seed))
        y = torch.randint(4, (12,), generator=torch.Generator().manual_seed(seed))
        alone = np.mean([float(function(Predictive(each[None]), y)) for each in z])
        assert float(function(Predictive(z), y)) <= alone + 1e-6
