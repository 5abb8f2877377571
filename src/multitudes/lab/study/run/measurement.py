"""Calibrate a trained network on the validation part, and score it on the test part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.calibrate import FEWEST, Calibrated, Calibration, helpful_scaling, log_scores
from multitudes.evaluation.conformal import Conformal
from multitudes.evaluation.evaluate import evaluate
from multitudes.evaluation.predict import predictions
from multitudes.evaluation.scores import Evaluation, Score, plain_number
from multitudes.lab.data import Data
from multitudes.lab.data.splits import spread
from multitudes.lab.study.spec.assignment import Batches
from multitudes.metrics import ECE, MCE, NLL, RMSE, Accuracy, LogDensity, macro_auroc, read_rows
from multitudes.metrics.regression_inputs import read_forecasts
from multitudes.networks.stochastic import stochastic_layers
from multitudes.tasks.predictive import Predictive

SAVED_MEMBERS = 16
"""Maximum number of members or draws whose predictions are saved."""
GROUPS = 64
"""Maximum number of member groups per size in the scores by ensemble size."""
EVALUATION_SEED = 0
"""Seed for all jobs, so that they get the same shifted images."""
MOST_CLASSES = 200
"""Maximum number of classes for the one-versus-rest AUROC."""
LEVELS = (*(0.05 * step for step in range(1, 20)), 0.99)
"""Interval levels whose width is saved for the page."""

Options = Mapping[str, Any]
"""Table `evaluation` of a job's configuration."""


# -- calibration -------------------------------------------------------------------------------------------


def calibrate_network(net: Multitude, data: Data, options: Options) -> Calibrated | Multitude:
    """Calibrate the network on the validation part: a temperature, or a variance factor and conformal scores.

    A scaling is kept only if cross-fitting shows that it helps: for classes by more than a standard error, since the
    best temperature on few rows is noise; for regression by any amount, since narrow intervals do more harm than wide
    ones. The same rows fit the variance factor and the conformal scores. The guarantee holds, since scores are errors
    over predicted deviations, so the factor cancels.
    """
    rows = len(data.validation)
    if not options.get("calibrate", True) or rows < FEWEST:
        return net
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    part = Batches(data, data.validation.x, size=options.get("batch_size", 256), device=device)
    predictive = Predictive.concat(p.cpu() for p, _ in predictions(net, part, False, seed=EVALUATION_SEED))
    target = data.validation.y if data.classes else data.standardised(data.validation.y)[:, None]
    fitted = helpful_scaling(predictive, target, net.members, EVALUATION_SEED)
    if data.classes and fitted is None:
        return net
    fitted = fitted or Calibration(predictive.task, None, None)
    if not data.classes:
        fitted = replace(fitted, conformal=Conformal.fit(fitted(predictive), target))
    return Calibrated(net, fitted.to(device))


