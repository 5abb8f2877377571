"""Rows of predictions: without targets, indexed, and calibrated."""

import numpy as np
import pytest
import torch

from multitudes import metrics
from multitudes.evaluation.calibrate import Calibration
from multitudes.evaluation.temperature import Temperature, Vector
from multitudes.metrics.class_inputs import places, read_without_target
from multitudes.tasks.predictive import Predictive
from tests.metrics.cases import classes, logits, pixels
from tests.zoo.predictions import raises

WEIGHT, BIAS = torch.tensor([0.5, 1.5, 1.0, 0.2]), torch.tensor([0.3, -2.0, 1.0, 0.0])


def calibrated(z):
    """Calibrate with a weight and a bias for each class, which change labels."""
    return Calibration("classification", Vector(WEIGHT, BIAS), None)(Predictive(z))


def text_calibrated(z):
    """Compute the same in NumPy: logits `[S, B, C, ...]` -> probabilities `[B, C, ...]`."""
    z = np.moveaxis(z.double().numpy(), 2, -1)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    scaled = np.exp(WEIGHT.numpy() * np.log(p.mean(0)) + BIAS.numpy())
    return torch.from_numpy(np.moveaxis(scaled / scaled.sum(-1, keepdims=True), -1, 1))


OF_THE_MEAN = {
    name: getattr(metrics, name)
    for name in ("nll", "brier", "accuracy", "ece", "classwise_ece", "aurc", "relative_confidence")
}
OF_MEMBERS = {
    name: getattr(metrics, name)
    for name in ("member_error", "disagreement", "js_divergence", "ensemble_js", "ambiguity_nll", "error_correlation")
}


@pytest.mark.parametrize("shape", [(3, 40, 4), (1, 40, 4), (3, 2, 4, 3, 5)], ids=str)
@pytest.mark.parametrize("function", OF_THE_MEAN.values(), ids=OF_THE_MEAN)
def test_metrics_use_calibrated_probabilities(function, shape):
    z = logits(*shape)
    p, expected = calibrated(z), text_calibrated(z)
    y = expected.argmax(1)
    y.view(-1)[::5] = classes(4, y.numel())[::5]  # right but for a few
    assert float(function(p, y)) == pytest.approx(float(function(expected, y)), rel=1e-5)
    assert float(function(p, y)) != pytest.approx(float(function(Predictive(z), y)), rel=1e-3)
    y[y == 2] = 255
    assert float(function(p, y, ignore=255)) == pytest.approx(float(function(expected, y, ignore=255)), rel=1e-5)


@pytest.mark.parametrize("function", OF_MEMBERS.values(), ids=OF_MEMBERS)
def test_metrics_of_members_ignore_a_calibration_of_the_mean(function):
    z, y = logits(3, 40, 4), classes(4, 40)
    one, other = function(calibrated(z), y), function(Predictive(z), y)
    torch.testing.assert_close(one, other)


def test_rows_keep_the_calibration():
    z, y = logits(3, 2, 4, 3, 5), classes(4, 2, 3, 5)
    p, (expected, _) = calibrated(z), pixels(text_calibrated(z), y)
    kept = y.flatten() != 2
    for rows, own in (
        (metrics.read_rows(p, y), expected),
        (metrics.read_rows(calibrated(z.requires_grad_()), y), expected),
        (metrics.read_rows(p, y, ignore=2), expected[kept]),
        (metrics.read_rows(metrics.read_rows(p, y), ignore=2), expected[kept]),
        (metrics.read_rows(p, y)[:7], expected[:7]),
        (read_without_target(p), expected),
    ):
        assert rows.predictive.calibration is not None
        torch.testing.assert_close(rows.probs.double(), own, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rows.log_probs.exp().double(), own, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rows.predictive.probs, rows.probs)


def test_nll_of_calibrated_predictions_is_exact_where_probabilities_underflow():
    cold = Calibration("classification", Temperature(torch.tensor(0.5)), None)
    p = cold(Predictive(torch.tensor([[[0.0, -300.0]]])))
    assert p.probs[0, 1] == 0
    assert float(metrics.nll(p, torch.tensor([1]))) == pytest.approx(600)


def test_places_are_inputs_and_pixels():
    assert places(Predictive(logits(3, 2, 4, 5, 6))) == places(logits(2, 4, 5, 6)) == (2, 5, 6)
    assert places(Predictive(logits(3, 2, 4))) == places(logits(2, 4)) == (2,)
    assert places(read_without_target(Predictive(logits(3, 2, 4, 5, 6)))) == (60,)


def test_rows_without_targets_are_checked():
    p = logits(9, 4).softmax(1)
    assert torch.equal(read_without_target(p).probs, p)
    assert len(read_without_target(p, torch.full((9,), 2), ignore=2)) == 0
    with raises("target is needed to find the rows that ignore=2 leaves out, got None"):
        read_without_target(p, ignore=2)
    with raises("prediction must be a Predictive or a floating-point tensor of probabilities, got list"):
        read_without_target(p.tolist())
    with raises("prediction must be probabilities [B, classes, ...], got shape [9]"):
        read_without_target(p[:, 0])
    with raises("prediction must add up to 1 over the classes in dim 1, got a sum of 0.5 at index [0] of [9]"):
        read_without_target(p / 2)
