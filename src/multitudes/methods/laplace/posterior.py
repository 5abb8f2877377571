"""The posterior of one network's output layer: its curvature, and the prior and noise that fit it.

The prior precision and the noise of values are fitted by the marginal likelihood or by held-out data. With the prior
`N(0, 1/delta)` on all P weights, the trained weights `w`, and eigenvalues `l` of the curvature, the log marginal
likelihood is (MacKay, 1992)

    log p(D | w) + (P log delta - sum log(l + delta) - delta |w|^2) / 2.

Its derivative in log delta is `(gamma - delta |w|^2) / 2`, where `gamma = sum l / (l + delta)` is the number of weights
that the data determine. The derivative falls as delta grows, so bisection finds the one maximum. For Gaussian noise of
variance v the eigenvalues are `l / v`, and the derivative in log v is `(E / v + gamma - N) / 2`, where E is the sum of
squared errors of N values. It falls with v, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.methods.laplace.curvature import PART, WIDE, Curvature, Spectrum
from multitudes.methods.laplace.layers import PROBIT
from multitudes.methods.laplace.output_rows import OutputRows, fits_noise
from multitudes.tasks import Task
from multitudes.tasks.gaussian import split_gaussian

BOUNDS = -40.0, 40.0
"""Bounds of the search, in logarithms around the starting value."""
TURNS = 64
STEPS = 100
CLOSE = 1e-12

CANDIDATES = tuple(10 ** (quarter / 4) for quarter in range(-20, 21))
"""Prior precisions to try on held-out data, a quarter of a decade apart."""


# -- the prior and the noise -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A prior precision, the noise of values `[O]` or `[1]`, and the log marginal likelihood with both."""

    prior: float
    noise: Tensor | None
    log_evidence: float


