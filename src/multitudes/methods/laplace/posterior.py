"""The posterior of one network's output layer: its curvature, its prior, and the noise of its targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multitudes.methods.laplace.curvature import PART, WIDE, Curvature, Spectrum
from multitudes.methods.laplace.likelihoods import Likelihood
from multitudes.methods.laplace.prior import Evidence, Fitted
from multitudes.methods.laplace.rows import Rows

__all__ = ["Posterior", "measured"]

CANDIDATES = tuple(10 ** (quarter / 4) for quarter in range(-20, 21))
"""The prior precisions that held-out data choose from: a quarter of a decade apart."""


@dataclass(frozen=True)
class Posterior:
    """What a pass over the training data gives."""

    likelihood: Likelihood
    spectrum: Spectrum
    evidence: Evidence

    def fitted(self, prior: float | None, noise: Tensor | None, held_out: Iterable[Rows] | None) -> Fitted:
        """With a prior precision, or the best by the marginal likelihood, or by held-out rows where there are any."""
        if held_out is None:
            return self.evidence.fitted(prior, noise)
        candidates = [self.evidence.fitted(candidate, noise) for candidate in CANDIDATES]
        losses = torch.zeros(len(candidates), dtype=torch.float64)
        for rows in held_out:
            losses += torch.tensor(self._losses(rows, candidates), dtype=torch.float64)
        if not bool(losses.isfinite().any()):
            raise ValueError("validation gives no finite likelihood for any prior precision: pass a number as prior")
        return candidates[int(losses.nan_to_num(nan=math.inf).argmin())]

    def precisions(self, fitted: Fitted) -> Tensor:
        """The eigenvalues of the posterior's precision."""
        return self.evidence.scaled(fitted.noise) + fitted.prior

    def _losses(self, rows: Rows, candidates: list[Fitted]) -> list[float]:
        """Minus the log-likelihood of rows, for each candidate, by predictions without draws."""
        width = self.spectrum.values.numel() if self.spectrum.vectors is not None else rows.phi.shape[1]
        size = max(1, PART // (WIDE * width))
        losses = [0.0] * len(candidates)
        for start in range(0, len(rows.phi), size):
            part = slice(start, start + size)
            projected = self.spectrum.projected(rows.phi[part])
            for index, candidate in enumerate(candidates):
                variances = self.spectrum.variances(projected, self.precisions(candidate))
                own = rows.outputs[part], rows.target[part], rows.weight[part]
                losses[index] -= float(self.likelihood.log(*own, variances, candidate.noise))
        return losses


def measured(likelihood: Likelihood, rows: Iterable[Rows], start: Callable[[], Curvature], square: float) -> Posterior:
    """The posterior of all rows; `start` gives an empty curvature, and `square` is the sum of the squared weights."""
    curvature = start()
    fit, by_output = 0.0, True
    errors: Any = 0.0
    counts: Any = 0.0
    for each in rows:
        curvature.add(each.phi, likelihood.curving(each.outputs, each.weight), each.weight.amax(1))
        if likelihood.fits_noise:
            errors = errors + ((each.target - each.outputs).square() * each.weight).sum(0)
            counts = counts + each.weight.sum(0)
            by_output = by_output and each.by_output
        else:
            fit += float(likelihood.log(each.outputs, each.target, each.weight))
    if not curvature.rows:
        raise ValueError("data must hold at least one target that is not ignored")
    spectrum = curvature.spectrum()
    if not likelihood.fits_noise:
        return Posterior(likelihood, spectrum, Evidence(spectrum.values, square, fit))
    if not by_output:
        errors, counts = errors.sum(0, keepdim=True), counts.sum(0, keepdim=True)
    return Posterior(likelihood, spectrum, Evidence(spectrum.values, square, 0.0, errors, counts))
