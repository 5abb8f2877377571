"""Selective prediction: risk-coverage curve, area under it (AURC), accuracy at a given coverage.

A network predicts only the least uncertain share of inputs, its *coverage*. Its *risk* is the share of errors among
these (Geifman & El-Yaniv, *Selective Classification for Deep Neural Networks*, 2017). With n rows, least uncertain
first,

    risk(k/n) = 1/k sum_{i <= k} [label_i wrong],    AURC = 1/n sum_{k = 1..n} risk(k/n).

E-AURC is the excess of AURC over that of the best order (Geifman et al., *Bias-Reduced Uncertainty Estimation*, 2019).
In a tie, each row counts as the mean error of the tied rows, which is the expectation over their orders.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from multitudes.base.checks import check_choice, check_number
from multitudes.metrics.class_inputs import Rows
from multitudes.metrics.declare import HIGHER, LOWER, NEITHER, metric
from multitudes.metrics.uncertainties import UNCERTAINTIES

__all__ = ["RiskCoverage"]


class RiskCoverage:
    """Risk-coverage curve in float64.

    Args:
        coverage: `k/n` for each k, `[n]`.
        risk: Share of wrong labels among the k least uncertain rows, `[n]`.
    """

    # Not a dataclass: torchmetrics would squeeze its fields if there is one row.
    def __init__(self, coverage: Tensor, risk: Tensor) -> None:
        self.coverage = coverage
        self.risk = risk

    def __repr__(self) -> str:
        return f"RiskCoverage(rows={len(self.risk)}, aurc={float(self.aurc):.4f})"

    @property
    def aurc(self) -> Tensor:
        """Area under the curve, the mean of its risks; NaN without rows."""
        return self.risk.mean()

    @property
    def excess_aurc(self) -> Tensor:
        """E-AURC: difference between `aurc` and that of the best order, at least 0; NaN without rows."""
        error = self.risk[-1:]  # over all rows
        best = (self.coverage - (1 - error)).clamp(min=0) / self.coverage
        return (self.risk - best).mean().clamp(min=0)

    def accuracy_at(self, coverage: float) -> Tensor:
        """Return the accuracy at the smallest possible coverage of at least `coverage`; NaN without rows."""
        check_coverage("coverage", coverage)
        return 1 - self.risk[self.coverage >= coverage][:1].mean()  # one row; without rows NaN

    def coverage_at(self, risk: float) -> Tensor:
        """Return the largest coverage with a risk of at most `risk`; 0 if there is none, NaN without rows."""
        check_number("risk", risk, 0, 1)
        share = self.coverage[self.risk <= risk][-1:].sum()
        return share if len(self.risk) else torch.full_like(share, torch.nan)


# Settings -----------------------------------------------------------------------------------------------


check_uncertainty = partial(check_choice, choices=tuple(UNCERTAINTIES))
check_coverage = partial(check_number, low=0, high=1, above=True)
Uncertainty = Annotated[str, check_uncertainty]
Coverage = Annotated[float, check_coverage]

# Metrics ------------------------------------------------------------------------------------------------


def _pairs(rows: Rows, uncertainty: str) -> Tensor:
    """Return the uncertainty of each row, and 1 if its label is wrong, `[N, 2]`, in at least float32."""
    values = UNCERTAINTIES[uncertainty](rows)
    return torch.stack([values, (~rows.correct).to(values.dtype)], 1)


def curve_of(pairs: Tensor) -> RiskCoverage:
    """Map uncertainty and error of all rows, `[N, 2]`, to the curve."""
    uncertainty, order = pairs[:, 0].sort()
    wrong = pairs[order, 1].double()
    _, group, size = uncertainty.unique_consecutive(return_inverse=True, return_counts=True)
    errors = wrong.new_zeros(len(size)).scatter_add_(0, group, wrong)
    # Start at the end of each tie, where the number of errors is an integer, and subtract its mean error per row.
    k = torch.arange(1, len(pairs) + 1, dtype=torch.float64, device=pairs.device)
    missing = (size.cumsum(0)[group] - k) * (errors / size)[group]
    # Divide by a tensor: a GPU divides by a number by multiplying with its inverse, which can round 9/10 to below 0.9.
    return RiskCoverage(k / k[-1:], (errors.cumsum(0)[group] - missing) / k)


def _accuracy_at(pairs: Tensor, coverage: Coverage = 0.9) -> Tensor:
    return curve_of(pairs).accuracy_at(coverage)


@metric("RiskCoverageCurve", curve_of, better=NEITHER, kept=2)
def risk_coverage(rows: Rows, uncertainty: Uncertainty = "max_probability") -> Tensor:
    """Risk-coverage curve.

    Args:
        uncertainty: Name in `UNCERTAINTIES`.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    >>> curve = risk_coverage(p, torch.tensor([0, 1, 1, 0]))
    >>> curve.coverage.tolist(), curve.risk.tolist()
    ([0.25, 0.5, 0.75, 1.0], [0.0, 0.5, 0.3333333333333333, 0.25])
    >>> float(curve.accuracy_at(coverage=0.25)), float(curve.coverage_at(risk=0.3))
    (1.0, 1.0)
    """
    return _pairs(rows, uncertainty)


@metric("AURC", lambda pairs: curve_of(pairs).aurc, better=LOWER, kept=2, group="selective")
def aurc(rows: Rows, uncertainty: Uncertainty = "max_probability") -> Tensor:
    """Area under the risk-coverage curve; NaN without rows.

    Args:
        uncertainty: Name in `UNCERTAINTIES`.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    >>> round(float(aurc(p, torch.tensor([0, 1, 1, 0]))), 4)  # (0 + 1/2 + 1/3 + 1/4) / 4
    0.2708
    """
    return _pairs(rows, uncertainty)


@metric(
    "AccuracyAtCoverage", _accuracy_at, better=HIGHER, kept=2, group="selective", score="accuracy_at_90",
    order=["coverage", "uncertainty", "ignore"],
)  # fmt: skip
def accuracy_at_coverage(rows: Rows, uncertainty: Uncertainty = "max_probability") -> Tensor:
    """Accuracy on the least uncertain rows.

    Args:
        coverage: Share of the rows, rounded up to whole rows.
        uncertainty: Name in `UNCERTAINTIES`.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    >>> float(accuracy_at_coverage(p, torch.tensor([0, 1, 1, 0]), coverage=0.5))
    0.5
    """
    return _pairs(rows, uncertainty)
