"""Out-of-distribution detection: AUROC, AUPR and FPR at 95 % recall, by any uncertainty.

The uncertainties of `uncertainties.py` are higher for predictions that look out-of-distribution. Each distinct value is
a threshold, and the measures equal scikit-learn's `roc_auc_score` and `average_precision_score`. torchmetrics maps
scores to [0, 1] by a float32 sigmoid, which rounds large scores to equal values; the counts here are exact.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.base.checks import check_number
from multitudes.metrics.class_inputs import Prediction, Rows, check_mask, kind_of, places, read_without_target
from multitudes.metrics.declare import HIGHER, LOWER, StreamingMetric, ranked
from multitudes.metrics.uncertainties import OF_PROBABILITIES, UNCERTAINTIES, has_logits

__all__ = ["Detection", "OODDetection", "OODTable", "aupr", "auroc", "detect", "fpr_at_recall"]

# Measures -----------------------------------------------------------------------------------------------


@ranked(HIGHER)
def auroc(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the probability that a positive has a higher score than a negative; ties count one half.

    Args:
        scores: Scores `[N]`, higher for positives.
        positive: Booleans `[N]`.

    Returns:
        Float64 scalar on the device of the scores; NaN unless there are positives and negatives.

    Example:
        >>> float(auroc(torch.tensor([0.1, 0.3, 0.3, 0.9]), torch.tensor([False, False, True, True])))  # (3 + 1/2) / 4
        0.875
    """
    return _auroc(*_counts(*_checked(scores, positive)))


