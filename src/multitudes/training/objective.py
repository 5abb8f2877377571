"""The training objective as a module, and its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from multitudes.base.checks import check_count
from multitudes.ensemble.multitude import Multitude
from multitudes.networks.calls import Input, split_batch
from multitudes.tasks import Criterion


class TrainingObjective(nn.Module):
    """A network whose forward is its training objective.

    Gradient synchronisation between processes, and compilers, wrap the forward, so the loss must be one.
    """

    def __init__(self, net: Multitude, criterion: Criterion | None, dataset_size: int | None) -> None:
        super().__init__()
        self.net, self.criterion, self.dataset_size = net, criterion, dataset_size

    def forward(self, x: Input, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, a scalar, with optional weights of its rows."""
        return self.loss(x, y, weight)

    def loss(self, x: Input, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss, never compiled."""
        options: dict[str, Any] = {} if weight is None else {"weight": weight}
        return self.net.loss(x, y, self.criterion, dataset_size=self.dataset_size, **options)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do `nn.Module.compile`, separately from other objectives: torch makes at most 8 versions of a function."""
        own = FunctionType(
            TrainingObjective.forward.__code__.replace(), TrainingObjective.forward.__globals__, "forward"
        )
        self.forward = MethodType(own, self)  # type: ignore[method-assign]
        super().compile(*args, **kwargs)


def batches_from(data: Any, epoch: int = 0, done: int = 0) -> Iterator[Any]:
    """Iterate data from a batch of an epoch on; data that cannot start there are read up to it."""
    if hasattr(data, "start"):
        data.start(epoch, done)
        return iter(data)
    batches = iter(data)
    for _ in range(done):
        next(batches, None)
    return batches


def size_of(data: Any, net: Multitude, given: int | None) -> int | None:
    """Return the number of examples to divide the divergence by; None if the objective has none."""
    if given is not None:
        return check_count("dataset_size", given)
    if not net.divergences:
        return None
    for holder in (getattr(data, "dataset", None), getattr(data, "part", None)):  # of a DataLoader; of our Loader
        if isinstance(holder, Sized):
            return len(holder)
    if isinstance(data, Sequence):
        return sum(len(y) for _, y in map(split_batch, data) if y is not None)
    raise ValueError("dataset_size must be given: the objective has a divergence, and data does not tell its size")
