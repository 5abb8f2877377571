"""Which method is worth its price: a row for each, what is within noise of the best, and the answer in words.

A number is the mean over seeds, with its standard deviation. One method is *within noise* of another where their
difference is no larger than two standard errors of the difference. Over n seeds each, the squared error is the sum of
`variance / n` of both. With one seed alone, it comes from the test inputs: both methods answered the same ones, so it
is that of the mean difference per input (accuracy, NLL, Brier score, RMSE), from `predictions.npz`; without that file,
an accuracy still has its binomial error. Where there is neither, nothing is called noise.

Two standard errors of few seeds are a rough measure: a difference that is called noise may be real, and, of many
comparisons, one that is not may be none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from multitudes.core.checks import needed
from multitudes.metrics.declare import RANKS, Better
from multitudes.study.store import Job, Run

__all__ = ["Row", "Value", "best", "better", "leaderboard", "marks", "verdict", "within_noise"]

COST_RANKS = {
    "inference_per_second": Better.HIGHER,
    **dict.fromkeys(("parameters", "multiply_adds", "training_seconds", "peak_memory_bytes"), Better.LOWER),
}


def better(name: str) -> Better:
    """Which values of a score or cost are better: scores as their metrics declare it.

    >>> [better(name).name for name in ("accuracy", "shift/fog/3/nll", "overconfidence", "disagreement")]
    ['HIGHER', 'LOWER', 'ZERO', 'NEITHER']
    """
    last = name.rpartition("/")[2]
    return COST_RANKS.get(last.removesuffix("_ratio")) or RANKS.get(last, Better.NEITHER)


# -- rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A score or cost of a method, over its seeds."""

    values: tuple[float, ...]
    """For each seed."""
    count: int = 0
    """How many inputs each was computed over; 0 for costs."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return math.fsum(self.values) / len(self.values)

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds; None of one seed."""
        if len(self.values) < 2:
            return None
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (len(self.values) - 1))


@dataclass(frozen=True)
class Row:
    """What a study found out about one method."""

    name: str
    """What the study calls it."""
    method: str
    seeds: tuple[int, ...]
    """Those that are done."""
    values: Mapping[str, Value]
    """Scores by name, and costs by `costs/name`; those that every seed has."""
    examples: Callable[[], Mapping[str, Any]] = field(default=dict, repr=False, compare=False)
    """What each test input contributes to a score, `[N]` by name, of the first seed (`example_scores`)."""

    def __getitem__(self, name: str) -> float:
        """The mean of a score or cost; NaN where there is none."""
        return self.values[name].mean if name in self.values else math.nan


def leaderboard(run: Run) -> list[Row]:
    """A row for each method that has a job done, the best first: by NLL, or by log density."""
    rows = []
    methods: dict[str, list[Job]] = {}
    for job in run.done:
        methods.setdefault(job.label, []).append(job)
    for label, jobs in methods.items():
        tables = [_numbers(job.metrics) for job in jobs]
        common = [name for name in tables[0] if all(name in table for table in tables)]
        values = {name: Value(tuple(t[name][0] for t in tables), tables[0][name][1]) for name in common}
        method = str((jobs[0].config or {}).get("method", label))
        rows.append(Row(label, method, tuple(job.seed for job in jobs), values, _Examples(jobs[0])))
    name = _ranking(rows)
    return sorted(rows, key=lambda row: (math.isnan(row[name]), -better(name).quality(row[name])))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Scores and costs, with their counts. What is NaN, and so null, is left out."""
    scores = {name: (score["value"], score["count"]) for name, score in metrics["scores"].items()}
    costs = {f"costs/{name}": (value, 0) for name, value in metrics["costs"].items()}
    return {name: (float(value), count) for name, (value, count) in (scores | costs).items() if value is not None}


def _ranking(rows: Sequence[Row]) -> str:
    return next((name for name in ("nll", "log_density") if any(name in row.values for row in rows)), "rmse")


class _Examples:
    """Read when it is first asked for."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> Mapping[str, Any]:
        return self._read

    @cached_property
    def _read(self) -> Mapping[str, Any]:
        return example_scores(self.job.predictions)


