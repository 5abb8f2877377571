"""Calibration errors: ECE and MCE, adaptive and classwise ECE, reliability diagrams.

Bins `(k/bins, (k+1)/bins]` of confidence are closed on the right, and 0 belongs to the first. For a bin `B_k` of n
rows in total, `acc(B_k)` is the share that is correct and `conf(B_k)` the mean confidence (Guo et al., *On Calibration
of Modern Neural Networks*, 2017):

    ECE = sum_k |B_k| / n |acc(B_k) - conf(B_k)|,    MCE = max_k |acc(B_k) - conf(B_k)|.

`min_count` drops bins with fewer rows, but n remains the number of all rows, so dropping never raises the ECE. Chang et
al. (*Ensemble Model Patching*, appendix D.2) use `bins=20, min_count=6`. If no bin is left, the result is NaN.
torchmetrics differs: it closes bins on the left, has a separate bin for confidence 1, and stores every confidence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multitudes.metrics.class_inputs import Rows
from multitudes.metrics.declare import BY_CLASS, LOWER, NEITHER, ZERO, Count, metric, total_of

__all__ = ["Reliability"]

# Bins ---------------------------------------------------------------------------------------------------


def bin_edges(bins: int) -> Tensor:
    """Return the edges `0, 1/bins, ..., 1`, `[bins + 1]`, in float64."""
    return torch.arange(bins + 1, dtype=torch.float64) / bins


def _bin_of(values: Tensor, bins: int) -> Tensor:
    """Return the index of the right-closed bin of each value in [0, 1], in the shape of `values`."""
    # Round edges to the dtype of the values: 0.2 in float32 is more than 0.2 in float64, but still on the edge.
    return torch.bucketize(values, bin_edges(bins)[1:-1].to(values))


def _sums(index: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Return the number of rows, the sum of `correct` and the sum of `confidence` of each bin, `[3, bins]`."""
    values = torch.stack([torch.ones_like(confidence), correct.to(confidence), confidence]).double()
    return values.new_zeros(3, bins).scatter_add_(1, index.expand(3, -1), values)


def _binned(rows: Rows, bins: int) -> Tensor:
    """Return the number of rows, of correct rows, and the sum of confidences of each bin, `[3, bins]`."""
    return _sums(_bin_of(rows.confidence, bins), rows.confidence, rows.correct, bins)


def _gaps(sums: Tensor) -> Tensor:
    """Return `|acc - conf|` of every bin from sums `[3, ..., bins]`; NaN for empty bins."""
    count, correct, confidence = sums
    return (correct - confidence).abs() / count


# ECE and MCE --------------------------------------------------------------------------------------------


def _expected(sums: Tensor, min_count: Count = 1) -> Tensor:
    """Map sums `[3, bins]` to the ECE; NaN if no bin has `min_count` rows."""
    kept = sums[0] >= min_count
    error = torch.where(kept, sums[0] * _gaps(sums), 0).sum() / sums[0].sum()
    return torch.where(kept.any(), error, torch.nan)


def _maximum(sums: Tensor, min_count: Count = 1) -> Tensor:
    """Map sums `[3, bins]` to the MCE; NaN if no bin has `min_count` rows."""
    kept = sums[0] >= min_count
    error = torch.where(kept, _gaps(sums), 0).amax()
    return torch.where(kept.any(), error, torch.nan)


@metric("ECE", _expected, better=LOWER, shape=(3, "bins"), group="calibration", shifted=True)
def ece(rows: Rows, bins: Count = 15) -> Tensor:
    """Expected calibration error: mean gap between confidence and accuracy within bins.

    Args:
        bins: Number of bins of confidence.
        min_count: Minimum number of rows for a bin to count.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    >>> round(float(ece(p, torch.tensor([0, 0, 1, 0]))), 4)  # (2 |1 - 0.9| + 2 |0.5 - 0.6|) / 4
    0.1
    """
    return _binned(rows, bins)


@metric("MCE", _maximum, better=LOWER, shape=(3, "bins"), group="calibration")
def mce(rows: Rows, bins: Count = 15) -> Tensor:
    """Maximum calibration error: largest gap between confidence and accuracy in any bin.

    Args:
        bins: Number of bins of confidence.
        min_count: Minimum number of rows for a bin to count.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    >>> round(float(mce(p, torch.tensor([0, 0, 0]))), 4), round(float(mce(p, torch.tensor([0, 0, 0]), min_count=2)), 4)
    (0.6, 0.1)
    """
    return _binned(rows, bins)


# Reliability diagrams -----------------------------------------------------------------------------------


class Reliability:
    """Data of a reliability diagram: `edges [bins + 1]`; `count`, `accuracy` and `confidence [bins]`, NaN if empty."""

    # Not a dataclass: torchmetrics would squeeze its fields if there is one bin.
    def __init__(self, edges: Tensor, count: Tensor, accuracy: Tensor, confidence: Tensor) -> None:
        self.edges = edges
        self.count = count
        self.accuracy = accuracy
        self.confidence = confidence

    def __repr__(self) -> str:
        lines = ["    bin            count  accuracy  confidence"]
        low, *high = self.edges.tolist()
        columns = (self.count.tolist(), self.accuracy.tolist(), self.confidence.tolist())
        for end, count, accuracy, confidence in zip(high, *columns, strict=True):
            lines.append(f"({low:.4f}, {end:.4f}] {count:7d}    {accuracy:6.4f}      {confidence:6.4f}")
            low = end
        return "\n".join(lines)


