"""Scalings that calibrate predictions, fitted to held-out data.

- `Temperature`, `Vector`: Guo, Pleiss, Sun & Weinberger, *On Calibration of Modern Neural Networks* (2017).
- `MemberTemperature`: Rahaman & Thiery, *Uncertainty Quantification and Deep Ensembles* (2021), on scaling before
  averaging or after it.
- `Isotonic`: Zadrozny & Elkan, *Transforming Classifier Scores into Accurate Multiclass Probability Estimates* (2002).
- `Variance`: Laves et al., *Well-Calibrated Regression Uncertainty in Medical Imaging with Deep Learning* (2020).

Each has a `fit(predictive, target)`, and changes either the members' predictions or their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.base.checks import needed
from multitudes.tasks import Task
from multitudes.tasks.predictive import Predictive
from multitudes.tasks.regression import ValueTask

LARGEST_TEMPERATURE = 100.0
"""Temperatures are between 1/100 and 100; the best one is 0 for perfect predictions, and infinity for random labels."""

LEAST_LOG_PROB = -1e4
"""Log-probabilities are clamped to at least this before a scaling: those of excluded classes are -inf."""

FLOOR = 1e-6
"""Minimum of a class's isotonic regression before normalisation, so that no probability is 0."""

LEAST_FACTOR = 1e-12
"""Minimum factor of a variance: if all targets equal their means, the best factor is 0."""

_CHUNK = 2**22  # number of values processed at once in a fit, in float64


class Scaling:
    """Change of the members' predictions, or of the log of their mean probabilities; by default of neither.

    `fit` takes checked predictions `[S, N, C]` and classes `[N]` (for regression `[S, N, ...]` and `[N, ...]`); the
    first `S / members` predictions belong to the first member.
    """

    @classmethod
    def fit(cls, predictive: Predictive, target: Tensor, members: int) -> Self:
        """Return the scaling that fits these targets best."""
        raise NotImplementedError

    def predictions(self, predictions: Tensor, task: Task) -> Tensor:
        """Scale the members' predictions, `[S, B, ...]`."""
        return predictions

    def log_probs(self, log_probs: Tensor) -> Tensor:
        """Scale the log of the members' mean probabilities, `[B, C, ...]`."""
        return log_probs

    def if_better(self, identity: Self, predictive: Predictive, target: Tensor) -> Self:
        """Return self if it lowers the NLL by more than float32 rounding, otherwise `identity`."""
        before = -predictive.log_probs
        scaled = replace(predictive, predictions=self.predictions(predictive.predictions, predictive.reading))
        after = -self.log_probs(scaled.log_probs)
        gain = (before.double() - after.double()).gather(1, target[:, None]).mean()
        better = bool(gain > 1e-7 * before.gather(1, target[:, None]).double().mean())  # False for NaN
        return self if better else identity