def example_scores(predictions: Mapping[str, Any]) -> dict[str, Any]:
    """What each test input contributes to accuracy, NLL and Brier score, or to the squared error, `[N]` by name.

    >>> import numpy as np
    >>> found = example_scores({"probs": np.array([[0.5, 0.5], [0.2, 0.8]]), "target": np.array([0, 1])})
    >>> found["accuracy"].tolist(), found["nll"].round(3).tolist(), found["brier"].round(3).tolist()
    ([1.0, 1.0], [0.693, 0.223], [0.5, 0.08])
    """
    np = needed("numpy", "study", "a leaderboard")
    target = predictions.get("target")
    if "probs" in predictions and target is not None:
        probs = predictions["probs"].astype("float64")
        right = probs[np.arange(len(target)), target]
        return {
            "accuracy": (probs.argmax(1) == target).astype("float64"),
            "nll": -np.log(np.maximum(right, np.finfo("float64").tiny)),
            "brier": (probs**2).sum(1) - 2 * right + 1,
        }
    if "mean" in predictions and target is not None:
        return {"rmse": (predictions["mean"].astype("float64") - target) ** 2}
    return {}


# -- noise -------------------------------------------------------------------------------------------------


def difference_error(a: Row, b: Row, name: str) -> float | None:
    """The standard error of the difference between two methods in a score; None where there is nothing to tell it by.

    >>> a = Row("a", "a", (0, 1), {"nll": Value((0.1, 0.3))})
    >>> b = Row("b", "b", (0, 1), {"nll": Value((0.4, 0.4))})
    >>> round(difference_error(a, b, "nll"), 3)
    0.1
    """
    ours, theirs = a.values[name], b.values[name]
    if ours.spread is not None and theirs.spread is not None:
        return math.sqrt(ours.spread**2 / len(ours.values) + theirs.spread**2 / len(theirs.values))
    paired = _paired_error(a, b, name)
    if paired is not None or name != "accuracy" or not (ours.count and theirs.count):
        return paired
    return math.sqrt(sum(value.mean * (1 - value.mean) / value.count for value in (ours, theirs)))


def _paired_error(a: Row, b: Row, name: str) -> float | None:
    ours, theirs = a.examples().get(name), b.examples().get(name)
    if ours is None or theirs is None or len(ours) != len(theirs) or len(ours) < 2:
        return None
    error = float((ours - theirs).std(ddof=1)) / math.sqrt(len(ours))
    if name == "rmse":  # the examples are squares, and the difference of roots is that of squares over their sum
        total = math.sqrt(float(ours.mean())) + math.sqrt(float(theirs.mean()))
        return error / total if total else 0.0
    return error


def best(rows: Sequence[Row], name: str) -> Row | None:
    """The row with the best mean of a score or cost; None where there is none, or no better or worse."""
    known = [row for row in rows if math.isfinite(row[name])]
    if not known or better(name) is Better.NEITHER:
        return None
    return max(known, key=lambda row: better(name).quality(row[name]))


def within_noise(row: Row, of: Row, name: str) -> bool:
    """Whether the difference between two methods in a score is no larger than two of its standard errors.

    Of a score that is best near zero, the distances from zero are compared.
    """
    if not (math.isfinite(row[name]) and math.isfinite(of[name])):
        return False
    nearest_zero = better(name) is Better.ZERO
    difference = abs(row[name]) - abs(of[name]) if nearest_zero else row[name] - of[name]
    if difference == 0:
        return True
    error = difference_error(row, of, name)
    return error is not None and abs(difference) <= 2 * error


def marks(rows: Sequence[Row], name: str) -> dict[str, str]:
    """By method: "best" for the best of a score or cost, "noise" for those within noise of it, and "" for the rest."""
    top = best(rows, name)
    if top is None:
        return {row.name: "" for row in rows}
    return {row.name: "best" if row is top else "noise" if within_noise(row, top, name) else "" for row in rows}


# -- the answer --------------------------------------------------------------------------------------------

WORDS = {"accuracy": "accuracy", "nll": "NLL", "rmse": "RMSE", "log_density": "log density"}
COSTS = {"costs/multiply_adds": "multiply-adds", "costs/parameters": "parameters"}


def verdict(rows: Sequence[Row]) -> str:
    """The answer in two sentences: which cheaper method is as good as the best, and whose probabilities are.

    The cost is the multiply-adds of a prediction, or else the number of parameters.

    >>> def row(name, accuracies, nlls, cost):
    ...     values = {"accuracy": Value(accuracies), "nll": Value(nlls), "costs/multiply_adds": Value((cost,))}
    ...     return Row(name, name, (0, 1), values)
    >>> deep, packed = row("deep", (0.970, 0.976), (0.08, 0.08), 4e6), row("packed", (0.969, 0.975), (0.1, 0.1), 1e6)
    >>> print(verdict([deep, packed]))
    packed is 0.1 points below deep, the best by accuracy (97.3 %), at a quarter of its multiply-adds: a difference
    within noise (2 seeds). By NLL deep is the best (0.080), ahead of all others by more than noise.
    """
    if not rows:
        return "No job is done yet, so there is nothing to compare."
    main, proper = ("accuracy", "nll") if best(rows, "accuracy") else ("rmse", "log_density")
    top = best(rows, main)
    if top is None:
        return f"{_listed(rows)} have no score to be compared by."
    if len(rows) == 1:
        return f"Only {top.name} is done ({WORDS[main]} {_told(main, top)}), so there is nothing to compare it with."
    return f"{_price(rows, top, main)} {_probabilities(rows, proper)}".strip()


