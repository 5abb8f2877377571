"""Overconfident predictions that the tests of calibration share."""

import torch

import multitudes as mt
from multitudes.evaluation.calibrate import fit_calibration
from multitudes.tasks.predictive import Predictive
from tests.zoo.predictions import randn


def sample(logits, seed=99):
    """Draw classes from the probabilities of logits `[N, C]`, with another seed than the tests' `randn`."""
    return logits.softmax(1).multinomial(1, generator=torch.Generator().manual_seed(seed))[:, 0]


def classifier(inputs=400, classes=5, members=3, sharpness=3.0, dtype=torch.float32):
    """Overconfident members, by a factor of about `sharpness`, and classes."""
    logits = randn(inputs, classes, scale=2.0)
    noise = randn(members, inputs, classes, scale=0.5, seed=1)
    return Predictive((sharpness * (logits + noise)).to(dtype)), sample(logits)


def nll(p, y):
    return float(mt.metrics.nll(p, y))


def scaled(p, y, scaling, **options):
    """Fit only the scaling; return it and the calibrated predictions."""
    calibration = fit_calibration(p, y, scaling=scaling, conformal=None, **options)
    return calibration.scaling, calibration(p)