def _diagram(sums: Tensor) -> Reliability:
    """Map sums `[3, bins]` to the data of the diagram."""
    count, correct, confidence = sums
    edges = bin_edges(sums.shape[1]).to(sums.device)
    return Reliability(edges, count.long(), correct / count, confidence / count)


@metric("ReliabilityDiagram", _diagram, better=NEITHER, shape=(3, "bins"))
def reliability(rows: Rows, bins: Count = 15) -> Tensor:
    """Accuracy, mean confidence and count for each bin of confidence.

    Args:
        bins: Number of bins of confidence.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    >>> reliability(p, torch.tensor([0, 0, 0]), bins=4)
        bin            count  accuracy  confidence
    (0.0000, 0.2500]       0       nan         nan
    (0.2500, 0.5000]       0       nan         nan
    (0.5000, 0.7500]       1    0.0000      0.6000
    (0.7500, 1.0000]       2    1.0000      0.9000
    """
    return _binned(rows, bins)


# Over- and underconfidence ------------------------------------------------------------------------------


@metric("Overconfidence", better=ZERO, group="calibration")
def overconfidence(rows: Rows) -> Tensor:
    """Mean confidence minus accuracy: above 0 is overconfident, below 0 underconfident.

    >>> p = torch.tensor([[0.9, 0.1], [0.7, 0.3]])
    >>> [round(float(overconfidence(p, torch.tensor(y))), 4) for y in ([0, 1], [0, 0])]
    [0.3, -0.2]
    """
    return total_of(rows.confidence.double() - rows.correct.double())


# Classwise ECE ------------------------------------------------------------------------------------------


def _classwise(sums: Tensor) -> Tensor:
    """Map sums `[3, C, bins]` to the mean ECE over classes; NaN without rows."""
    count, correct, confidence = sums
    return ((correct - confidence).abs().sum(1) / count.sum(1)).mean()


@metric("ClasswiseECE", _classwise, better=LOWER, kind=BY_CLASS, shape=(3, "classes", "bins"), group="calibration")
def classwise_ece(rows: Rows, bins: Count = 15) -> Tensor:
    """Mean over classes c of the ECE of the predictions "class c or not"; uses all probabilities.

    `1/C sum_c sum_k |B_kc| / n |share of y = c in B_kc - mean p_c in B_kc|`, with the bins `B_kc` of `p_c`
    (Kull et al., *Beyond Temperature Scaling*, 2019).

    Args:
        bins: Number of bins of each class's probability.

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    >>> round(float(classwise_ece(p, torch.tensor([0, 0, 1, 0]))), 4)
    0.1
    """
    index = _bin_of(rows.probs.contiguous(), bins)
    sums = rows.probs.new_zeros(3, rows.classes, bins, dtype=torch.float64)
    columns, probs = index.T, rows.probs.T.double()
    sums[0].scatter_add_(1, columns, torch.ones_like(probs))
    sums[2].scatter_add_(1, columns, probs)
    at = rows.target * bins + index.gather(1, rows.target[:, None])[:, 0]
    sums[1].view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.float64))
    return sums


# Adaptive ECE -------------------------------------------------------------------------------------------


def _adaptive(pairs: Tensor, bins: Count = 15) -> Tensor:
    """Map confidence and correctness of all rows, `[N, 2]`, to the ECE; NaN without rows."""
    confidence, correct = pairs.T.contiguous()
    if not len(pairs):
        return pairs.new_tensor(torch.nan, dtype=torch.float64)
    # The k-th edge is the ceil(k n / bins)-th smallest confidence: without ties, bins differ by at most one row.
    last = -(-torch.arange(1, bins, device=pairs.device) * len(pairs) // bins) - 1
    index = torch.bucketize(confidence, confidence.sort().values[last])
    return _expected(_sums(index, confidence, correct, bins))


@metric("AdaptiveECE", _adaptive, better=LOWER, kept=2, group="calibration")
def adaptive_ece(rows: Rows) -> Tensor:
    """ECE with bins of equal mass (Nguyen & O'Connor, 2015; Nixon et al., 2019).

    The edges are the `k/bins` quantiles of the confidences. Equal confidences share a bin, so the order of rows
    does not matter. Bins may then be uneven or empty.

    Args:
        bins: Number of bins of confidence.

    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
    >>> round(float(adaptive_ece(p, torch.tensor([0, 0, 1, 0]), bins=2)), 4)  # (2 |1 - 0.85| + 2 |0.5 - 0.65|) / 4
    0.15
    """
    return torch.stack([rows.confidence.float(), rows.correct.float()], 1)
