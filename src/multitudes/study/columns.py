"""The columns of a leaderboard: which scores and costs it shows, in which order, unit and precision.

One list for the terminal and for the page, so that both show the same numbers. Costs are multiples of the single
network's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multitudes.study.leaderboard import Row, Value, better

__all__ = ["COSTS", "SCORES", "Column", "column_of", "first_columns", "fixed", "more_columns"]


@dataclass(frozen=True)
class Column:
    """A column: the score or cost that it shows, its title, and in which unit."""

    name: str
    title: str
    unit: str = ""
    """ "%" of fractions, "×" of ratios."""
    digits: int = 3
    """After the decimal point."""
    inverse: bool = False
    """Whether a speed is shown as a time."""

    @property
    def heading(self) -> str:
        """The title with its unit.

        >>> Column("ece", "ECE", "%").heading, Column("coverage_95", "coverage at 95 %", "%").heading
        ('ECE %', 'coverage at 95 %')
        """
        return self.title if self.title.endswith(self.unit) else f"{self.title} {self.unit}"

    @property
    def arrow(self) -> str:
        """Points to the better values of a score; a cost has none."""
        return "" if self.is_cost else better(self.name).value

    @property
    def is_cost(self) -> bool:
        """Whether it is a cost, and so has no best method: the cheapest is the single network."""
        return self.name.startswith("costs/")

    def shown(self, value: float) -> float:
        """A value in the unit of the column."""
        if self.inverse:
            return 1 / value if value else math.nan
        return 100 * value if self.unit == "%" else value

    def of(self, row: Row) -> Value | None:
        """The values of a method in the unit of the column; None where it has none."""
        found = row.values.get(self.name)
        return found and Value(tuple(map(self.shown, found.values)), found.count)

    def text(self, value: float) -> str:
        """A value that is in the unit of the column, with its decimal places, and without the unit."""
        return fixed(value, self.digits)

    def told(self, value: float) -> str:
        """A value as it was measured, with its unit.

        >>> Column("accuracy", "accuracy", "%", 1).told(0.9731), Column("nll", "NLL").told(0.0546)
        ('97.3 %', '0.055')
        >>> Column("costs/inference_per_second_ratio", "inference time", "×", 2, inverse=True).told(0.5)
        '2.00 ×'
        """
        return f"{self.text(self.shown(value))} {self.unit}".strip()


def fixed(value: float, digits: int = 1) -> str:
    """A number with so many decimal places, and a dash for NaN.

    >>> fixed(-0.0314, 3), fixed(1234567.0, 0), fixed(float("nan")), fixed(float("inf"))
    ('−0.031', '1,234,567', '–', '∞')
    """
    if math.isnan(value):
        return "–"
    return f"{value:,.{digits}f}".replace("-", "−").replace("inf", "∞")


SCORES = (
    Column("accuracy", "accuracy", "%", 1),
    Column("nll", "NLL"),
    Column("brier", "Brier score"),
    Column("ece", "ECE", "%", 1),
    Column("rmse", "RMSE"),
    Column("log_density", "log density"),
    Column("crps", "CRPS"),
    Column("coverage_95", "coverage at 95 %", "%", 1),
    Column("width_95", "width at 95 %"),
    Column("shift/mean/accuracy", "shifted accuracy", "%", 1),
)
COSTS = (
    Column("costs/multiply_adds_ratio", "multiply-adds", "×", 2),
    Column("costs/inference_per_second_ratio", "inference time", "×", 2, inverse=True),
    Column("costs/training_seconds_ratio", "training time", "×", 2),
    Column("costs/parameters_ratio", "parameters", "×", 2),
    Column("costs/peak_memory_bytes_ratio", "peak memory", "×", 2),
)

FRACTIONS = ("mce", "classwise_ece", "adaptive_ece", "overconfidence", "accuracy_at_90", "disagreement", "member_error")
"""Scores beside these that are shown in percent."""
ABBREVIATIONS = ("aurc", "crps", "ece", "js", "mce", "nll", "rmse")


def column_of(name: str) -> Column:
    """The column of a score or cost, whether or not a leaderboard shows it by itself.

    >>> column_of("shift/fog/3/accuracy").heading, column_of("ood/letters/entropy/auroc").heading
    ('shift fog 3 accuracy %', 'AUROC letters %')
    >>> column_of("adaptive_ece").heading
    'adaptive ECE %'
    """
    known = {column.name: column for column in (*SCORES, *COSTS)}
    if name in known:
        return known[name]
    if _is_auroc(name):
        return Column(name, f"AUROC {name.removeprefix('ood/').removesuffix('/entropy/auroc')}", "%", 1)
    last = name.rpartition("/")[2]
    words = name.replace("_", " ").replace("/", " ").split()
    title = " ".join(word.upper() if word in ABBREVIATIONS else word for word in words)
    in_percent = last in FRACTIONS or (last in known and known[last].unit == "%")
    return Column(name, title, "%", 1) if in_percent else Column(name, title)


def first_columns(rows: Sequence[Row]) -> list[Column]:
    """What the leaderboard shows: scores, the detection of out-of-distribution inputs by entropy, and costs."""
    names = _names(rows)
    detected = [column_of(name) for name in names if _is_auroc(name)]
    return [column for column in (*SCORES, *detected, *COSTS) if column.name in names]


def more_columns(rows: Sequence[Row]) -> list[Column]:
    """The other scores of clean test data."""
    first = {column.name for column in first_columns(rows)}
    return [column_of(name) for name in _names(rows) if "/" not in name and name not in first]


def _is_auroc(name: str) -> bool:
    return name.startswith("ood/") and name.endswith("/entropy/auroc")


def _names(rows: Iterable[Row]) -> dict[str, None]:
    """All names that some method has a value of, in order."""
    return {name: None for row in rows for name in row.values}
