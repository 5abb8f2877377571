"""Predict a whole dataset, batch by batch: `predict`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count
from multitudes.base.progress import ProgressBar
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.predictor import Predictor, predicted, predictor
from multitudes.networks.calls import Input, evaluating, input_errors, split_batch, to_device
from multitudes.networks.verification import rows_interact
from multitudes.tasks.predictive import Predictive
from multitudes.training.batches import ROWS, Batches


def predict(
    net: nn.Module | Predictor,
    data: Any,
    *,
    task: str | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Predictive:
    """Predict a whole dataset in batches; store the predictions on the CPU.

    Args:
        net: Multitude, calibrated or not, stream, or plain network; it stays on its device.
        data: A tensor `[N, ...]`, one batch as a tuple `(x, y)` or a mapping, or an iterable of batches such as a
            `DataLoader`. A batch is an input, or a tuple or list that starts with one and goes on with targets, which
            are ignored. An input is a tensor, a mapping of keyword arguments (without `"label"` and `"labels"`), or,
            inside a batch, a tuple of positional arguments.
        task: Meaning of the predictions (see `Predictive`); by default the network's task.
        batch_size: Number of rows of a tensor to run at a time, 256 by default.
        progress: True to show progress on stderr; by default on a terminal, after two seconds.
        device: Device for the inputs; by default that of the network's parameters.
        options: Passed to the network's `predict`: `draws`, `seed`, `memory`, ... With a seed, all batches have the
            same draws.

    Example:
        >>> class Doubtful(nn.Module):
        ...     def predict(self, x):
        ...         return Predictive(torch.stack([x, -x]))
        >>> predict(Doubtful(), torch.randn(1000, 10))
        Predictive(task='classification', members=2, inputs=1000, outputs=[10])
    """
    if task is not None:
        options["task"] = task
    if batch_size is not None and not isinstance(data, Tensor):
        raise ValueError(f"batch_size is only for tensors; data is a {type(data).__name__} with its own batches")
    if isinstance(data, tuple) and len(data) == 2 and _may_be_two_batches(*data):
        raise ValueError(
            f"data is ambiguous: two tensors of shape {list(data[0].shape)} can be inputs and targets, or two batches; "
            "pass a list, [(x, y)] or [x_1, x_2]"
        )
    rows = ROWS if batch_size is None else check_count("batch_size", batch_size)
    batches = data if isinstance(data, Iterator) else Batches(data, rows).batches
    if isinstance(data, Tensor) and len(data) > rows:
        _check_splittable(net, data[:2])
    parts = [part.cpu() for part, _ in predictions(net, batches, progress, device, **options)]
    return Predictive.concat(parts)


@torch.no_grad()
def predictions(
    net: nn.Module | Predictor,
    batches: Iterable[Any],
    progress: bool | None = None,
    device: torch.device | str | None = None,
    prepare: Callable[[Any, int], Input] | None = None,
    **options: Any,
) -> Iterator[tuple[Predictive, Tensor | None]]:
    """Yield the predictions of each batch, on the network's device, and the batch's targets.

    `prepare(x, number of the batch)` maps `x`, already on the device, to the network's input.
    """
    runner = predictor(net)
    if device is None and isinstance(runner, nn.Module):
        device = next((parameter.device for parameter in runner.parameters()), None)
    bar = ProgressBar(operator.length_hint(batches), progress)
    index = -1
    try:
        for index, batch in enumerate(batches):
            try:
                x, y = split_batch(batch)
                x = to_device(x, device)
                predictive = predicted(runner, x if prepare is None else prepare(x, index), **options)
            except ValueError as error:
                raise ValueError(f"batch {index} of data: {error}") from error
            bar.update(index + 1)
            yield predictive, y
    finally:
        bar.clear()
    if index < 0:
        raise ValueError("data must hold at least one batch, got none")


def _check_splittable(net: Any, x: Tensor) -> None:
    """Raise ValueError if a tensor cannot be split: its rows interact in the network, or are not inputs."""
    multitude = predictor(net)
    if not isinstance(multitude, Multitude):
        return
    x = to_device(x, next((parameter.device for parameter in multitude.parameters()), None))
    with evaluating(multitude), input_errors(x):
        interact = rows_interact(multitude.network, multitude._predictions, x)
    if interact:
        raise ValueError(
            f"cannot split data along its first dimension: in {type(multitude.network).__name__} rows affect each "
            "other, or the batch axis is another one; pass a list of whole batches, [x]"
        )


def _may_be_two_batches(x: Any, y: Any) -> bool:
    both = isinstance(x, Tensor) and isinstance(y, Tensor)
    return both and x.dim() > 1 and x.shape == y.shape and x.dtype == y.dtype
