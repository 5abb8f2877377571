"""How far confidence can be taken at its word: ECE and MCE, adaptive and classwise ECE, reliability diagrams.

Confidences are put into bins `(k/bins, (k+1)/bins]`, closed on the right: a confidence on an edge belongs to the lower
bin, and 0 to the first. For a bin `B_k` of all n rows, `acc(B_k)` is the share that is right, `conf(B_k)` the mean
confidence, and (Guo et al., *On Calibration of Modern Neural Networks*, 2017)

    ECE = sum_k |B_k| / n |acc(B_k) - conf(B_k)|,    MCE = max_k |acc(B_k) - conf(B_k)|.

`min_count` drops bins with fewer rows. Chang et al. (*Ensemble Model Patching*, appendix D.2) remove bins of at most 5
rows, with 20 bins: `bins=20, min_count=6`. As there, n stays the number of all rows, so that dropping bins never
raises the ECE. If no bin is left, the result is NaN.

torchmetrics' calibration error has bins that are closed on the left, gives confidence 1 a bin of its own, and keeps
every confidence; here a few sums per bin are enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multitudes.core.checks import check_count
from multitudes.metrics.inputs import Prediction, Rows, check_classes, check_ignore, read_rows
from multitudes.metrics.streaming import KeptMetric, RowsMetric, mean_of, total_of

__all__ = [
    "ECE",
    "MCE",
    "AdaptiveECE",
    "ClasswiseECE",
    "Overconfidence",
    "Reliability",
    "ReliabilityDiagram",
    "adaptive_ece",
    "classwise_ece",
    "ece",
    "mce",
    "overconfidence",
    "reliability",
]

# Bins ---------------------------------------------------------------------------------------------------


def bin_edges(bins: int) -> Tensor:
    """The edges `0, 1/bins, ..., 1`, `[bins + 1]`, in float64."""
    return torch.arange(bins + 1, dtype=torch.float64) / bins


def _bin_of(values: Tensor, bins: int) -> Tensor:
    """The number of the right-closed bin that each value in [0, 1] falls in, in the shape of `values`."""
    # Edges are rounded as the values are: 0.2 in float32 is more than 0.2 in float64, but on the edge all the same.
    return torch.bucketize(values, bin_edges(bins)[1:-1].to(values))


def _binned(index: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Rows `[N]` with their bins -> counts, sums of `correct` and sums of `confidence`, `[3, bins]`."""
    values = torch.stack([torch.ones_like(confidence), correct.to(confidence), confidence]).double()
    return values.new_zeros(3, bins).scatter_add_(1, index.expand(3, -1), values)


def _gaps(sums: Tensor) -> Tensor:
    """`|acc - conf|` of every bin, from sums `[3, ..., bins]`; NaN for empty bins."""
    count, correct, confidence = sums
    return (correct - confidence).abs() / count


def bins_update(rows: Rows, bins: int = 15) -> Tensor:
    """Rows -> for each bin of confidence: count, number right and sum of confidences, `[3, bins]`."""
    return _binned(_bin_of(rows.confidence, check_count("bins", bins)), rows.confidence, rows.correct, bins)


class _BinnedMetric(RowsMetric):
    """What ECE, MCE and the reliability diagram share: the sums of `bins_update`."""

    def __init__(self, bins: int = 15, ignore: int | None = None, **kwargs: Any) -> None:
        super().__init__(ignore, shape=(3, check_count("bins", bins)), **kwargs)
        self.bins = bins

    def _sums(self, rows: Rows) -> Tensor:
        return bins_update(rows, self.bins)


# ECE and MCE --------------------------------------------------------------------------------------------

ece_update = mce_update = bins_update


def ece_compute(sums: Tensor, min_count: int = 1) -> Tensor:
    """Sums `[3, bins]` -> ECE, a float64 scalar; NaN if no bin has `min_count` rows."""
    kept = sums[0] >= check_count("min_count", min_count)
    error = torch.where(kept, sums[0] * _gaps(sums), 0).sum() / sums[0].sum()
    return torch.where(kept.any(), error, torch.nan)


def mce_compute(sums: Tensor, min_count: int = 1) -> Tensor:
    """Sums `[3, bins]` -> MCE, a float64 scalar; NaN if no bin has `min_count` rows."""
    kept = sums[0] >= check_count("min_count", min_count)
    error = torch.where(kept, _gaps(sums), 0).amax()
    return torch.where(kept.any(), error, torch.nan)


def ece(
    prediction: Prediction,
    target: Tensor | None = None,
    bins: int = 15,
    min_count: int = 1,
    ignore: int | None = None,
) -> Tensor:
    """Expected calibration error of `[B, C, ...]`: the mean distance of confidence and accuracy within bins.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    >>> round(float(ece(p, torch.tensor([0, 0, 1, 0]))), 4)  # (2 |1 - 0.9| + 2 |0.5 - 0.6|) / 4
    0.1
    """
    return ece_compute(ece_update(read_rows(prediction, target, ignore), bins), min_count)


