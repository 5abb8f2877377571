"""Streaming metrics: state per batch, and reduction over batches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

# Sums ---------------------------------------------------------------------------------------------------


def total_of(values: Tensor) -> Tensor:
    """Return the sum and the number of values `[N]`, `[2]` in float64.

    >>> total_of(torch.tensor([True, True, False]))
    tensor([2., 3.], dtype=torch.float64)
    """
    return counted(values.sum(dtype=torch.float64), len(values))


def counted(total: Tensor, count: int) -> Tensor:
    """Stack sums of any shape with the number of values in each, `[2, ...]` in float64."""
    return torch.stack([total.double(), torch.full_like(total, count, dtype=torch.float64)])


def mean_of(total: Tensor) -> Tensor:
    """Divide sums by counts, both in `[2, ...]`; NaN for a count of 0.

    >>> mean_of(torch.tensor([1.0, 4.0]))
    tensor(0.2500)
    """
    return total[0] / total[1]


# Metrics ------------------------------------------------------------------------------------------------


class StreamingMetric(Metric):
    """A metric whose state is one tensor of float64 sums with a `shape`, or `columns` numbers of every row.

    Sums are added over batches and processes, rows are concatenated. `settings` is all that updates depend on besides
    the data.
    """

    full_state_update = False
    is_differentiable = False
    sums: Tensor
    values: list[Tensor]

    def __init__(
        self, *, shape: Sequence[int] = (), columns: int = 0, settings: tuple[object, ...] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        # A collection merges two metrics, and updates only the first, if their states are equal after the first batch,
        # as for accuracy and error if half of the batch is correct. It also compares state names, so add one that is
        # unique and always empty.
        self.add_state(f"{type(self).__name__}{settings}", [], dist_reduce_fx=None)
        self.columns = columns
        if columns:
            self.add_state("values", [], dist_reduce_fx="cat")
        else:
            self.add_state("sums", torch.zeros(*shape, dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, found: Tensor) -> None:
        """Add the result of a batch."""
        if self.columns:
            self.values.append(found.to(self.device))
        else:
            self.sums = self.sums + found.to(self.sums.device)

    def _all(self) -> Tensor:
        """Return the state over all batches so far: sums, or rows `[N, columns]`."""
        if not self.columns:
            return self.sums
        # After a reduction over processes it is a tensor instead of a list.
        return dim_zero_cat(self.values) if len(self.values) else torch.empty(0, self.columns, device=self.device)
