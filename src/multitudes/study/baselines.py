"""What predicts without a network, to compare networks with: chance, a constant, and for tables gradient boosting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multitudes.core.checks import needed
from multitudes.data import Data

__all__ = ["measure_baselines"]

MOST_ROWS = 50_000
"""Of a larger test part, what each row adds to a score is not kept."""
TINY = 1e-12
"""The least probability, so that a class that training has not gives no infinite score."""


def measure_baselines(data: Data) -> dict[str, Any]:
    """Scores of each baseline on the test part, and what each row adds to them, as JSON holds them.

    - `chance`, of classes: all of them equally probable.
    - `constant`: the classes' shares of the training part, or the Gaussian of its targets.
    - `gradient_boosting`, of tables: scikit-learn's histogram gradient boosting with its default settings, trained on
      the training part; of numbers with the deviation that it has on the validation part.
    """
    makers: dict[str, Callable[[Data], Tensor | tuple[Tensor, Tensor]]] = {"constant": _constant}
    if data.classes:
        makers = {"chance": _chance, **makers}
    if data.kind.named:
        makers["gradient_boosting"] = _boosting
    return {
        "fingerprint": data.fingerprint,
        "baselines": {name: _scored(make(data), data) for name, make in makers.items()},
    }


# -- predictions: probabilities `[N, C]`, or means and deviations `[N]` in the targets' units --------------


def _chance(data: Data) -> Tensor:
    return torch.full((len(data.test), len(data.classes)), 1 / len(data.classes), dtype=torch.float64)


def _constant(data: Data) -> Tensor | tuple[Tensor, Tensor]:
    rows, y = len(data.test), data.train.y
    if data.classes:
        counts = torch.bincount(y, minlength=len(data.classes)).double()
        return (counts / counts.sum()).expand(rows, -1)
    exact = y.double()
    deviation = exact.std(correction=0).clamp(min=1e-6 * max(1.0, float(exact.abs().max())))
    return exact.mean().expand(rows), deviation.expand(rows)


def _boosting(data: Data) -> Tensor | tuple[Tensor, Tensor]:
    ensemble = needed("sklearn.ensemble", "study", "gradient boosting")
    train, test = data.train, data.test.x.numpy()
    if data.classes:
        model = ensemble.HistGradientBoostingClassifier(random_state=0).fit(train.x.numpy(), train.y.numpy())
        probs = torch.zeros(len(test), len(data.classes), dtype=torch.float64)
        probs[:, torch.from_numpy(model.classes_)] = torch.from_numpy(model.predict_proba(test))
        return probs
    model = ensemble.HistGradientBoostingRegressor(random_state=0).fit(train.x.numpy(), train.y.double().numpy())
    held_out = torch.from_numpy(model.predict(data.validation.x.numpy())) - data.validation.y
    mean = torch.from_numpy(model.predict(test))
    return mean, held_out.square().mean().sqrt().clamp(min=1e-6 * data.target_std).expand(len(test))


# -- scores ------------------------------------------------------------------------------------------------


def _scored(predicted: Tensor | tuple[Tensor, Tensor], data: Data) -> dict[str, Any]:
    rows = (
        _of_classes(predicted, data.test.y) if isinstance(predicted, Tensor) else _of_numbers(*predicted, data.test.y)
    )
    scores = {name: float(values.mean()) for name, values in rows.items()}
    if "rmse" in scores:
        scores["rmse"] = math.sqrt(scores["rmse"])
    kept = rows if len(data.test) <= MOST_ROWS else {}
    return {
        "count": len(data.test),
        "scores": scores,
        "rows": {name: [float(f"{value:.6g}") for value in values.tolist()] for name, values in kept.items()},
    }


def _of_classes(probs: Tensor, target: Tensor) -> dict[str, Tensor]:
    right = probs.gather(1, target[:, None])[:, 0]
    return {
        "nll": -right.clamp(min=TINY).log(),
        "accuracy": (probs.argmax(1) == target).double(),
        "brier": probs.square().sum(1) - 2 * right + 1,
    }


def _of_numbers(mean: Tensor, deviation: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Of Gaussians; the continuous ranked probability score in its closed form (Gneiting and Raftery, 2007)."""
    off = (target - mean) / deviation
    density = -0.5 * off.square() - deviation.log() - 0.5 * math.log(2 * math.pi)
    inside = torch.special.ndtr(off)
    bell = (-0.5 * off.square()).exp() / math.sqrt(2 * math.pi)
    crps = deviation * (off * (2 * inside - 1) + 2 * bell - 1 / math.sqrt(math.pi))
    return {"log_density": density, "crps": crps, "rmse": (target - mean).square()}
