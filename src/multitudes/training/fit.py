"""One training loop for every multitude: `fit`.

net = mt.packed(model, members=4, alpha=2)
history = mt.fit(net, loader, epochs=75, optimizer="sgd", lr=0.05, schedule="cosine")
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from multitudes.core.calling import Input, moved, split_batch
from multitudes.core.checks import check_count, check_number, check_seed
from multitudes.core.multitude import Multitude
from multitudes.core.predictor import multitude_of
from multitudes.core.progress import ProgressBar
from multitudes.core.seeding import seeded
from multitudes.core.tasks import Criterion, criterion_for
from multitudes.training.checkpoint import Checkpoint, TrainingState, random_state, set_random_state
from multitudes.training.diagnosis import first_bad_layer
from multitudes.training.interruption import HeldSignals
from multitudes.training.late_losses import Loss, Losses
from multitudes.training.objective import Objective, size_of
from multitudes.training.optimizers import make_optimizer
from multitudes.training.precision import PRECISIONS, check_precision
from multitudes.training.schedules import Schedule, schedule_of

__all__ = ["Epoch", "Progress", "fit"]


@dataclass(frozen=True)
class Epoch:
    """What an epoch of training was like."""

    epoch: int
    """Its number, from 1."""
    loss: float
    """The mean loss of its batches."""
    lr: float
    """The learning rate of its last step."""
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Where training is, which callbacks get after every step; one that returns True ends the training."""

    net: nn.Module
    epoch: int
    """The number of the epoch, from 1."""
    epochs: int
    batch: int
    """How many of the epoch's batches are done."""
    batches: int | None
    """How many there are, where that is known."""
    step: int
    """How many steps have been made since the beginning."""
    last: Loss | float
    lr: float
    epoch_ended: bool

    @property
    def loss(self) -> float:
        """The loss of the last batch, or the mean of the epoch that has ended. Asking may wait for a GPU."""
        return float(self.last)


Callback = Callable[[Progress], bool | None]


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
        data: an iterable of batches `(x, y)` that can be iterated once an epoch, such as a `DataLoader`.
        epochs: how many times to iterate them.
        optimizer: `"sgd"` (with Nesterov momentum), `"adam"` or `"adamw"`; or an optimizer of this network, or a
            function that makes one of parameter groups.
        lr: the learning rate at its highest; by default 0.05 for SGD and 0.001 for Adam.
        momentum: of SGD.
        weight_decay: of the named optimizers.
        schedule: `"cosine"`, `"linear"`, `"multistep"`, `"cyclic"` or `"constant"`, by name or with settings
            (`{"name": "multistep", "milestones": [0.3, 0.6, 0.8], "factor": 0.2}`), or a function of the share of
            the training that is done.
        warmup: during how many epochs the rate rises to the schedule's own.
        precision: `"float32"`, or `"bfloat16"` for automatic mixed precision.
        channels_last: whether network and images are laid out channels-last.
        compile: whether to compile the objective.
        clip: the largest norm of the gradient, for each independent member its own.
        task: what the targets are, "classification", "tokens", "binary", "multilabel", "regression", "gaussian" or
            "quantiles" (see `Predictive`), which the network then predicts; by default the network's own task.
        criterion: of `net.loss`; by default the task's own: cross-entropy, mean squared error, Gaussian NLL, pinball.
        dataset_size: how many examples there are, for objectives with a divergence; found out where `data` tells.
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
    _check_batches(data)
    device = next((parameter.device for parameter in multitude.parameters()), torch.device("cpu"))
    check_precision(precision, device)
    _set_task(multitude, task)
    criterion_for(multitude.known_task, criterion)  # an error before the first step
    factor = schedule_of(schedule, warmup / epochs)
    chosen = make_optimizer(optimizer, multitude, lr, momentum, weight_decay)
    objective = Objective(multitude, criterion, size_of(data, multitude, dataset_size))
    if channels_last:
        multitude.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = TrainConfig(
        factor, PRECISIONS[precision], channels_last, compile, clip, tuple(callbacks), accelerator, progress
    )
    kept = None if checkpoint is None else Checkpoint(Path(checkpoint), checkpoint_seconds, checkpoint_of)
    with seeded(seed):
        return Trainer(objective, chosen, data, epochs, config, kept).run()


