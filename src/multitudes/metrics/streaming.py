"""How metrics stream: what they keep of each batch, and how batches and processes are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

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


class StreamingMetric(Metric):
    """A metric whose state is one tensor of float64 sums of a `shape`, or `columns` numbers of every row.

    Sums are added up over batches and processes, rows concatenated. `settings` is what updates depend on, apart from
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
        # A collection takes two metrics for one, and updates only the first, if their states are equal after the first
        # batch, as those of accuracy and error are where half are right. Names of states must be equal too: this one is
        # always empty, and only has a name.
        self.add_state(f"{type(self).__name__}{settings}", [], dist_reduce_fx=None)
        self.columns = columns
        if columns:
            self.add_state("values", [], dist_reduce_fx="cat")
        else:
            self.add_state("sums", torch.zeros(*shape, dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, found: Tensor) -> None:
        """Add what a batch gave."""
        if self.columns:
            self.values.append(found.to(self.device))
        else:
            self.sums = self.sums + found.to(self.sums.device)

    def _all(self) -> Tensor:
        """What all batches so far gave: sums, or rows `[N, columns]`."""
        if not self.columns:
            return self.sums
        # After processes were joined it is one tensor, and no list any more.
        return dim_zero_cat(self.values) if len(self.values) else torch.empty(0, self.columns, device=self.device)
