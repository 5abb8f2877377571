"""Estimators that are quick to train, and tables to train them on."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

import multitudes as mt
from multitudes.sklearn import MultitudeClassifier, MultitudeRegressor

EPOCHS = 8


def small(inputs: int, outputs: int) -> nn.Module:
    """A network that trains in a moment."""
    return mt.models.mlp(inputs, outputs, (32,))


def quick(**changes: Any) -> dict[str, Any]:
    """The arguments of an estimator that is quick to train."""
    own = {
        "method": "batch_ensemble", "members": 2, "module": small, "epochs": EPOCHS, "lr": 0.05, "batch_size": 64,
        "random_state": 0,
    }  # fmt: skip
    return own | changes


def classifier(**changes: Any) -> MultitudeClassifier:
    """A quick classifier."""
    return MultitudeClassifier(**quick(**changes))


def regressor(**changes: Any) -> MultitudeRegressor:
    """A quick regressor."""
    return MultitudeRegressor(**quick(**changes))


def line(rows: int = 200, seed: int = 0) -> tuple[Any, Any]:
    """Features `[N, 3]` and a target that is linear in the first, with a little noise."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(rows, 3))
    return X, 5 + 2 * X[:, 0] + 0.1 * random.normal(size=rows)


def blobs(rows: int = 200, seed: int = 0) -> tuple[Any, Any]:
    """Features `[N, 3]` and one of three classes, texts, which the first feature tells but for a little noise."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(rows, 3))
    place = np.digitize(X[:, 0] + 0.1 * random.normal(size=rows), [-0.5, 0.5])
    return X, np.array(["low", "middle", "high"])[place]


def spreading(rows: int, seed: int) -> tuple[Any, Any, Any]:
    """x `[N, 1]` in [0, 1], y normal with mean sin(6 x) and deviation 0.1 + 0.5 x, and that deviation."""
    random = np.random.default_rng(seed)
    x = random.random((rows, 1))
    deviation = 0.1 + 0.5 * x[:, 0]
    return x, np.sin(6 * x[:, 0]) + deviation * random.normal(size=rows), deviation
