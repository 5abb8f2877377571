"""Estimators for tables with scikit-learn's API: `MultitudeClassifier` and `MultitudeRegressor`.

    from multitudes.sklearn import MultitudeRegressor

    model = MultitudeRegressor(random_state=0).fit(X, y)      # arrays, pandas, polars or Arrow
    low, high = model.predict_interval(X_new, 0.9)

`frames` reads tables into columns, `train` trains a network on rows, `fitted` is the fitted part and predicts,
`base` is shared by both estimators, `estimator_files` saves and loads them.

Imports the library, `lab.data` and scikit-learn. Add a new argument to both estimators and, if
training needs it, to `train.Recipe`; a new kind of table is a case of `frames.columns_of`.
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
