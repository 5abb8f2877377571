"""Leaderboard columns, for the terminal and the page: scores and costs with their order, unit and precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multitudes.lab.study.results.leaderboard import best, better
from multitudes.lab.study.results.result_rows import Row, Value

MOST_UNEVEN = 3.0
"""Ratio of the largest to the smallest class from which classes count as unbalanced."""


@dataclass(frozen=True)
class Column:
    """A column: the name of its score or cost, its title, and its unit ("%" for fractions, "×" for ratios)."""

    name: str
    title: str
    unit: str = ""
    digits: int = 3

    @property
    def heading(self) -> str:
        """Title with its unit.

        >>> Column("ece", "ECE", "%").heading, Column("coverage_90", "coverage at 90 %", "%").heading
        ('ECE %', 'coverage at 90 %')
        """
        return self.title if self.title.endswith(self.unit) else f"{self.title} {self.unit}"

    @property
    def arrow(self) -> str:
        """Return an arrow towards better values; empty for costs."""
        return "" if self.is_cost else better(self.name).value

    @property
    def is_cost(self) -> bool:
        """True for costs. They have no best method: the cheapest is always the single network."""
        return self.name.startswith("costs/")

    def shown(self, value: float) -> float:
        """Convert a value to the column's unit."""
        return 100 * value if self.unit == "%" else value

    def of(self, row: Row) -> Value | None:
        """Return a method's values in the column's unit, or None."""
        found = row.values.get(self.name)
        return found and replace(found, values=tuple(map(self.shown, found.values)))

    def best(self, rows: Sequence[Row]) -> Row | None:
        """Return the best method by this score, ignoring baselines; None for costs."""
        return None if self.is_cost else best([row for row in rows if not row.baseline], self.name)

    def text(self, value: float, beside: float | None = None) -> str:
        """Format a value without its unit, with the decimal places that `beside` would get if given.

        >>> column = Column("rmse", "RMSE")
        >>> column.text(0.0614), column.text(6142.71), column.text(0.0614, beside=6142.71)
        ('0.061', '6,142.7', '0.1')
        """
        size = abs(value if beside is None else beside)
        return fixed(value, self.digits if size < 100 or not math.isfinite(size) else min(self.digits, 1))

    def cell(self, value: Value) -> str:
        """Format the mean over seeds, with "about" if a time varies by more than it differs from the single network's.

        >>> time = column_of("costs/inference_time_ratio")
        >>> time.cell(Value((1.21,), low=0.9, high=1.4)), time.cell(Value((4.06,), low=3.9, high=4.2))
        ('about 1.2', '4.06')
        """
        return f"about {fixed(value.mean, 1)}" if self.is_cost and is_vague(value) else self.text(value.mean)

    def with_unit(self, value: float) -> str:
        """Format a raw value with its unit.

        >>> Column("accuracy", "accuracy", "%", 1).with_unit(0.9731), Column("nll", "NLL").with_unit(0.0546)
        ('97.3 %', '0.055')
        >>> Column("costs/inference_time_ratio", "inference time", "×", 2).with_unit(2.0)
        '2.00 ×'
        """
        return f"{self.text(self.shown(value))} {self.unit}".strip()


def is_vague(value: Value) -> bool:
    """Return whether a time ratio varies by more than it differs from 1."""
    return value.low is not None and value.high is not None and value.low <= 1 <= value.high and value.mean != 1


def fixed(value: float, digits: int = 1) -> str:
    """Format a number with this many decimal places; NaN is a dash.

    >>> fixed(-0.0314, 3), fixed(1234567.0, 0), fixed(float("nan")), fixed(float("inf"))
    ('−0.031', '1,234,567', '–', '∞')
    """
    if math.isnan(value):
        return "–"
    return f"{value:,.{digits}f}".replace("-", "−").replace("inf", "∞")


SCORES = (
    Column("accuracy", "accuracy", "%", 1),
    Column("nll", "NLL"),
    Column("ece", "ECE", "%", 1),
    Column("rmse", "RMSE"),
    Column("log_density", "log density"),
    Column("crps", "CRPS"),
    Column("coverage_90", "coverage at 90 %", "%", 1),
    Column("width_90", "width at 90 %"),
    Column("shift/mean/accuracy", "shifted accuracy", "%", 1),
)
COSTS = (
    Column("costs/inference_time_ratio", "inference time", "×", 2),
    Column("costs/training_time_ratio", "training time", "×", 2),
    Column("costs/multiply_adds_ratio", "multiply-adds", "×", 2),
    Column("costs/parameters_ratio", "parameters", "×", 2),
)
UNBALANCED = (Column("balanced_accuracy", "balanced accuracy", "%", 1), Column("macro_auroc", "AUROC", "%", 1))
"""Scores listed first for unbalanced classes, and with the other scores otherwise."""
MORE = (
    Column("brier", "Brier score"),
    Column("gaussian_ece", "Gaussian ECE", "%", 1),
    Column("coverage_95", "coverage at 95 %", "%", 1),
    Column("width_95", "width at 95 %"),
    *UNBALANCED,
)
MORE_COSTS = (Column("costs/peak_memory_bytes_ratio", "peak memory", "×", 2),)

FRACTIONS = ("mce", "classwise_ece", "adaptive_ece", "overconfidence", "accuracy_at_90", "disagreement", "member_error")
"""Further scores shown in percent."""
ABBREVIATIONS = ("aurc", "crps", "ece", "js", "mce", "nll", "rmse")


