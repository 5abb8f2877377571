"""The posterior of one network's output layer: its curvature, its prior, and the noise of its targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.core.tasks import Task
from multitudes.core.tasks.gaussian import split_gaussian
from multitudes.methods.laplace.curvature import PART, WIDE, Curvature, Spectrum
from multitudes.methods.laplace.layers import PROBIT
from multitudes.methods.laplace.prior import Evidence, Fitted
from multitudes.methods.laplace.rows import Rows, fits_noise

__all__ = ["Posterior", "measured"]

CANDIDATES = tuple(10 ** (quarter / 4) for quarter in range(-20, 21))
"""The prior precisions that held-out data choose from: a quarter of a decade apart."""


@dataclass(frozen=True)
class Posterior:
    """What a pass over the training data gives."""

    task: Task
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
                losses[index] -= float(log_likelihood(self.task, *own, variances, candidate.noise))
        return losses


def measured(task: Task, rows: Iterable[Rows], start: Callable[[], Curvature], square: float) -> Posterior:
    """The posterior of all rows; `start` gives an empty curvature, and `square` is the sum of the squared weights."""
    curvature = start()
    fit, by_output = 0.0, True
    errors: Any = 0.0
    counts: Any = 0.0
    for each in rows:
        curvature.add(each.phi, _curving(task, each), each.weight.amax(1))
        if fits_noise(task):
            errors = errors + ((each.target - each.outputs).square() * each.weight).sum(0)
            counts = counts + each.weight.sum(0)
            by_output = by_output and each.by_output
        else:
            fit += float(log_likelihood(task, each.outputs, each.target, each.weight))
    if not curvature.rows:
        raise ValueError("data must hold at least one target that is not ignored")
    spectrum = curvature.spectrum()
    if not fits_noise(task):
        return Posterior(task, spectrum, Evidence(spectrum.values, square, fit))
    if not by_output:
        errors, counts = errors.sum(0, keepdim=True), counts.sum(0, keepdim=True)
    return Posterior(task, spectrum, Evidence(spectrum.values, square, 0.0, errors, counts))


def _curving(task: Task, rows: Rows) -> Tensor:
    """Probabilities of a softmax, else the second derivatives of the negative log-likelihood in the outputs."""
    if task.class_axis is not None:
        return rows.outputs.softmax(1)
    if task.tells_noise:
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
    """The log-likelihood of rows, of their outputs, or averaged over Gaussian outputs of these variances."""
    if not task.classes:
        mean, spread = split_gaussian(outputs) if task.tells_noise else (outputs, noise)
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