@ranked(HIGHER)
def aupr(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the average precision, `sum_k (R_k - R_k-1) P_k` over the distinct scores from the highest.

    Precision `P_k` and recall `R_k` use the k-th score as threshold. There is no interpolation between thresholds,
    which would be too optimistic (Davis & Goadrich, 2006).

    Args:
        scores: Scores `[N]`, higher for positives.
        positive: Booleans `[N]`.

    Returns:
        Float64 scalar on the device of the scores; NaN unless there are positives and negatives.

    Example:
        >>> float(aupr(torch.tensor([0.1, 0.3, 0.5, 0.9]), torch.tensor([False, True, False, True])))  # (1 + 2/3) / 2
        0.8333333333333333
    """
    return _aupr(*_counts(*_checked(scores, positive)))


@ranked(LOWER, "fpr95")
def fpr_at_recall(scores: Tensor, positive: Tensor, recall: float = 0.95) -> Tensor:
    """Return the smallest false-positive rate of a threshold with at least this recall.

    Args:
        scores: Scores `[N]`, higher for positives.
        positive: Booleans `[N]`.
        recall: Share of the positives that the threshold must find.

    Returns:
        Float64 scalar on the device of the scores; NaN unless there are positives and negatives.

    Example:
        >>> float(fpr_at_recall(torch.tensor([0.1, 0.3, 0.5, 0.9]), torch.tensor([False, True, False, True])))
        0.5
    """
    check_number("recall", recall, 0, 1, above=True)
    return _fpr(*_counts(*_checked(scores, positive)), recall)


def _counts(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Count positives and negatives that score at least the k-th distinct value, `[K + 1]` each, from k = 0."""
    scores, order = scores.sort(descending=True)
    last = torch.ones_like(scores, dtype=torch.bool)
    last[:-1] = scores[1:] != scores[:-1]
    true = positive[order].cumsum(0)[last]
    false = last.nonzero()[:, 0] + 1 - true
    return F.pad(true, (1, 0)), F.pad(false, (1, 0))


def _auroc(true: Tensor, false: Tensor) -> Tensor:
    twice = ((true[1:] + true[:-1]) * false.diff()).sum()  # trapezoids, in integers
    return _or_nan(twice.double() / (2 * true[-1] * false[-1]), true, false)


def _aupr(true: Tensor, false: Tensor) -> Tensor:
    precision = true[1:].double() / (true + false)[1:]
    return _or_nan((true.diff() * precision).sum() / true[-1], true, false)


def _fpr(true: Tensor, false: Tensor, recall: float) -> Tensor:
    # The quotient rounds like the literal: 19 of 20 is 0.95.
    enough = true.double() / true[-1] >= recall
    return _or_nan(torch.where(enough, false.double() / false[-1], torch.inf).amin(), true, false)


def _or_nan(measure: Tensor, true: Tensor, false: Tensor) -> Tensor:
    """Return the measure, or NaN unless there are positives and negatives."""
    return torch.where((true[-1] > 0) & (false[-1] > 0), measure, torch.nan)


def _checked(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim != 1:
        raise ValueError(f"scores must be a floating-point tensor [N], got {kind_of(scores)}")
    check_mask("positive", positive, scores.shape)
    if bool(scores.isnan().any()):
        raise ValueError(f"scores must not be NaN, got nan at index {scores.isnan().nonzero()[0].tolist()}")
    return scores.detach(), positive.to(scores.device)


# The table of all uncertainties ------------------------------------------------------------------------------


class Detection(NamedTuple):
    """Measures of one uncertainty at separating outside from inside; NaN if one of them was empty."""

    auroc: float
    aupr: float
    fpr: float  # at the table's recall


class OODTable:
    """Mapping from uncertainties to their `Detection`: `table["entropy"].auroc`."""

    # Neither a dataclass nor a Mapping: torchmetrics would rebuild it.
    def __init__(self, detections: dict[str, Detection], inside: int, outside: int, positive: str, recall: float):
        self._detections = detections
        self.inside = inside
        self.outside = outside
        self.positive = positive
        self.recall = recall

    def __getitem__(self, uncertainty: str) -> Detection:
        return self._detections[uncertainty]

    def __iter__(self) -> Iterator[str]:
        return iter(self._detections)

    def __len__(self) -> int:
        return len(self._detections)

    def keys(self) -> KeysView[str]:
        """Return the uncertainties that were computed."""
        return self._detections.keys()

    def items(self) -> ItemsView[str, Detection]:
        """Return the uncertainties with their detections."""
        return self._detections.items()

    def __repr__(self) -> str:
        width = max(map(len, self._detections), default=0)
        lines = [f"{'':{width}}   auroc    aupr  {f'fpr{100 * self.recall:.4g}':>6}"]
        lines += [f"{name:{width}}  {d.auroc:6.4f}  {d.aupr:6.4f}  {d.fpr:6.4f}" for name, d in self.items()]
        return "\n".join([*lines, f"{self.inside} inside, {self.outside} outside; positive: {self.positive}"])


def detect_update(rows: Rows, outside: bool | Tensor, uncertainties: Sequence[str] | None = None) -> Tensor:
    """Return 1 for outside and the scores by each uncertainty for each row, `[N, 1 + uncertainties]`.

    `uncertainties=None` computes all, with NaN for those that need members if there are none. Several labels of one
    input become one row with the mean of their scores.
    """
    columns = []
    for name in UNCERTAINTIES if uncertainties is None else uncertainties:
        missing = rows.predictive is None and name not in OF_PROBABILITIES
        missing = missing or (name == "max_logit" and not has_logits(rows))
        if uncertainties is None and missing:
            columns.append(torch.full_like(rows.confidence, torch.nan))
        else:
            columns.append(UNCERTAINTIES[name](rows))
    columns = [_by_input(column, rows) for column in columns]
    marks = torch.as_tensor(outside, device=rows.probs.device).to(rows.probs.dtype).expand(len(columns[0]))
    return torch.stack([marks, *columns], 1)


def _by_input(scores: Tensor, rows: Rows) -> Tensor:
    """Average scores of rows `[N]` over the labels of each input or pixel, if there are several."""
    if rows.column is None or not len(scores):
        return scores
    labels = int(rows.column.max()) + 1
    pixels = int((rows.column.cumsum(0) == 0).sum())  # the first label's rows of the first input
    return scores.view(-1, labels, pixels).mean(1).flatten()


def detect_compute(
    table: Tensor, uncertainties: Sequence[str] | None = None, positive: str = "out", recall: float = 0.95
) -> OODTable:
    """Measure how well each uncertainty separates outside from inside, from all rows of `detect_update`."""
    outside, detections = table[:, 0] == 1, {}
    for name, scores in zip(UNCERTAINTIES if uncertainties is None else uncertainties, table[:, 1:].T, strict=True):
        if uncertainties is None and bool(scores.isnan().any()):
            continue
        counts = _counts(*_checked(scores, outside) if positive == "out" else _checked(-scores, ~outside))
        detections[name] = Detection(float(_auroc(*counts)), float(_aupr(*counts)), float(_fpr(*counts, recall)))
    return OODTable(detections, int((~outside).sum()), int(outside.sum()), positive, recall)


def detect(
    inside: Prediction,
    outside: Prediction,
    uncertainties: Sequence[str] | None = None,
    positive: str = "out",
    recall: float = 0.95,
) -> OODTable:
    """Measure how well uncertainties separate predictions inside and outside of the distribution.

    Args:
        inside: `Predictive` of classes or probabilities `[B, C, ...]`. Each pixel and each token counts once; with
            several labels, each input does.
        outside: The same for out-of-distribution inputs.
        uncertainties: Names in `UNCERTAINTIES`; by default all that the predictions support.
        positive: Positive class of AUPR and FPR, "out" or "in".
        recall: Share of the positives that the threshold of the FPR must find.

    Example:
        >>> from multitudes import Predictive
        >>> known = Predictive(torch.tensor([[[5.0, 0.0], [4.0, 0.0]], [[6.0, 0.0], [0.0, 1.0]]]))
        >>> new = Predictive(torch.tensor([[[1.0, 0.0], [0.0, 9.0]], [[0.0, 1.0], [7.0, 0.0]]]))
        >>> table = detect(known, new, uncertainties=["entropy", "disagreement", "energy"])
        >>> table
                       auroc    aupr   fpr95
        entropy       1.0000  1.0000  0.0000
        disagreement  0.7500  0.6667  0.5000
        energy        0.5000  0.7500  1.0000
        2 inside, 2 outside; positive: out
        >>> table["disagreement"].auroc
        0.75
    """
    _check_options(uncertainties, positive, recall)
    rows = []
    for name, prediction in (("inside", inside), ("outside", outside)):
        try:
            rows.append(read_without_target(prediction))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if rows[0].classes != rows[1].classes:
        raise ValueError(f"outside must have {rows[0].classes} classes like inside, got {rows[1].classes}")
    device, other = rows[0].probs.device, rows[1].probs.device
    if device != other:  # devices round differently, which would break ties
        raise ValueError(f"outside must be on {device} like inside, got {other}")
    tables = [detect_update(rows[0], False, uncertainties), detect_update(rows[1], True, uncertainties)]
    return detect_compute(torch.cat(tables), uncertainties, positive, recall)


class OODDetection(StreamingMetric):
    """Streaming version of `detect`, with the same settings.

    It stores one number per prediction and uncertainty, and one more: in float32 36 MB for a million predictions and
    all uncertainties. Batches should come from one device: devices round differently, which breaks ties.
    """

    higher_is_better = None

    def __init__(
        self, uncertainties: Sequence[str] | None = None, positive: str = "out", recall: float = 0.95, **kwargs: Any
    ) -> None:
        _check_options(uncertainties, positive, recall)
        names = uncertainties if uncertainties is None else list(uncertainties)
        columns = 1 + len(UNCERTAINTIES if names is None else names)
        super().__init__(settings=(names,), columns=columns, **kwargs)
        self.uncertainties = names
        self.positive = positive
        self.recall = recall

    def update(self, prediction: Prediction, outside: bool | Tensor) -> None:
        """Add a batch.

        Args:
            prediction: `Predictive` of classes or probabilities `[B, C, ...]`.
            outside: True for out-of-distribution inputs, one for all or `[B, ...]`.
        """
        rows = read_without_target(prediction)
        if not isinstance(outside, bool):
            inputs = places(prediction)
            if rows.column is not None:
                inputs = inputs[:1] + inputs[2:]  # over all labels
            check_mask("outside", outside, inputs)
            outside = outside.flatten()
        self._add(detect_update(rows, outside, self.uncertainties))

    def compute(self) -> OODTable:
        """Compute the table over all predictions so far; NaN if none was inside or none was outside."""
        return detect_compute(self._all(), self.uncertainties, self.positive, self.recall)


def _check_options(uncertainties: Sequence[str] | None, positive: str, recall: float) -> None:
    names = tuple(uncertainties) if isinstance(uncertainties, (list, tuple)) else ()
    if uncertainties is not None and (not names or any(name not in tuple(UNCERTAINTIES) for name in names)):
        raise ValueError(
            f"uncertainties must be None or a list of names from {', '.join(UNCERTAINTIES)}, got {uncertainties!r}"
        )
    if positive not in ("out", "in"):
        raise ValueError(f"positive must be 'out' or 'in', got {positive!r}")
    check_number("recall", recall, 0, 1, above=True)