def mce(
    prediction: Prediction,
    target: Tensor | None = None,
    bins: int = 15,
    min_count: int = 1,
    ignore: int | None = None,
) -> Tensor:
    """Maximum calibration error of `[B, C, ...]`: the largest distance of confidence and accuracy in any bin.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    >>> round(float(mce(p, torch.tensor([0, 0, 0]))), 4), round(float(mce(p, torch.tensor([0, 0, 0]), min_count=2)), 4)
    (0.6, 0.1)
    """
    return mce_compute(mce_update(read_rows(prediction, target, ignore), bins), min_count)


class ECE(_BinnedMetric):
    """`ece`, streaming."""

    higher_is_better = False

    def __init__(self, bins: int = 15, min_count: int = 1, ignore: int | None = None, **kwargs: Any) -> None:
        check_count("min_count", min_count)
        super().__init__(bins, ignore, **kwargs)
        self.min_count = min_count

    def compute(self) -> Tensor:
        """The error over all rows so far."""
        return ece_compute(self.sums, self.min_count)


class MCE(ECE):
    """`mce`, streaming."""

    def compute(self) -> Tensor:
        """The error over all rows so far."""
        return mce_compute(self.sums, self.min_count)


# Reliability diagrams -----------------------------------------------------------------------------------


class Reliability:
    """The data of a reliability diagram: what happened in each bin of confidence.

    `edges [bins + 1]`, and `[bins]` each: `count`, the number of rows; `accuracy`, the share that is right;
    `confidence`, their mean confidence. The latter two are NaN for empty bins.
    """

    # Not a dataclass, into whose fields torchmetrics would reach and squeeze those of a single bin.
    def __init__(self, edges: Tensor, count: Tensor, accuracy: Tensor, confidence: Tensor) -> None:
        self.edges = edges
        self.count = count
        self.accuracy = accuracy
        self.confidence = confidence

    def __repr__(self) -> str:
        lines = ["    bin            count  accuracy  confidence"]
        low, *high = self.edges.tolist()
        for end, count, right, sure in zip(
            high, self.count.tolist(), self.accuracy.tolist(), self.confidence.tolist(), strict=True
        ):
            lines.append(f"({low:.4f}, {end:.4f}] {count:7d}    {right:6.4f}      {sure:6.4f}")
            low = end
        return "\n".join(lines)


reliability_update = bins_update


def reliability_compute(sums: Tensor) -> Reliability:
    """Sums `[3, bins]` -> the data of the diagram."""
    count, correct, confidence = sums
    edges = bin_edges(sums.shape[1]).to(sums.device)
    return Reliability(edges, count.long(), correct / count, confidence / count)


def reliability(
    prediction: Prediction, target: Tensor | None = None, bins: int = 15, ignore: int | None = None
) -> Reliability:
    """Accuracy, mean confidence and count for each bin of confidence, of `[B, C, ...]`.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    >>> reliability(p, torch.tensor([0, 0, 0]), bins=4)
        bin            count  accuracy  confidence
    (0.0000, 0.2500]       0       nan         nan
    (0.2500, 0.5000]       0       nan         nan
    (0.5000, 0.7500]       1    0.0000      0.6000
    (0.7500, 1.0000]       2    1.0000      0.9000
    """
    return reliability_compute(reliability_update(read_rows(prediction, target, ignore), bins))


class ReliabilityDiagram(_BinnedMetric):
    """`reliability`, streaming."""

    higher_is_better = None

    def compute(self) -> Reliability:  # type: ignore[override]
        """The data of the diagram over all rows so far."""
        return reliability_compute(self.sums)


# Over- and underconfidence ------------------------------------------------------------------------------


def overconfidence_update(rows: Rows) -> Tensor:
    """Rows -> the sum of `confidence - correct`, and the number of rows, `[2]`."""
    return total_of(rows.confidence.double() - rows.correct.double())


overconfidence_compute = mean_of


def overconfidence(prediction: Prediction, target: Tensor | None = None, ignore: int | None = None) -> Tensor:
    """Mean confidence minus accuracy of `[B, C, ...]`: above 0 is overconfident, below 0 underconfident.

    >>> p = torch.tensor([[0.9, 0.1], [0.7, 0.3]])
    >>> (
    ...     round(float(overconfidence(p, torch.tensor([0, 1]))), 4),
    ...     round(float(overconfidence(p, torch.tensor([0, 0]))), 4),
    ... )
    (0.3, -0.2)
    """
    return overconfidence_compute(overconfidence_update(read_rows(prediction, target, ignore)))


class Overconfidence(RowsMetric):
    """`overconfidence`, streaming."""

    higher_is_better = None

    def _sums(self, rows: Rows) -> Tensor:
        return overconfidence_update(rows)


# Classwise ECE ------------------------------------------------------------------------------------------


