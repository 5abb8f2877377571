"""Predicting a whole dataset, batch by batch: `predict`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from multitudes.core.calling import Input, moved, split_batch
from multitudes.core.predictive import Predictive
from multitudes.core.progress import ProgressBar

__all__ = ["predict", "predictions"]


class Predictor(Protocol):
    """What `predict` asks of a network. Every `Multitude` is one."""

    @property
    def predict(self) -> Callable[..., Predictive]:
        """`predict(x)` or `predict(x, task=...)` for one batch."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters, whose device is where the inputs go."""
        ...


def predict(
    net: Predictor,
    data: Tensor | Iterable[Any],
    *,
    task: str | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Predictive:
    """Predict all of `data` in batches, keeping nothing but the predictions, on the CPU.

    Args:
        net: a multitude; it stays on its device.
        data: a tensor `[N, ...]`, one batch as a mapping, or an iterable of batches such as a `DataLoader`.
            A batch is an input, or a tuple or list that starts with one, the rest being targets, which are left
            alone. An input is a tensor, a mapping of keyword arguments (`"label"` and `"labels"` are dropped),
            or, inside a batch, a tuple of positional arguments.
        task: how to read the predictions (see `Predictive`); the network's own task by default.
        batch_size: how many inputs of a tensor to run at a time, 256 by default.
        progress: whether to show progress on stderr; by default on a terminal, after two seconds.
        device: where inputs are moved to; by default where the network's parameters are.
        options: of the network's own `predict`: `draws`, `seed`, `memory`, ... A seed gives each batch the same draws.

    >>> class Doubtful(nn.Module):
    ...     def predict(self, x):
    ...         return Predictive(torch.stack([x, -x]))
    >>> predict(Doubtful(), torch.randn(1000, 10))
    Predictive(task='classification', members=2, inputs=1000, outputs=[10])
    """
    if task is not None:
        options["task"] = task
    parts = [part.cpu() for part, _ in predictions(net, _batches(data, batch_size), progress, device, **options)]
    return Predictive.concat(parts)


@torch.no_grad()
def predictions(
    net: Predictor,
    batches: Iterable[Any],
    progress: bool | None = None,
    device: torch.device | str | None = None,
    prepare: Callable[[Any, int], Input] | None = None,
    **options: Any,
) -> Iterator[tuple[Predictive, Tensor | None]]:
    """What `net` predicts of each batch, on its own device, and the batch's targets.

    `prepare(x, number of the batch)` gives what the network is called with instead of `x`, which is on its device.
    """
    if not callable(getattr(net, "predict", None)):
        raise ValueError(f"net must be a multitude, got a {type(net).__name__}: convert it first")
    if device is None:
        device = next((parameter.device for parameter in net.parameters()), None)
    bar = ProgressBar(operator.length_hint(batches), progress)
    index = -1
    try:
        for index, batch in enumerate(batches):
            try:
                x, y = split_batch(batch)
                x = moved(x, device)
                predicted = net.predict(x if prepare is None else prepare(x, index), **options)
            except ValueError as error:
                raise ValueError(f"batch {index} of data: {error}") from error
            bar.update(index + 1)
            yield predicted, y
    finally:
        bar.clear()
    if index < 0:
        raise ValueError("data must hold at least one batch, got none")


def _batches(data: Tensor | Iterable[Any], batch_size: int | None) -> Iterable[Any]:
    """The batches of `data`: a tensor is cut, an iterable of batches passes through."""
    if isinstance(data, Tensor):
        if data.ndim == 0 or len(data) == 0:
            raise ValueError(f"data must hold at least one input, got shape {list(data.shape)}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return data.split(batch_size or 256)
    if isinstance(data, Mapping):
        return [data]  # one batch of keyword arguments
    if batch_size is not None:
        raise ValueError(f"batch_size cuts a tensor, and data is a {type(data).__name__} with its own batches")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError(f"data must come in batches, got a {type(data).__name__}: wrap it in a DataLoader")
    return data
