"""The estimators inside of what scikit-learn and MAPIE wrap around estimators."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("sklearn")

import joblib
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.inspection import permutation_importance
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.sklearn.sklearn_cases import blobs, classifier, line, quick, regressor


def test_in_a_pipeline_and_in_cross_validation() -> None:
    X, y = line()
    scores = cross_val_score(make_pipeline(StandardScaler(), regressor()), X, y, cv=3)
    assert scores.min() > 0.8


@pytest.mark.slow
def test_a_grid_search_takes_numbers_of_numpy_and_refits_the_best() -> None:
    X, y = blobs()
    grid = {"members": np.array([1, 3]), "lr": np.array([1e-6, 2e-2])}
    search = GridSearchCV(classifier(), grid, cv=2).fit(X, y)
    assert search.best_params_["lr"] == 2e-2 and search.best_score_ > 0.8
    assert list(search.classes_) == ["high", "low", "middle"]


def test_a_wrapped_calibration_knows_the_classes() -> None:
    X, y = blobs()
    wrapped = CalibratedClassifierCV(classifier(), cv=2).fit(X, y)
    assert wrapped.predict_proba(X).shape == (200, 3) and wrapped.score(X, y) > 0.8


def test_permutation_importance_finds_the_feature_that_matters() -> None:
    X, y = line()
    found = permutation_importance(regressor().fit(X, y), X, y, n_repeats=3, random_state=0)
    assert found.importances_mean[0] > 1 and abs(found.importances_mean[1:]).max() < 0.1


def test_a_clone_has_the_same_arguments_and_gives_the_same_predictions() -> None:
    X, y = line()
    model = regressor().fit(X, y)
    copy = clone(model)
    assert copy.get_params() == model.get_params() and not hasattr(copy, "model_")
    assert np.array_equal(copy.set_params(epochs=quick()["epochs"]).fit(X, y).predict(X), model.predict(X))


def test_joblib_gives_it_back() -> None:
    X, y = blobs()
    model, file = classifier().fit(X, y), io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    loaded = joblib.load(file)
    assert np.array_equal(loaded.predict_proba(X), model.predict_proba(X))
    assert np.array_equal(loaded.predict_set(X, 0.8), model.predict_set(X, 0.8))


def test_mapie_wraps_a_fitted_regressor_and_covers() -> None:
    mapie = pytest.importorskip("mapie.regression")
    X, y = line(900)
    wrapped = mapie.SplitConformalRegressor(regressor().fit(X[:300], y[:300]), confidence_level=0.9, prefit=True)
    wrapped.conformalize(X[300:600], y[300:600])
    _, intervals = wrapped.predict_interval(X[600:])
    held = (intervals[:, 0, 0] <= y[600:]) & (y[600:] <= intervals[:, 1, 0])
    assert abs(held.mean() - 0.9) < 4 * (0.9 * 0.1 * (1 / 300 + 1 / 300)) ** 0.5


@pytest.mark.slow
def test_mapie_trains_a_regressor_itself_fold_by_fold() -> None:
    mapie = pytest.importorskip("mapie.regression")
    X, y = line()
    wrapped = mapie.CrossConformalRegressor(regressor(), confidence_level=0.9, cv=3)
    wrapped.fit_conformalize(X, y)
    points, intervals = wrapped.predict_interval(X)
    assert points.shape == (200,) and (intervals[:, 0, 0] < intervals[:, 1, 0]).all()


def test_mapie_wraps_a_classifier() -> None:
    mapie = pytest.importorskip("mapie.classification")
    X, y = blobs(900)
    wrapped = mapie.SplitConformalClassifier(classifier().fit(X[:300], y[:300]), confidence_level=0.9, prefit=True)
    wrapped.conformalize(X[300:600], y[300:600])
    labels, sets = wrapped.predict_set(X[600:])
    place = np.searchsorted(["high", "low", "middle"], y[600:])
    held = sets[np.arange(300), place, 0]
    assert (labels == y[600:]).mean() > 0.8 and held.mean() > 0.9 - 4 * (0.9 * 0.1 * 2 / 300) ** 0.5