def _price(rows: Sequence[Row], top: Row, name: str) -> str:
    """The cheapest method within noise of the best; or how far the next one is behind."""
    cost = next((cost for cost in COSTS if math.isfinite(top[cost])), "costs/parameters")
    equals = [row for row in rows if row is not top and within_noise(row, top, name)]

    def price(row: Row) -> tuple[float, float]:  # of two that cost the same, the better one
        return row[cost] if math.isfinite(row[cost]) else math.inf, -better(name).quality(row[name])

    cheapest = min([top, *equals], key=price)
    if cheapest is not top:
        gap = (
            f"{cheapest.name} is {_gap(cheapest, top, name)} {top.name}, the best by {WORDS[name]} ({_told(name, top)})"
        )
        return f"{gap}, at {_share(cheapest, top, cost)}: a difference within noise ({_basis(cheapest, top)})."
    lead = f"{top.name} is the best by {WORDS[name]} ({_told(name, top)})"
    if equals:
        return f"{lead}; {_listed(equals)}, within noise of it ({_basis(equals[0], top)}), cost no less."
    following = best([row for row in rows if row is not top], name)
    if following is None:
        return f"{lead}, and the only one that has any."
    behind = f"the next, {following.name}, is {_gap(following, top, name)} it, at {_share(following, top, cost)}"
    if difference_error(following, top, name) is None:
        return f"{lead}; {behind}, and one run of each cannot tell whether that is noise."
    return f"{lead} by more than noise ({_basis(following, top)}); {behind}."


def _probabilities(rows: Sequence[Row], name: str) -> str:
    """Who is best by a proper score."""
    top = best(rows, name)
    if top is None:
        return ""
    lead = f"By {WORDS[name]} {top.name} is the best ({_told(name, top)})"
    others = [row for row in rows if row is not top and math.isfinite(row[name])]
    equals = [row for row in others if within_noise(row, top, name)]
    if equals:
        return f"{lead}, with {_listed(equals)} within noise of it."
    unknown = any(difference_error(row, top, name) is None for row in others)
    return f"{lead}{'' if unknown or not others else ', ahead of all others by more than noise'}."


def _told(name: str, row: Row) -> str:
    return f"{100 * row[name]:.1f} %" if name == "accuracy" else f"{row[name]:.3f}"


def _gap(row: Row, top: Row, name: str) -> str:
    """How far a method is from the best one: "0.1 points below"."""
    difference = abs(row[name] - top[name])
    if difference == 0:
        return "level with"
    side = "below" if better(name) is Better.HIGHER else "above"
    if name != "accuracy":
        return f"{difference:.2g} {side}"
    points = 100 * difference
    return f"{points:.1f} points {side}" if points >= 0.1 else f"less than 0.1 points {side}"


def _share(row: Row, top: Row, cost: str) -> str:
    """What a method costs, of what the best one does: "a quarter of its multiply-adds"."""
    if not (math.isfinite(row[cost]) and top[cost] > 0):
        return f"unknown {COSTS[cost]}"
    ratio = row[cost] / top[cost]
    for known, word in ((1, "the same"), (1 / 2, "half"), (1 / 3, "a third of"), (1 / 4, "a quarter of")):
        if abs(ratio / known - 1) < 0.03:
            return f"{word}{' number of' if known == 1 else ' its'} {COSTS[cost]}"
    return f"{ratio:.0%} of its {COSTS[cost]}" if 0.01 <= ratio < 1 else f"{ratio:.2g} times its {COSTS[cost]}"


def _basis(row: Row, top: Row) -> str:
    """What the noise was told by."""
    counts = sorted({len(row.seeds), len(top.seeds)})
    if counts[0] == 1:
        return "one seed, by the test inputs"
    return f"{' and '.join(map(str, counts))} seeds"


def _listed(rows: Sequence[Row]) -> str:
    names = [row.name for row in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
