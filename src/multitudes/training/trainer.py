"""`Trainer`: the loop of `fit`, and what it reports."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from multitudes.base.progress import ProgressBar
from multitudes.ensemble.members import Members
from multitudes.networks.calls import Input, split_batch, tensors_in, to_device, weight_in
from multitudes.networks.devices import device_in
from multitudes.networks.settings import override_attribute
from multitudes.networks.trace import hooked
from multitudes.training.checkpoint import Checkpoint, DeferredSignals, TrainingState, random_state, set_random_state
from multitudes.training.class_weights import ClassWeights
from multitudes.training.late_losses import DelayedLosses, Loss
from multitudes.training.objective import TrainingObjective, batches_from
from multitudes.training.schedules import Schedule
from multitudes.training.validation import Validation, copied_tensors, restore
from multitudes.training.weight_average import MovingAverage


@dataclass(frozen=True)
class Epoch:
    """Results of an epoch (counted from 1): mean loss of its batches, learning rate of its last step."""

    epoch: int
    loss: float
    lr: float
    seconds: float
    validation: float | None = None
    """The validation score after the epoch, lower is better; None without validation data."""


@dataclass(frozen=True)
class Progress:
    """Progress of a training, passed to callbacks after each step and each epoch."""

    net: nn.Module
    epoch: int
    epochs: int
    batch: int
    """Number of finished batches of the epoch, out of `batches` (None if unknown)."""
    batches: int | None
    step: int
    last: Loss | float
    lr: float
    epoch_ended: bool
    validation: float | None = None
    """The validation score, if the epoch has ended and there are validation data."""

    @property
    def loss(self) -> float:
        """Loss of the last batch, or mean loss of a finished epoch. Reading it may wait for a GPU."""
        return float(self.last)


Callback = Callable[[Progress], bool | None]


@dataclass(frozen=True)
class TrainConfig:
    """Checked settings of a training."""

    schedule: Schedule
    dtype: torch.dtype | None
    channels_last: bool
    compile: bool
    clip: float | None
    callbacks: tuple[Callback, ...]
    accelerator: Any
    progress: bool | None
    validation: Validation | None = None
    class_weights: ClassWeights | None = None
    average: float | None = None


class Trainer:
    """The training loop, from the start or from a checkpoint."""

    def __init__(
        self,
        objective: TrainingObjective,
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
        self.device = device_in(self.net)

    def run(self) -> list[Epoch]:
        """Train to the end; with validation, restore the weights of the best epoch."""
        if self.checkpoint is not None:
            self.checkpoint.load(self.state, self.net, self.optimizer, self._settings())
        if self.config.compile:
            self.objective.compile()
        self.wrapped: nn.Module = self.objective
        if self.config.accelerator is not None:
            self._distribute(self.config.accelerator)
        self.net.train()
        rate = self.config.average
        self.average = None if rate is None else MovingAverage(self.net, rate, self.state.average)
        if self.config.validation is not None:
            self.config.validation.check(self.net, self._on_device)
        self.losses = DelayedLosses(self.optimizer)
        bar = ProgressBar(self.epochs * (self.state.batches or 0), self.config.progress, "steps")
        alone = self.config.accelerator is None or self.config.accelerator.num_processes == 1
        deferred = DeferredSignals() if self.checkpoint is not None and alone else nullcontext()
        try:
            with deferred as self.signals:
                while self.state.epoch < self.epochs and not self.state.stopped:
                    self._epoch(bar)
                self._read_losses(all_of_them=True)
                self._save()
                if self.average is not None:
                    self.average.apply()
                restore(self.net, self.state.best)
        finally:
            bar.clear()
            self.losses.close()
        return [Epoch(**epoch) for epoch in self.state.history]

    def _epoch(self, bar: ProgressBar) -> None:
        state = self.state
        start = time.monotonic() - state.seconds
        for x, y, weight in self._batches():
            loss = self._step(x, y, weight)
            state.step, state.batch = state.step + 1, state.batch + 1
            state.seconds = time.monotonic() - start
            bar.update(state.step)
            self._call_back(loss)
            self._save_if_due()
            if state.stopped:
                return
        if state.batch == 0:
            raise ValueError(f"data must hold at least one batch in every epoch, got none in epoch {state.epoch + 1}")
        self.state.batches = state.batch
        self._read_losses(all_of_them=True)
        score = self._validate()
        mean, rate = state.total / state.batch, self.optimizer.param_groups[0]["lr"]
        state.seconds = time.monotonic() - start
        state.history.append(asdict(Epoch(state.epoch + 1, mean, rate, state.seconds, score)))
        self._call_back(mean, epoch_ended=True, validation=score)
        state.epoch, state.batch, state.total, state.seconds = state.epoch + 1, 0, 0.0, 0.0
        self._save_if_due(epoch_ended=True)

    def _validate(self) -> float | None:
        """Score the network after an epoch; copy its weights if they are the best so far."""
        validation, state = self.config.validation, self.state
        if validation is None:
            return None
        while (score := self._score(validation)) is None:
            self._save_if_due()  # scoring was interrupted: save the last step, and score again on resume
        accelerator = self.config.accelerator
        if (
            accelerator is not None and accelerator.num_processes > 1
        ):  # buffers may differ, so the first process decides
            score = float(accelerator.gather(torch.tensor([score], dtype=torch.float64, device=self.device))[0])
        state.since_best += 1
        if not math.isnan(score) and (state.best_score is None or score < state.best_score):
            with nullcontext() if self.average is None else self.average.swapped_in():
                state.best_score, state.since_best, state.best = score, 0, copied_tensors(self.net)
        if validation.patience is not None and state.since_best >= validation.patience:
            state.stopped = True
        return score

    def _score(self, validation: Validation) -> float | None:
        with nullcontext() if self.average is None else self.average.swapped_in():
            return validation.score(self.net, self._on_device, self._signal_pending)

    def _signal_pending(self) -> bool:
        return self.signals is not None and self.signals.pending

    def _save_if_due(self, epoch_ended: bool = False) -> None:
        """Save the training if a checkpoint is due or a signal is pending; then deliver the signal."""
        signals = self.signals if self._signal_pending() else None
        if signals or (self.checkpoint is not None and self.checkpoint.due(epoch_ended)):
            self._read_losses(all_of_them=True)
            self._save()
        if signals:
            signals.deliver()

    def _batches(self) -> Iterator[tuple[Input, Tensor, Tensor | None]]:
        """Iterate the rest of the current epoch, on the network's device."""
        state, done = self.state, self.state.batch
        now = random_state(self.device)
        if done:  # it determines the order of batches
            set_random_state(state.epoch_random, self.device)
        else:
            state.epoch_random = now
        batches = batches_from(self.data, state.epoch, done)
        if done:
            set_random_state(now, self.device)
        for number, batch in enumerate(batches, done):
            yield self._on_device(batch, f"batch {number} of data")

    def _on_device(self, batch: Any, what: str) -> tuple[Input, Tensor, Tensor | None]:
        """Return input, targets and weights of a batch, named `what` in errors."""
        x, y = split_batch(batch)
        if y is None:
            raise ValueError(f"{what} must have targets, (x, y), got an input alone")
        weight = weight_in(batch, y, what)
        x = to_device(x, self.device)
        if self.config.channels_last and isinstance(x, Tensor) and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        if self.config.class_weights is not None:
            weight = self.config.class_weights.of(y, weight)
        return x, y.to(self.device), None if weight is None else weight.to(self.device)

    def _step(self, x: Input, y: Tensor, weight: Tensor | None = None) -> Loss:
        done = (self.state.epoch + self.state.batch / (self.state.batches or self.state.batch + 1)) / self.epochs
        factor = self.config.schedule(done)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        if self.config.class_weights is not None:
            self.config.class_weights.check(self.net, x)
        if self.config.compile and self.state.step == 0:
            self.net._prepare(x)  # not possible during compilation
        with self._autocast():
            loss = self.wrapped(x, y, weight)
        kept = self.losses.add(loss, (x, y, weight), self.state.step + 1)
        self._read_losses()
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.accelerator is None:
            loss.backward()
        else:
            self.config.accelerator.backward(loss)
        if self.config.clip is not None:
            self.net.clip_grad_norm_(self.config.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.state.step + 1)
        return kept

    def _read_losses(self, all_of_them: bool = False) -> None:
        """Add up the losses that are available; raise an error for a bad one."""
        for loss in self.losses.take(all_of_them):
            if not math.isfinite(float(loss)):
                raise FloatingPointError(self._diagnosis(loss))
            self.state.total += float(loss)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.config.dtype) if self.config.dtype else nullcontext()

    def _diagnosis(self, loss: Loss) -> str:
        def again() -> None:
            with self._autocast():
                self.objective.loss(*loss.batch)

        place = first_bad_layer(self.net, loss.batch[0], again)
        return (
            f"the loss is {float(loss)} at step {loss.step} (epoch {self.state.epoch + 1}) of training a "
            f"{type(self.net).__name__}: {place}; try a lower lr, or clip="
        )

    def _call_back(self, loss: Loss | float, epoch_ended: bool = False, validation: float | None = None) -> None:
        state = self.state
        progress = Progress(
            self.net, state.epoch + 1, self.epochs, state.batch, self.state.batches, state.step, loss,
            self.optimizer.param_groups[0]["lr"], epoch_ended, validation,
        )  # fmt: skip
        for callback in self.config.callbacks:
            if callback(progress):
                state.stopped = True

    def _save(self) -> None:
        accelerator = self.config.accelerator
        if self.checkpoint is not None and (accelerator is None or accelerator.is_main_process):
            self.checkpoint.save(self.state, self.net, self.optimizer, self._settings())

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must match a checkpoint to resume from it."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # unwrap Accelerate's
        validation = self.config.validation
        return {
            "epochs": self.epochs,
            "optimizer": type(optimizer).__name__,
            "lr": self.rates,
            "average": self.config.average,
            "stop_by": None if validation is None else validation.stop_by,
            "patience": None if validation is None else validation.patience,
        }

    def _distribute(self, accelerator: Any) -> None:
        """Wrap the objective to synchronize gradients, and distribute the batches over processes."""
        self.device = accelerator.device
        self.wrapped, self.optimizer = accelerator.prepare(self.objective, self.optimizer)
        if isinstance(self.data, DataLoader):
            self.data = accelerator.prepare(self.data)
        else:
            self.data = _ProcessBatches(self.data, accelerator.process_index, accelerator.num_processes)
        self.state.batches = operator.length_hint(self.data) or self.state.batches