@dataclass(frozen=True)
class Posterior:
    """Result of a pass over the training data; gives the posterior and its marginal likelihood for any prior."""

    task: Task
    spectrum: Spectrum
    """For values with noise: its eigenvalues at noise variance 1."""
    square: float
    """`|w|^2`."""
    log_likelihood: float = 0.0
    """`log p(D | w)`; 0 for values with noise, for which `errors` gives it."""
    errors: Tensor | None = None
    """For values with noise: sums of squared errors, per output `[O]` or over all outputs `[1]`."""
    counts: Tensor | None = None
    """Number of values in each of `errors`."""

    # -- for a prior and a noise -------------------------------------------------------------------------

    def eigenvalues(self, noise: Tensor | None) -> Tensor:
        """Return the eigenvalues of the curvature at a noise variance."""
        values = self.spectrum.values
        return values if noise is None else values / noise[:, None]

    def precisions(self, fitted: Fit) -> Tensor:
        """Return the eigenvalues of the posterior precision."""
        return self.eigenvalues(fitted.noise) + fitted.prior

    def log_evidence(self, prior: float, noise: Tensor | None) -> float:
        """Return the log marginal likelihood."""
        values, fit = self.eigenvalues(noise), self.log_likelihood
        if noise is not None and self.errors is not None and self.counts is not None:
            fit = -0.5 * float((self.counts * (2 * math.pi * noise).log() + self.errors / noise).sum())
        determinant = values.numel() * math.log(prior) - float((values + prior).log().sum())
        return fit + 0.5 * (determinant - prior * self.square)

    # -- fitting -----------------------------------------------------------------------------------------

    def fit(self, prior: float | None, noise: Tensor | None, held_out: Iterable[OutputRows] | None) -> Fit:
        """Fit the prior and the noise where they are None: the prior by held-out rows, if there are any."""
        if held_out is None:
            return self.fit_evidence(prior, noise)
        candidates = [self.fit_evidence(candidate, noise) for candidate in CANDIDATES]
        losses = torch.zeros(len(candidates), dtype=torch.float64)
        for rows in held_out:
            losses += torch.tensor(self._losses(rows, candidates), dtype=torch.float64)
        if not bool(losses.isfinite().any()):
            raise ValueError(
                "the likelihood of validation is not finite for any prior precision: pass a number as prior"
            )
        return candidates[int(losses.nan_to_num(nan=math.inf).argmin())]

    def fit_evidence(self, prior: float | None, noise: Tensor | None) -> Fit:
        """Fit the prior and the noise, where they are None, by the marginal likelihood."""
        if self.errors is None or self.counts is None or noise is not None:
            own = self.best_prior(noise) if prior is None else prior
            return Fit(own, noise, self.log_evidence(own, noise))
        noise = self.errors / self.counts
        own = self.best_prior(noise) if prior is None else prior
        for _ in range(STEPS):  # alternate: each update raises the marginal likelihood
            before = math.log(own), noise.log()
            noise = self.best_noise(own)
            own = self.best_prior(noise) if prior is None else prior
            moved = max(abs(math.log(own) - before[0]), float((noise.log() - before[1]).abs().max()))
            if moved < CLOSE or prior is not None:
                break
        return Fit(own, noise, self.log_evidence(own, noise))

    def _losses(self, rows: OutputRows, candidates: list[Fit]) -> list[float]:
        """Return the negative log-likelihood of rows for each candidate, predicted without draws."""
        width = self.spectrum.values.numel() if self.spectrum.vectors is not None else rows.phi.shape[1]
        size = max(1, PART // (WIDE * width))
        losses = [0.0] * len(candidates)
        for start in range(0, len(rows.phi), size):
            part = slice(start, start + size)
            projected = self.spectrum.project(rows.phi[part])
            for index, candidate in enumerate(candidates):
                variances = self.spectrum.variances(projected, self.precisions(candidate))
                own = rows.outputs[part], rows.target[part], rows.weight[part]
                losses[index] -= float(log_likelihood(self.task, *own, variances, candidate.noise))
        return losses

    def best_prior(self, noise: Tensor | None) -> float:
        """Return the prior precision with the largest marginal likelihood."""
        values = self.eigenvalues(noise)
        if not self.square > 0:
            raise ValueError(
                "prior='marginal' cannot be fitted if all weights of the output layer are 0: pass a number"
            )

        def rises(log: Tensor) -> Tensor:
            prior = log.exp()
            return (values / (values + prior)).sum() - prior * self.square > 0

        return float(_root(rises, values.new_tensor(math.log(values.numel() / self.square))).exp())

    def best_noise(self, prior: float) -> Tensor:
        """Return the noise with the largest marginal likelihood for a prior, `[O]` or `[1]`."""
        assert self.errors is not None and self.counts is not None
        values, errors, counts = self.spectrum.values, self.errors, self.counts

        def rises(log: Tensor) -> Tensor:
            noise = log.exp()
            determined = (values / (values + prior * noise[:, None])).sum(1)
            determined = determined.sum(0, keepdim=True) if len(errors) == 1 else determined
            return errors / noise + determined - counts > 0

        return _root(rises, (errors / counts).log()).exp()


def _root(rises: Callable[[Tensor], Tensor], middle: Tensor) -> Tensor:
    """Find the maximum of a function that rises, then falls, by bisection around `middle`."""
    low, high = middle + BOUNDS[0], middle + BOUNDS[1]
    for _ in range(TURNS):
        middle = (low + high) / 2
        up = rises(middle)
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
    return (low + high) / 2


# -- rows --------------------------------------------------------------------------------------------------


def posterior_of(task: Task, rows: Iterable[OutputRows], curvature: Curvature, square: float) -> Posterior:
    """Compute the posterior of all rows with an empty `curvature`; `square` is the sum of squared weights."""
    fit, by_output = 0.0, True
    errors: Any = 0.0
    counts: Any = 0.0
    for each in rows:
        curvature.add(each.phi, _output_curvatures(task, each), each.weight.amax(1))
        if fits_noise(task):
            errors = errors + ((each.target - each.outputs).square() * each.weight).sum(0)
            counts = counts + each.weight.sum(0)
            by_output = by_output and each.by_output
        else:
            fit += float(log_likelihood(task, each.outputs, each.target, each.weight))
    if not curvature.rows:
        raise ValueError("data must have at least one target that is not ignored")
    spectrum = curvature.spectrum()
    if not fits_noise(task):
        return Posterior(task, spectrum, square, fit)
    if not by_output:
        errors, counts = errors.sum(0, keepdim=True), counts.sum(0, keepdim=True)
    return Posterior(task, spectrum, square, 0.0, errors, counts)


def _output_curvatures(task: Task, rows: OutputRows) -> Tensor:
    """Return a softmax's probabilities, or else the weighted second derivatives of -log p in the outputs."""
    if task.class_axis is not None:
        return rows.outputs.softmax(1)
    if task.predicts_noise:
        return rows.weight / split_gaussian(rows.outputs)[1]
    if not task.classes:
        return rows.weight
    yes = rows.outputs.sigmoid()
    return yes * (1 - yes) * rows.weight


def log_likelihood(
    task: Task,
    outputs: Tensor,
    target: Tensor,
    weight: Tensor,
    variances: Tensor | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Return the log-likelihood of rows. With `variances`, average over Gaussian outputs of these variances."""
    if not task.classes:
        mean, spread = split_gaussian(outputs) if task.predicts_noise else (outputs, noise)
        assert spread is not None
        total = spread if variances is None else spread + variances
        logs = -0.5 * ((2 * math.pi * total).log() + (target - mean).square() / total)
        return (logs * weight).sum()
    if variances is not None:
        outputs = outputs * torch.rsqrt(1 + PROBIT * variances)
    if task.class_axis is not None:
        logs = F.log_softmax(outputs, 1)
        logs = logs * target if target.is_floating_point() else logs.gather(1, target[:, None])
    else:
        logs = target * F.logsigmoid(outputs) + (1 - target) * F.logsigmoid(-outputs)
    return (logs * weight).sum()
