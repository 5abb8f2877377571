"""Whether a scaling helps: `scaling_helps` asks it of held-out rows before one is fitted to them."""

from __future__ import annotations

import torch
from torch import Tensor

from multitudes.core.tasks.predictive import Predictive
from multitudes.evaluation.calibrate import Calibration, fit_calibration

__all__ = ["FEWEST", "helpful_scaling", "log_scores", "scaling_helps"]

PRIOR = 0.5
"""The deviation of the logarithm of temperatures, before any row has told more."""
FEWEST = 20
"""The fewest held-out rows that anything is fitted to: of 19, none can tell an interval of 95 %."""


def helpful_scaling(predictive: Predictive, target: Tensor, members: int, seed: int = 0) -> Calibration | None:
    """The task's own scaling, fitted to held-out rows, if there are enough of them and it helps; else None."""
    known = predictive.reading.scalings[0] is not None
    if not known or len(target) < FEWEST or not scaling_helps(predictive, target, members, seed):
        return None
    return fit_calibration(predictive, target, members=members, conformal=None)


def scaling_helps(predictive: Predictive, target: Tensor, members: int, seed: int = 0) -> bool:
    """Whether a scaling that is fitted to half of the rows improves the log score of the other half, and back.

    Of classes by more than a standard error, since the best temperature of few rows is chance, and by more than a prior
    of its logarithm costs (`PRIOR`): of a few rows that are all right, the best temperature is near 0. Of numbers at
    all, since too narrow intervals do more harm than too wide ones.
    """
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed))
    halves = order.tensor_split(2)
    gains = []
    for fitted_to, other in (halves, halves[::-1]):
        fitted = fit_calibration(predictive[fitted_to], target[fitted_to], members=members, conformal=None)
        rest = predictive[other]
        gains.append(log_scores(fitted(rest), target[other]) - log_scores(rest, target[other]))
    gain = torch.cat(gains)
    if not predictive.reading.classes:
        return bool(gain.mean() > 0)
    whole = fit_calibration(predictive, target, members=members, conformal=None)
    price = float(whole.tensors["temperature"].log().square().sum()) / (2 * PRIOR**2)
    earned = log_scores(whole(predictive), target) - log_scores(predictive, target)
    return bool(gain.mean() > gain.std() / len(gain) ** 0.5) and float(earned.sum()) > price


def log_scores(predictive: Predictive, target: Tensor) -> Tensor:
    """The log probability, or density, of each target, `[N]`, float64."""
    from multitudes.metrics.declare import read_batch  # here: a network that predicts needs no metrics

    read = read_batch(predictive, target)
    return (read.target_log_prob if predictive.reading.classes else read.log_density).double()
