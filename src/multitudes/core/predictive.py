"""What S predictions of the same inputs say together: `Predictive`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from multitudes.core.class_quantities import ClassQuantities
from multitudes.core.gaussian import VARIANCE_FLOOR, at_least_float32, gaussian_nll, split_gaussian
from multitudes.core.quantiles import check_levels, default_levels
from multitudes.core.targets import check_shape
from multitudes.core.tasks import CLASSES, averaged, by_class, check_task
from multitudes.core.value_quantities import ValueQuantities

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


@dataclass(frozen=True, eq=False, repr=False)
class Predictive(ClassQuantities, ValueQuantities):
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

    The predictions of a calibrated network (`calibrate`) have a `set(level)`, of values also as `interval(level)`, and
    their `probs`, `log_probs`, `label`, `confidence` and `entropy` are calibrated. What is said of the members stays:
    `member_probs`, `member_log_probs`, `expected_entropy`, `mutual_information`, `variance`, `disagreement`,
    `max_logit`. Scalings of the predictions themselves ("member_temperature", "variance") change these too, since the
    members are others then.

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

    def as_classes(self) -> Predictive:
        """The same predictions as those of classification, `[S, B, C, ...]`: of yes and no there are two classes."""
        self._require("as_classes", *CLASSES)
        if self.task == "classification":
            return self
        return Predictive(by_class(self.predictions, self.task), "classification", self.draws, self.calibration)

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
