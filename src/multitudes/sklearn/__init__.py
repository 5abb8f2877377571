"""Estimators for tables with the API of scikit-learn.

    from multitudes.sklearn import MultitudeRegressor

    model = MultitudeRegressor(random_state=0).fit(X, y)      # arrays, pandas, polars or Arrow
    low, high = model.predict_interval(X_new, 0.9)

`frames` reads tables into columns, `train` trains a network, `fitted` predicts, `base` is shared by both estimators,
`estimator_files` saves and loads them. Add an argument to both estimators, and to `train.FitSettings` if training
needs it. Add a kind of table to `frames.frame_columns`. Imports the library, `lab.data` and scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitudes.base.lazy import lazy_names

if TYPE_CHECKING:  # for static type checkers
    from multitudes.sklearn.classifier import MultitudeClassifier
    from multitudes.sklearn.regressor import MultitudeRegressor

__all__ = ["MultitudeClassifier", "MultitudeRegressor"]

HOMES = {"classifier": "MultitudeClassifier", "regressor": "MultitudeRegressor"}
__getattr__, __dir__ = lazy_names(__name__, HOMES)