# -- scores ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """All scores, scores by ensemble size, and the predictions as arrays.

    Scores are those of the final network; scores before calibration start with `raw/`.
    """

    scores: Evaluation
    by_size: dict[str, Any]
    predictions: dict[str, Any]


def measure(net: Calibrated | Multitude, data: Data, options: Options) -> Measurement:
    """Score a network on the test part, on corrupted images, and on out-of-distribution inputs."""
    size = options.get("batch_size", 256)
    bins = {"bins": options.get("bins", 15), "min_count": options.get("min_count", 1)}
    how = {"preprocess": data.preprocess, "scale": data.target_std, "seed": EVALUATION_SEED, "progress": False, **bins}
    test = Batches(data, data.test.x, data.test.y, size)
    # OOD criteria are defined for classes only.
    ood = {name: Batches(data, x, size=size) for name, x in data.ood.items()} if data.classes else {}
    by_size = _ScoresBySize(options.get("sizes", (1, 2, 4, 8, 16)), data, **bins)
    kept = _Predictions(data, by_size if isinstance(net, Multitude) else None)
    scores = dict(evaluate(net, test, ood=ood, watch=kept, **how).scores) | kept.scores()
    if options.get("calibrate", True):
        before, plain = kept, scores
        if isinstance(net, Calibrated):
            before = _Predictions(data, by_size)
            plain = dict(evaluate(net.net, test, watch=before, **how).scores) | before.scores()
        scores |= {f"raw/{name}": score for name, score in plain.items() if "/" not in name}
        kept.parts |= {f"raw/{name}": parts for name, parts in before.parts.items() if not name.endswith("members")}
    if options.get("shift"):
        draws = options.get("shift_draws") if stochastic_layers(net) else None
        corrupted = evaluate(
            net, _corruptible(data, options.get("shift_limit"), size), shift=options["shift"], tasks="scores",
            severities=options.get("severities", (1, 2, 3, 4, 5)), draws=draws, **how,
        )  # fmt: skip
        scores |= {name: score for name, score in corrupted.scores.items() if "shift/" in name}
    return Measurement(Evaluation(scores), by_size.table(), kept.arrays())


def _corruptible(data: Data, limit: int | None, size: int) -> Batches:
    """Return the part of the test set to corrupt, stratified by class."""
    rows = torch.arange(len(data.test))
    if limit is not None and limit < len(rows):
        rows = spread(data.test.y, limit, EVALUATION_SEED)
    return Batches(data, data.test.x[rows], data.test.y[rows], size)


class _Predictions:
    """Collect predictions while they are scored, for the page and for paired tests."""

    def __init__(self, data: Data, by_size: _ScoresBySize | None) -> None:
        self.data, self.by_size = data, by_size
        self.parts: dict[str, list[Tensor]] = {}

    def __call__(self, ood: str | None, predicted: Predictive, target: Tensor | None) -> None:
        part = predicted.cpu()
        if ood is not None:
            self._keep(f"ood/{ood}/members", self._members(part))
            return
        assert target is not None
        if self.by_size is not None:
            self.by_size.update(part, target.cpu())
        self._keep("members", self._members(part))
        if not self.data.classes and "reach" not in self.parts:
            self._keep("reach", _reach(part))
        for name, tensor in self._arrays(part, target.cpu()):
            self._keep(name, tensor)

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.parts.setdefault(name, []).append(tensor)

    def _members(self, part: Predictive) -> Tensor:
        """Return each member's predictions before calibration."""
        if self.data.classes:
            return part.member_probs[:SAVED_MEMBERS].half()
        return self.data.in_units(part.member_values[:SAVED_MEMBERS, :, 0])

    def _arrays(self, part: Predictive, target: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield arrays for a batch of the test part, in the target's units; `rows/` are per-row scores."""
        data = self.data
        if data.classes:
            hit = torch.nn.functional.one_hot(target, len(data.classes))
            yield "probs", part.probs.float()
            yield "rows/nll", -log_scores(part, target).float()
            yield "rows/accuracy", (part.label == target).float()
            yield "rows/brier", (part.probs - hit).square().sum(1).float()
            return
        forecasts = read_forecasts(part, target, scale=data.target_std)
        yield "mean", data.in_units(part.mean[:, 0])
        yield "std", part.std[:, 0] * data.target_std
        yield "cdf", forecasts.cdf.float()
        for name, end in zip(("low", "high"), forecasts.interval(0.9), strict=True):
            yield name, (end + data.target_mean).float()
        yield "rows/log_density", forecasts.log_density.float()
        yield "rows/crps", forecasts.crps.float()
        yield "rows/rmse", (forecasts.mean - forecasts.target).square().float()

    def scores(self) -> dict[str, Score]:
        """Return scores that need all rows at once, or interval levels that `evaluate` does not cover."""
        kept = {name: torch.cat(self.parts[name]) for name in ("probs", "low", "high") if name in self.parts}
        y = self.data.test.y
        if "probs" in kept and len(self.data.classes) <= MOST_CLASSES:
            return {"macro_auroc": Score(float(macro_auroc(kept["probs"], y)), len(y))}
        if "low" not in kept:
            return {}
        low, high = kept["low"], kept["high"]
        inside = ((low <= y) & (y <= high)).double().mean()
        width = (high.double() - low.double()).mean()
        return {"coverage_90": Score(float(inside), len(y)), "width_90": Score(float(width), len(y))}

    def arrays(self) -> dict[str, Any]:
        """Return everything as NumPy arrays."""
        whole = {name: torch.cat(parts, int(name.endswith("members"))) for name, parts in self.parts.items()}
        return {name: tensor.numpy() for name, tensor in {**whole, "target": self.data.test.y}.items()}


def _reach(predictive: Predictive) -> Tensor:
    """Return the half-width of the intervals at `LEVELS`, in predicted standard deviations, `[L]`."""
    one = predictive[torch.zeros(1, dtype=torch.int64)]
    ends = [one.interval(level) for level in LEVELS]
    return torch.stack([(high - low).flatten()[0].double() for low, high in ends]) / (2 * one.std.flatten()[0].double())


class _ScoresBySize:
    """Scores by number of members or draws, over disjoint groups of that size."""

    def __init__(self, sizes: Any, data: Data, bins: int, min_count: int) -> None:
        self.sizes, self.data, self.bins = sorted(set(sizes)), data, (bins, min_count)
        self.metrics: dict[int, dict[str, Metric]] = {}

    def update(self, part: Predictive, target: Tensor) -> None:
        for size in [size for size in self.sizes if size <= part.members]:
            found = self.metrics.setdefault(size, self._metrics())
            for start in range(0, min(part.members - size + 1, GROUPS * size), size):
                group = replace(part, predictions=part.predictions[start : start + size])
                rows = (read_rows(group, target),) if self.data.classes else (group, target)
                for metric in found.values():
                    metric.update(*rows)

    def _metrics(self) -> dict[str, Metric]:
        if self.data.classes:
            return {"nll": NLL(), "accuracy": Accuracy(), "ece": ECE(*self.bins), "mce": MCE(*self.bins)}
        scale = self.data.target_std
        return {"nll": LogDensity(scale=scale), "rmse": RMSE(scale=scale)}

    def table(self) -> dict[str, Any]:
        """Return `{"sizes": [...], "nll": [...], ...}`."""
        sign = {"nll": 1 if self.data.classes else -1}  # sign of a log density
        rows = self.metrics.values()

        def values(name: str) -> list[Any]:
            return [plain_number(sign.get(name, 1) * float(row[name].compute())) for row in rows]

        return {"sizes": list(self.metrics), **{name: values(name) for name in self._metrics()}}
