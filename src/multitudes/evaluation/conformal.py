"""Split conformal prediction: sets and intervals that hold the target as often as they say.

Vovk, Gammerman & Shafer, *Algorithmic Learning in a Random World* (2005). A score says how badly a target fits a
prediction. Of n held-out inputs, exchangeable with the new one, the `ceil((n + 1) level)`-th smallest score is the
threshold; all targets whose score is not above it form the set. It holds the new target with probability `level` or
more, and `level + 1 / (n + 1)` at most where no two scores are equal, whatever the network and the distribution.

Where an input has several targets (pixels, outputs), each counts for its share of the input, and the guarantee is for
the mean share of an input's targets that their sets hold: Angelopoulos et al., *Conformal Risk Control* (2024),
of which the rule above is the case of one target for each input.

The scores, with classes from the most probable to the least (of equally probable ones the first comes first):

- "lac", `1 - p_y`: the smallest sets, some of them empty. Sadinle, Lei & Wasserman, *Least Ambiguous Set-Valued
  Classifiers with Bounded Error Levels* (2019).
- "aps", the probability of all classes before y: larger sets for harder inputs. Romano, Sesia & Candès,
  *Classification with Valid and Adaptive Coverage* (2020). Every set holds the most probable class, whose score is 0;
  where that alone is right often enough, sets hold it alone. Randomized, `u p_y` is added with u uniform between
  0 and 1: coverage is exact, and sets may be empty.
- "raps", "aps" plus `penalty * max(0, rank of y - k_reg)`: fewer very large sets. Angelopoulos, Bates, Jordan & Malik,
  *Uncertainty Sets for Image Classifiers using Conformal Prediction* (2021).
- "absolute", `|y - mean|`, and "scaled", `|y - mean| / std`: intervals of one width, or of a width in proportion to the
  predicted standard deviation. Lei et al., *Distribution-Free Predictive Inference for Regression* (2018).
- "cqr", `max(low - y, y - high)`, how far y lies outside of the widest interval between the predicted quantiles, below
  0 inside: that interval, its ends moved by one distance. Romano, Patterson & Candès, *Conformalized Quantile
  Regression* (2019).

A yes or no has a set of the two classes no and yes, which may hold both, or none; so has each label of several, which
are the input's targets then. Tokens whose label is -100 have no score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from multitudes.core.checks import check_count, check_number, check_seed
from multitudes.core.tasks import TASKS, Task
from multitudes.core.tasks.predictive import Predictive

TIE = 1e-6
"""Scores of classes that are this near count as equal: rounding, which no two devices do alike, must not part them."""

_CHUNK = 2**22  # how many probabilities are sorted together
# A seed gives scores and sets random numbers of their own, and others than a division of the data by that seed has:
# an input must share none with another input, or with its place.
_FOR_SCORES, _FOR_SETS = 0x5C02E5, 0x5E75


@dataclass(frozen=True)
class ConformalScore:
    """The misfit of a class, or a number, to a prediction: "lac", "aps", "raps", "absolute", "scaled" or "cqr"."""

    name: str
    k_reg: int = 5
    """The rank, from 1, up to which "raps" adds no penalty."""
    penalty: float = 0.01
    """The penalty that "raps" adds for each rank after that."""
    randomized: bool = False
    """True if "aps" and "raps" add a random part of the class's own probability."""

    def __post_init__(self) -> None:
        names = sorted({name for task in TASKS.values() for name in task.scores})
        if self.name not in names:
            raise ValueError(f"score must be one of {', '.join(names)}, got {self.name!r}")
        check_count("k_reg", self.k_reg, 0)
        check_number("penalty", self.penalty, 0)
        if not isinstance(self.randomized, bool):
            raise ValueError(f"randomized must be True or False, got {self.randomized!r}")
        if self.randomized and self.name not in ("aps", "raps"):
            raise ValueError(f"randomized=True is for 'aps' and 'raps', got {self.name!r}")

    def of_classes(self, probs: Tensor, u: Tensor | None) -> Tensor:
        """The score of every class, `[B, C, ...]`, in float64; `u [B, 1, ...]` where it is randomized."""
        probs = probs.double()
        if self.name == "lac":
            return 1 - probs
        ordered, order = probs.sort(dim=1, descending=True, stable=True)
        scores = ordered.cumsum(1) - ordered  # of the classes before, without its own
        if u is not None:
            scores = scores + u * ordered
        if self.name == "raps":
            ranks = torch.arange(1, probs.shape[1] + 1).to(probs).view(-1, *[1] * (probs.ndim - 2))
            scores = scores + self.penalty * (ranks - self.k_reg).clamp(min=0)
        return torch.empty_like(scores).scatter_(1, order, scores)

    def band(self, predictive: Predictive) -> tuple[Tensor, Tensor, Tensor]:
        """Return `low`, `high` and `reach` in float64, each of the mean's shape.

        A value y has the score `max(low - y, y - high) / reach`; a score of 1 is `reach` outside of low and high.
        """
        if self.name == "cqr":  # the widest interval between the predicted quantiles, as it is without calibration
            low, high = replace(predictive, calibration=None).interval()
        else:
            low = high = predictive.mean
        reach = predictive.std.double() if self.name == "scaled" else torch.ones_like(low.double())
        return low.double(), high.double(), reach


