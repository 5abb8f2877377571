"""The results of a study as rows, best first: one per method, and one per baseline without a network.

Numbers are means over seeds with their standard deviation. Methods are *level* if their difference may be chance, by a
95 % interval over seeds and test rows (`paired.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from multitudes.base.checks import needed
from multitudes.lab.study.results.paired import Comparison
from multitudes.lab.study.results.result_rows import Row, Value, known_score
from multitudes.lab.study.run.store import Job, Run
from multitudes.metrics.declare import RANKS, Better

COSTS = ("parameters", "multiply_adds", "training_seconds", "peak_memory_bytes", "inference_time", "training_time")


def better(name: str) -> Better:
    """Return which values of a score or cost are better; for scores, as their metrics declare it.

    >>> [better(name).name for name in ("accuracy", "shift/fog/3/nll", "overconfidence", "disagreement")]
    ['HIGHER', 'LOWER', 'ZERO', 'NEITHER']
    """
    last = name.rpartition("/")[2]
    return Better.LOWER if last.removesuffix("_ratio") in COSTS else RANKS.get(last, Better.NEITHER)


def leaderboard(run: Run, by: str | None = None) -> list[Row]:
    """Return a row per finished method and per baseline, best first by a score from `Targets.by`."""
    methods: dict[str, list[Job]] = {}
    for job in run.done:
        methods.setdefault(job.label, []).append(job)
    times, folds, parts = (run.times or {}).get("methods", {}), tuple(run.folds), (run.about or {}).get("parts") or {}
    rest = parts.get("train", 0) + parts.get("validation", 0)
    overlap = float(parts.get("test", 0) / rest) if folds and rest else 0.0
    rows = []
    for label, jobs in methods.items():
        tables = [_numbers(job.metrics) for job in jobs]
        values = {name: _value([table[name] for table in tables], bool(folds)) for name in _common(tables)}
        for kind, own in times.get(label, {}).items():
            values[f"costs/{kind}_time_ratio"] = Value((own["ratio"],), low=own["low"], high=own["high"])
        method, seeds = str((jobs[0].config or {}).get("method", label)), tuple(job.seed for job in jobs)
        examples = cache(partial(_examples, jobs, bool(folds)))
        rows.append(Row(label, method, seeds, values, examples, folds=seeds if folds else (), overlap=overlap))
    if rows:
        rows += _baselines(run, folds, overlap)
    name = score_to_rank_by(rows, by)
    return sorted(rows, key=lambda row: (math.isnan(row[name]), -better(name).quality(row[name])))


def score_to_rank_by(rows: Sequence[Row], by: str | None) -> str:
    """Return the score to rank by: `by`, or a default proper score."""
    task = "regression" if any({"rmse", "log_density"} & row.values.keys() for row in rows) else "classification"
    return known_score(task, by)


def _common(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names that all tables have."""
    return [name for name in tables[0] if all(name in table for table in tables)]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Return scores and costs with their counts, without null (NaN) values."""
    scores = {name: (score["value"], score["count"]) for name, score in metrics["scores"].items()}
    costs = {f"costs/{name}": (value, 0) for name, value in metrics["costs"].items()}
    return {name: (float(value), count) for name, (value, count) in (scores | costs).items() if value is not None}


def _value(each: Sequence[tuple[float, int]], folded: bool) -> Value:
    """Build a value from numbers and counts; folds have disjoint test rows, so their counts add up."""
    values, counts = zip(*each, strict=True)
    return Value(values, sum(counts) if folded else counts[0])


def _baselines(run: Run, folds: tuple[int, ...], overlap: float) -> list[Row]:
    """Return the rows of baselines that every fold has."""
    np = needed("numpy", "study", "a leaderboard")
    table = run.baselines or {}
    tables = table.get("folds") or [table.get("baselines") or {}]
    rows = []
    for name in _common(tables):
        own = [each[name] for each in tables]
        values = {
            score: _value([(each["scores"][score], each["count"]) for each in own], bool(folds))
            for score in _common([each["scores"] for each in own])
        }
        examples = {
            score: np.asarray([[value for each in own for value in each["rows"][score]]], dtype="float64")
            for score in _common([each["rows"] for each in own])
        }
        rows.append(Row(name, name, (), values, partial(dict, examples), True, folds, overlap))
    return rows


def _examples(jobs: Sequence[Job], folded: bool) -> Mapping[str, Any]:
    """Return per-row scores `[seeds, N]` by name; `raw/NAME` is before calibration."""
    np = needed("numpy", "study", "a leaderboard")
    every = [job.predictions for job in jobs]
    found = [
        {name.replace("rows/", ""): one[name].astype("float64") for name in one if "rows/" in name} for one in every
    ]
    if folded:  # disjoint test rows: concatenate them into one long test part
        return {name: np.concatenate([one[name] for one in found])[None] for name in _common(found)}
    aligned = [name for name in _common(found) if len({len(one[name]) for one in found}) == 1]
    return {name: np.stack([one[name] for one in found]) for name in aligned}


# -- the best ----------------------------------------------------------------------------------------------


def best(rows: Sequence[Row], name: str) -> Row | None:
    """Return the row with the best mean of a score or cost; None if no row has it or no direction is better."""
    known = [row for row in rows if math.isfinite(row[name])]
    if not known or better(name) is Better.NEITHER:
        return None
    return max(known, key=lambda row: better(name).quality(row[name]))


def level_with_best(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the methods that may equal the best one in a score, best first, without baselines."""
    methods = [row for row in rows if not row.baseline]
    top = best(methods, name)
    if top is None:
        return []
    comparison = Comparison(methods, name)
    differences = {row.name: comparison.difference(row, top) for row in methods if row is not top}
    return [top, *(row for row in methods if (found := differences.get(row.name)) and not found.significant())]