def column_of(name: str) -> Column:
    """Return the column of any score or cost, including those that no leaderboard shows by default.

    >>> column_of("shift/fog/3/accuracy").heading, column_of("ood/letters/entropy/auroc").heading
    ('shift fog 3 accuracy %', 'AUROC letters %')
    >>> column_of("adaptive_ece").heading
    'adaptive ECE %'
    """
    known = {column.name: column for column in (*SCORES, *MORE, *COSTS, *MORE_COSTS)}
    if name in known:
        return known[name]
    if _is_auroc(name):
        return Column(name, f"AUROC {name.removeprefix('ood/').removesuffix('/entropy/auroc')}", "%", 1)
    last = name.rpartition("/")[2]
    words = name.replace("_", " ").replace("/", " ").split()
    title = " ".join(word.upper() if word in ABBREVIATIONS else word for word in words)
    in_percent = last in FRACTIONS or (last in known and known[last].unit == "%")
    return Column(name, title, "%", 1) if in_percent else Column(name, title)


def costs(tiny: bool = False) -> list[Column]:
    """Return the cost columns; multiply-adds come first if the network is tiny."""
    return sorted(COSTS, key=lambda column: tiny and column.name != "costs/multiply_adds_ratio")


def first_columns(rows: Sequence[Row], by: str = "", tiny: bool = False, unbalanced: bool = False) -> list[Column]:
    """Return the main columns: the ranking score first, then scores, OOD detection by entropy, and costs."""
    names = {name: None for row in rows for name in row.values}
    scores = (SCORES[0], *UNBALANCED, *SCORES[1:]) if unbalanced else SCORES
    detected = [column_of(name) for name in names if _is_auroc(name)]
    shown = [column for column in (*scores, *detected, *costs(tiny)) if column.name in names and column.name != by]
    return [column_of(by), *shown] if by in names else shown


def more_columns(rows: Sequence[Row], by: str = "", unbalanced: bool = False) -> list[Column]:
    """Return the columns of other scores on clean test data and other costs; balanced classes omit `UNBALANCED`."""
    names = {name: None for row in rows for name in row.values}
    shown = [*first_columns(rows, by, unbalanced=unbalanced), *(() if unbalanced else UNBALANCED)]
    left_out = {column.name for column in shown}
    scores = [column_of(name) for name in names if "/" not in name and name not in left_out]
    return scores + [column for column in MORE_COSTS if column.name in names]


def caption(rows: Sequence[Row], tiny: bool = False) -> str:
    """Describe the numbers of a leaderboard.

    >>> print(caption([Row("a", "a", (0,), {}), Row("chance", "chance", (), {}, baseline=True)]))
    Mean over one seed. ★ is the best of a score. Costs are multiples of the single network's.
    """
    counts = sorted({len(row.seeds) for row in rows if not row.baseline})
    unit = "folds" if any(row.folds for row in rows) else "seeds"
    seeds = f"{counts[0]} to {counts[-1]} {unit}" if len(counts) > 1 else f"{counts[0]} {unit}"
    parts = ["Mean over one seed" if counts[-1] == 1 else f"Mean over {seeds}, ± the standard deviation between them"]
    parts += ["★ is the best of a score", "Costs are multiples of the single network's"]
    if any(column.is_cost and is_vague(value) for row in rows for column in COSTS if (value := column.of(row))):
        parts[-1] += "; “about” marks times whose variation is larger than their difference from it"
    if tiny:
        parts.append("The network is so small that call overhead dominates the times: compare multiply-adds")
    return "".join(f"{part}. " for part in parts).strip()


def imbalance(about: Mapping[str, Any]) -> str:
    """Return a sentence if classes are unbalanced, based on `data.json`; else an empty string.

    >>> print(imbalance({"classes": {"no": 90, "yes": 10}}))
    Classes are unbalanced: no has 90 % of the training rows, yes 10 %. Balanced accuracy and AUROC weigh them equally.
    >>> imbalance({"classes": {"no": 60, "yes": 40}})
    ''
    """
    counts = about.get("classes") or {}
    if len(counts) < 2:
        return ""
    total = sum(counts.values())
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[most] < MOST_UNEVEN * max(counts[least], 1):
        return ""
    shares = [f"{100 * counts[name] / total:.2g} %" for name in (most, least)]
    return (
        f"Classes are unbalanced: {most} has {shares[0]} of the training rows, {least} {shares[1]}. "
        f"Balanced accuracy and AUROC weigh them equally."
    )


def remark(row: Row, rows: Sequence[Row], by: str) -> str:
    """Return the remark next to a row's name: "baseline", or the worst baseline that beats it."""
    if row.baseline:
        return "baseline"
    quality = better(by).quality
    beaten = [other for other in rows if other.baseline and quality(other[by]) > quality(row[by])]
    return f"worse than {display_name(min(beaten, key=lambda other: quality(other[by])))}" if beaten else ""


def display_name(row: Row) -> str:
    """Return a row's name, spelled out for baselines."""
    names = {
        "constant": "a constant prediction",
        "linear": "a linear model",
        "random_forest": "a random forest",
        "gradient_boosting_quantiles": "gradient boosting of quantiles",
    }
    return names.get(row.name, row.name.replace("_", " ")) if row.baseline else row.name


def _is_auroc(name: str) -> bool:
    return name.startswith("ood/") and name.endswith("/entropy/auroc")
