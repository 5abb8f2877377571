"""What S predictions of the same inputs say together: `Predictive`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from statistics import NormalDist
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.core.gaussian import VARIANCE_FLOOR, at_least_float32, gaussian_nll, split_gaussian
from multitudes.core.quantiles import check_levels, default_levels, mixture_quantile, moments, widest_level
from multitudes.core.targets import check_shape
from multitudes.core.tasks import CLASSES, averaged, by_class, check_task

__all__ = ["VARIANCE_FLOOR", "Calibration", "Predictive", "gaussian_nll", "split_gaussian"]


class Calibration(Protocol):
    """What a `Predictive` asks of its calibration (see `evaluation.calibrate`)."""

    @property
    def conformal(self) -> Any:
        """The scores for sets and intervals, whose `set(predictive, level, seed)` gives them; or None."""
        ...

    def log_probs(self, log_probs: Tensor) -> Tensor:
        """The log of the members' mean probabilities, `[B, C, ...]`, calibrated."""
        ...

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        ...

    def equals(self, other: Any) -> bool:
        """Whether the other gives the same predictions the same calibration."""
        ...


VALUES = ("regression", "gaussian", "quantiles")
"""The tasks whose predictions are of numbers."""


def _quantity(*tasks: str) -> Callable[[Callable[[Predictive], Tensor]], cached_property[Tensor]]:
    """A property of a `Predictive` that is computed once, and an error for any task but `tasks`."""

    def decorate(compute: Callable[[Predictive], Tensor]) -> cached_property[Tensor]:
        @wraps(compute)
        def checked(self: Predictive) -> Tensor:
            self._require(compute.__name__, *tasks)
            return compute(self)

        return cached_property(checked)

    return decorate


