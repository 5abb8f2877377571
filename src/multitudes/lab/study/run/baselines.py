"""Baselines without a network: chance, a constant, and scikit-learn models with default settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multitudes.base.checks import needed
from multitudes.lab.data import Data
from multitudes.metrics import balanced_accuracy, macro_auroc
from multitudes.metrics.regression_inputs import Forecasts

MOST_ROWS = 50_000
"""Largest test part for which per-row scores are kept."""
MOST_FOR_FOREST = 20_000
"""Largest number of training rows for a random forest; more take too long."""
MOST_FOR_LINEAR = 200_000
"""Largest number of training rows for a linear model; more change nothing."""
TREES = 100
"""Trees in a random forest; scikit-learn's default."""
TINY = 1e-12
"""Lower bound on probabilities, so that a class missing from training does not give an infinite score."""
LEVEL = 0.9
"""Level of the measured intervals."""


def measure_baselines(data: Data) -> dict[str, Any]:
    """Return the test scores of each baseline, overall and per row, as JSON.

    - `chance` (classes): uniform probabilities.
    - `constant`: the class frequencies of the training part, or the Gaussian of its targets.
    - `gradient_boosting`, `random_forest` and `linear` (logistic or ridge regression) for tables: scikit-learn models
      with default settings. In regression, the standard deviation is that of the validation residuals.
    - `linear` for texts: logistic or ridge regression on tf-idf token counts.
    - `gradient_boosting_quantiles` (regression on tables): quantiles 0.05, 0.5 and 0.95, for 90 % intervals.
    """
    makers: dict[str, Callable[[Data], Tensor | Forecasts]] = {"constant": _constant}
    if data.classes:
        makers = {"chance": _chance, **makers}
    if data.kind.is_text:
        makers["linear"] = _linear
    if data.kind.has_columns:
        makers |= {"gradient_boosting": _boosting, "linear": _linear}
        if not data.classes:
            makers["gradient_boosting_quantiles"] = _quantiles
        if len(data.train) <= MOST_FOR_FOREST:
            makers["random_forest"] = _forest
    return {
        "fingerprint": data.fingerprint,
        "baselines": {name: _scored(make(data), data) for name, make in makers.items()},
    }


# -- predictions: probabilities `[N, C]`, or forecasts in the targets' units ---------------------------------


def _gaussian(data: Data, mean: Tensor, deviation: Tensor) -> Forecasts:
    return Forecasts(mean[None], deviation.square().expand(1, len(mean)), data.test.y.double())


def _chance(data: Data) -> Tensor:
    return torch.full((len(data.test), len(data.classes)), 1 / len(data.classes), dtype=torch.float64)


def _constant(data: Data) -> Tensor | Forecasts:
    rows, y = len(data.test), data.train.y
    if data.classes:
        counts = torch.bincount(y, minlength=len(data.classes)).double()
        return (counts / counts.sum()).expand(rows, -1)
    exact = y.double()
    deviation = exact.std(correction=0).clamp(min=1e-6 * max(1.0, float(exact.abs().max())))
    return _gaussian(data, exact.mean().expand(rows), deviation)


def _boosting(data: Data) -> Tensor | Forecasts:
    ensemble = needed("sklearn.ensemble", "study", "gradient boosting")
    if data.classes:
        return _probabilities(ensemble.HistGradientBoostingClassifier(random_state=0), data)
    return _with_residuals(ensemble.HistGradientBoostingRegressor(random_state=0), data)


def _quantiles(data: Data) -> Forecasts:
    ensemble = needed("sklearn.ensemble", "study", "gradient boosting")
    x, test = (_inputs(data, part.x, normalised=False) for part in (data.train, data.test))
    y = data.train.y.double().numpy()
    low, middle, high = (
        torch.from_numpy(
            ensemble.HistGradientBoostingRegressor(loss="quantile", quantile=level, random_state=0)
            .fit(x, y)
            .predict(test)
        )
        for level in ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2)
    )
    interval = torch.minimum(low, high), torch.maximum(low, high)
    return Forecasts(middle[None], torch.zeros_like(middle)[None], data.test.y.double(), lambda level: interval)


def _forest(data: Data) -> Tensor | Forecasts:
    ensemble = needed("sklearn.ensemble", "study", "a random forest")
    if not data.classes:
        return _with_residuals(ensemble.RandomForestRegressor(TREES, random_state=0), data)
    probs = _probabilities(ensemble.RandomForestClassifier(TREES, random_state=0), data)
    # Smooth as if one more tree voted uniformly: a class without votes is not impossible.
    return (TREES * probs + 1 / len(data.classes)) / (TREES + 1)


