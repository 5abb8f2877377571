"""One training loop for every multitude: `fit`.

net = mt.packed(model, members=4, alpha=2)
history = mt.fit(net, loader, epochs=75, optimizer="sgd", lr=0.05, schedule="cosine")
"""

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
    """Train `net` on `data` by its own objective; leave it in training mode, and return the results of each epoch.

    Args:
        net: a multitude, or a plain network, on the device to train on.
        data: an iterable of batches `(x, y)`, such as a `DataLoader`, that can be iterated once per epoch. For batches
            `(x, y, weight)`, with a weight `[B]` for each row, the loss is the mean of the rows' losses times weights.
        epochs: how many times to iterate the data.
        optimizer: `"sgd"` (with Nesterov momentum), `"adam"` or `"adamw"`; or an optimizer of this network, or a
            function that makes one from parameter groups.
        lr: the maximum learning rate; by default 0.05 for SGD and 0.001 for Adam.
        momentum: momentum of SGD.
        weight_decay: weight decay of the named optimizers, for all parameters, as in torch.
        schedule: `"cosine"`, `"linear"`, `"multistep"`, `"cyclic"` or `"constant"`, by name or with settings
            (`{"name": "multistep", "milestones": [0.3, 0.6, 0.8], "factor": 0.2}`), or a function of the share of
            the training that is done.
        warmup: the number of epochs in which the rate rises to the schedule's own.
        precision: `"float32"`, or `"bfloat16"` for automatic mixed precision, or `"auto"`: bfloat16 on a GPU that
            supports it, otherwise float32. Validation runs in float32, as predictions do.
        channels_last: whether to use the channels-last layout for network and images.
        compile: whether to compile the objective.
        clip: the maximum norm of the gradient, for each independent member separately.
        task: the meaning of the targets, "classification", "tokens", "binary", "multilabel", "regression", "gaussian"
            or "quantiles" (see `Predictive`), which the network then predicts; by default the network's own task.
        criterion: passed to `net.loss`; by default the task's own: cross-entropy, mean squared error, Gaussian NLL,
            pinball.
        dataset_size: the number of examples, for objectives with a divergence; by default taken from `data`.
        average: the share of a moving average of the weights that is kept in each step, such as 0.99. The average is
            validated, and becomes the network's weights at the end.
        class_weight: the weights of the targets of each class: one number per class, or `"balanced"`,
            `n / (classes * count)` from one pass over `data`, with which all classes count the same. Validation uses
            them too.
        validation: batches like those of `data`, but not trained on. After each epoch the joint prediction of members
            and draws is scored on them in evaluation mode (`Epoch.validation`, lower is better): by the negative log
            probability of classes, the negative log density of "gaussian", the mean squared error of "regression", the
            pinball loss of "quantiles". At the end the network has the weights and buffers of the best epoch.
        patience: stop the training after this many epochs without a better score.
        stop_by: `"score"`, or, for values, `"error"` for the root mean squared error of the mean prediction.
        callbacks: functions of a `Progress`, called after each step.
        checkpoint: a file to save the training in: after epochs (see `checkpoint_seconds`), at the end, and on Ctrl-C
            or SIGTERM after the current step. If the file exists, the training resumes, and ends as if it had never
            been interrupted (exactly so on a CPU).
        checkpoint_seconds: save after an epoch if the last save is at least this many seconds old; within an epoch,
            thirty times as many. Slow saves are less frequent, to take at most 5 % of the time.
        checkpoint_of: a name for what is trained; a file that was saved under another name is refused.
        seed: the seed of all randomness in training, which then leaves torch's own random state alone.
        accelerator: a Hugging Face `Accelerator`, to train in several processes, each on its share of the batches.
        progress: whether to show progress on stderr; by default on a terminal, after two seconds.

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


# -- arguments ---------------------------------------------------------------------------------------------


def _validation(batches: Any, patience: int | None, stop_by: str) -> Validation | None:
    check_choice("stop_by", stop_by, STOP_BY)
    if patience is not None:
        check_count("patience", patience)
        if batches is None:
            raise ValueError(f"patience={patience} needs a score to wait for: pass validation=, batches (x, y)")
    if batches is None:
        return None
    _check_batches(batches, "validation")
    return Validation(batches, stop_by, patience)


def _check_batches(data: Any, name: str = "data") -> None:
    """Raise an error unless `data` is an iterable of batches, not a single batch or single examples."""
    if isinstance(data, (Tensor, tuple, Mapping)):
        raise ValueError(f"{name} must hold batches, got one ({type(data).__name__}): pass a list of them, [(x, y)]")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError(f"{name} must come in batches, got a {type(data).__name__}: wrap it in a DataLoader")
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise ValueError(f"{name} must be an iterable of batches, got {type(data).__name__}")
