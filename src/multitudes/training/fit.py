"""`fit`: train any multitude."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from multitudes.base.checks import check_choice, check_count, check_number, check_seed
from multitudes.ensemble.predictor import multitude_of
from multitudes.networks.devices import device_in
from multitudes.networks.seeds import seeded
from multitudes.tasks import Criterion, criterion_for
from multitudes.training.checkpoint import Checkpoint
from multitudes.training.class_weights import class_weights_of
from multitudes.training.objective import TrainingObjective, size_of
from multitudes.training.optimizers import make_optimizer
from multitudes.training.precision import precision_dtype
from multitudes.training.schedules import Schedule, schedule_of
from multitudes.training.trainer import Callback, Epoch, TrainConfig, Trainer
from multitudes.training.validation import STOP_BY, Validation


def fit(
    net: nn.Module,
    data: Iterable[Any],
    epochs: int = 10,
    *,
    optimizer: str | Optimizer | Callable[[Iterable[Any]], Optimizer] = "sgd",
    lr: float | None = None,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: str | Mapping[str, Any] | Schedule = "cosine",
    warmup: float = 0.0,
    precision: str = "float32",
    channels_last: bool = False,
    compile: bool = False,
    clip: float | None = None,
    task: str | None = None,
    criterion: Criterion | None = None,
    dataset_size: int | None = None,
    average: float | None = None,
    class_weight: str | Sequence[float] | Tensor | None = None,
    validation: Iterable[Any] | None = None,
    patience: int | None = None,
    stop_by: str = "score",
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 20.0,
    checkpoint_of: str = "",
    seed: int | None = None,
    accelerator: Any = None,
    progress: bool | None = None,
) -> list[Epoch]:
    """Train a network by its own objective, and leave it in training mode.

    Args:
        net: A multitude or a plain network, on the device to train on.
        data: Iterable of batches `(x, y)` or `(x, y, weight)`, iterated once per epoch, such as a `DataLoader`. With
            weights `[B]`, one per row, the loss is the mean of weight times loss over the rows.
        epochs: Number of passes over the data.
        optimizer: `"sgd"` (with Nesterov momentum), `"adam"`, `"adamw"`, an optimizer of this network, or a function
            from its parameters to an optimizer.
        lr: Maximum learning rate; default 0.05 for SGD and 0.001 for Adam.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of the named optimizers, for all parameters, as in torch.
        schedule: `"cosine"`, `"linear"`, `"multistep"`, `"cyclic"` or `"constant"`; a mapping with settings, such as
            `{"name": "multistep", "milestones": [0.3, 0.6, 0.8], "factor": 0.2}`; or a function from the share of the
            training that is done to a factor of the learning rate.
        warmup: Number of epochs in which the rate rises linearly to that of the schedule.
        precision: `"float32"`, `"bfloat16"` for automatic mixed precision, or `"auto"` for bfloat16 on GPUs that
            support it and float32 elsewhere. Validation always runs in float32.
        channels_last: Use the channels-last memory format for the network and its images.
        compile: Compile the objective with `torch.compile`.
        clip: Maximum norm of the gradient; independent members are clipped separately.
        task: Meaning of the targets (see `Predictive`), also for later predictions; default: the network's own task.
        criterion: Loss function, passed to `net.loss`; default: the task's own (cross-entropy, mean squared error,
            Gaussian negative log-likelihood, pinball loss).
        dataset_size: Number of examples, which scales a divergence in the objective; default: taken from `data`.
        average: Decay of an exponential moving average of the weights, such as 0.99. The average is validated and
            replaces the weights at the end.
        class_weight: One weight per class, or `"balanced"` for `n / (classes * count)`, counted in one pass over
            `data`. The weights also apply to the validation score.
        validation: Batches like those of `data`, to score after each epoch. The score, `Epoch.validation`, is that of
            the joint prediction in evaluation mode, and lower is better: negative log-likelihood for classes and
            `"gaussian"`, mean squared error for `"regression"`, pinball loss for `"quantiles"`. The weights and
            buffers of the best epoch are restored at the end.
        patience: Stop after this many epochs without a better score.
        stop_by: `"score"`, or `"error"` to score tasks with values by the root mean squared error of the mean.
        callbacks: Functions of a `Progress`, called after each step and each epoch. A function that returns True ends
            the training.
        checkpoint: File that stores the state of the training. It is written after epochs, at the end, and before a
            Ctrl-C or SIGTERM takes effect. If the file exists, the training resumes from it; on a CPU it ends with the
            same weights as without interruption.
        checkpoint_seconds: Minimum seconds between writes after epochs; 30 times as many within an epoch. Slow writes
            are less frequent, so that they take at most 5 % of the time.
        checkpoint_of: Name of the training. A checkpoint with another name is refused.
        seed: Seed of all random numbers of the training; torch's random state is then left unchanged.
        accelerator: A Hugging Face `Accelerator`, to train in several processes.
        progress: Show progress on stderr; default: on a terminal, after two seconds.

    Returns:
        One `Epoch` per epoch, with its mean loss, learning rate, seconds and validation score.

    Raises:
        ValueError: An argument is invalid, or the checkpoint belongs to another training.
        FloatingPointError: A loss is NaN or infinite. The message names the step and the first layer with such values.

    Example:
        >>> from multitudes.ensemble.multitude import Multitude
        >>> net = Multitude(nn.Linear(2, 2))
        >>> x = torch.randn(64, 2)
        >>> history = fit(net, [(x, (x[:, 0] > 0).long())], epochs=30, lr=1.0)
        >>> len(history), history[-1].loss < 0.3
        (30, True)
    """
    multitude = multitude_of(net)
    check_count("epochs", epochs)
    check_number("warmup", warmup, 0, below=epochs)
    check_number("momentum", momentum, 0, below=1)
    check_number("weight_decay", weight_decay, 0)
    check_number("checkpoint_seconds", checkpoint_seconds, 0)
    check_seed(seed)
    if clip is not None:
        check_number("clip", clip, 0, above=True)
    if average is not None:
        check_number("average", average, 0, above=True, below=1)
    _check_batches(data)
    validated = _validation(validation, patience, stop_by)
    device = device_in(multitude)
    dtype = precision_dtype(precision, device if accelerator is None else accelerator.device)
    if task is not None and multitude.chosen_task not in (None, task):
        raise ValueError(f"task must be {multitude.task!r}, the network's own, got {task!r}")
    if task is not None:
        multitude.task = task
    criterion_for(multitude.known_task, criterion)  # raises before the first step
    factor = schedule_of(schedule, warmup / epochs)
    chosen = make_optimizer(optimizer, multitude, lr, momentum, weight_decay)
    objective = TrainingObjective(multitude, criterion, size_of(data, multitude, dataset_size))
    if channels_last:
        multitude.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = TrainConfig(
        factor, dtype, channels_last, compile, clip, tuple(callbacks), accelerator, progress, validated,
        class_weights_of(class_weight, multitude, data), average,
    )  # fmt: skip
    kept = None if checkpoint is None else Checkpoint(Path(checkpoint), checkpoint_seconds, checkpoint_of)
    with seeded(seed):
        return Trainer(objective, chosen, data, epochs, config, kept).run()


def _validation(batches: Any, patience: int | None, stop_by: str) -> Validation | None:
    check_choice("stop_by", stop_by, STOP_BY)
    if patience is not None:
        check_count("patience", patience)
        if batches is None:
            raise ValueError(f"patience={patience} needs a validation score: pass validation=, batches (x, y)")
    if batches is None:
        return None
    _check_batches(batches, "validation")
    return Validation(batches, stop_by, patience)


def _check_batches(data: Any, name: str = "data") -> None:
    """Refuse a single batch, and a data set of single examples."""
    if isinstance(data, (Tensor, tuple, Mapping)):
        raise ValueError(f"{name} must be a list of batches, got a single {type(data).__name__}: pass [(x, y)]")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError(f"{name} must come in batches, got a {type(data).__name__}: wrap it in a DataLoader")
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise ValueError(f"{name} must be an iterable of batches, got {type(data).__name__}")
