"""Split conformal prediction: sets and intervals with guaranteed coverage.

Vovk, Gammerman & Shafer, *Algorithmic Learning in a Random World* (2005). A score measures how badly a target fits a
prediction. The threshold is the `ceil((n + 1) level)`-th smallest score of n held-out inputs that are exchangeable with
the new one; the set consists of all targets whose score is not above it. It contains the new target with probability at
least `level`, and at most `level + 1 / (n + 1)` if no two scores are equal, for any network and distribution.

If an input has several targets (pixels, outputs), each counts for its share of the input, and the guarantee is for the
mean share of an input's targets that are in their sets: Angelopoulos et al., *Conformal Risk Control* (2024). The rule
above is the case of one target per input.

The scores, with classes from the most probable to the least (in index order if equally probable):

- "lac", `1 - p_y`: the smallest sets, some of them empty. Sadinle, Lei & Wasserman, *Least Ambiguous Set-Valued
  Classifiers with Bounded Error Levels* (2019).
- "aps", the probability of all classes before y: larger sets for harder inputs. Romano, Sesia & Candès,
  *Classification with Valid and Adaptive Coverage* (2020). Every set contains the most probable class, whose score is
  0, and no other if that one is correct often enough. If randomized, `u p_y` is added with u uniform between 0 and 1:
  coverage is exact, and sets may be empty.
- "raps", "aps" plus `penalty * max(0, rank of y - k_reg)`: fewer very large sets. Angelopoulos, Bates, Jordan & Malik,
  *Uncertainty Sets for Image Classifiers using Conformal Prediction* (2021).
- "absolute", `|y - mean|`, and "scaled", `|y - mean| / std`: intervals of constant width, or of a width proportional to
  the predicted standard deviation. Lei et al., *Distribution-Free Predictive Inference for Regression* (2018).
- "cqr", `max(low - y, y - high)`, the distance of y from the widest interval between the predicted quantiles, negative
  inside: that interval, with both ends moved by the same distance. Romano, Patterson & Candès, *Conformalized Quantile
  Regression* (2019).

Binary predictions have sets of the two classes no and yes. Multilabel predictions have such a set per label; the labels
are then the input's targets. Tokens with label -100 have no score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from multitudes.base.checks import check_choice, check_count, check_number, check_seed
from multitudes.tasks import TASKS, Task
from multitudes.tasks.predictive import Predictive

TIE = 1e-6
"""Class scores this close count as equal, since rounding differs between devices."""

_CHUNK = 2**22  # number of probabilities sorted together
# Scores, sets and the division of the data use the same seed, but must have independent random numbers.
_FOR_SCORES, _FOR_SETS = 0x5C02E5, 0x5E75


@dataclass(frozen=True)
class ConformalScore:
    """Misfit of a class or a number to a prediction: "lac", "aps", "raps", "absolute", "scaled" or "cqr"."""

    name: str
    k_reg: int = 5
    """Rank, from 1, up to which "raps" adds no penalty."""
    penalty: float = 0.01
    """Penalty that "raps" adds for each rank after that."""
    randomized: bool = False
    """True if "aps" and "raps" add a random part of the class's own probability."""

    def __post_init__(self) -> None:
        check_choice("score", self.name, sorted({name for task in TASKS.values() for name in task.scores}))
        check_count("k_reg", self.k_reg, 0)
        check_number("penalty", self.penalty, 0)
        if not isinstance(self.randomized, bool):
            raise ValueError(f"randomized must be True or False, got {self.randomized!r}")
        if self.randomized and self.name not in ("aps", "raps"):
            raise ValueError(f"randomized=True needs score 'aps' or 'raps', got {self.name!r}")

    def of_classes(self, probs: Tensor, u: Tensor | None) -> Tensor:
        """Return the score of every class, `[B, C, ...]` in float64; `u` is `[B, 1, ...]` if randomized."""
        probs = probs.double()
        if self.name == "lac":
            return 1 - probs
        ordered, order = probs.sort(dim=1, descending=True, stable=True)
        scores = ordered.cumsum(1) - ordered  # of the classes before, excluding its own
        if u is not None:
            scores = scores + u * ordered
        if self.name == "raps":
            ranks = torch.arange(1, probs.shape[1] + 1).to(probs).view(-1, *[1] * (probs.ndim - 2))
            scores = scores + self.penalty * (ranks - self.k_reg).clamp(min=0)
        return torch.empty_like(scores).scatter_(1, order, scores)

    def band(self, predictive: Predictive) -> tuple[Tensor, Tensor, Tensor]:
        """Return `low`, `high` and `reach` in float64, each in the shape of the mean.

        A value y has the score `max(low - y, y - high) / reach`.
        """
        if self.name == "cqr":  # the widest interval between the predicted quantiles, not calibrated
            low, high = replace(predictive, calibration=None).interval()
        else:
            low = high = predictive.mean
        reach = predictive.std.double() if self.name == "scaled" else torch.ones_like(low.double())
        return low.double(), high.double(), reach