@dataclass(frozen=True, eq=False, repr=False)
class Predictive:
    """S predictions of B inputs, and what they say together.

    - `task="classification"`, logits `[S, B, C, ...]`: `probs`, `log_probs` `[B, C, ...]`, `member_probs`,
      `member_log_probs` `[S, B, C, ...]`, `label`, `confidence`, `entropy`, `expected_entropy`,
      `mutual_information`, `variance`, `disagreement`, `max_logit` `[B, ...]`. Dense prediction,
      `[S, B, C, H, W]`, works alike: classes are dim 2, and each pixel has its own answer.
    - `task="tokens"`, logits with classes last, `[S, B, T, C]`: the same for each token, `[B, T, C]` and `[B, T]`.
    - `task="binary"`, one logit, `[S, B]` or `[S, B, 1, ...]`: the same but for `max_logit`, all `[B, ...]` without the
      single channel. `probs` is the probability of yes, `label` is 0 or 1 and `confidence` its probability.
    - `task="multilabel"`, independent logits `[S, B, L, ...]`: that for each label, `[B, L, ...]`.
    - `task="regression"`, means `[S, B]` or `[S, B, D, ...]`: `mean`, `epistemic_variance`,
      `aleatoric_variance`, `variance`, `std`, `interval()` `[B]` or `[B, D, ...]`.
    - `task="gaussian"`, means and then raw variances (see `split_gaussian`) `[S, B, 2D, ...]`: the same,
      `[B, D, ...]`.
    - `task="quantiles"`, quantiles of rising levels `[S, B, Q, ...]`: the same, `median` and `quantile(level)`, of the
      mixture of the members' distributions (see `core.quantiles`), `[B, ...]`.

    Each quantity is computed when first asked for, in float32 or better, and kept: do not write into it.

    The predictions of a calibrated network (`calibrate`) have a `set(level)`, and their `probs`, `log_probs`, `label`,
    `confidence` and `entropy` are the calibrated ones. What is said of the members stays: `member_probs`,
    `member_log_probs`, `expected_entropy`, `mutual_information`, `variance`, `disagreement`, `max_logit`. Scalings of
    the predictions themselves ("member_temperature", "variance") change these too, since the members are others then.

    Two members that are sure of different classes, and two that are both unsure:

    >>> sure, unsure = [[8.0, 0.0], [0.0, 8.0]], [[0.0, 0.0], [0.0, 0.0]]
    >>> p = Predictive(torch.tensor([sure, unsure]).transpose(0, 1))
    >>> p
    Predictive(task='classification', members=2, inputs=2, outputs=[2])
    >>> p.entropy  # each input is a coin flip ...
    tensor([0.6931, 0.6931])
    >>> p.mutual_information  # ... but only about the first is there more to know
    tensor([0.6901, 0.0000])
    >>> p.disagreement
    tensor([1., 0.])

    Two members with a mean and a variance head:

    >>> p = Predictive(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]), task="gaussian")
    >>> p.mean, p.epistemic_variance, p.aleatoric_variance
    (tensor([[2.]]), tensor([[1.]]), tensor([[0.6931]]))
    >>> p.interval(0.95)
    (tensor([[-0.5503]]), tensor([[4.5503]]))
    """

    predictions: Tensor
    task: str = "classification"
    draws: Tensor | None = None
    """How many draws each input took, `[B]`, where that was left to the inputs (`draws="auto"`)."""
    calibration: Calibration | None = None
    """What a calibrated network knows of its errors, fitted to data that it was not trained on."""

    quantiles: tuple[float, ...] | None = None
    """The levels of `task="quantiles"`; evenly spaced from 0.05 to 0.95 where they are not given."""
    next_tokens: bool = False
    """Whether position t of `task="tokens"` predicts the label at t + 1, as that of a causal language model does."""

    def __post_init__(self) -> None:
        check_task(self.task)
        if not isinstance(self.predictions, Tensor) or not self.predictions.is_floating_point():
            kind = getattr(self.predictions, "dtype", type(self.predictions).__name__)
            raise ValueError(f"predictions must be a floating-point tensor, got {kind}")
        check_shape(self.predictions.shape, self.task)
        if self.task == "quantiles":
            count = self.predictions.shape[2]
            levels = default_levels(count) if self.quantiles is None else check_levels(self.quantiles, count)
            object.__setattr__(self, "quantiles", levels)

    def _require(self, quantity: str, *tasks: str) -> None:
        if self.task not in tasks:
            # Not an AttributeError, which hasattr and getattr would swallow.
            raise ValueError(f"{quantity} needs task {' or '.join(tasks)}, got predictions of {self.task}")

    @property
    def members(self) -> int:
        """S: how many predictions there are of each input."""
        return self.predictions.shape[0]

    def __len__(self) -> int:
        """B: how many inputs were predicted."""
        return self.predictions.shape[1]

    def __repr__(self) -> str:
        outputs = list(self.predictions.shape[2:])
        if self.task == "gaussian":
            outputs[0] //= 2
        if self.task == "binary":
            outputs = outputs[1:]
        calibrated = "" if self.calibration is None else ", calibrated=True"
        levels = f", quantiles={self.quantiles}" if self.task == "quantiles" else ""
        what = f"members={self.members}, inputs={len(self)}, {outputs=}{levels}{calibrated}"
        return f"Predictive(task='{self.task}', {what})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles take the predictions alone: what follows from them can be computed again.
        settings = self.task, self.draws, self.calibration, self.quantiles, self.next_tokens
        return type(self), (self.predictions, *settings)

    # Classes --------------------------------------------------------------------------------------------
    # Computed in the form of classification, classes in dim 2 (`by_class`), and given in the task's own.

    def as_classes(self) -> Predictive:
        """The same predictions as those of classification, `[S, B, C, ...]`: of yes and no there are two classes."""
        self._require("as_classes", *CLASSES)
        if self.task == "classification":
            return self
        return Predictive(by_class(self.predictions, self.task), "classification", self.draws, self.calibration)

    def _own_form(self, values: Tensor, dim: int) -> Tensor:
        """What was computed for each class in `dim`, where the task has its classes; of yes and no, that of yes."""
        if self.task == "tokens":
            return values.movedim(dim, -1)
        return values if self.task == "classification" else values.select(dim, 1)

    @cached_property
    def _member_log_probs(self) -> Tensor:
        """`[S, B, C, ...]`"""
        return F.log_softmax(by_class(at_least_float32(self.predictions), self.task), dim=2)

    @cached_property
    def _mean_log_probs(self) -> Tensor:
        """Log of the members' mean probabilities, as they are before any calibration, `[B, C, ...]`."""
        # Rounding may leave the logarithm of a sum of ones a little above 0; a probability stops at 1.
        return (self._member_log_probs.logsumexp(0) - math.log(self.members)).clamp(max=0)

    @cached_property
    def _log_probs(self) -> Tensor:
        """The same, calibrated."""
        return self._mean_log_probs if self.calibration is None else self.calibration.log_probs(self._mean_log_probs)

    @_quantity(*CLASSES)
    def member_log_probs(self) -> Tensor:
        """Log-probabilities of each member, `[S, B, C, ...]`."""
        return self._own_form(self._member_log_probs, 2)

    @_quantity(*CLASSES)
    def member_probs(self) -> Tensor:
        """Probabilities of each member, `[S, B, C, ...]`."""
        return self.member_log_probs.exp()

    @_quantity(*CLASSES)
    def log_probs(self) -> Tensor:
        """Log of `probs`, `[B, C, ...]`, exact also where `probs` underflows.

        >>> p = Predictive(torch.tensor([[[0.0, -300.0]], [[0.0, -300.0]]]))
        >>> p.probs, p.log_probs
        (tensor([[1., 0.]]), tensor([[   0., -300.]]))
        """
        return self._own_form(self._log_probs, 1)

    @_quantity(*CLASSES)
    def probs(self) -> Tensor:
        """The members' mean probabilities, `[B, C, ...]`; never the softmax of their mean logits."""
        return self.log_probs.exp()

    @_quantity(*CLASSES)
    def label(self) -> Tensor:
        """The most probable class, `[B, ...]`; of yes and no, 1 where yes is the more probable."""
        return self._log_probs.exp().argmax(1)

    @_quantity(*CLASSES)
    def confidence(self) -> Tensor:
        """The probability of `label`, `[B, ...]`."""
        return self._log_probs.exp().amax(1)

    @_quantity(*CLASSES)
    def entropy(self) -> Tensor:
        """Total uncertainty in nats, `[B, ...]`: the entropy of `probs`, between 0 and log C."""
        return _entropy(self._log_probs, dim=1)

    @_quantity(*CLASSES)
    def expected_entropy(self) -> Tensor:
        """Aleatoric uncertainty in nats, `[B, ...]`: the mean of the members' entropies."""
        return _entropy(self._member_log_probs, dim=2).mean(0)

    @_quantity(*CLASSES)
    def mutual_information(self) -> Tensor:
        """Epistemic uncertainty in nats, `[B, ...]`: `entropy - expected_entropy`, never below 0.

        Of calibrated predictions, the entropy meant here is that of the members' mean before calibration.
        """
        total = self.entropy if self.calibration is None else _entropy(self._mean_log_probs, dim=1)
        return (total - self.expected_entropy).clamp(min=0)

    @_quantity("classification", "tokens")
    def max_logit(self) -> Tensor:
        """The largest of the members' mean logits, `[B, ...]`: a score of how familiar an input looks."""
        return at_least_float32(self.predictions).mean(0).amax(1 if self.task == "classification" else -1)

    @_quantity(*CLASSES)
    def disagreement(self) -> Tensor:
        """The share of pairs of members whose labels differ, `[B, ...]`; 0 for a single member.

        >>> votes = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # two against one: 2 pairs of 3
        >>> Predictive(votes[:, None]).disagreement
        tensor([0.6667])
        """
        logits = by_class(self.predictions, self.task)
        labels = logits.argmax(2).movedim(0, 1)
        votes = labels.new_zeros(logits.shape[1:]).scatter_add(1, labels, torch.ones_like(labels))
        # Of all S * S ordered pairs, take those of equal labels away; a member and itself are one of them.
        differing = self.members**2 - votes.square().sum(1)
        pairs = max(1, self.members * (self.members - 1))
        return differing.to(torch.promote_types(self.predictions.dtype, torch.float32)) / pairs

    # Values ---------------------------------------------------------------------------------------------

    @cached_property
    def _means_and_variances(self) -> tuple[Tensor, Tensor]:
        """Each member's mean and predicted variance, `[S, B]` or `[S, B, D, ...]`."""
        if self.task == "gaussian":
            return split_gaussian(self.predictions, dim=2)
        means = at_least_float32(self.predictions)
        if self.task == "quantiles":
            return moments(means, self._levels)
        return means, means.new_zeros(()).expand_as(means)

    @_quantity(*VALUES)
    def mean(self) -> Tensor:
        """The members' mean, `[B]` or `[B, D, ...]`."""
        return self._means_and_variances[0].mean(0)

    @_quantity(*VALUES)
    def epistemic_variance(self) -> Tensor:
        """How far the members lie apart: the variance of their means, `[B]` or `[B, D, ...]`."""
        return self._means_and_variances[0].var(0, correction=0)

    @_quantity(*VALUES)
    def aleatoric_variance(self) -> Tensor:
        """The noise that the members predict: the mean of their variances; 0 for `task="regression"`."""
        return self._means_and_variances[1].mean(0)

    @_quantity(*VALUES)
    def std(self) -> Tensor:
        """The square root of `variance`, `[B]` or `[B, D, ...]`."""
        return self.variance.sqrt()

    @property
    def _levels(self) -> tuple[float, ...]:
        assert self.quantiles is not None
        return self.quantiles

    def quantile(self, level: float) -> Tensor:
        """The quantile of a level of the members' mixture, `[B, ...]`; of `task="quantiles"`, and between its levels."""
        self._require("quantile", "quantiles")
        return mixture_quantile(self.predictions, self._levels, level)

    @_quantity("quantiles")
    def median(self) -> Tensor:
        """The median of the members' mixture, `[B, ...]`."""
        return self.quantile(0.5)

    def interval(self, level: float | None = None) -> tuple[Tensor, Tensor]:
        """The central interval `(low, high)` that holds the target with probability `level`, by default 0.95.

        It is that of the Gaussian with the mean and variance of the members' mixture (ibid., section 2.4). Of quantiles
        it is that of the mixture itself, by default the widest between them. Of a calibrated network with conformal
        scores it is `set(level)`, which holds the target as often as it says whatever the distribution.

        >>> p = Predictive(torch.tensor([[1.0], [3.0]]), task="regression")
        >>> p.interval(0.5)
        (tensor([1.3255]), tensor([2.6745]))
        """
        self._require("interval", *VALUES)
        if level is None:
            level = widest_level(self._levels) if self.task == "quantiles" else 0.95
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        if self.calibration is not None and self.calibration.conformal is not None:
            return self.calibration.conformal.set(self, level)
        return self._plain_interval(level)

    def _plain_interval(self, level: float) -> tuple[Tensor, Tensor]:
        if self.task == "quantiles":
            tail = round((1 - level) / 2, 12)
            return self.quantile(tail), self.quantile(1 - tail)
        # From the lower tail, whose probability is exact in floating point even as level nears 1.
        reach = -NormalDist().inv_cdf((1 - level) / 2) * self.std
        return self.mean - reach, self.mean + reach

    # Every task -----------------------------------------------------------------------------------------

    @cached_property
    def variance(self) -> Tensor:
        """Of classes: the members' variance of a class's probability, mean over the classes, `[B, ...]`.

        Of values: the variance of the members' mixture, `[B]` or `[B, D, ...]`, which is
        `epistemic_variance + aleatoric_variance`.
        """
        if self.task in CLASSES:
            return self._member_log_probs.exp().var(0, correction=0).mean(1)
        return self.epistemic_variance + self.aleatoric_variance

    def set(self, level: float = 0.9, *, seed: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """What holds the target with probability `level`, where the network was calibrated (`calibrate`).

        Of classes: a set of them, boolean `[B, C, ...]`; of tokens `[B, T, C]`, and where the answer is yes or no
        `[B, 2, ...]`, whether no and whether yes is in it. Of values: an interval, `(low, high)`, each of the mean's
        shape. A `seed` is for randomized sets alone.
        """
        if self.calibration is None or self.calibration.conformal is None:
            raise ValueError("set needs a network with conformal scores: calibrated = mt.calibrate(net, data) first")
        return self.calibration.conformal.set(self, level, seed)

    @property
    def member_values(self) -> Tensor:
        """What the mean prediction is the mean of, `[S, B, ...]`: each member's probabilities, means or quantiles."""
        if self.task == "quantiles":
            return at_least_float32(self.predictions).sort(2).values
        return self.member_probs if self.task in CLASSES else self._means_and_variances[0]

    @property
    def together(self) -> Tensor:
        """What all say together in the form of one member's prediction, `[B, ...]`: the calibrated logits, say."""
        if self.calibration is None or self.task not in CLASSES:
            return averaged(self.predictions, self.task)
        logits = self._own_form(self._log_probs, 1)
        if self.task in ("binary", "multilabel"):
            logits = logits - self._log_probs.select(1, 0)
        return logits.reshape(self.predictions.shape[1:])

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Predictive:
        """Select inputs by an int, a slice, a boolean mask `[B]` or positions; the batch dimension stays.

        >>> p = Predictive(torch.randn(4, 10, 3))
        >>> p[2:5]
        Predictive(task='classification', members=4, inputs=3, outputs=[3])
        >>> p[-1]
        Predictive(task='classification', members=4, inputs=1, outputs=[3])
        """
        if isinstance(index, int) or getattr(index, "ndim", 1) == 0:  # torch and numpy scalars have ndim 0
            position = int(index)  # type: ignore[arg-type]
            if not -len(self) <= position < len(self):
                raise IndexError(f"index must lie within the {len(self)} inputs, got {position}")
            index = [position]
        chosen = self.predictions[:, index]
        if chosen.ndim != self.predictions.ndim:
            raise IndexError(f"index must select along the {len(self)} inputs alone, got {index}")
        return replace(self, predictions=chosen, draws=None if self.draws is None else self.draws[index])

    @staticmethod
    def concat(parts: Iterable[Predictive]) -> Predictive:
        """Join batches along B: members, task, output shape and calibration must be the same.

        >>> Predictive.concat([Predictive(torch.randn(4, 10, 3)), Predictive(torch.randn(4, 6, 3))])
        Predictive(task='classification', members=4, inputs=16, outputs=[3])
        """
        parts = list(parts)
        if not parts:
            raise ValueError("parts must hold at least one Predictive, got none")
        first = parts[0]
        for part in parts:
            if part.task != first.task:
                raise ValueError(f"parts must have the same task, got {first.task} and {part.task}")
            if (part.quantiles, part.next_tokens) != (first.quantiles, first.next_tokens):
                raise ValueError("parts must have the same quantiles and next_tokens, got predictions that differ")
            one, other = list(first.predictions.shape), list(part.predictions.shape)
            if one[:1] + one[2:] != other[:1] + other[2:]:
                raise ValueError(f"parts must have the same shape but for dim 1, got {one} and {other}")
            if not _same(part.calibration, first.calibration):
                raise ValueError("parts must have the same calibration, or none, got predictions that differ in it")
        counts = [part.draws for part in parts if part.draws is not None]
        return replace(
            first,
            predictions=torch.cat([part.predictions for part in parts], dim=1),
            draws=torch.cat(counts) if len(counts) == len(parts) else None,
        )

    def to(self, target: torch.device | torch.dtype | str) -> Predictive:
        """The same predictions on another device or in another dtype; itself where nothing changes."""
        moved = self.predictions.to(target)
        if moved is self.predictions:
            return self
        draws = None if self.draws is None else self.draws.to(moved.device)
        calibration = None if self.calibration is None else self.calibration.to(moved.device)
        return replace(self, predictions=moved, draws=draws, calibration=calibration)

    def cpu(self) -> Predictive:
        """The same predictions on the CPU; itself if they are there."""
        return self.to("cpu")


def _same(one: Calibration | None, other: Calibration | None) -> bool:
    return one is other or (one is not None and other is not None and one.equals(other))


def _entropy(log_probs: Tensor, dim: int) -> Tensor:
    """`-sum p log p` over `dim`, where p log p is 0 at p = 0."""
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 * -inf would be NaN
    return (log_probs.exp() * -finite).sum(dim)
