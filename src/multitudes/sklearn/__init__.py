"""Tables by scikit-learn's rules: `MultitudeClassifier` and `MultitudeRegressor`.

    from multitudes.sklearn import MultitudeRegressor

    model = MultitudeRegressor(random_state=0).fit(X, y)      # arrays, pandas, polars or Arrow
    low, high = model.predict_interval(X_new, 0.9)

`inputs` reads tables into columns, `training` trains a network on rows, `learned` is what came of it and predicts,
`base` has what both estimators share, `files` saves and loads them.

Imports every room but `study`, `report` and `cli`, and scikit-learn. A new argument goes into both estimators and, if
training needs it, into `training.Recipe`; a new kind of table is a case of `inputs.columns_of`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitudes.core.lazy import lazy_names

if TYPE_CHECKING:  # as below, for those who read types
    from multitudes.sklearn.classifier import MultitudeClassifier
    from multitudes.sklearn.regressor import MultitudeRegressor

__all__ = ["MultitudeClassifier", "MultitudeRegressor"]

HOMES = {"classifier": "MultitudeClassifier", "regressor": "MultitudeRegressor"}
__getattr__, __dir__ = lazy_names(__name__, HOMES)