def _linear(data: Data) -> Tensor | Forecasts:
    models = needed("sklearn.linear_model", "study", "a linear model")
    if data.classes:
        return _probabilities(models.LogisticRegression(max_iter=1000), data, normalised=True)
    return _with_residuals(models.Ridge(), data, normalised=True)


def _probabilities(model: Any, data: Data, normalised: bool = False) -> Tensor:
    """Return a classifier's probabilities `[N, C]`; 0 for classes missing from training."""
    probs = torch.zeros(len(data.test), len(data.classes), dtype=torch.float64)
    present = data.train.y.unique()
    if len(present) == 1:  # scikit-learn cannot fit a single class
        probs[:, present] = 1.0
        return probs
    _fit(model, data, data.train.y, normalised)
    found = model.predict_proba(_inputs(data, data.test.x, normalised))
    probs[:, torch.from_numpy(model.classes_)] = torch.from_numpy(found).double()
    return probs


def _with_residuals(model: Any, data: Data, normalised: bool = False) -> Forecasts:
    """Predict means with a regressor; the standard deviation is that of its validation residuals."""
    _fit(model, data, data.train.y.double(), normalised)
    held_out = torch.from_numpy(model.predict(_inputs(data, data.validation.x, normalised))) - data.validation.y
    mean = torch.from_numpy(model.predict(_inputs(data, data.test.x, normalised))).double()
    return _gaussian(data, mean, held_out.double().square().mean().sqrt().clamp(min=1e-6 * data.target_std))


def _fit(model: Any, data: Data, y: Tensor, normalised: bool) -> None:
    step = math.ceil(len(y) / MOST_FOR_LINEAR) if normalised else 1
    model.fit(_inputs(data, data.train.x[::step], normalised), y[::step].numpy())


def _inputs(data: Data, x: Tensor, normalised: bool) -> Any:
    if data.kind.is_text:
        weights = needed("sklearn.feature_extraction.text", "study", "a linear model").TfidfTransformer()
        return weights.fit(_counts(data, data.train.x)).transform(_counts(data, x))
    return (data.normalised(x) if normalised else x).flatten(1).numpy()


def _counts(data: Data, x: Tensor) -> Any:
    """Count each token in each text, as a sparse matrix `[N, tokens]`."""
    every = max(int(part.x.max()) for part in data.parts.values()) + 1
    row, place = (x >= 0).nonzero(as_tuple=True)
    token = x[row, place].long()
    matrix = needed("scipy.sparse", "study", "a linear model").csr_matrix
    ones = torch.ones(len(row), dtype=torch.float64)
    return matrix((ones.numpy(), (row.numpy(), token.numpy())), shape=(len(x), every))


# -- scores ------------------------------------------------------------------------------------------------


def _scored(predicted: Tensor | Forecasts, data: Data) -> dict[str, Any]:
    rows, more = _of_numbers(predicted) if isinstance(predicted, Forecasts) else _of_classes(predicted, data.test.y)
    scores = {name: float(values.mean()) for name, values in rows.items()} | more
    if "rmse" in scores:
        scores["rmse"] = math.sqrt(scores["rmse"])
    kept = rows if len(data.test) <= MOST_ROWS else {}
    return {
        "count": len(data.test),
        "scores": {name: score for name, score in scores.items() if math.isfinite(score)},
        "rows": {name: [float(f"{value:.6g}") for value in values.tolist()] for name, values in kept.items()},
    }


def _of_classes(probs: Tensor, target: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return per-row scores, and scores that are not sums over rows."""
    right = probs.gather(1, target[:, None])[:, 0]
    rows = {
        "nll": -right.clamp(min=TINY).log(),
        "accuracy": (probs.argmax(1) == target).double(),
        "brier": probs.square().sum(1) - 2 * right + 1,
    }
    return rows, {
        "balanced_accuracy": float(balanced_accuracy(probs, target)),
        "macro_auroc": float(macro_auroc(probs, target)),
    }


def _of_numbers(predicted: Forecasts) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the same for regression; quantiles have no density."""
    low, high = predicted.interval(LEVEL)
    inside = (low <= predicted.target) & (predicted.target <= high)
    more = {"coverage_90": float(inside.double().mean()), "width_90": float((high - low).double().mean())}
    rows = {"rmse": (predicted.target - predicted.mean).square()}
    return ({"log_density": predicted.log_density, "crps": predicted.crps} if predicted.noisy else {}) | rows, more
