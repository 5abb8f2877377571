"""The precision of the weights' prior, and the noise of values: by the marginal likelihood, or by held-out data.

With the prior `N(0, 1/delta)` of all P weights, the trained ones `w`, and eigenvalues `l` of the curvature, the
logarithm of the marginal likelihood is (MacKay, 1992)

    log p(D | w) + (P log delta - sum log(l + delta) - delta |w|^2) / 2.

Its derivative in log delta is `(gamma - delta |w|^2) / 2` with `gamma = sum l / (l + delta)`, the number of weights
that the data determine. It falls as delta grows, so that there is one maximum, which bisection finds. For Gaussian
noise of variance v the eigenvalues are `l / v`, and in log v the derivative is `(E / v + gamma - N) / 2`, with E the
sum of squared errors of N values, which falls as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Evidence", "Fitted"]

BOUNDS = -40.0, 40.0
"""The logarithms between which the prior's precision is looked for, relative to 1 / mean(w^2)."""
TURNS = 64
STEPS = 100
CLOSE = 1e-12


@dataclass(frozen=True)
class Fitted:
    """A prior precision, the noise of values, `[O]` or `[]`, and the log marginal likelihood with both."""

    prior: float
    noise: Tensor | None
    log_evidence: float


@dataclass(frozen=True)
class Evidence:
    """What the marginal likelihood is computed from."""

    values: Tensor
    """The curvature's eigenvalues; for values with noise, those of a noise of variance 1, `[O, F]`."""
    square: float
    """`|w|^2`."""
    log_likelihood: float = 0.0
    """`log p(D | w)`, but for values with noise, whose is that of `errors`."""
    errors: Tensor | None = None
    """For values with noise: the sums of squared errors, `[O]`, or one of all outputs, `[1]`."""
    counts: Tensor | None = None
    """How many values these are of."""

    # -- for a prior and a noise -------------------------------------------------------------------------

    def scaled(self, noise: Tensor | None) -> Tensor:
        """The eigenvalues for a noise."""
        return self.values if noise is None else self.values / noise[:, None]

    def at(self, prior: float, noise: Tensor | None) -> float:
        """The log marginal likelihood."""
        values, fit = self.scaled(noise), self.log_likelihood
        if noise is not None and self.errors is not None and self.counts is not None:
            fit = -0.5 * float((self.counts * (2 * math.pi * noise).log() + self.errors / noise).sum())
        determinant = values.numel() * math.log(prior) - float((values + prior).log().sum())
        return fit + 0.5 * (determinant - prior * self.square)

    # -- the best ----------------------------------------------------------------------------------------

    def fitted(self, prior: float | None, noise: Tensor | None) -> Fitted:
        """With this prior and noise, or what maximises the marginal likelihood in the place of None."""
        if self.errors is None:
            own = self.best_prior(None) if prior is None else prior
            return Fitted(own, None, self.at(own, None))
        if noise is not None:
            own = self.best_prior(noise) if prior is None else prior
            return Fitted(own, noise, self.at(own, noise))
        assert self.counts is not None
        noise = self.errors / self.counts
        own = self.best_prior(noise) if prior is None else prior
        for _ in range(STEPS):  # each step is up: the best prior for the noise, the best noise for the prior
            before = math.log(own), noise.log()
            noise = self.best_noise(own)
            own = self.best_prior(noise) if prior is None else prior
            moved = max(abs(math.log(own) - before[0]), float((noise.log() - before[1]).abs().max()))
            if moved < CLOSE or prior is not None:
                break
        return Fitted(own, noise, self.at(own, noise))

    def best_prior(self, noise: Tensor | None) -> float:
        """The prior's precision of the largest marginal likelihood."""
        values = self.scaled(noise)
        if not self.square > 0:
            raise ValueError("prior='marginal' needs weights that are not all 0 in the output layer: pass a number")

        def rises(log: Tensor) -> Tensor:
            prior = log.exp()
            return (values / (values + prior)).sum() - prior * self.square > 0

        return float(_root(rises, values.new_tensor(math.log(values.numel() / self.square))).exp())

    def best_noise(self, prior: float) -> Tensor:
        """The noise of the largest marginal likelihood for a prior, `[O]` or `[1]`."""
        assert self.errors is not None and self.counts is not None
        errors, counts = self.errors, self.counts

        def rises(log: Tensor) -> Tensor:
            noise = log.exp()
            determined = (self.values / (self.values + prior * noise[:, None])).sum(1)
            determined = determined.sum(0, keepdim=True) if len(errors) == 1 else determined
            return errors / noise + determined - counts > 0

        return _root(rises, (errors / counts).log()).exp()


def _root(rises: Callable[[Tensor], Tensor], middle: Tensor) -> Tensor:
    """Where a function stops rising, which it does once, around `middle`."""
    low, high = middle + BOUNDS[0], middle + BOUNDS[1]
    for _ in range(TURNS):
        middle = (low + high) / 2
        up = rises(middle)
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
    return (low + high) / 2
