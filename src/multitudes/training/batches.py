"""`Batches`: a common form of evaluation data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from multitudes.networks.calls import Input, split_batch, to_device

ROWS = 256
"""Maximum rows of a tensor per batch."""


class Batches:
    """Batches that can be iterated repeatedly.

    The data is a tensor of inputs `[N, ...]`, one batch (`(x, y)` or a mapping of keyword arguments), or an iterable of
    batches, such as a `DataLoader`. Tensors are split into parts of equal size. Deep copies share the data.
    """

    def __init__(self, data: Any, rows: int = ROWS) -> None:
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            raise ValueError(f"data must come in batches, got a {type(data).__name__}: wrap it in a DataLoader")
        if isinstance(data, tuple) and len(data) > 2:
            raise ValueError(f"data must be one batch (x, y) or a list of batches, got a tuple of {len(data)}")
        if isinstance(data, Tensor | tuple | Mapping):
            data = list(_split(*split_batch(data), rows))
        elif not isinstance(data, Iterable):
            raise ValueError(f"data must be a tensor, a batch or an iterable of batches, got {type(data).__name__}")
        self.batches = list(data) if isinstance(data, Iterator) else data

    @classmethod
    def of(cls, data: Any) -> Batches | None:
        """Wrap `data`; return None for None."""
        return data if data is None or isinstance(data, Batches) else cls(data)

    def on(self, device: torch.device) -> Iterator[tuple[Input, Tensor | None]]:
        """Yield the inputs and targets of each batch on a device; raise an error if there is no batch."""
        empty = True
        for batch in self.batches:
            empty = False
            x, y = split_batch(batch)
            yield to_device(x, device), None if y is None else y.to(device)
        if empty:
            raise ValueError("data must hold at least one batch, got none")

    def __deepcopy__(self, memo: Any) -> Batches:
        return self


def _split(x: Input, y: Tensor | None, rows: int) -> Iterator[tuple[Input, Tensor | None]]:
    if not isinstance(x, Tensor):
        yield x, y
        return
    if y is not None and x.dim() and len(y) != len(x):
        sequences = x.dim() > 2 or (x.dim() == 2 and not x.is_floating_point())
        if sequences and len(x) <= rows and len(y) == x.shape[1]:  # sequence axis first
            yield x, y
            return
        raise ValueError(f"data must have one target for each of the {len(x)} inputs, got {len(y)}")
    if not x.dim() or not len(x):
        raise ValueError(f"data must hold at least one input, got shape {list(x.shape)}")
    parts = -(-len(x) // rows)
    targets = [None] * parts if y is None else y.tensor_split(parts)
    yield from zip(x.tensor_split(parts), targets, strict=True)
