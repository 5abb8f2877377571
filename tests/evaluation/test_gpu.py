"""Metrics, corruptions and calibration on a GPU give the numbers of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import multitudes as mt
from multitudes import metrics
from multitudes.evaluation.evaluate import evaluate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LOGITS = 3 * torch.randn(3, 200, 7, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(7, (200,), generator=torch.Generator().manual_seed(1))
VALUES = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
IMAGES = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(3))

DATA = {
    **dict.fromkeys(("classification", "targetless", "segmentation"), (LOGITS, "classification", TARGET)),
    **dict.fromkeys(("regression", "intervals"), (VALUES, "regression", LOGITS[0, :, 0])),
}


@pytest.mark.parametrize("name", [name for name, each in metrics.METRICS.items() if each.kind.name in DATA])
def test_metrics_agree_on_all_devices(name):
    predictions, task, y = DATA[metrics.METRICS[name].kind.name]
    own, there, mixed = (
        getattr(metrics, name)(mt.Predictive(predictions.to(device), task), y.to(other))
        for device, other in (("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu"))
    )
    if isinstance(own, torch.Tensor):
        torch.testing.assert_close(there.cpu(), own, rtol=1e-5, atol=1e-7, equal_nan=True)
        assert torch.equal(mixed, there)


def test_detection_agrees():
    own = metrics.detect(mt.Predictive(LOGITS), mt.Predictive(LOGITS / 3))
    there = metrics.detect(mt.Predictive(LOGITS.cuda()), mt.Predictive(LOGITS.cuda() / 3))
    for uncertainty in own:
        for measure in ("auroc", "aupr", "fpr"):
            expected = float(getattr(own[uncertainty], measure))
            assert float(getattr(there[uncertainty], measure)) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", mt.shift.CORRUPTIONS + mt.shift.EXTRA)
def test_corruptions_are_as_strong_as_on_the_cpu(name):
    for severity in (1, 5):
        there = mt.shift.corrupt(IMAGES.cuda(), name, severity, seed=0)
        assert there.is_cuda and there.shape == IMAGES.shape and there.dtype == IMAGES.dtype
        assert float(there.min()) >= 0 and float(there.max()) <= 1
        assert torch.equal(there, mt.shift.corrupt(IMAGES.cuda(), name, severity, seed=0))
        own = (mt.shift.corrupt(IMAGES, name, severity, seed=0) - IMAGES).square().mean()
        assert float((there.cpu() - IMAGES).square().mean()) == pytest.approx(float(own), rel=0.5)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 900, 7))


def test_evaluations_agree(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net, y = mt.deep_ensemble(small(), 2, seed=0), torch.arange(6)
    options = {"shift": "contrast", "severities": [3], "ood": 1 - IMAGES}
    own = evaluate(net, (IMAGES, y), **options)
    there = evaluate(net.cuda(), (IMAGES, y), **options)
    assert dict(there) == pytest.approx(dict(own), rel=1e-3, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic"])
def test_calibrated_networks_agree(scaling):
    torch.manual_seed(0)
    x, y = torch.randn(300, 5), torch.randint(3, (300,))
    own = mt.calibrate(mt.deep_ensemble(nn.Linear(5, 3), 2, seed=0), (x, y), scaling=scaling, seed=0)
    expected = own.predict(x)
    found = own.cuda().predict(x.cuda())
    torch.testing.assert_close(found.probs.cpu(), expected.probs, atol=1e-4, rtol=1e-4)
    assert (found.set(0.9).cpu() == expected.set(0.9)).float().mean() > 0.99
