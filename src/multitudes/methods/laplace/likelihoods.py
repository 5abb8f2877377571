"""Likelihoods that a Laplace posterior knows: the log-probability of targets, and its curvature in the outputs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.core.tasks import task_of
from multitudes.core.tasks.gaussian import split_gaussian
from multitudes.methods.laplace.layers import PROBIT

__all__ = ["LIKELIHOODS", "Likelihood", "likelihood_of"]


class Likelihood:
    """p(y | f) for the outputs f `[R, O]` of a layer."""

    softmax = False
    """Whether the classes of a row have one softmax."""
    grouped = False
    """Whether all outputs of a row are one prediction."""
    fits_noise = False
    """Whether the variance of the noise is no output, and fitted or given."""
    approximations: tuple[str, ...] = ("draws", "exact")
    """How such networks can predict."""

    def random(self, outputs: int) -> int:
        """How many of the outputs have a posterior."""
        return outputs

    def curving(self, outputs: Tensor, weight: Tensor) -> Tensor:
        """Probabilities of a softmax, else the second derivatives of the negative log-likelihood in the outputs."""
        raise NotImplementedError

    def log(
        self,
        outputs: Tensor,
        target: Tensor,
        weight: Tensor,
        variances: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """The log-likelihood of rows, of their outputs, or averaged over Gaussian outputs of these variances."""
        if variances is not None:
            outputs = outputs * torch.rsqrt(1 + PROBIT * variances)
        return (self._logs(outputs, target) * weight).sum()

    def _logs(self, outputs: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError


class Softmax(Likelihood):
    """One class of several."""

    softmax = grouped = True
    approximations = ("draws", "probit")

    def curving(self, outputs: Tensor, weight: Tensor) -> Tensor:
        return outputs.softmax(1)

    def _logs(self, outputs: Tensor, target: Tensor) -> Tensor:
        logs = F.log_softmax(outputs, 1)
        return logs * target if target.is_floating_point() else logs.gather(1, target[:, None])


class Bernoulli(Likelihood):
    """Yes or no for each output."""

    approximations = ("draws", "probit")

    def curving(self, outputs: Tensor, weight: Tensor) -> Tensor:
        yes = outputs.sigmoid()
        return yes * (1 - yes) * weight

    def _logs(self, outputs: Tensor, target: Tensor) -> Tensor:
        return target * F.logsigmoid(outputs) + (1 - target) * F.logsigmoid(-outputs)


class Normal(Likelihood):
    """A value for each output, with noise of one variance, or of one for each output."""

    fits_noise = True

    def curving(self, outputs: Tensor, weight: Tensor) -> Tensor:
        return weight

    def log(
        self,
        outputs: Tensor,
        target: Tensor,
        weight: Tensor,
        variances: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        mean, spread = self._read(outputs, noise)
        total = spread if variances is None else spread + variances
        logs = -0.5 * ((2 * math.pi * total).log() + (target - mean).square() / total)
        return (logs * weight).sum()

    def _read(self, outputs: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        assert noise is not None
        return outputs, noise


class Heteroscedastic(Normal):
    """A value and the variance of its noise, each an output; the means' weights have a posterior."""

    fits_noise = False
    grouped = True

    def random(self, outputs: int) -> int:
        return outputs // 2

    def curving(self, outputs: Tensor, weight: Tensor) -> Tensor:
        return weight / split_gaussian(outputs)[1]

    def _read(self, outputs: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        return split_gaussian(outputs)


LIKELIHOODS: dict[str, Likelihood] = {
    "softmax": Softmax(),
    "bernoulli": Bernoulli(),
    "normal": Normal(),
    "gaussian": Heteroscedastic(),
}
"""The likelihoods by the name that tasks give them (`Task.likelihood`)."""


def likelihood_of(task: str) -> Likelihood:
    """The likelihood of a task's predictions."""
    name = task_of(task).likelihood
    if name is None:
        raise ValueError(f"task {task!r} has no likelihood, which a Laplace posterior needs: use another method")
    return LIKELIHOODS[name]
