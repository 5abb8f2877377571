"""How metrics stream: what they keep of each batch, and how batches and processes are joined.

Every metric of this room is two plain functions, from checked rows to sums (or to a few numbers of each row) and from
those to the result, and a thin `torchmetrics.Metric` over them: a `SumsMetric`, or a `KeptMetric`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from multitudes.metrics.inputs import Prediction, Rows, check_ignore, read_rows, read_without_target

__all__ = ["KeptMetric", "RowsMetric", "SumsMetric", "TargetlessMetric", "counted", "mean_of", "total_of"]

# Sums ---------------------------------------------------------------------------------------------------


def total_of(values: Tensor) -> Tensor:
    """Values `[N]` -> their sum and their number, `[2]` in float64.

    >>> total_of(torch.tensor([True, True, False]))
    tensor([2., 3.], dtype=torch.float64)
    """
    return counted(values.sum(dtype=torch.float64), len(values))


def counted(total: Tensor, count: int) -> Tensor:
    """Sums of any shape, and how many values went into each -> both in one tensor, `[2, ...]` in float64."""
    return torch.stack([total.double(), torch.full_like(total, count, dtype=torch.float64)])


def mean_of(total: Tensor) -> Tensor:
    """Sums `[2, ...]` of a quantity and of how often it was seen -> its mean; NaN where there was nothing to see.

    >>> mean_of(torch.tensor([1.0, 4.0]))
    tensor(0.2500)
    """
    return total[0] / total[1]


# Metrics ------------------------------------------------------------------------------------------------


class _StreamingMetric(Metric):
    """What all metrics share. `settings` is what their updates depend on, apart from the data."""

    full_state_update = False
    is_differentiable = False

    def __init__(self, *, settings: tuple[object, ...] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A collection takes two metrics for one, and updates only the first, if their states are equal after the first
        # batch, as those of accuracy and error are where half are right. Names of states must be equal too: this one is
        # always empty, and only has a name.
        self.add_state(f"{type(self).__name__}{settings}", [], dist_reduce_fx=None)


class SumsMetric(_StreamingMetric):
    """A metric whose state is one tensor of float64 sums: batches and processes are joined by adding them up."""

    sums: Tensor

    def __init__(self, *, shape: Sequence[int] = (2,), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(*shape, dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, sums: Tensor) -> None:
        self.sums = self.sums + sums.to(self.sums.device)

    def compute(self) -> Tensor:
        """The mean over all batches so far, a float64 scalar; NaN if there was nothing in them."""
        return mean_of(self.sums)


class RowsMetric(SumsMetric):
    """A metric of classification. A subclass says how rows become sums (`_sums`), and sums the result (`compute`)."""

    def __init__(self, ignore: int | None = None, *, settings: tuple[object, ...] = (), **kwargs: Any) -> None:
        check_ignore(ignore)
        super().__init__(settings=(ignore, *settings), **kwargs)
        self.ignore = ignore

    def _sums(self, rows: Rows) -> Tensor:
        raise NotImplementedError

    def update(self, prediction: Prediction, target: Tensor | None = None) -> None:
        """Add a batch; `read_rows` says what it may be."""
        self._add(self._sums(read_rows(prediction, target, self.ignore)))


class TargetlessMetric(RowsMetric):
    """A metric of classification that needs no classes: it says how predictions are, and not how good."""

    higher_is_better = None

    def update(self, prediction: Prediction, target: Tensor | None = None) -> None:
        """Add a batch; `target` is only needed to say which rows to ignore."""
        self._add(self._sums(read_without_target(prediction, target, self.ignore)))


class KeptMetric(_StreamingMetric):
    """A metric whose state is a few numbers of every row, since their order is known only at the end.

    Batches and processes are joined by putting their rows together.
    """

    columns = 2
    values: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("values", [], dist_reduce_fx="cat")

    def _keep(self, values: Tensor) -> None:
        self.values.append(values.to(self.device))

    def _kept(self) -> Tensor:
        """The numbers of all rows so far, `[N, columns]`."""
        # After processes were joined it is one tensor, and no list any more.
        return dim_zero_cat(self.values) if len(self.values) else torch.empty(0, self.columns, device=self.device)
