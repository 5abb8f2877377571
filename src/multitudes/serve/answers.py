"""What a network predicts, as plain values for JSON."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from multitudes.core.tasks.predictive import Predictive
from multitudes.data.types import Data
from multitudes.evaluation.conformal import Conformal

__all__ = ["answer_rows", "rounded"]


def rounded(values: Tensor) -> list[Any]:
    """Numbers to six digits, as many as float32 has, in lists as the tensor has dimensions; None where not finite.

    >>> import torch
    >>> rounded(torch.tensor([[1 / 3, 2.0], [torch.nan, torch.inf]]))
    [[0.333333, 2.0], [None, None]]
    """
    if values.dim() > 1:
        return [rounded(each) for each in values]
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def answer_rows(answer: Predictive, data: Data, level: float, conformal: Conformal | None) -> list[dict[str, Any]]:
    """An answer for each input; `conformal` has the scores of sets of classes, where the predictions have none."""
    return _of_classes(answer, data, level, conformal) if data.classes else _of_numbers(answer, data, level)


def _of_classes(answer: Predictive, data: Data, level: float, conformal: Conformal | None) -> list[dict[str, Any]]:
    names = data.classes
    own = answer.calibration is not None and answer.calibration.conformal is not None
    sets = answer.set(level, seed=0) if own else None if conformal is None else conformal.set(answer, level, seed=0)
    confidence, label = answer.member_probs.max(2)
    votes = list(zip(label.T.tolist(), rounded(confidence.T), strict=True))
    columns = {
        "label": [names[label] for label in answer.label.tolist()],
        "confidence": rounded(answer.confidence),
        "probabilities": [dict(zip(names, row, strict=True)) for row in rounded(answer.probs)],
        "entropy": rounded(answer.entropy),
        "mutual_information": rounded(answer.mutual_information),
        "set": _named(sets, names) if isinstance(sets, Tensor) else [None] * len(answer),
        "members": [
            [{"label": names[label], "confidence": sure} for label, sure in zip(*row, strict=True)] for row in votes
        ],
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _named(sets: Tensor, names: tuple[str, ...]) -> list[list[str]]:
    """The names of the classes in each set, of boolean `[B, C]`."""
    return [[name for name, inside in zip(names, row, strict=True) if inside] for row in sets.tolist()]


def _of_numbers(answer: Predictive, data: Data, level: float) -> list[dict[str, Any]]:
    low, high = answer.interval(level)
    members = rounded(data.in_units(answer.member_values[:, :, 0]).T)
    columns = {
        "mean": rounded(data.in_units(answer.mean[:, 0])),
        "std": rounded(answer.std[:, 0] * data.target_std),
        "std_between_members": rounded(answer.epistemic_variance[:, 0].sqrt() * data.target_std),
        "low": rounded(data.in_units(low[:, 0])),
        "high": rounded(data.in_units(high[:, 0])),
        "members": [[{"mean": mean} for mean in row] for row in members],
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
