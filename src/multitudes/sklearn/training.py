"""One network, trained on rows of a table by a method, and stopped by its score of the rows that were held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import call
from multitudes.core.copying import copied
from multitudes.core.locking import evaluating
from multitudes.core.multitude import Multitude
from multitudes.core.seeding import mixed, seeded
from multitudes.core.tasks import task_of
from multitudes.core.tasks.gaussian import beta_nll
from multitudes.data.kinds import table_training
from multitudes.methods.registry import Method, Recording
from multitudes.models import tabular
from multitudes.training.fit import Epoch, fit
from multitudes.training.recorder import Recorder

__all__ = ["Recipe", "RowBatches", "Rows", "made", "threads", "trained"]

SETTLING = 2048
"""The most training rows that batch-norm statistics are computed on."""


@dataclass(frozen=True)
class Rows:
    """Rows as a network sees them, `x [N, F]`, with their targets and, where they differ, weights `[N]`."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Tensor) -> Rows:
        return Rows(self.x[rows], self.y[rows], None if self.weight is None else self.weight[rows])

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        return Rows(self.x.to(device), self.y.to(device), None if self.weight is None else self.weight.to(device))


class RowBatches:
    """Batches `(x, y)` or `(x, y, weight)` of rows, in an order that the seed gives each epoch; without one, in theirs.

    A last batch of a single row is left out of training, since it has no variance to normalise by. With `streams` of M,
    a batch is M batches one after the other, each of an order of its own.
    """

    def __init__(self, rows: Rows, size: int, seed: int | None = None, streams: int = 1) -> None:
        self.rows, self.size, self.seed, self.streams = rows, min(size, len(rows)), seed, streams
        self.epoch, self._first = 0, 0

    def __len__(self) -> int:
        whole, rest = divmod(len(self.rows), self.size)
        return whole + (rest > 0 if self.seed is None or not whole else rest > 1)

    def start(self, epoch: int, batch: int = 0) -> None:
        """The next iteration is of this epoch, beginning with this batch."""
        self.epoch, self._first = epoch, batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        first, self._first = self._first, 0
        order = torch.arange(len(self.rows)).expand(self.streams, -1)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
            order = torch.stack([torch.randperm(len(self.rows), generator=generator) for _ in order])
        for batch in range(first, len(self)):
            chosen = order[:, batch * self.size : (batch + 1) * self.size].flatten()
            own = self.rows[chosen.to(self.rows.x.device)]
            yield (own.x, own.y) if own.weight is None else (own.x, own.y, own.weight)
        self.epoch += 1


def made(module: Any, inputs: int, outputs: int) -> nn.Module:
    """The user's own network for so many features: a copy of a given one, or what a class or a function makes."""
    if isinstance(module, nn.Module):
        return copied(module)
    if not callable(module):
        raise ValueError(f"module must be an nn.Module, or make one of (inputs, outputs), got {module!r}")
    try:
        network = module(inputs, outputs)
    except TypeError as error:
        raise ValueError(f"module must make a network of (inputs={inputs}, outputs={outputs}), got: {error}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"module must give an nn.Module, got {type(network).__name__}")
    return network


@dataclass(frozen=True)
class Recipe:
    """How a network is built and trained: the arguments of an estimator, checked."""

    method: Method
    settings: Mapping[str, Any]
    module: Any
    task: str
    outputs: int
    quantiles: tuple[float, ...] | None
    epochs: int | None
    patience: int | None
    batch_size: int | str
    lr: float
    weight_decay: float
    device: torch.device
    progress: bool | None

    def built(self, example: Tensor, layout: Any, seed: int) -> Multitude:
        """The network converted by the method, for inputs like these `[B, F]`, on the device."""
        inputs = example.shape[1]
        own = self.module is not None
        network = made(self.module, inputs, self.outputs) if own else tabular(inputs, self.outputs, layout)
        self._check_outputs(network, example)
        return self.prepared(self.method.build(network, example, self.settings, seed))

    def prepared(self, net: Multitude) -> Multitude:
        """With the task, on the device."""
        if self.quantiles is None:
            net.task = self.task
        else:
            net.quantiles = self.quantiles
        return net.to(self.device)

    def _check_outputs(self, network: nn.Module, example: Tensor) -> None:
        with evaluating(network), torch.no_grad():
            try:
                shape = list(call(network, example).shape)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"module must take rows of {example.shape[1]} features, got: {reason}") from error
        if shape != [len(example), self.outputs]:
            raise ValueError(f"module must give {self.outputs} outputs for each row, got predictions of shape {shape}")

    @property
    def criterion(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What a network is trained by, where that is not the task's own criterion."""
        return beta_nll if task_of(self.task).knows(beta_nll) else None

    def training(self, rows: int) -> dict[str, Any]:
        """How so many rows are trained on: as studies do it, but for what was given."""
        given: dict[str, Any] = {"epochs": self.epochs, "lr": self.lr, "weight_decay": self.weight_decay}
        if self.batch_size != "auto":
            given["batch_size"] = self.batch_size
        return {**table_training(rows), **{name: value for name, value in given.items() if value is not None}}


def trained(recipe: Recipe, train: Rows, held: Rows | None, layout: Any, seed: int) -> tuple[Multitude, list[Epoch]]:
    """A network trained on rows, and what each epoch was like; the best one by the held-out rows, if there are any.

    Methods that are made of checkpoints of a whole training, such as snapshots, are not stopped, nor averaged.
    """
    train = train.to(recipe.device)
    training, settings = recipe.training(len(train)), recipe.settings
    size, average = training.pop("batch_size"), training.pop("average")
    del training["patience"]
    batches = RowBatches(train, size, seed, settings["members"] if settings.get("rows") == "own" else 1)
    with seeded(seed):
        net = recipe.built(train.x[:8].cpu(), layout, seed)
        plan = {**recipe.method.train(net, training, settings), "criterion": recipe.criterion}
        plan["dataset_size"] = len(train)
        times = recipe.method.times(plan["epochs"] * len(batches), settings)
        if not times:
            plan["average"] = average
            if held is not None and recipe.patience is not None:
                held_out = RowBatches(held.to(recipe.device), 1024)
                plan |= {"validation": held_out, "patience": recipe.patience, "stop_by": "error"}
        recorder = Recorder(net, keep=len(times)) if times else None
        callbacks = () if recorder is None else (Recording(recorder, times),)
        history = fit(net, batches, **plan, callbacks=callbacks, seed=seed, progress=recipe.progress)
        net = recipe.method.finish(net, recorder, train.x[:SETTLING], settings, seed)
        validation = None if held is None else RowBatches(held.to(recipe.device), 1024)
        net = recipe.method.after(net, RowBatches(train, 1024), validation, settings, seed)
    return recipe.prepared(net).eval(), history


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads of torch inside, and as many as before after; None leaves them alone."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
