"""Estimators for tables with scikit-learn's API: `MultitudeClassifier` and `MultitudeRegressor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitudes.core.lazy import lazy_names

if TYPE_CHECKING:  # for static type checkers
    from multitudes.sklearn.classifier import MultitudeClassifier
    from multitudes.sklearn.regressor import MultitudeRegressor

__all__ = ["MultitudeClassifier", "MultitudeRegressor"]

HOMES = {"classifier": "MultitudeClassifier", "regressor": "MultitudeRegressor"}
__getattr__, __dir__ = lazy_names(__name__, HOMES)