class _ProcessBatches:
    """Every n-th batch; all processes get equally many."""

    def __init__(self, data: Iterable[Any], index: int, processes: int) -> None:
        self.data, self.index, self.processes = data, index, processes
        if hasattr(data, "start"):  # the data can start at any batch of any epoch
            self.start = lambda epoch, batch: data.start(epoch, batch * processes)

    def __length_hint__(self) -> int:
        return operator.length_hint(self.data) // self.processes

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.data)
        while len(together := list(islice(batches, self.processes))) == self.processes:
            yield together[self.index]


# -- diagnosis ---------------------------------------------------------------------------------------------


@torch.no_grad()
def first_bad_layer(net: nn.Module, x: Input, compute: Callable[[], Any]) -> str:
    """Describe the first NaN or infinity, in the input, the weights or a layer's output, when `compute` runs `net`."""
    if any(_bad(tensor) for tensor in tensors_in(x)):
        return "the input holds NaN or infinite values"
    for name, parameter in net.named_parameters():
        if _bad(parameter):
            return f"the weights {name!r} hold NaN or infinite values"
    found: list[str] = []

    def look(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        if not found and isinstance(output, Tensor) and _bad(output):
            found.append(f"the output of layer {name!r} ({type(layer).__name__}) is the first with such values")

    layers = [name for name, layer in net.named_modules() if name and not any(True for _ in layer.children())]
    members = [net] if isinstance(net, Members) else []
    with override_attribute(members, "_runner", "loop"), hooked(net, layers, look):  # hooks need the loop runner
        compute()
    return found[0] if found else "every layer's output is finite in a second run, so the loss itself overflows"


def _bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())
