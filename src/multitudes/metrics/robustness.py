"""Robustness to shifted inputs: corruption errors, consistency along a sequence, success of attacks.

- Corruption error, also relative to clean data: Hendrycks & Dietterich, *Benchmarking Neural Network Robustness to
  Common Corruptions and Perturbations*, 2019. From NLLs or ECEs the same functions compute CNLL and CECE, mCNLL and
  mCECE (Park & Kim, *Blurs Behave Like Ensembles*, 2022, eq. 35 and 36).
- Consistency, cross-entropy consistency and relative confidence: Park & Kim, eq. 37 to 39; consistency after Zhang,
  *Making Convolutional Networks Shift-Invariant Again*, 2019.
- Attack success rate: Park & Kim, Table E.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from multitudes.metrics.class_inputs import Ignore, Prediction, Rows, check_mask, places, read_rows, read_without_target
from multitudes.metrics.declare import HIGHER, LOWER, InputFormat, metric, ranked, total_of
from multitudes.tasks.predictive import Predictive

__all__ = [
    "corruption_error",
    "mean_corruption_error",
    "relative_corruption_error",
    "relative_mean_corruption_error",
]

SeverityScores = Tensor | Sequence[Sequence[float]] | Mapping[str, Tensor | Sequence[float]]
"""A score for each corruption and severity: `{corruption: 5 values}`, or `[K, 5]`."""

# Corruptions --------------------------------------------------------------------------------------------


def corruption_error(errors: SeverityScores, baseline: SeverityScores | None = None) -> Tensor:
    """Return the error under each corruption relative to a baseline, `CE_c = sum_s E_cs / sum_s E_cs^baseline`.

    Args:
        errors: Error for each corruption and severity, `{corruption: values}` or `[K, severities]`.
        baseline: The baseline's errors in the same unit; None for means of `errors` over the severities.

    Returns:
        Corruption errors `[K]` in the order of `errors`, in float64 on the CPU.

    >>> errors = {"fog": [0.1, 0.1, 0.2, 0.2, 0.4], "snow": [0.2, 0.3, 0.3, 0.4, 0.6]}
    >>> baseline = {"snow": [0.4, 0.4, 0.4, 0.4, 0.4], "fog": [0.3, 0.4, 0.4, 0.4, 0.5]}
    >>> corruption_error(errors, baseline), corruption_error(errors)
    (tensor([0.5000, 0.9000], dtype=torch.float64), tensor([0.2000, 0.3600], dtype=torch.float64))
    """
    return _increase(errors, 0.0, baseline, 0.0, "baseline")


@ranked(LOWER, "mean_corruption_error", "mcnll", "mcece")
def mean_corruption_error(errors: SeverityScores, baseline: SeverityScores | None = None) -> Tensor:
    """Return mCE, the mean of `corruption_error` over the corruptions, a float64 scalar.

    Args:
        errors: Error for each corruption and severity, `{corruption: values}` or `[K, severities]`.
        baseline: The baseline's errors in the same unit, or None.

    >>> errors, baseline = [[0.1, 0.1, 0.2, 0.2, 0.4], [0.2, 0.3, 0.3, 0.4, 0.6]], [[0.4] * 5, [0.4] * 5]
    >>> round(float(mean_corruption_error(errors, baseline)), 4)  # (0.5 + 0.9) / 2
    0.7
    """
    return corruption_error(errors, baseline).mean()


def relative_corruption_error(
    errors: SeverityScores, clean: float, baseline: SeverityScores | None = None, baseline_clean: float | None = None
) -> Tensor:
    """Return the increase of the error under each corruption, relative to a baseline, `[K]` in float64.

    `sum_s (E_cs - E_clean) / sum_s (E_cs^baseline - E_clean^baseline)` (Hendrycks & Dietterich).

    Args:
        errors: Error for each corruption and severity, `{corruption: values}` or `[K, severities]`.
        clean: Error without corruption.
        baseline: The baseline's errors in the same unit; None for the mean of the numerator over the severities.
        baseline_clean: The baseline's error without corruption; required with `baseline`.

    >>> errors, baseline = {"fog": [0.1, 0.1, 0.2, 0.2, 0.4]}, {"fog": [0.3, 0.4, 0.4, 0.4, 0.5]}
    >>> relative_corruption_error(errors, 0.1, baseline, 0.2)  # 0.5 / 1
    tensor([0.5000], dtype=torch.float64)
    """
    if (baseline is None) != (baseline_clean is None):
        raise ValueError(f"baseline and baseline_clean must be given together, got baseline_clean={baseline_clean!r}")
    return _increase(errors, clean, baseline, baseline_clean, "baseline minus baseline_clean")


@ranked(LOWER)
def relative_mean_corruption_error(
    errors: SeverityScores, clean: float, baseline: SeverityScores | None = None, baseline_clean: float | None = None
) -> Tensor:
    """Return relative mCE, the mean of `relative_corruption_error` (with the same arguments) over the corruptions."""
    return relative_corruption_error(errors, clean, baseline, baseline_clean).mean()


def _increase(
    errors: SeverityScores,
    clean: float,
    baseline: SeverityScores | None,
    baseline_clean: float | None,
    divisor: str,
) -> Tensor:
    """Return the errors minus `clean` per corruption, relative to a baseline's; `divisor` names these in errors."""
    names, table = _read_scores("errors", errors)
    increase = table - _read_clean("clean", clean)
    if baseline is None:
        return increase.mean(1)
    own_names, base = _read_scores("baseline", baseline)
    if sorted(own_names) != sorted(names):
        raise ValueError(
            f"baseline must hold the corruptions of errors, {', '.join(names)}, got {', '.join(own_names)}"
        )
    if base.shape != table.shape:
        raise ValueError(f"baseline must hold as many severities as errors, {table.shape[1]}, got {base.shape[1]}")
    base = base[[own_names.index(name) for name in names]] - _read_clean("baseline_clean", baseline_clean)
    total = base.sum(1)
    if bool((total == 0).any()):
        raise ValueError(f"{divisor} must not sum to 0, got 0 for {names[int((total == 0).nonzero()[0])]}")
    return increase.sum(1) / total


