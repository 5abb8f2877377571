"""Intervals and sets have the requested coverage, and equal split conformal prediction."""

from __future__ import annotations

import math
import warnings
from statistics import NormalDist

import numpy as np
import pytest

pytest.importorskip("sklearn")

import torch

from multitudes.sklearn import MultitudeRegressor
from tests.sklearn.sklearn_cases import blobs, classifier, line, regressor, spreading


def share_error(level: float, held_out: int, test: int) -> float:
    """Standard deviation of the coverage on test rows, over held-out and test rows."""
    return math.sqrt(level * (1 - level) * (1 / held_out + 1 / test))


@pytest.fixture(scope="module")
def wave() -> MultitudeRegressor:
    """A model of 2,000 rows with growing noise."""
    x, y, _ = spreading(2000, seed=0)
    return regressor(epochs=100, members=4, batch_size=256, validation=0.25).fit(x, y)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_have_the_requested_coverage(wave: MultitudeRegressor, level: float) -> None:
    new, truth, _ = spreading(4000, seed=1)
    low, high = wave.predict_interval(new, level)
    assert abs(((low <= truth) & (truth <= high)).mean() - level) < 4 * share_error(level, 500, 4000)


def test_intervals_are_near_the_true_quantiles(wave: MultitudeRegressor) -> None:
    new, _, deviation = spreading(1000, seed=1)
    low, high = wave.predict_interval(new, 0.9)
    reach = NormalDist().inv_cdf(0.95) * deviation
    mean = np.sin(6 * new[:, 0])
    assert np.median(abs(low - (mean - reach)) / deviation) < 0.3
    assert np.median(abs(high - (mean + reach)) / deviation) < 0.3
    found, std = wave.predict(new, return_std=True)
    assert np.median(abs(std / deviation - 1)) < 0.2 and np.median(abs(found - mean) / deviation) < 0.2
    quantiles = wave.predict_quantiles(new, (0.05, 0.5, 0.95))
    right = mean[:, None] + deviation[:, None] * [[NormalDist().inv_cdf(level) for level in (0.05, 0.5, 0.95)]]
    assert np.median(abs(quantiles - right) / deviation[:, None]) < 0.3


def held_out(model: MultitudeRegressor, X: np.ndarray) -> np.ndarray:
    """Rows of X that `fit` holds out."""
    groups = torch.zeros(len(X), dtype=torch.int64)
    seed = int(np.random.RandomState(model.random_state).randint(2**31 - 1))
    return model._split(groups, seed)[0][1].numpy()


def test_an_interval_equals_split_conformal_prediction() -> None:
    x, y, _ = spreading(400, seed=0)
    model = regressor().fit(x, y)
    rows = held_out(model, x)
    mean, std = model.predict(x, return_std=True)
    scores = np.sort(abs(y[rows] - mean[rows]) / std[rows])
    threshold = scores[math.ceil((len(rows) + 1) * 0.9) - 1]
    low, high = model.predict_interval(x, 0.9)
    assert len(rows) == 60
    for found, by_hand in ((low, mean - threshold * std), (high, mean + threshold * std)):
        assert (abs(found - by_hand) < 1e-5 * std).all()


def test_sets_have_the_requested_coverage() -> None:
    random = np.random.default_rng(0)
    X = random.normal(size=(5000, 2))
    p = 1 / (1 + np.exp(-2 * X[:, 0]))
    y = (random.random(5000) < p).astype(int)
    model = classifier(epochs=30, validation=0.5).fit(X[:1000], y[:1000])
    sets = model.predict_set(X[1000:], 0.9)
    assert abs(sets[np.arange(4000), y[1000:]].mean() - 0.9) < 4 * share_error(0.9, 500, 4000)
    sure = sets.sum(1) == 1
    assert sure.mean() > 0.3


def test_folds_calibrate_on_every_row() -> None:
    x, y, _ = spreading(400, seed=0)
    model = regressor(folds=4).fit(x, y)
    assert len(model.model_.networks) == 4 and len(model.model_.conformal.scores) == 400
    new, truth, _ = spreading(4000, seed=1)
    low, high = model.predict_interval(new, 0.9)
    assert abs(((low <= truth) & (truth <= high)).mean() - 0.9) < 4 * share_error(0.9, 400, 4000)
    p = model.model_.predictive(torch.zeros(1, 1))
    assert p.members == 4 * 2


def test_too_few_held_out_rows_give_infinite_intervals_and_a_warning() -> None:
    X, y = line(20)
    model = regressor().fit(X, y)
    with pytest.warns(UserWarning, match=r"3 held-out rows are too few for level=0.9"):
        low, high = model.predict_interval(X, 0.9)
    assert np.isinf(low).all() and np.isinf(high).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict_interval(X, 0.7)
    labels = blobs(20)[1]
    with pytest.warns(UserWarning, match="too few"):
        assert classifier().fit(X, labels).predict_set(X, 0.9).all()


def test_without_held_out_rows_there_are_no_intervals() -> None:
    X, y = line(40)
    model = regressor(validation=None).fit(X, y)
    with pytest.raises(ValueError, match=r"require held-out rows: fit with validation=0.15 or folds=5"):
        model.predict_interval(X)


@pytest.mark.slow
def test_learned_quantiles_are_near_the_true_ones() -> None:
    x, y, _ = spreading(2000, seed=0)
    levels = (0.05, 0.5, 0.95)
    model = regressor(epochs=100, batch_size=256, validation=0.25, quantiles=levels).fit(x, y)
    new, truth, deviation = spreading(4000, seed=1)
    found = model.predict_quantiles(new, levels)
    right = np.sin(6 * new[:, :1]) + deviation[:, None] * [[NormalDist().inv_cdf(level) for level in levels]]
    assert found.shape == (4000, 3) and np.median(abs(found - right) / deviation[:, None]) < 0.3
    low, high = model.predict_interval(new, 0.9)
    assert abs(((low <= truth) & (truth <= high)).mean() - 0.9) < 4 * share_error(0.9, 500, 4000)