@dataclass(frozen=True, eq=False)
class Conformal:
    """Scores of held-out data, and the sets and intervals computed from them."""

    score: ConformalScore
    scores: Tensor
    """Scores of all N held-out targets in rising order, `[N]` in float64."""
    shares: Tensor
    """Share of each target in its input, `[N]`: 1 if the input has one target."""

    @classmethod
    def fit(
        cls,
        predictive: Predictive,
        target: Tensor,
        score: ConformalScore | str | None = None,
        *,
        ignore: int | None = None,
        seed: int | None = None,
    ) -> Self:
        """Compute the scores of held-out inputs that nothing else was fitted to.

        >>> p = Predictive(torch.tensor([[[0.7, 0.2, 0.1]] * 9]).log())  # the same for 9 inputs
        >>> conformal = Conformal.fit(p, torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 2]), "aps")
        >>> conformal.set(p[0], 0.7), conformal.set(p[0], 0.8)  # the 7th score of 9 is 0, the 8th is 0.7
        (tensor([[ True, False, False]]), tensor([[ True,  True, False]]))
        """
        score = _score_of(score, predictive.reading)
        scores = conformal_scores(predictive, target, score, ignore=ignore, seed=seed)
        scores = scores.reshape(len(scores), -1)
        known = ~scores.isnan()
        shares = (known.double() / known.sum(1, keepdim=True))[known]
        scores, order = scores[known].sort()
        return cls(score, scores, shares[order])

    def threshold(self, level: float) -> float:
        """Return the largest score that a target may have; infinity if there is not enough data for `level`.

        It is the smallest score at which the shares of all targets with scores up to it sum to `(n + 1) level`.
        """
        check_number("level", level, 0, above=True, below=1)
        inputs = round(float(self.shares.sum()))
        # (n + 1) level may round up past an integer.
        reached = self.shares.cumsum(0) >= (inputs + 1) * level * (1 - 1e-12)
        return float(self.scores[reached][0]) if bool(reached.any()) else math.inf

    def set(self, predictive: Predictive, level: float, seed: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return a boolean set `[B, C, ...]`, or for values `(low, high)`, each in the shape of `mean`."""
        check_seed(seed)
        threshold = self.threshold(level)
        if predictive.reading.classes:
            probs = predictive.as_classes().probs
            u = _uniform(probs, seed, _FOR_SETS) if self.score.randomized else None
            inside = torch.cat([self.score.of_classes(*part) <= threshold + TIE for part in _parts(probs, u)])
            return inside.movedim(1, predictive.reading.class_axis or 1)
        low, high, reach = self.score.band(predictive)
        # Infinity times a standard deviation of 0 would be NaN.
        by = threshold * reach if threshold < math.inf else torch.full_like(reach, math.inf)
        middle = (low + high) / 2  # the interval shrinks to this if its ends would cross
        dtype = torch.promote_types(predictive.predictions.dtype, torch.float32)
        return torch.minimum(low - by, middle).to(dtype), torch.maximum(high + by, middle).to(dtype)


@torch.no_grad()
def conformal_scores(
    predictive: Predictive,
    target: Tensor,
    score: ConformalScore | str | None = None,
    *,
    ignore: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """Return scores of how badly targets fit their predictions, `[B, ...]` in float64; NaN for ignored targets.

    Args:
        predictive: Predictions of B inputs.
        target: True classes or values.
        score: Score or its name; by default the first of the task's.
        ignore: Target to leave out.
        seed: Seed of randomized scores.

    Example:
        >>> p = Predictive(torch.tensor([[[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]]]).log())
        >>> conformal_scores(p, torch.tensor([0, 2]), "lac"), conformal_scores(p, torch.tensor([0, 2]), "aps")
        (tensor([0.3000, 0.9000], dtype=torch.float64), tensor([0.0000, 0.9000], dtype=torch.float64))
    """
    score = _score_of(score, predictive.reading)
    check_seed(seed)
    target = check_targets(predictive, target, ignore)
    if not predictive.reading.classes:
        low, high, reach = score.band(predictive)
        return torch.maximum(low - target.double(), target.double() - high) / _positive(reach)
    target = predictive.reading.targets_by_class(target, predictive.predictions.shape[1:]).long()
    ignored = torch.zeros_like(target, dtype=torch.bool) if ignore is None else target == ignore
    if predictive.reading.ignored is not None:
        ignored |= target == predictive.reading.ignored
    probs = predictive.as_classes().probs
    parts = _parts(probs, _uniform(probs, seed, _FOR_SCORES) if score.randomized else None)
    own = target.masked_fill(ignored, 0).unsqueeze(1).split(len(parts[0][0]))
    scores = [score.of_classes(*part).gather(1, at).squeeze(1) for part, at in zip(parts, own, strict=True)]
    return torch.cat(scores).masked_fill(ignored, math.nan)


def check_targets(predictive: Predictive, target: Tensor, ignore: int | None = None) -> Tensor:
    """Return targets on the predictions' device, or raise ValueError with the first bad index."""
    if ignore is not None and not predictive.reading.classes:
        raise ValueError(f"ignore must be None for predictions of task {predictive.task}, got {ignore!r}")
    from multitudes.metrics.declare import read_batch  # not needed to predict

    read_batch(predictive, target, ignore=ignore)
    return target.to(predictive.predictions.device)


def _score_of(score: ConformalScore | str | None, task: Task) -> ConformalScore:
    """Return a score by name or by default, or raise ValueError unless the task supports it."""
    if not isinstance(score, ConformalScore):
        score = ConformalScore(task.scores[0] if score is None else score)
    if score.name not in task.scores:
        raise ValueError(f"score must be one of {', '.join(task.scores)} for {task.name}, got {score.name!r}")
    return score


def _parts(probs: Tensor, u: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Split probabilities `[B, C, ...]` and their random numbers into chunks."""
    step = max(1, _CHUNK * len(probs) // max(1, probs.numel()))
    parts = probs.split(step)
    return list(zip(parts, [None] * len(parts) if u is None else u.split(step), strict=True))


def _uniform(probs: Tensor, seed: int | None, purpose: int) -> Tensor:
    """Draw uniform numbers in [0, 1], one per prediction, `[B, 1, ...]`, the same on every device."""
    generator = None if seed is None else torch.Generator().manual_seed(seed ^ purpose)
    return torch.rand(len(probs), 1, *probs.shape[2:], generator=generator, dtype=torch.float64).to(probs.device)


def _positive(reach: Tensor) -> Tensor:
    if not bool((reach > 0).all()):
        index = (reach <= 0).nonzero()[0].tolist()
        raise ValueError(
            f"score 'scaled' needs standard deviations above 0, got 0 at index {index}: "
            "use members that differ, task='gaussian', or score 'absolute'"
        )
    return reach
