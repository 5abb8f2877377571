"""The training objective as a module, and iteration over its data."""

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
    """A module whose forward computes the loss, because compilers and distributed training wrap a forward."""

    def __init__(self, net: Multitude, criterion: Criterion | None, dataset_size: int | None) -> None:
        super().__init__()
        self.net, self.criterion, self.dataset_size = net, criterion, dataset_size

    def forward(self, x: Input, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, with optional weights of its rows."""
        return self.loss(x, y, weight)

    def loss(self, x: Input, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the loss without the compiled code."""
        options: dict[str, Any] = {} if weight is None else {"weight": weight}
        return self.net.loss(x, y, self.criterion, dataset_size=self.dataset_size, **options)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile a function of its own, since torch recompiles each function at most 8 times."""
        own = FunctionType(
            TrainingObjective.forward.__code__.replace(), TrainingObjective.forward.__globals__, "forward"
        )
        self.forward = MethodType(own, self)  # type: ignore[method-assign]
        super().compile(*args, **kwargs)


def batches_from(data: Any, epoch: int = 0, done: int = 0) -> Iterator[Any]:
    """Iterate data from batch `done` of an epoch; skip batches if the data has no `start` method."""
    if hasattr(data, "start"):
        data.start(epoch, done)
        return iter(data)
    batches = iter(data)
    for _ in range(done):
        next(batches, None)
    return batches


def size_of(data: Any, net: Multitude, given: int | None) -> int | None:
    """Return the number of examples that scales a divergence; None if there is no divergence."""
    if given is not None:
        return check_count("dataset_size", given)
    if not net.divergences:
        return None
    for holder in (getattr(data, "dataset", None), getattr(data, "part", None)):  # of a DataLoader, and of our Loader
        if isinstance(holder, Sized):
            return len(holder)
    if isinstance(data, Sequence):
        return sum(len(y) for _, y in map(split_batch, data) if y is not None)
    raise ValueError("dataset_size must be given: the objective has a divergence, and data has no known size")
