"""The estimators inside the tools of scikit-learn, joblib and MAPIE."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import joblib
from sklearn.calibration import CalibratedClassifierCV
from sklearn.inspection import permutation_importance
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

from multitudes.sklearn import MultitudeClassifier, MultitudeRegressor
from tests.sklearn.sklearn_cases import blobs, classifier, line, regressor


def test_an_estimator_works_in_pipelines_and_cross_validation() -> None:
    X, y = line()
    scores = cross_val_score(make_pipeline(StandardScaler(), regressor()), X, y, cv=3)
    assert scores.min() > 0.8


@pytest.mark.slow
def test_a_grid_search_accepts_numpy_numbers_and_refits_the_best() -> None:
    X, y = blobs()
    grid = {"members": np.array([1, 3]), "lr": np.array([1e-6, 2e-2])}
    search = GridSearchCV(classifier(), grid, cv=2).fit(X, y)
    assert search.best_params_["lr"] == 2e-2 and search.best_score_ > 0.8
    assert list(search.classes_) == ["high", "low", "middle"]


def test_an_estimator_can_be_wrapped_for_calibration() -> None:
    X, y = blobs()
    wrapped = CalibratedClassifierCV(classifier(), cv=2).fit(X, y)
    assert wrapped.predict_proba(X).shape == (200, 3) and wrapped.score(X, y) > 0.8


def test_permutation_importance_finds_the_relevant_feature() -> None:
    X, y = line()
    found = permutation_importance(regressor().fit(X, y), X, y, n_repeats=3, random_state=0)
    assert found.importances_mean[0] > 1 and abs(found.importances_mean[1:]).max() < 0.1


def test_joblib_restores_an_estimator() -> None:
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


def test_mapie_wraps_a_classifier() -> None:
    mapie = pytest.importorskip("mapie.classification")
    X, y = blobs(900)
    wrapped = mapie.SplitConformalClassifier(classifier().fit(X[:300], y[:300]), confidence_level=0.9, prefit=True)
    wrapped.conformalize(X[300:600], y[300:600])
    labels, sets = wrapped.predict_set(X[600:])
    place = np.searchsorted(["high", "low", "middle"], y[600:])
    held = sets[np.arange(300), place, 0]
    assert (labels == y[600:]).mean() > 0.8 and held.mean() > 0.9 - 4 * (0.9 * 0.1 * 2 / 300) ** 0.5


# -- checks of scikit-learn --------------------------------------------------------------------------------

EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "a duplicated row may be held out once, or be in two batches, "
    "so a weight of two is equivalent only on average"
}


def checks() -> Iterator[Any]:
    """All checks, with names that are equal in every process."""
    for estimator in (classifier(), regressor()):
        slow = [pytest.mark.slow] if isinstance(estimator, MultitudeRegressor) else []
        for number, (own, check) in enumerate(estimator_checks_generator(estimator)):
            name = getattr(check, "func", check).__name__
            marks = (
                [pytest.mark.xfail(reason=EXPECTED_FAILURES[name], strict=False)] if name in EXPECTED_FAILURES else []
            )
            yield pytest.param(own, check, marks=[*marks, *slow], id=f"{type(estimator).__name__}-{name}-{number}")


@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_a_check_of_scikit_learn_passes(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MultitudeClassifier, MultitudeRegressor])
def test_all_checks_pass_at_the_defaults(kind: type) -> None:
    results = check_estimator(kind(), expected_failed_checks=EXPECTED_FAILURES, on_fail=None)
    failed = {each["check_name"]: each["exception"] for each in results if each["status"] == "failed"}
    assert not failed
    assert {each["check_name"] for each in results if each["status"] == "xfail"} == set(EXPECTED_FAILURES)
