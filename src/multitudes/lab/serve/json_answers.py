"""Predictions as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from multitudes.evaluation.conformal import Conformal
from multitudes.lab.data.parts import Data
from multitudes.tasks.predictive import Predictive


def rounded(values: Tensor) -> list[Any]:
    """Round numbers to six digits, float32 precision, as nested lists; None if not finite.

    >>> import torch
    >>> rounded(torch.tensor([[1 / 3, 2.0], [torch.nan, torch.inf]]))
    [[0.333333, 2.0], [None, None]]
    """
    if values.dim() > 1:
        return [rounded(each) for each in values]
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def answer_columns(answer: Predictive, data: Data, level: float) -> dict[str, list[Any]]:
    """Return an answer per input, as columns: classes with uncertainty, or intervals in the target's units."""
    if data.classes:
        return {
            "label": [data.classes[label] for label in answer.label.tolist()],
            "confidence": rounded(answer.confidence),
            "entropy": rounded(answer.entropy),
            "mutual_information": rounded(answer.mutual_information),
        }
    low, high = answer.interval(level)
    return {
        "mean": rounded(data.in_units(answer.mean[:, 0])),
        "std": rounded(answer.std[:, 0] * data.target_std),
        "low": rounded(data.in_units(low[:, 0])),
        "high": rounded(data.in_units(high[:, 0])),
    }


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Convert columns of a table to rows.

    >>> rows_of({"label": ["oak", "elm"], "confidence": [0.9, 0.6]})
    [{'label': 'oak', 'confidence': 0.9}, {'label': 'elm', 'confidence': 0.6}]
    """
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def answer_rows(answer: Predictive, data: Data, level: float, conformal: Conformal | None) -> list[dict[str, Any]]:
    """Return one answer per input, with those of the members; `conformal` has the scores for sets of classes if the
    predictions have none."""
    columns, names = answer_columns(answer, data, level), data.classes
    if not names:
        members = rounded(data.in_units(answer.member_values[:, :, 0]).T)
        between = answer.epistemic_variance[:, 0].sqrt() * data.target_std
        return rows_of(
            {
                **columns,
                "std_between_members": rounded(between),
                "members": [[{"mean": m} for m in row] for row in members],
            }
        )
    own = answer.calibration is not None and answer.calibration.conformal is not None
    sets = answer.set(level, seed=0) if own else None if conformal is None else conformal.set(answer, level, seed=0)
    confidence, label = answer.member_probs.max(2)
    votes = zip(label.T.tolist(), rounded(confidence.T), strict=True)
    return rows_of(
        {
            **columns,
            "probabilities": [dict(zip(names, row, strict=True)) for row in rounded(answer.probs)],
            "set": _named(sets, names) if isinstance(sets, Tensor) else [None] * len(answer),
            "members": [
                [{"label": names[at], "confidence": sure} for at, sure in zip(*each, strict=True)] for each in votes
            ],
        }
    )


def _named(sets: Tensor, names: tuple[str, ...]) -> list[list[str]]:
    """Return the class names in each set, given a boolean mask `[B, C]`."""
    return [[name for name, inside in zip(names, row, strict=True) if inside] for row in sets.tolist()]
