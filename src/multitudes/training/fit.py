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

from multitudes.core.checks import check_choice, check_count, check_number, check_seed
from multitudes.core.devices import device_in
from multitudes.core.predictor import multitude_of
from multitudes.core.seeding import seeded
from multitudes.core.tasks import Criterion, criterion_for
from multitudes.training.checkpoint import Checkpoint
from multitudes.training.class_weights import class_weights_of
from multitudes.training.objective import Objective, size_of
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
    """Train `net` on `data` by its own objective; it is left in training mode. Returns what each epoch was like.

    Args:
        net: a multitude, or a plain network, on the device where it shall train.
        data: an iterable of batches `(x, y)` that can be iterated once an epoch, such as a `DataLoader`. Of batches
            `(x, y, weight)`, with a weight `[B]` of each row, the loss is the mean of the rows' losses times weights.
        epochs: how many times to iterate them.
        optimizer: `"sgd"` (with Nesterov momentum), `"adam"` or `"adamw"`; or an optimizer of this network, or a
            function that makes one of parameter groups.
        lr: the learning rate at its highest; by default 0.05 for SGD and 0.001 for Adam.
        momentum: of SGD.
        weight_decay: of the named optimizers, for every parameter, as torch's own have it.
        schedule: `"cosine"`, `"linear"`, `"multistep"`, `"cyclic"` or `"constant"`, by name or with settings
            (`{"name": "multistep", "milestones": [0.3, 0.6, 0.8], "factor": 0.2}`), or a function of the share of
            the training that is done.
        warmup: during how many epochs the rate rises to the schedule's own.
        precision: `"float32"`, or `"bfloat16"` for automatic mixed precision, or `"auto"`: the latter on a GPU that has
            it, else the former. Validation is computed in float32, as predictions are.
        channels_last: whether network and images are laid out channels-last.
        compile: whether to compile the objective.
        clip: the largest norm of the gradient, for each independent member its own.
        task: what the targets are, "classification", "tokens", "binary", "multilabel", "regression", "gaussian" or
            "quantiles" (see `Predictive`), which the network then predicts; by default the network's own task.
        criterion: of `net.loss`; by default the task's own: cross-entropy, mean squared error, Gaussian NLL, pinball.
        dataset_size: how many examples there are, for objectives with a divergence; found out where `data` tells.
        average: what share of a moving average of the weights is kept each step, such as 0.99. The average is what is
            validated, and what the network ends with.
        class_weight: how much the targets of each class count: one number for each class, or `"balanced"`, by which all
            classes count the same, `n / (classes * count)`, from one pass over `data`. Validation is weighted alike.
        validation: batches like those of `data`, which are not trained on. After each epoch all members and draws
            together are scored on them in evaluation mode (`Epoch.validation`, lower is better): by the negative log
            probability of classes, the negative log density of "gaussian", the mean squared error of "regression", the
            pinball loss of "quantiles". At the end the network has the weights and buffers of the best epoch.
        patience: end the training after so many epochs without a better score.
        stop_by: `"score"`, or `"error"` for the root mean squared error of the mean prediction instead, of values.
        callbacks: functions of a `Progress`, called after each step.
        checkpoint: a file to save the training in: after epochs (see `checkpoint_seconds`), at the end, and on Ctrl-C
            or SIGTERM after the step at hand. Where the file is there, the training is resumed, and ends as if it had
            never been interrupted (exactly so on a CPU).
        checkpoint_seconds: save after an epoch that ends so many seconds or more after the last saving; within an
            epoch after thirty times as many. Where saving is slow, it is done less often, for 5 % of the time.
        checkpoint_of: a name for what is trained; a file that was saved under another name is refused.
        seed: of everything random in training, which then leaves torch's own random state alone.
        accelerator: a Hugging Face `Accelerator`, to train in several processes: each takes its share of the batches.
        progress: whether to show progress on stderr; by default on a terminal, after two seconds.

    >>> from multitudes.core.multitude import Multitude
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
    criterion_for(multitude.known_task, criterion)  # an error before the first step
    factor = schedule_of(schedule, warmup / epochs)
    chosen = make_optimizer(optimizer, multitude, lr, momentum, weight_decay)
    objective = Objective(multitude, criterion, size_of(data, multitude, dataset_size))
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
    """Batches to iterate, and not one of them, nor single examples."""
    if isinstance(data, (Tensor, tuple, Mapping)):
        raise ValueError(f"{name} must hold batches, got one ({type(data).__name__}): pass a list of them, [(x, y)]")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError(f"{name} must come in batches, got a {type(data).__name__}: wrap it in a DataLoader")
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise ValueError(f"{name} must be an iterable of batches, got {type(data).__name__}")