@dataclass(frozen=True)
class TrainConfig:
    """How to train, checked."""

    schedule: Schedule
    dtype: torch.dtype | None
    channels_last: bool
    compile: bool
    clip: float | None
    callbacks: tuple[Callback, ...]
    accelerator: Any
    progress: bool | None


class Trainer:
    """The loop of `fit`: one step after the other, from wherever a checkpoint has left off."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        data: Iterable[Any],
        epochs: int,
        config: TrainConfig,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.net, self.objective = objective.net, objective
        self.optimizer, self.config, self.checkpoint = optimizer, config, checkpoint
        self.data, self.epochs = data, epochs
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.state = TrainingState(batches=operator.length_hint(data) or None)
        self.device = next((parameter.device for parameter in self.net.parameters()), torch.device("cpu"))

    def run(self) -> list[Epoch]:
        """Train to the end."""
        if self.checkpoint is not None:
            self.checkpoint.load(self.state, self.net, self.optimizer, self._settings())
        if self.config.compile:
            self.objective.compile()
        self.wrapped: nn.Module = self.objective
        if self.config.accelerator is not None:
            self._distribute(self.config.accelerator)
        self.net.train()
        self.losses = Losses(self.optimizer)
        bar = ProgressBar(self.epochs * (self.state.batches or 0), self.config.progress, "steps")
        try:
            with self._held() as self.held:
                while self.state.epoch < self.epochs and not self.state.stopped:
                    self._epoch(bar)
                self._look(all_of_them=True)
                self._save()
        finally:
            bar.clear()
            self.losses.close()
        return [Epoch(**epoch) for epoch in self.state.history]

    def _held(self) -> AbstractContextManager[HeldSignals | None]:
        """Signals wait for the step at hand where there is a file to save it in, and no other process waits for it."""
        alone = self.config.accelerator is None or self.config.accelerator.num_processes == 1
        return HeldSignals() if self.checkpoint is not None and alone else nullcontext()

    def _epoch(self, bar: ProgressBar) -> None:
        state = self.state
        start = time.monotonic() - state.seconds
        for x, y in self._batches():
            loss = self._step(x, y)
            state.step, state.batch = state.step + 1, state.batch + 1
            state.seconds = time.monotonic() - start
            bar.update(state.step)
            self._call_back(loss, epoch_ended=False)
            self._keep()
            if state.stopped:
                return
        if state.batch == 0:
            raise ValueError(f"data must hold at least one batch in every epoch, got none in epoch {state.epoch + 1}")
        self.state.batches = state.batch
        self._look(all_of_them=True)
        mean = state.total / state.batch
        state.history.append(asdict(Epoch(state.epoch + 1, mean, self.optimizer.param_groups[0]["lr"], state.seconds)))
        self._call_back(mean, epoch_ended=True)
        state.epoch, state.batch, state.total, state.seconds = state.epoch + 1, 0, 0.0, 0.0
        self._keep(epoch_ended=True)

    def _keep(self, epoch_ended: bool = False) -> None:
        """Save the training where that is due, or where the process is asked to end, which it then does."""
        held = self.held if self.held is not None and self.held.pending else None
        if held or (self.checkpoint is not None and self.checkpoint.due(epoch_ended)):
            self._look(all_of_them=True)
            self._save()
        if held:
            held.deliver()

    def _batches(self) -> Iterator[tuple[Input, Tensor]]:
        """What is left of the current epoch, on the network's device."""
        state, done = self.state, self.state.batch
        now = random_state(self.device)
        if done:  # the order of the batches follows from the random state that the epoch began with
            set_random_state(state.epoch_random, self.device)
        else:
            state.epoch_random = now
        if hasattr(self.data, "start"):
            self.data.start(state.epoch, done)
            batches = iter(self.data)
        else:
            batches = iter(self.data)
            for _ in range(done):
                next(batches, None)
        if done:
            set_random_state(now, self.device)
        for number, batch in enumerate(batches, done):
            x, y = split_batch(batch)
            if y is None:
                raise ValueError(f"batch {number} of data must have targets, (x, y), got an input alone")
            x = moved(x, self.device)
            if self.config.channels_last and isinstance(x, Tensor) and x.dim() == 4:
                x = x.to(memory_format=torch.channels_last)
            yield x, y.to(self.device)

    def _step(self, x: Input, y: Tensor) -> Loss:
        done = (self.state.epoch + self.state.batch / (self.state.batches or self.state.batch + 1)) / self.epochs
        factor = self.config.schedule(done)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        if self.config.compile and self.state.step == 0:
            self.net._prepare(x)  # which cannot be found out while it compiles
        with self._autocast():
            loss = self.wrapped(x, y)
        kept = self.losses.add(loss, (x, y), self.state.step + 1)
        self._look()
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.accelerator is None:
            loss.backward()
        else:
            self.config.accelerator.backward(loss)
        if self.config.clip is not None:
            self.net.clip_grad_norm_(self.config.clip)
        self.optimizer.step()
        return kept

    def _look(self, all_of_them: bool = False) -> None:
        """Look at the losses that have arrived: one that is bad ends the training."""
        for loss in self.losses.take(all_of_them):
            if loss.bad:
                raise FloatingPointError(self._diagnosis(loss))
            self.state.total += float(loss)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.config.dtype) if self.config.dtype else nullcontext()

    def _diagnosis(self, loss: Loss) -> str:
        x, y = loss.about

        def again() -> None:
            with self._autocast():
                self.net.loss(x, y, self.objective.criterion, dataset_size=self.objective.dataset_size)

        return (
            f"the loss is {float(loss)} at step {loss.step} (epoch {self.state.epoch + 1}) of training a "
            f"{type(self.net).__name__}: {first_bad_layer(self.net, x, again)}; a lower lr or clip= may help"
        )

    def _call_back(self, loss: Loss | float, epoch_ended: bool) -> None:
        state = self.state
        progress = Progress(
            self.net, state.epoch + 1, self.epochs, state.batch, self.state.batches, state.step, loss,
            self.optimizer.param_groups[0]["lr"], epoch_ended,
        )  # fmt: skip
        for callback in self.config.callbacks:
            if callback(progress):
                state.stopped = True

    def _save(self) -> None:
        accelerator = self.config.accelerator
        if self.checkpoint is not None and (accelerator is None or accelerator.is_main_process):
            self.checkpoint.save(self.state, self.net, self.optimizer, self._settings())

    def _settings(self) -> dict[str, Any]:
        """What must not change between a checkpoint and what goes on from it."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        return {"epochs": self.epochs, "optimizer": type(optimizer).__name__, "lr": self.rates}

    def _distribute(self, accelerator: Any) -> None:
        """Gradients are synchronised by wrapping the objective, and each process gets its share of the batches."""
        self.device = accelerator.device
        self.wrapped, self.optimizer = accelerator.prepare(self.objective, self.optimizer)
        if isinstance(self.data, DataLoader):
            self.data = accelerator.prepare(self.data)
        else:
            self.data = _Share(self.data, accelerator.process_index, accelerator.num_processes)
        self.state.batches = operator.length_hint(self.data) or self.state.batches


class _Share:
    """Every n-th batch, as many for each process."""

    def __init__(self, data: Iterable[Any], index: int, processes: int) -> None:
        self.data, self.index, self.processes = data, index, processes
        if hasattr(data, "start"):  # where it can, it begins at any batch of any epoch
            self.start = lambda epoch, batch: data.start(epoch, batch * processes)

    def __length_hint__(self) -> int:
        return operator.length_hint(self.data) // self.processes

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.data)
        while len(together := list(islice(batches, self.processes))) == self.processes:
            yield together[self.index]


# -- arguments ---------------------------------------------------------------------------------------------


def _set_task(net: Multitude, task: str | None) -> None:
    if task is None:
        return
    if net.chosen_task not in (None, task):
        raise ValueError(f"task must be {net.task!r}, the network's own, got {task!r}")
    net.task = task


def _check_batches(data: Any) -> None:
    """Batches to iterate, and not one of them, nor single examples."""
    if isinstance(data, (Tensor, tuple, Mapping)):
        raise ValueError(f"data must hold batches, got one ({type(data).__name__}): pass a list of them, [(x, y)]")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError(f"data must come in batches, got a {type(data).__name__}: wrap it in a DataLoader")
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise ValueError(f"data must be an iterable of batches, got {type(data).__name__}")