@dataclass(frozen=True, eq=False)
class Conformal:
    """The scores of held-out data, and the sets and intervals that follow from them."""

    score: ConformalScore
    scores: Tensor
    """The scores of all N held-out targets, in rising order, `[N]`, float64."""
    shares: Tensor
    """The share of its input that each of them is, `[N]`: 1, where an input has one target."""

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
        """From predictions of inputs that nothing else was fitted to, and their targets.

        >>> p = Predictive(torch.tensor([[[0.7, 0.2, 0.1]] * 9]).log())  # the same for 9 inputs
        >>> conformal = Conformal.fit(p, torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 2]), "aps")
        >>> conformal.set(p[0], 0.7), conformal.set(p[0], 0.8)  # the 7th score of 9 is 0, the 8th is 0.7
        (tensor([[ True, False, False]]), tensor([[ True,  True, False]]))
        """
        score = _fitting(score, predictive.reading)
        scores = conformal_scores(predictive, target, score, ignore=ignore, seed=seed)
        scores = scores.reshape(len(scores), -1)
        known = ~scores.isnan()
        shares = (known.double() / known.sum(1, keepdim=True))[known]
        scores, order = scores[known].sort()
        return cls(score, scores, shares[order])

    def threshold(self, level: float) -> float:
        """The largest score that a target may have; infinite where the data are too few for `level`.

        It is the least one for which the inputs' shares of targets with scores up to it add up to `(n + 1) level`.
        """
        check_number("level", level, 0, above=True, below=1)
        inputs = round(float(self.shares.sum()))
        # (n + 1) level may round to a little more than the whole number that it is.
        reached = self.shares.cumsum(0) >= (inputs + 1) * level * (1 - 1e-12)
        return float(self.scores[reached][0]) if bool(reached.any()) else math.inf

    def set(self, predictive: Predictive, level: float, seed: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Boolean `[B, C, ...]`; of values `(low, high)`, each of the shape of `mean`."""
        check_seed(seed)
        threshold = self.threshold(level)
        if predictive.reading.classes:
            probs = predictive.as_classes().probs
            u = _uniform(probs, seed, _FOR_SETS) if self.score.randomized else None
            found = torch.cat([self.score.of_classes(*part) <= threshold + TIE for part in _parts(probs, u)])
            return found.movedim(1, predictive.reading.class_axis or 1)
        low, high, reach = self.score.band(predictive)
        # Infinity itself, which times a standard deviation of 0 would be NaN.
        by = threshold * reach if threshold < math.inf else torch.full_like(reach, math.inf)
        middle = (low + high) / 2  # all that is left of an interval whose ends would pass each other
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
    """Score how badly each target fits its prediction, in float64: `[B, ...]`, for values the shape of `mean`.

    Targets that are `ignore` have a score of NaN. By default the score is the first of `Task.scores`: "aps",
    "absolute" or, for gaussian predictions, "scaled". A `seed` is for randomized scores alone.

    >>> p = Predictive(torch.tensor([[[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]]]).log())
    >>> conformal_scores(p, torch.tensor([0, 2]), "lac"), conformal_scores(p, torch.tensor([0, 2]), "aps")
    (tensor([0.3000, 0.9000], dtype=torch.float64), tensor([0.0000, 0.9000], dtype=torch.float64))
    """
    score = _fitting(score, predictive.reading)
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
    """Targets on the predictions' device; a ValueError with the first bad index where they do not fit."""
    if ignore is not None and not predictive.reading.classes:
        raise ValueError(f"ignore={ignore!r} is a class, and the predictions are of task {predictive.task}")
    from multitudes.metrics.declare import read_batch  # here: a network that predicts needs no metrics

    read_batch(predictive, target, ignore=ignore)
    return target.to(predictive.predictions.device)


def _fitting(score: ConformalScore | str | None, task: Task) -> ConformalScore:
    """The score that is meant, which must be one of the task's."""
    if not isinstance(score, ConformalScore):
        score = ConformalScore(task.scores[0] if score is None else score)
    if score.name not in task.scores:
        raise ValueError(f"score must be one of {', '.join(task.scores)} for {task.name}, got {score.name!r}")
    return score


def _parts(probs: Tensor, u: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Probabilities `[B, C, ...]`, and their random numbers, some inputs at a time."""
    step = max(1, _CHUNK * len(probs) // max(1, probs.numel()))
    parts = probs.split(step)
    return list(zip(parts, [None] * len(parts) if u is None else u.split(step), strict=True))


def _uniform(probs: Tensor, seed: int | None, purpose: int) -> Tensor:
    """A number between 0 and 1 for each prediction, `[B, 1, ...]`, the same on every device."""
    generator = None if seed is None else torch.Generator().manual_seed(seed ^ purpose)
    return torch.rand(len(probs), 1, *probs.shape[2:], generator=generator, dtype=torch.float64).to(probs.device)


def _positive(reach: Tensor) -> Tensor:
    if not bool((reach > 0).all()):
        index = (reach <= 0).nonzero()[0].tolist()
        raise ValueError(
            f"score 'scaled' needs standard deviations above 0, got 0 at index {index}: "
            "use members that differ, task='gaussian', or 'absolute'"
        )
    return reach
