"""What predictions of classes say together: probabilities, labels, uncertainties.

They are computed in the form of classification, classes in dim 2 (`by_class`), and given in the task's own.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.core.gaussian import at_least_float32
from multitudes.core.quantities import Quantities, quantity
from multitudes.core.tasks import CLASSES, by_class

__all__ = ["ClassQuantities"]


class ClassQuantities(Quantities):
    """The quantities of "classification", "tokens", "binary" and "multilabel"."""

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
        return (self._member_log_probs.logsumexp(0) - math.log(len(self.predictions))).clamp(max=0)

    @cached_property
    def _log_probs(self) -> Tensor:
        """The same, calibrated."""
        return self._mean_log_probs if self.calibration is None else self.calibration.log_probs(self._mean_log_probs)

    @cached_property
    def _probs(self) -> Tensor:
        """`[B, C, ...]`"""
        return self._log_probs.exp()

    @quantity(*CLASSES)
    def member_log_probs(self) -> Tensor:
        """Log-probabilities of each member, `[S, B, C, ...]`."""
        return self._own_form(self._member_log_probs, 2)

    @quantity(*CLASSES)
    def member_probs(self) -> Tensor:
        """Probabilities of each member, `[S, B, C, ...]`."""
        return self.member_log_probs.exp()

    @quantity(*CLASSES)
    def log_probs(self) -> Tensor:
        """Log of `probs`, `[B, C, ...]`, exact also where `probs` underflows.

        >>> from multitudes import Predictive
        >>> p = Predictive(torch.tensor([[[0.0, -300.0]], [[0.0, -300.0]]]))
        >>> p.probs, p.log_probs
        (tensor([[1., 0.]]), tensor([[   0., -300.]]))
        """
        return self._own_form(self._log_probs, 1)

    @quantity(*CLASSES)
    def probs(self) -> Tensor:
        """The members' mean probabilities, `[B, C, ...]`; never the softmax of their mean logits."""
        return self._own_form(self._probs, 1)

    @quantity(*CLASSES)
    def label(self) -> Tensor:
        """The most probable class, `[B, ...]`; of yes and no, 1 where yes is the more probable."""
        return self._probs.argmax(1)

    @quantity(*CLASSES)
    def confidence(self) -> Tensor:
        """The probability of `label`, `[B, ...]`."""
        return self._probs.amax(1)

    @quantity(*CLASSES)
    def entropy(self) -> Tensor:
        """Total uncertainty in nats, `[B, ...]`: the entropy of `probs`, between 0 and log C."""
        return _entropy(self._log_probs, dim=1)

    @quantity(*CLASSES)
    def expected_entropy(self) -> Tensor:
        """Aleatoric uncertainty in nats, `[B, ...]`: the mean of the members' entropies."""
        return _entropy(self._member_log_probs, dim=2).mean(0)

    @quantity(*CLASSES)
    def mutual_information(self) -> Tensor:
        """Epistemic uncertainty in nats, `[B, ...]`: `entropy - expected_entropy`, never below 0.

        Of calibrated predictions, the entropy meant here is that of the members' mean before calibration.
        """
        total = self.entropy if self.calibration is None else _entropy(self._mean_log_probs, dim=1)
        return (total - self.expected_entropy).clamp(min=0)

    @quantity("classification", "tokens")
    def max_logit(self) -> Tensor:
        """The largest of the members' mean logits, `[B, ...]`: a score of how familiar an input looks."""
        return at_least_float32(self.predictions).mean(0).amax(1 if self.task == "classification" else -1)

    @quantity(*CLASSES)
    def disagreement(self) -> Tensor:
        """The share of pairs of members whose labels differ, `[B, ...]`; 0 for a single member.

        >>> from multitudes import Predictive
        >>> votes = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # two against one: 2 pairs of 3
        >>> Predictive(votes[:, None]).disagreement
        tensor([0.6667])
        """
        logits = by_class(self.predictions, self.task)
        labels = logits.argmax(2).movedim(0, 1)
        votes = labels.new_zeros(logits.shape[1:]).scatter_add(1, labels, torch.ones_like(labels))
        # Of all S * S ordered pairs, take those of equal labels away; a member and itself are one of them.
        differing = len(self.predictions) ** 2 - votes.square().sum(1)
        pairs = max(1, len(self.predictions) * (len(self.predictions) - 1))
        return differing.to(torch.promote_types(self.predictions.dtype, torch.float32)) / pairs


def _entropy(log_probs: Tensor, dim: int) -> Tensor:
    """`-sum p log p` over `dim`, where p log p is 0 at p = 0."""
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 * -inf would be NaN
    return (log_probs.exp() * -finite).sum(dim)