@dataclass(frozen=True, eq=False)
class Temperature(Scaling):
    """One temperature T for the mean of the members: `softmax(log p / T)`. It changes no label.

    >>> p = Predictive(torch.tensor([[[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]]]))  # 88 %, right in 2 of 3 cases
    >>> scaling = Temperature.fit(p, torch.tensor([0, 0, 1]))
    >>> scaling.temperature, scaling.log_probs(p.log_probs).exp()[0]
    (tensor(2.8854, dtype=torch.float64), tensor([0.6667, 0.3333]))
    """

    temperature: Tensor
    """T, `[]`: above 1 if the predictions were overconfident."""

    @classmethod
    def fit(cls, predictive: Predictive, target: Tensor, members: int = 1) -> Self:
        """Return the T with the lowest NLL, or 1 if it is not better. The NLL is convex in 1/T, so the T is unique."""
        # The mean is one member whose logits are its log-probabilities.
        own = _temperatures(predictive.log_probs.unsqueeze(0), target, 1)[0]
        return cls(own).if_better(cls(torch.ones_like(own)), predictive, target)

    def log_probs(self, log_probs: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and self.temperature == 1:
            return log_probs  # bitwise unchanged
        return F.log_softmax(log_probs / self.temperature.to(log_probs), 1)


@dataclass(frozen=True, eq=False)
class MemberTemperature(Scaling):
    """A temperature for each member's logits, before their probabilities are averaged; a member's draws share it."""

    temperature: Tensor
    """T of each member, `[M]`."""

    @classmethod
    def fit(cls, predictive: Predictive, target: Tensor, members: int) -> Self:
        """Fit the T of all members together by the NLL of their mean, starting at T = 1; keep 1 if not better.

        The best T of each member alone can make the mean worse: the mean of calibrated members that disagree is
        underconfident. The result is a local minimum.
        """
        own = _temperatures(predictive.member_log_probs, target, members)
        return cls(own).if_better(cls(torch.ones_like(own)), predictive, target)

    def predictions(self, predictions: Tensor, task: Task) -> Tensor:
        members = len(self.temperature)
        if len(predictions) % members:
            raise ValueError(f"number of predictions must be a multiple of {members} members, got {len(predictions)}")
        own = self.temperature.to(predictions).repeat_interleave(len(predictions) // members)
        return predictions / own.view(-1, *[1] * (predictions.ndim - 1))


@dataclass(frozen=True, eq=False)
class Vector(Scaling):
    """A weight and a bias for each class's log-probability: `softmax(w * log p + b)`. It may change labels."""

    weight: Tensor
    """w, `[C]`."""
    bias: Tensor
    """b, `[C]`."""

    @classmethod
    def fit(cls, predictive: Predictive, target: Tensor, members: int = 1) -> Self:
        """Return the w and b with the lowest `N * NLL + (|w - 1|^2 + |b|^2) / 2`; w = 1, b = 0 if not better.

        The penalty is a standard normal prior. Without it, a class that is missing among the targets would get a bias
        of -inf. It is 0 for w = 1, b = 0, so the NLL never rises.
        """
        log_probs = predictive.log_probs
        start = torch.zeros(2, log_probs.shape[1], dtype=torch.float64, device=log_probs.device)
        start[0] = 1

        def objective(at: Tensor) -> Iterator[Tensor]:
            yield (at - start).square().sum() / (2 * len(target))
            for rows, own in _chunks(log_probs, target):
                yield F.cross_entropy(at[0] * rows + at[1], own, reduction="sum") / len(target)

        return cls(*_minimize(objective, start)).if_better(cls(*start), predictive, target)

    def log_probs(self, log_probs: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and bool((self.weight == 1).all() and (self.bias == 0).all()):
            return log_probs  # bitwise unchanged
        shape = (-1, *[1] * (log_probs.ndim - 2))
        weight, bias = self.weight.to(log_probs).view(shape), self.bias.to(log_probs).view(shape)
        return F.log_softmax(weight * log_probs.clamp(min=LEAST_LOG_PROB) + bias, 1)


@dataclass(frozen=True, eq=False)
class Isotonic(Scaling):
    """Rising function of each class's probability, linear between knots, at least 1e-6; then normalised.

    It may change labels and create ties.
    """

    knots: Tensor
    """Probabilities in rising order, `[C, K]`; a class with fewer than K repeats its last one."""
    heights: Tensor
    """Values that replace them, `[C, K]`."""

    @classmethod
    def fit(cls, predictive: Predictive, target: Tensor, members: int = 1) -> Self:
        """Fit isotonic regressions of each class against the rest, with scikit-learn."""
        regression = needed("sklearn.isotonic", "calibration", "scaling='isotonic'").IsotonicRegression
        knots, heights = [], []
        for number, probs in enumerate(predictive.probs.double().cpu().unbind(1)):
            fitted = regression(y_min=0, y_max=1, out_of_bounds="clip").fit(probs, (target.cpu() == number).double())
            knots.append(torch.from_numpy(fitted.X_thresholds_))
            heights.append(torch.from_numpy(fitted.y_thresholds_))
        return cls(_pad(knots), _pad(heights))

    def log_probs(self, log_probs: Tensor) -> Tensor:
        probs = log_probs.exp().double().movedim(1, 0)
        knots, heights = self.knots.to(probs.device), self.heights.to(probs.device)
        values = _interpolate(probs.flatten(1), knots, heights).view(probs.shape).movedim(0, 1).clamp(min=FLOOR)
        return (values / values.sum(1, keepdim=True)).log().to(log_probs)


@dataclass(frozen=True, eq=False)
class Variance(Scaling):
    """One factor for all predicted variances: stretch the members' mixture about its mean.

    Members' distances from their mean are multiplied by `sqrt(factor)`, their variances by `factor`. So the mean does
    not change, and `epistemic_variance`, `aleatoric_variance` and `variance` are multiplied by the factor.
    """

    factor: Tensor
    """Scalar, above 1 if the predictions were overconfident."""

    @classmethod
    def fit(cls, predictive: Predictive, target: Tensor, members: int = 1) -> Self:
        """Return the maximum-likelihood factor for normal targets: the mean of `(y - mean)^2 / variance`."""
        variance = predictive.variance.double()
        if not bool((variance > 0).all()):
            index = (variance <= 0).nonzero()[0].tolist()
            raise ValueError(
                f"scaling='variance' needs variances above 0, got 0 at index {index}: "
                "use members that differ, task='gaussian', or scaling=None"
            )
        factor = ((target.double() - predictive.mean.double()).square() / variance).mean()
        return cls(factor.clamp(min=LEAST_FACTOR))

    def predictions(self, predictions: Tensor, task: Task) -> Tensor:
        factor = self.factor.to(predictions.device, torch.promote_types(predictions.dtype, torch.float32))
        assert isinstance(task, ValueTask)
        return task.stretched(predictions, factor)


SCALINGS: dict[str, type[Scaling]] = {
    "temperature": Temperature,
    "member_temperature": MemberTemperature,
    "vector": Vector,
    "isotonic": Isotonic,
    "variance": Variance,
}


# Temperatures -------------------------------------------------------------------------------------------


def _temperatures(logits: Tensor, target: Tensor, members: int) -> Tensor:
    """Return the temperatures `[M]` with the lowest NLL for the mean of predictions `[S, N, C]`, S / M per member."""
    widest = math.log(LARGEST_TEMPERATURE)

    def bounded(at: Tensor) -> Tensor:
        return (widest * torch.tanh(at / widest)).exp()  # 1 at 0, with a slope of 1

    def objective(at: Tensor) -> Iterator[Tensor]:
        for rows, classes in _chunks(logits, target):
            own = bounded(at).repeat_interleave(len(logits) // members).view(-1, 1, 1)
            log_probs = F.log_softmax(rows / own, 2).logsumexp(0) - math.log(len(logits))
            yield F.nll_loss(log_probs, classes, reduction="sum") / len(target)

    return bounded(_minimize(objective, torch.zeros(members, dtype=torch.float64, device=logits.device)))


# Fitting ------------------------------------------------------------------------------------------------


def _chunks(values: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of `values`, `[..., N, C]`, and their classes `[N]`, in chunks, finite and in float64."""
    step = max(1, _CHUNK * len(target) // max(1, values.numel()))
    for rows, classes in zip(values.split(step, -2), target.split(step), strict=True):
        yield rows.double().clamp(min=LEAST_LOG_PROB), classes.clone()  # clone: autograd refuses inference tensors


@torch.inference_mode(False)
@torch.enable_grad()
def _minimize(objective: Callable[[Tensor], Iterable[Tensor]], start: Tensor) -> Tensor:
    """Minimize the sum of the parts of an objective by L-BFGS from `start`.

    The backward pass runs on one part at a time to save memory, so parts must not share a graph.
    """
    at = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [at], max_iter=200, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros_like(at).sum()
        for part in objective(at):
            part.backward()
            total = total + part.detach()
        return total

    optimizer.step(closure)
    return at.detach()


def _pad(rows: list[Tensor]) -> Tensor:
    """Stack rows of several lengths; shorter ones repeat their last value."""
    longest = max(len(row) for row in rows)
    return torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])


def _interpolate(x: Tensor, knots: Tensor, heights: Tensor) -> Tensor:
    """Evaluate piecewise linear functions, one per row of `[C, K]`, at the points in the rows of `x`, `[C, N]`."""
    right = torch.searchsorted(knots, x.contiguous()).clamp(1, knots.shape[1] - 1)  # 0 if there is one knot
    left = (right - 1).clamp(min=0)
    low, high = knots.gather(1, left), knots.gather(1, right)
    share = ((x - low) / (high - low).clamp(min=torch.finfo(x.dtype).tiny)).clamp(0, 1)
    return torch.lerp(heights.gather(1, left), heights.gather(1, right), share)