def _read_scores(argument: str, values: SeverityScores) -> tuple[list[str], Tensor]:
    """Return the corruptions' names, and the scores `[K, severities]` in float64 on the CPU."""
    if isinstance(values, Mapping):
        names, rows = [repr(name) for name in values], list(values.values())
    elif isinstance(values, (Tensor, Sequence)) and not isinstance(values, str) and getattr(values, "ndim", 2) == 2:
        names, rows = [f"corruption {k}" for k in range(len(values))], list(values)
    else:
        raise ValueError(f"{argument} must be {{corruption: scores}} or [corruptions, severities], got {values!r}")
    scores = [torch.as_tensor(row).detach().to("cpu", torch.float64) for row in rows]
    if not scores or scores[0].ndim != 1 or not len(scores[0]):
        raise ValueError(f"{argument} must hold at least one corruption, each with at least one score, got {values!r}")
    for name, row in zip(names, scores, strict=True):
        if row.shape != scores[0].shape:
            raise ValueError(f"{argument} must hold {len(scores[0])} scores for {name}, got shape {list(row.shape)}")
        if not bool(row.isfinite().all()):
            bad = int((~row.isfinite()).nonzero()[0])
            raise ValueError(f"{argument} must hold finite scores, got {float(row[bad])} for {name} at index {bad}")
    return names, torch.stack(scores)


def _read_clean(argument: str, value: float | None) -> Tensor:
    clean = torch.as_tensor(value, dtype=torch.float64)
    if clean.ndim or not bool(clean.isfinite()):
        raise ValueError(f"{argument} must be a finite number, the score without corruption, got {value!r}")
    return clean.cpu()


# Sequences ----------------------------------------------------------------------------------------------

Frames = Predictive | Tensor | Iterable[Predictive | Tensor]
"""Predictions of T frames, see `read_sequence`."""
Masks = Tensor | Iterable[Tensor]
"""Inputs or pixels of the frames that count: `[T, ...]`, or one mask for each frame."""
_MISSING: Any = object()


def read_sequence(frames: Frames, masks: Masks | None = None) -> Iterator[tuple[Rows, Rows]]:
    """Check the predictions of at least two frames. Yield the rows of each frame with those of the next.

    Args:
        frames: One sequence, a `Predictive` of T inputs or probabilities `[T, C]`; or B parallel sequences, a tensor
            `[T, B, C, ...]` or an iterable of T `Predictive`s or of probabilities `[B, C, ...]`. Each pixel of dense
            predictions is a sequence of its own.
        masks: Boolean masks in the shape of each frame's labels, true for what counts, such as `target != 255`. A
            step counts if both of its frames do.
    """
    if masks is not None and not isinstance(masks, Iterable):
        raise ValueError(f"masks must be None or boolean tensors, one for each frame, got {type(masks).__name__}")
    if isinstance(frames, Predictive) or (isinstance(frames, Tensor) and frames.ndim == 2):
        _check_length(len(frames))
        rows, mask = _read_frame(frames, masks, "masks")
        step = len(rows) // len(frames)
        both = mask[:-step] & mask[step:]
        yield rows[:-step][both], rows[step:][both]
        return
    if isinstance(frames, (Rows, Mapping, str)) or not isinstance(frames, Iterable):
        raise ValueError(f"frames must be a Predictive, probabilities, or several of them, got {type(frames).__name__}")
    for number, ((before, one), (after, other)) in enumerate(pairwise(_read_frames(frames, masks))):
        if after.probs.shape != before.probs.shape:
            raise ValueError(
                f"frames must have the same shape, got {before!r} in frames[{number}] and {after!r} in the next"
            )
        yield before[one & other], after[one & other]