def classwise_ece_update(rows: Rows, bins: int = 15) -> Tensor:
    """Rows -> for each class and bin of its probability: count, how often it was true, sum, `[3, C, bins]`."""
    index = _bin_of(rows.probs.contiguous(), check_count("bins", bins))
    sums = rows.probs.new_zeros(3, rows.classes, bins, dtype=torch.float64)
    columns, probs = index.T, rows.probs.T.double()
    sums[0].scatter_add_(1, columns, torch.ones_like(probs))
    sums[2].scatter_add_(1, columns, probs)
    at = rows.target * bins + index.gather(1, rows.target[:, None])[:, 0]
    sums[1].view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.float64))
    return sums


def classwise_ece_compute(sums: Tensor) -> Tensor:
    """Sums `[3, C, bins]` -> the mean over classes of each one's ECE, a float64 scalar; NaN without rows."""
    count, correct, confidence = sums
    return ((correct - confidence).abs().sum(1) / count.sum(1)).mean()


def classwise_ece(
    prediction: Prediction, target: Tensor | None = None, bins: int = 15, ignore: int | None = None
) -> Tensor:
    """The mean over classes of the ECE of "is it class c?", asked of every row of `[B, C, ...]`.

    `1/C sum_c sum_k |B_kc| / n |share of y = c in B_kc - mean p_c in B_kc|`, with the bins `B_kc` of `p_c`
    (Kull et al., *Beyond Temperature Scaling*, 2019); all probabilities count, not only the largest.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    >>> round(float(classwise_ece(p, torch.tensor([0, 0, 1, 0]))), 4)
    0.1
    """
    return classwise_ece_compute(classwise_ece_update(read_rows(prediction, target, ignore), bins))


class ClasswiseECE(RowsMetric):
    """`classwise_ece`, streaming; it needs the number of `classes` first, so that all processes have the same sums."""

    higher_is_better = False

    def __init__(self, classes: int, bins: int = 15, ignore: int | None = None, **kwargs: Any) -> None:
        super().__init__(ignore, shape=(3, check_count("classes", classes), check_count("bins", bins)), **kwargs)
        self.classes = classes
        self.bins = bins

    def _sums(self, rows: Rows) -> Tensor:
        check_classes(rows, self.classes)
        return classwise_ece_update(rows, self.bins)

    def compute(self) -> Tensor:
        """The error over all rows so far."""
        return classwise_ece_compute(self.sums)


# Adaptive ECE -------------------------------------------------------------------------------------------


def adaptive_ece_update(rows: Rows) -> Tensor:
    """Rows -> confidence and whether it was right, `[N, 2]` in float32: equal-mass bins need every confidence."""
    return torch.stack([rows.confidence.float(), rows.correct.float()], 1)


def adaptive_ece_compute(pairs: Tensor, bins: int = 15) -> Tensor:
    """Confidence and correctness of all rows, `[N, 2]` -> the error, a float64 scalar; NaN without rows."""
    check_count("bins", bins)
    confidence, correct = pairs.T.contiguous()
    if not len(pairs):
        return pairs.new_tensor(torch.nan, dtype=torch.float64)
    # The k-th edge is the ceil(k n / bins)-th smallest confidence: bins differ by one row at most, but for ties.
    last = -(-torch.arange(1, bins, device=pairs.device) * len(pairs) // bins) - 1
    index = torch.bucketize(confidence, confidence.sort().values[last])
    return ece_compute(_binned(index, confidence, correct, bins))


def adaptive_ece(
    prediction: Prediction, target: Tensor | None = None, bins: int = 15, ignore: int | None = None
) -> Tensor:
    """ECE of `[B, C, ...]` with bins of equal mass (Nguyen & O'Connor, 2015; Nixon et al., 2019).

    The edges are the `k/bins` quantiles of the confidences, bins again closed on the right. Equal confidences stay in
    one bin, so that the order of rows does not matter; bins may then be uneven, or empty.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
    >>> round(float(adaptive_ece(p, torch.tensor([0, 0, 1, 0]), bins=2)), 4)  # (2 |1 - 0.85| + 2 |0.5 - 0.65|) / 4
    0.15
    """
    return adaptive_ece_compute(adaptive_ece_update(read_rows(prediction, target, ignore)), bins)


class AdaptiveECE(KeptMetric):
    """`adaptive_ece`, streaming.

    The edges are known only at the end, so it keeps 8 bytes for each row: 8 MB for a million.
    """

    higher_is_better = False

    def __init__(self, bins: int = 15, ignore: int | None = None, **kwargs: Any) -> None:
        check_count("bins", bins)
        check_ignore(ignore)
        super().__init__(settings=(ignore,), **kwargs)
        self.bins = bins
        self.ignore = ignore

    def update(self, prediction: Prediction, target: Tensor | None = None) -> None:
        """Add a batch; `read_rows` says what it may be."""
        self._keep(adaptive_ece_update(read_rows(prediction, target, self.ignore)))

    def compute(self) -> Tensor:
        """The error over all rows so far."""
        return adaptive_ece_compute(self._kept(), self.bins)
