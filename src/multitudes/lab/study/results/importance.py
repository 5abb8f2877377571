"""Permutation importance: how errors and uncertainty change when a column of a table is shuffled.

Breiman, *Random Forests* (2001), for errors: permute one column, with all features made from it, among test rows.
Redundant columns replace each other, so each one appears less important.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from multitudes.evaluation.predict import predictions
from multitudes.lab.data import Data
from multitudes.lab.data.splits import spread
from multitudes.lab.study.results.leaderboard import leaderboard
from multitudes.lab.study.results.result_rows import TARGETS
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.spec.assignment import Batches
from multitudes.tasks.predictive import Predictive

NAME = "importance.json"
MOST_ROWS = 1000
"""Maximum number of test rows to predict for each column."""
MOST_PREDICTIONS = 50_000
"""Maximum number of rows to predict when every column is shuffled once; many columns mean fewer test rows."""
FEWEST_ROWS = 100
REPEATS = 3
SEED = 0
LIMIT = 15.0
"""Seconds after which no new repeat starts."""


def measure_importance(run: Run) -> dict[str, Any]:
    """Measure importance for the first job of the best method and of the single network; empty without a table."""
    rows = [row for row in leaderboard(run, run.spec.get("by")) if not row.baseline]
    chosen = {row.name: row for row in (*rows[:1], *(row for row in rows if row.method == "single"))}
    methods = {}
    for label, row in list(chosen.items())[:2]:
        trained = Trained.read(run.job(label, row.seeds[0]).directory, "cpu", model_file=run.code)
        if not trained.data.kind.has_columns or len(trained.data.encoder.features) < 2:
            return {}
        methods[label] = importance(trained.net, trained.data)
        targets = TARGETS[trained.data.task]
    return {"score": targets.error, "uncertainty": targets.uncertainty, "methods": methods} if methods else {}


def importance(net: Any, data: Data) -> dict[str, Any]:
    """Return a network's score and uncertainty on test rows, and how much shuffling each column changes them.

    `{"rows": n, "base": [score, uncertainty], "columns": {name: {"score": [...], "uncertainty": [...]}}}`, with one
    number per repeat. Changes are positive where accuracy falls or RMSE rises.
    """
    features = data.encoder.features
    ends = list(accumulate(len(feature.names) for feature in features))
    groups = {f.column: slice(end - len(f.names), end) for f, end in zip(features, ends, strict=True)}
    count = min(len(data.test), MOST_ROWS, max(FEWEST_ROWS, MOST_PREDICTIONS // len(groups)))
    chosen = spread(data.test.y if data.classes else torch.zeros(len(data.test)), count, SEED)
    x, y = data.test.x[chosen], data.test.y[chosen]
    base = _measured(net, data, x, y)
    sign = -1.0 if data.classes else 1.0
    found: dict[str, dict[str, list[float]]] = {name: {"score": [], "uncertainty": []} for name in groups}
    generator, started = torch.Generator().manual_seed(SEED), time.monotonic()
    for repeat in range(REPEATS):
        if repeat and time.monotonic() - started > LIMIT:
            break
        order = torch.randperm(count, generator=generator)
        for name, places in groups.items():
            changed = x.clone()
            changed[:, places] = x[order][:, places]
            score, uncertainty = _measured(net, data, changed, y)
            found[name]["score"].append(sign * (score - base[0]))
            found[name]["uncertainty"].append(uncertainty - base[1])
    order_of = sorted(found, key=lambda name: -statistics.fmean(found[name]["score"]))
    return {"rows": count, "base": list(base), "columns": {name: found[name] for name in order_of}}


def importance_sentence(table: Mapping[str, Any]) -> str:
    """List the columns that matter most to the best method; empty if nothing was measured or nothing matters.

    >>> columns = {"age": {"score": [0.4, 0.6]}, "id": {"score": [-0.01, 0.0]}}
    >>> importance_sentence({"score": "rmse", "methods": {"packed": {"columns": columns}}})
    'Most important columns for packed, with the effect of shuffling each: age (RMSE +0.5).'
    """
    label, own = next(iter((table.get("methods") or {}).items()), ("", {"columns": {}}))
    means = {name: statistics.fmean(each["score"]) for name, each in own["columns"].items()}
    form = "{} (accuracy −{:.2g} points)" if table.get("score") == "accuracy" else "{} (RMSE +{:.2g})"
    scale = 100 if table.get("score") == "accuracy" else 1
    changes = [form.format(name, scale * mean) for name, mean in list(means.items())[:3] if mean > 0]
    if not changes:
        return ""
    return f"Most important columns for {label}, with the effect of shuffling each: {', '.join(changes)}."


def _measured(net: Any, data: Data, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the score and the mean uncertainty of rows; in the target's units for regression."""
    batches = Batches(data, x, device=torch.device("cpu"))
    p = Predictive.concat(each for each, _ in predictions(net, batches, False, seed=SEED))
    if data.classes:
        return float((p.label == y).double().mean()), float(p.entropy.double().mean())
    error = (p.mean[:, 0] - data.standardised(y)).double() * data.target_std
    return float(error.square().mean().sqrt()), float(p.std[:, 0].double().mean()) * data.target_std