def _read_frames(
    frames: Iterable[Predictive | Tensor], masks: Iterable[Tensor] | None
) -> Iterator[tuple[Rows, Tensor]]:
    """Yield the rows of each frame, and the mask of those that count."""
    count = 0
    for frame, mask in zip_longest(frames, () if masks is None else masks, fillvalue=_MISSING):
        if frame is _MISSING or (mask is _MISSING and masks is not None):
            raise ValueError(
                f"masks must hold one mask per frame, got more {'masks' if frame is _MISSING else 'frames'}"
            )
        try:
            rows = _read_frame(frame, None if mask is _MISSING else mask, "mask")
        except ValueError as error:
            raise ValueError(f"frames[{count}]: {error}") from error
        yield rows
        count += 1
    _check_length(count)


def _read_frame(frame: Predictive | Tensor, mask: Any, name: str) -> tuple[Rows, Tensor]:
    if isinstance(frame, Rows):  # rows may be missing
        raise ValueError(f"prediction must be a Predictive or probabilities of a whole frame, got {frame!r}")
    rows = read_without_target(frame)
    mask = torch.ones(places(frame), dtype=torch.bool) if mask is None else mask
    check_mask(name, mask, places(frame))
    return rows, mask.flatten().to(rows.probs.device)


def _check_length(frames: int) -> None:
    if frames < 2:
        raise ValueError(f"frames must be 2 or more, since each is compared with the next, got {frames}")


SEQUENCES = InputFormat("sequences", read_sequence)


@metric("Consistency", better=HIGHER, kind=SEQUENCES)
def consistency(steps: Iterable[tuple[Rows, Rows]]) -> Tensor:
    """Share of steps between consecutive frames where the label stays the same (eq. 37).

    `1/M sum_i 1[g(x_i) = g(x_i+1)]`, with the most probable class g and M = T - 1 steps, mean over sequences.

    >>> float(consistency(torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.1, 0.9], [0.2, 0.8]])))
    0.75
    """
    return torch.stack([total_of(before.label == after.label) for before, after in steps]).sum(0)


@metric("CrossEntropyConsistency", better=LOWER, kind=SEQUENCES)
def cross_entropy_consistency(steps: Iterable[tuple[Rows, Rows]]) -> Tensor:
    """Cross-entropy between the probabilities of consecutive frames (eq. 38), in nats.

    `-1/M sum_i f(x_i) . log f(x_i+1)`, with the mean probabilities f, mean over sequences. It is the entropy of f if
    nothing changes, and larger otherwise.

    >>> round(float(cross_entropy_consistency(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))), 4)  # (log 4 + log 4/3) / 2
    0.837
    """
    sums = []
    for before, after in steps:
        p = before.probs.double()
        sums.append(total_of(-torch.where(p > 0, p * after.log_probs, 0).sum(1)))
    return torch.stack(sums).sum(0)


# Single predictions -------------------------------------------------------------------------------------


@metric("RelativeConfidence", better=HIGHER)
def relative_confidence(rows: Rows) -> Tensor:
    """Probability of the true class relative to the largest, `p(y) / max p` (eq. 39), mean over rows.

    It is 1 for correct predictions, and smaller for more confident wrong ones.

    >>> p = torch.tensor([[0.8, 0.2], [0.4, 0.6]])
    >>> round(float(relative_confidence(p, torch.tensor([0, 0]))), 4)  # (1 + 0.4 / 0.6) / 2
    0.8333
    """
    return total_of(rows.probs.gather(1, rows.target[:, None])[:, 0].double() / rows.confidence)


# Attacks ------------------------------------------------------------------------------------------------


def read_attack(
    clean: Prediction, attacked: Prediction, target: Tensor | None = None, ignore: Ignore = None
) -> tuple[Rows, Rows]:
    """Read the same rows before and after an attack, both with `read_rows`.

    Args:
        clean: Predictions before the attack, a `Predictive` or probabilities `[B, C, ...]`.
        attacked: Predictions for the same inputs after the attack.
        target: True classes `[B, ...]`.
        ignore: Target of the rows to leave out.
    """
    before, after = read_rows(clean, target, ignore), read_rows(attacked, target, ignore)
    if not torch.equal(before.target, after.target.to(before.target.device)):
        raise ValueError(f"attacked must have the targets of clean, {before!r}, got {after!r}")
    return before, after


@metric("AttackSuccessRate", better=LOWER, kind=InputFormat("attacks", read_attack))
def attack_success_rate(rows: tuple[Rows, Rows]) -> Tensor:
    """Share of correctly predicted inputs that are wrong after the attack; NaN if none were correct.

    >>> clean = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    >>> attacked = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.2, 0.8], [0.1, 0.9]])
    >>> round(float(attack_success_rate(clean, attacked, torch.tensor([0, 0, 0, 0]))), 4)  # 2 of the 3 that were right
    0.6667
    """
    before, after = rows
    return total_of(~after.correct.to(before.correct.device)[before.correct])
