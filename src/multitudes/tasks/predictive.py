"""`Predictive`: the joint prediction of S predictions of the same inputs, and its uncertainty.

Quantities of classes are computed with classes in dim 2 (`ClassTask.by_class`) and returned in the task's own form.
Quantities of values are computed from each member's mean and variance (`ValueTask.means_and_variances`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.tasks import TASKS, task_of
from multitudes.tasks.criteria import at_least_float32


def quantity(compute: Callable[[Any], Tensor]) -> cached_property[Tensor]:
    """Turn a method into a cached property that raises an error for tasks without this quantity."""

    @wraps(compute)
    def checked(self: Predictive) -> Tensor:
        self._require(compute.__name__)
        return compute(self)

    return cached_property(checked)


@dataclass(frozen=True, eq=False, repr=False)
class Predictive:
    """S predictions of B inputs, and quantities computed from them.

    - `task="classification"`, logits `[S, B, C, ...]`: `probs`, `log_probs` `[B, C, ...]`, `member_probs`,
      `member_log_probs` `[S, B, C, ...]`, `label`, `confidence`, `entropy`, `expected_entropy`,
      `mutual_information`, `variance`, `disagreement`, `max_logit` `[B, ...]`. Dense prediction,
      `[S, B, C, H, W]`, works in the same way: classes are dim 2, and each pixel has its own prediction.
    - `task="tokens"`, logits with classes last, `[S, B, T, C]`: the same for each token, `[B, T, C]` and `[B, T]`.
    - `task="binary"`, one logit, `[S, B]` or `[S, B, 1, ...]`: the same except `max_logit`, all `[B, ...]` without the
      single channel. `probs` is the probability of yes, `label` is 0 or 1 and `confidence` its probability.
    - `task="multilabel"`, independent logits `[S, B, L, ...]`: the same for each label, `[B, L, ...]`.
    - `task="regression"`, means `[S, B]` or `[S, B, D, ...]`: `mean`, `epistemic_variance`,
      `aleatoric_variance`, `variance`, `std`, `interval()` `[B]` or `[B, D, ...]`.
    - `task="gaussian"`, means and then raw variances (see `split_gaussian`) `[S, B, 2D, ...]`: the same,
      `[B, D, ...]`.
    - `task="quantiles"`, quantiles of rising levels `[S, B, Q, ...]`: the same, `median` and `quantile(level)`, of the
      mixture of the members' distributions (see `multitudes.tasks.quantiles`), `[B, ...]`.

    Each quantity is computed on first access, in float32 or better, and cached: do not modify it in place.

    A calibrated network (`calibrate`) has calibrated `probs`, `log_probs`, `label`, `confidence` and `entropy`, and
    `set(level)`, for values also as `interval(level)`. Quantities of members are not calibrated: `member_probs`,
    `member_log_probs`, `expected_entropy`, `mutual_information`, `variance`, `disagreement`, `max_logit`. Only the
    scalings "member_temperature" and "variance" change them too.

    Example: two confident members that disagree, and two unsure ones.


    >>> sure, unsure = [[8.0, 0.0], [0.0, 8.0]], [[0.0, 0.0], [0.0, 0.0]]
    >>> p = Predictive(torch.tensor([sure, unsure]).transpose(0, 1))
    >>> p
    Predictive(task='classification', members=2, inputs=2, outputs=[2])
    >>> p.entropy  # both inputs are uncertain ...
    tensor([0.6931, 0.6931])
    >>> p.mutual_information  # ... but members disagree about the first one only
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
    """The number of draws per input, `[B]`, for `draws="auto"`."""
    calibration: Any = None
    """The `evaluation.calibrate.Calibration` of a calibrated network, fitted to held-out data."""
    quantiles: tuple[float, ...] | None = None
    """The levels of `task="quantiles"`; evenly spaced from 0.05 to 0.95 by default."""
    next_tokens: bool = False
    """True if position t of `task="tokens"` predicts the label at t + 1, as in a causal language model."""

    reading: Any = field(init=False, repr=False)
    """The task as an object (see `multitudes.tasks`)."""

    def __post_init__(self) -> None:
        reading = task_of(self.task, self.quantiles, self.next_tokens)
        if not isinstance(self.predictions, Tensor) or not self.predictions.is_floating_point():
            kind = getattr(self.predictions, "dtype", type(self.predictions).__name__)
            raise ValueError(f"predictions must be a floating-point tensor, got {kind}")
        reading.check_shape(self.predictions.shape)
        object.__setattr__(self, "reading", reading.sized(self.predictions.shape))
        object.__setattr__(self, "quantiles", self.reading.quantiles)

    def _require(self, quantity: str) -> None:
        if quantity not in self.reading.quantities:
            *tasks, last = (name for name, kind in TASKS.items() if quantity in kind.quantities)
            needed = f"{', '.join(tasks)} or {last}" if tasks else last
            # hasattr and getattr would hide an AttributeError.
            raise ValueError(f"{quantity} needs task {needed}, got predictions of {self.task}")

    @property
    def members(self) -> int:
        """S, the number of predictions per input."""
        return self.predictions.shape[0]

    def __len__(self) -> int:
        """Return B, the number of inputs."""
        return self.predictions.shape[1]

    def __repr__(self) -> str:
        outputs = self.reading.shown(self.predictions.shape[2:])
        calibrated = "" if self.calibration is None else ", calibrated=True"
        levels = "" if self.quantiles is None else f", quantiles={self.quantiles}"
        what = f"members={self.members}, inputs={len(self)}, {outputs=}{levels}{calibrated}"
        return f"Predictive(task='{self.task}', {what})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles omit the cached quantities.
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

    # -- all tasks -----------------------------------------------------------------------------------------

    @cached_property
    def variance(self) -> Tensor:
        """Variance over members of a class's probability, mean over the classes, `[B, ...]`.

        For values, the variance of the members' mixture, `[B]` or `[B, D, ...]`, which is
        `epistemic_variance + aleatoric_variance`.
        """
        if self.reading.classes:
            return self._member_log_probs.exp().var(0, correction=0).mean(1)
        return self.epistemic_variance + self.aleatoric_variance

    def set(self, level: float = 0.9, *, seed: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return a calibrated network's set or interval that contains the target with probability `level`.

        Args:
            level: the probability.
            seed: a seed for randomized sets.

        Returns:
            For classes, a boolean set `[B, C, ...]` (`[B, T, C]` for tokens, `[B, 2, ...]` for no and yes). For values,
            an interval `(low, high)`, both in the mean's shape.
        """
        if self.calibration is None or self.calibration.conformal is None:
            raise ValueError("set needs a network with conformal scores: calibrated = mt.calibrate(net, data) first")
        return self.calibration.conformal.set(self, level, seed)

    @property
    def member_values(self) -> Tensor:
        """Return each member's probabilities, means or quantiles, `[S, B, ...]`."""
        return self.member_probs if self.reading.classes else self.reading.member_values(self.predictions)

    @property
    def together(self) -> Tensor:
        """The joint prediction in the form of a member's prediction, `[B, ...]`, for example calibrated logits."""
        if self.calibration is None or not self.reading.classes:
            return self.reading.averaged(self.predictions)
        return self.reading.logits(self._log_probs).reshape(self.predictions.shape[1:])

    # -- classes -------------------------------------------------------------------------------------------

    def as_classes(self) -> Predictive:
        """Return the predictions in the form of classification, `[S, B, C, ...]`: yes/no becomes two classes."""
        self._require("as_classes")
        if self.reading.class_axis == 1:
            return self
        return Predictive(self.reading.by_class(self.predictions), draws=self.draws, calibration=self.calibration)

    @cached_property
    def _member_log_probs(self) -> Tensor:
        """Log-probabilities of each member with classes in dim 2, `[S, B, C, ...]`."""
        return F.log_softmax(self.reading.by_class(at_least_float32(self.predictions)), dim=2)

    @cached_property
    def _mean_log_probs(self) -> Tensor:
        """Log of the members' mean probabilities, before any calibration, `[B, C, ...]`."""
        # Rounding may push the log of a sum of ones above 0.
        return (self._member_log_probs.logsumexp(0) - math.log(len(self.predictions))).clamp(max=0)

    @cached_property
    def _log_probs(self) -> Tensor:
        """Log of the members' mean probabilities, calibrated, `[B, C, ...]`."""
        return self._mean_log_probs if self.calibration is None else self.calibration.log_probs(self._mean_log_probs)

    @cached_property
    def _probs(self) -> Tensor:
        """The members' mean probabilities, calibrated, `[B, C, ...]`."""
        return self._log_probs.exp()

    @quantity
    def member_log_probs(self) -> Tensor:
        """Log-probabilities of each member, `[S, B, C, ...]`."""
        return self.reading.own_form(self._member_log_probs, 2)

    @quantity
    def member_probs(self) -> Tensor:
        """Probabilities of each member, `[S, B, C, ...]`."""
        return self.member_log_probs.exp()

    @quantity
    def log_probs(self) -> Tensor:
        """Log of `probs`, `[B, C, ...]`, exact even if `probs` underflows.

        >>> p = Predictive(torch.tensor([[[0.0, -300.0]], [[0.0, -300.0]]]))
        >>> p.probs, p.log_probs
        (tensor([[1., 0.]]), tensor([[   0., -300.]]))
        """
        return self.reading.own_form(self._log_probs, 1)

    @quantity
    def probs(self) -> Tensor:
        """The members' mean probabilities, `[B, C, ...]`, not the softmax of their mean logits."""
        return self.reading.own_form(self._probs, 1)

    @quantity
    def label(self) -> Tensor:
        """The most probable class, `[B, ...]`; for yes/no, 1 if yes is more probable."""
        return self._probs.argmax(1)

    @quantity
    def confidence(self) -> Tensor:
        """The probability of `label`, `[B, ...]`."""
        return self._probs.amax(1)

    @quantity
    def entropy(self) -> Tensor:
        """Total uncertainty in nats, `[B, ...]`: the entropy of `probs`, between 0 and log C."""
        return _entropy(self._log_probs, dim=1)

    @quantity
    def expected_entropy(self) -> Tensor:
        """Aleatoric uncertainty in nats, `[B, ...]`: the mean of the members' entropies."""
        return _entropy(self._member_log_probs, dim=2).mean(0)

    @quantity
    def mutual_information(self) -> Tensor:
        """Epistemic uncertainty in nats, `[B, ...]`: `entropy - expected_entropy`, at least 0.

        For calibrated predictions it uses the entropy before calibration.
        """
        total = self.entropy if self.calibration is None else _entropy(self._mean_log_probs, dim=1)
        return (total - self.expected_entropy).clamp(min=0)

    @quantity
    def max_logit(self) -> Tensor:
        """The maximum of the members' mean logits, `[B, ...]`; low for out-of-distribution inputs."""
        return at_least_float32(self.reading.by_class(self.predictions)).mean(0).amax(1)

    @quantity
    def disagreement(self) -> Tensor:
        """The share of pairs of members whose labels differ, `[B, ...]`; 0 for a single member.

        >>> votes = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # two against one: 2 pairs of 3
        >>> Predictive(votes[:, None]).disagreement
        tensor([0.6667])
        """
        logits = self.reading.by_class(self.predictions)
        labels = logits.argmax(2).movedim(0, 1)
        votes = labels.new_zeros(logits.shape[1:]).scatter_add(1, labels, torch.ones_like(labels))
        # All S * S ordered pairs, minus those of equal labels, which include each member with itself.
        differing = len(self.predictions) ** 2 - votes.square().sum(1)
        pairs = max(1, len(self.predictions) * (len(self.predictions) - 1))
        return differing.to(torch.promote_types(self.predictions.dtype, torch.float32)) / pairs

    # -- values --------------------------------------------------------------------------------------------

    @cached_property
    def member_means_and_variances(self) -> tuple[Tensor, Tensor]:
        """Each member's mean and predicted variance, `[S, B]` or `[S, B, D, ...]`."""
        return self.reading.means_and_variances(self.predictions)

    @quantity
    def mean(self) -> Tensor:
        """The members' mean, `[B]` or `[B, D, ...]`."""
        return self.member_means_and_variances[0].mean(0)

    @quantity
    def epistemic_variance(self) -> Tensor:
        """The variance of the members' means, `[B]` or `[B, D, ...]`."""
        return self.member_means_and_variances[0].var(0, correction=0)

    @quantity
    def aleatoric_variance(self) -> Tensor:
        """The mean of the variances that members predict, `[B]` or `[B, D, ...]`; 0 for `task="regression"`."""
        return self.member_means_and_variances[1].mean(0)

    @quantity
    def std(self) -> Tensor:
        """The square root of `variance`, `[B]` or `[B, D, ...]`."""
        return self.variance.sqrt()

    def quantile(self, level: float) -> Tensor:
        """Return a quantile of the members' mixture, `[B, ...]`; `level` lies between the predicted ones."""
        self._require("quantile")
        return self.reading.quantile(self.predictions, level)

    @quantity
    def median(self) -> Tensor:
        """The median of the members' mixture, `[B, ...]`."""
        return self.quantile(0.5)

    def interval(self, level: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the central interval `(low, high)` that contains the target with probability `level`.

        It is the interval of the Gaussian with the mean and variance of the members' mixture (Lakshminarayanan et al.,
        2017, section 2.4); for quantiles, of the mixture itself. For a calibrated network with conformal scores it is
        `set(level)`, whose coverage holds for any distribution.

        Args:
            level: the probability, by default 0.95; for quantiles, that of the widest interval between their levels.

        >>> p = Predictive(torch.tensor([[1.0], [3.0]]), task="regression")
        >>> p.interval(0.5)
        (tensor([1.3255]), tensor([2.6745]))
        """
        self._require("interval")
        level = self.reading.level if level is None else level
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        if self.calibration is not None and self.calibration.conformal is not None:
            return self.calibration.conformal.set(self, level)
        return self.reading.interval(self.predictions, self.mean, self.std, level)

    # -- selection -----------------------------------------------------------------------------------------

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Predictive:
        """Select inputs by an int, a slice, a boolean mask `[B]` or positions; keep the batch axis.

        >>> p = Predictive(torch.randn(4, 10, 3))
        >>> p[2:5]
        Predictive(task='classification', members=4, inputs=3, outputs=[3])
        >>> p[-1]
        Predictive(task='classification', members=4, inputs=1, outputs=[3])
        """
        if isinstance(index, int) or getattr(index, "ndim", 1) == 0:  # torch and numpy scalars have ndim 0
            position = int(index)  # type: ignore[arg-type]
            if not -len(self) <= position < len(self):
                raise IndexError(f"index {position} is out of range for {len(self)} inputs")
            index = [position]
        chosen = self.predictions[:, index]
        if chosen.ndim != self.predictions.ndim:
            raise IndexError(f"index must select inputs ({len(self)}) and no other axis, got {index}")
        return replace(self, predictions=chosen, draws=None if self.draws is None else self.draws[index])

    @staticmethod
    def concat(parts: Iterable[Predictive]) -> Predictive:
        """Concatenate batches along B; members, task, output shape and calibration must be the same.

        >>> Predictive.concat([Predictive(torch.randn(4, 10, 3)), Predictive(torch.randn(4, 6, 3))])
        Predictive(task='classification', members=4, inputs=16, outputs=[3])
        """
        parts = list(parts)
        if not parts:
            raise ValueError("parts must hold at least one Predictive, got none")
        first = parts[0]
        for part in parts:
            for name in ("task", "quantiles", "next_tokens"):
                if getattr(part, name) != getattr(first, name):
                    raise ValueError(
                        f"parts must have the same {name}, got {getattr(first, name)} and {getattr(part, name)}"
                    )
            one, other = list(first.predictions.shape), list(part.predictions.shape)
            if one[:1] + one[2:] != other[:1] + other[2:]:
                raise ValueError(f"parts must have the same shape except in dim 1, got {one} and {other}")
            if part.calibration != first.calibration:
                raise ValueError("parts must have the same calibration or none, got different ones")
        counts = [part.draws for part in parts if part.draws is not None]
        return replace(
            first,
            predictions=torch.cat([part.predictions for part in parts], dim=1),
            draws=torch.cat(counts) if len(counts) == len(parts) else None,
        )

    def to(self, target: torch.device | torch.dtype | str) -> Predictive:
        """Convert the predictions to a device or dtype; return itself if nothing changes."""
        moved = self.predictions.to(target)
        if moved is self.predictions:
            return self
        draws = None if self.draws is None else self.draws.to(moved.device)
        calibration = None if self.calibration is None else self.calibration.to(moved.device)
        return replace(self, predictions=moved, draws=draws, calibration=calibration)

    def cpu(self) -> Predictive:
        """Move the predictions to the CPU; return itself if they are there."""
        return self.to("cpu")


def _entropy(log_probs: Tensor, dim: int) -> Tensor:
    """Return `-sum p log p` over `dim`, with p log p = 0 at p = 0."""
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 * -inf would be NaN
    return (log_probs.exp() * -finite).sum(dim)
