"""Preprocessing of network inputs, fitted to the training part: `Preprocessing`.

Pixels are standardised. Numbers of a table become normal scores: a quantile transform pulls in outliers and spreads out
skewed columns, as in Gorishniy et al., *Revisiting Deep Learning Models for Tabular Data* (2021), and *TabM* (2025).
Zeros and ones are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from multitudes.base.checks import check_choice
from multitudes.lab.data.tables.features import Feature

NUMBERS = ("quantile", "standard")
"""Preprocessing of a table's numbers: normal scores, or zero mean and unit standard deviation."""

ROWS_A_KNOT, FEWEST, MOST = 30, 16, 1000
"""Training rows per knot of the quantile transform, and bounds on the number of knots, so that it does not overfit."""

BEYOND = 2.0
"""Standard deviations by which the transform extends linearly beyond the training range."""


class Preprocessing(nn.Module):
    """Standardise `x [N, ...]` by `mean` and `std`; with knots, also apply a function to each feature of `[N, F]`.

    The function is linear between the knots `[F, K]`, with values `scores` `[F, K]`, and constant outside. A row of
    knots may be padded with infinities. Features whose first knot is infinite have no function.

    >>> x = torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, 1.0], [50.0, 0.0]])
    >>> scores = Preprocessing.fitted(x, [True, False])(x)
    >>> scores[:, 0]  # of the mid-ranks 1/8, 1/2, 1/2 and 7/8
    tensor([-1.1503,  0.0000,  0.0000,  1.1503])
    >>> scores[:, 1]
    tensor([0., 1., 1., 0.])
    """

    def __init__(self, mean: Tensor, std: Tensor, knots: Tensor | None = None, scores: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.register_buffer("knots", knots)
        self.register_buffer("scores", scores)

    mean: Tensor
    std: Tensor
    knots: Tensor | None
    scores: Tensor | None

    @classmethod
    def fitted(cls, x: Tensor, numeric: Sequence[bool], numbers: str = "quantile") -> Preprocessing:
        """Fit to training rows `[N, F]`; `numeric` marks the numbers, and other features are zeros and ones."""
        check_choice("numbers", numbers, NUMBERS)
        mean, std = (values.float() for values in mean_std(x))
        if numbers == "standard":
            return cls(mean, std)
        own = torch.tensor(list(numeric), dtype=torch.bool)
        mean, std = torch.where(own, mean, 0.0), torch.where(own, std, 1.0)
        none = torch.full((2,), torch.inf), torch.zeros(2)
        functions = [_function((x[:, at] - mean[at]) / std[at]) if own[at] else none for at in range(x.shape[1])]
        knots, scores = (list(each) for each in zip(*functions, strict=True))
        return cls(mean, std, pad_sequence(knots, True, torch.inf), pad_sequence(scores, True))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.std
        return x if self.knots is None else self._scored(x)

    def _scored(self, x: Tensor) -> Tensor:
        assert self.knots is not None and self.scores is not None
        at = torch.searchsorted(self.knots, x.mT.contiguous(), right=True).mT
        knots, scores = self.knots.mT, self.scores.mT
        at = (at - 1).clamp(min=0)
        low, high = knots.gather(0, at), knots.gather(0, at + 1)
        share = ((x - low) / (high - low)).clamp(0, 1)  # 0 from the last knot on: the next one is infinite
        first, second = scores.gather(0, at), scores.gather(0, at + 1)
        return torch.where(knots[0].isfinite(), first + share * (second - first), x)


def _function(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return knots and normal scores of a column `[N]` of standardised numbers; ties get the score of their mid-rank.

    The last knot is infinite padding.
    """
    known, counts = values.unique(return_counts=True)
    middle = (counts.double().cumsum(0) - counts.double() / 2) / len(values)
    many = min(MOST, max(FEWEST, len(values) // ROWS_A_KNOT))
    if len(known) > many:
        levels = torch.linspace(0, 1, many, dtype=torch.float64) * (middle[-1] - middle[0]) + middle[0]
        chosen = torch.searchsorted(middle, levels).clamp(max=len(known) - 1).unique()
        known, middle = known[chosen], middle[chosen]
    scores = torch.special.ndtri(middle).float()
    reach = torch.tensor([BEYOND])
    knots = torch.cat([known[:1] - reach, known, known[-1:] + reach, torch.tensor([torch.inf])])
    return knots, torch.cat([scores[:1] - reach, scores, scores[-1:] + reach, torch.zeros(1)])


NARROWEST = 1e-4
"""Width of the narrowest bin, in standard deviations; narrower ones would be rounding noise."""


def edges_of(scores: Tensor, bins: int) -> list[float]:
    """Return the edges of at most `bins` quantile bins of values `[N]`; empty if all are equal.

    >>> edges_of(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), 2), edges_of(torch.tensor([1.0, 1.0]), 2)
    ([0.0, 2.0, 4.0], [])
    """
    ordered = scores.sort().values
    at = torch.linspace(0, len(ordered) - 1, min(bins, max(1, len(ordered) - 1)) + 1, dtype=torch.float64)
    edges: list[float] = []
    for edge in ordered[at.round().long()].tolist():
        if not edges or edge - edges[-1] >= NARROWEST:
            edges.append(edge)
    return edges if len(edges) > 1 else []


def layout_of(features: Sequence[Feature], seen: Tensor, bins: int = 128) -> list[int | list[float]]:
    """Return the layout of features (see `Data.layout`) from preprocessed training rows `[N, F]`."""
    found: list[int | list[float]] = []
    at = 0
    for feature in features:
        many = sum(feature.numeric)
        # a constant number has no bins
        found += [edges_of(seen[:, place], bins) or 1 for place in range(at, at + many)]
        at += len(feature.names)
        if rest := len(feature.names) - many:
            found.append(rest)
    return found


def mean_std(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column of `[N, F]` in float64; 1 for constant columns."""
    exact = x.double()
    constant = x.amin(0) == x.amax(0)
    mean = torch.where(constant, exact[0], exact.mean(0))
    return mean, torch.where(constant, 1.0, exact.std(0, correction=0))
