"""Train a network on rows of a table by a method, with early stopping on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multitudes.ensemble.multitude import Multitude
from multitudes.lab.data.kinds import table_training
from multitudes.methods.registry import Method, Recording
from multitudes.models import tabular
from multitudes.networks.calls import call, evaluating
from multitudes.networks.copies import copied
from multitudes.networks.seeds import mixed, seeded
from multitudes.tasks import tasks_of
from multitudes.tasks.gaussian import beta_nll
from multitudes.training.fit import fit
from multitudes.training.recorder import Recorder
from multitudes.training.trainer import Epoch

SETTLING = 2048
"""Maximum number of training rows for batch-norm statistics."""


class RowBatches:
    """Batches of rows `(x, y)` or `(x, y, weight)` for training, shuffled each epoch.

    A last batch of a single row is skipped, because it has no variance for batch norm. With M `streams`, a batch
    concatenates M batches, each with its own order.
    """

    def __init__(self, rows: TensorDataset, size: int, seed: int, streams: int = 1) -> None:
        self.rows, self.size, self.seed, self.streams = rows, min(size, len(rows)), seed, streams
        self.epoch = 0

    def __len__(self) -> int:
        whole, rest = divmod(len(self.rows), self.size)
        return whole + (rest > 1)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        order = torch.stack([torch.randperm(len(self.rows), generator=generator) for _ in range(self.streams)])
        for rows in order.split(self.size, 1)[: len(self)]:
            yield self.rows[rows.flatten().to(self.rows.tensors[0].device)]
        self.epoch += 1


def batches_in_order(rows: TensorDataset) -> list[tuple[Tensor, ...]]:
    """Return all rows as batches, in order."""
    return list(zip(*(tensor.split(1024) for tensor in rows.tensors), strict=True))


def make_network(module: Any, inputs: int, outputs: int) -> nn.Module:
    """Copy the network of the user, or build it with a class or function."""
    if isinstance(module, nn.Module):
        return copied(module)
    if not callable(module):
        raise ValueError(f"module must be an nn.Module, or build one from (inputs, outputs), got {module!r}")
    try:
        network = module(inputs, outputs)
    except TypeError as error:
        raise ValueError(
            f"module must build a network from (inputs={inputs}, outputs={outputs}), got: {error}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"module must return an nn.Module, got {type(network).__name__}")
    return network


@dataclass(frozen=True)
class FitSettings:
    """Settings for building and training a network; `given` are the checked arguments of an estimator."""

    method: Method
    settings: Mapping[str, Any]
    task: str
    outputs: int
    quantiles: tuple[float, ...] | None
    device: torch.device
    given: Mapping[str, Any]

    def build(self, example: Tensor, layout: Any, seed: int) -> Multitude:
        """Build the network for inputs like `example [B, F]`, and convert it by the method."""
        inputs, module = example.shape[1], self.given["module"]
        network = (
            tabular(inputs, self.outputs, layout) if module is None else make_network(module, inputs, self.outputs)
        )
        with evaluating(network), torch.no_grad():
            try:
                shape = list(call(network, example).shape)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"module must accept rows of {inputs} features, got: {reason}") from error
        if shape != [len(example), self.outputs]:
            raise ValueError(f"module must return {self.outputs} outputs per row, got predictions of shape {shape}")
        return self.prepare(self.method.build(network, example, self.settings, seed))

    def prepare(self, net: Multitude) -> Multitude:
        """Set the task of the network, and move it to the device."""
        if self.quantiles is None:
            net.task = self.task
        else:
            net.quantiles = self.quantiles
        return net.to(self.device)

    def training(self, rows: int) -> dict[str, Any]:
        """Return the training settings of studies for this many rows, overridden by the arguments."""
        own = {name: self.given[name] for name in ("epochs", "lr", "weight_decay", "batch_size")}
        return {**table_training(rows), **{name: value for name, value in own.items() if value not in (None, "auto")}}


def train_network(
    fit_settings: FitSettings, train: TensorDataset, held: TensorDataset | None, layout: Any, seed: int
) -> tuple[Multitude, list[Epoch]]:
    """Train a network; return the best one by its score on the held-out rows, if any, and its epochs.

    Methods that collect checkpoints, such as snapshots, have no early stopping or averaging.
    """
    train = TensorDataset(*(tensor.to(fit_settings.device) for tensor in train.tensors))
    validation = None
    if held is not None:
        validation = batches_in_order(TensorDataset(*(tensor.to(fit_settings.device) for tensor in held.tensors)))
    x, training, settings = train.tensors[0], fit_settings.training(len(train)), fit_settings.settings
    size, average = training.pop("batch_size"), training.pop("average")
    del training["patience"]
    batches = RowBatches(train, size, seed, settings["members"] if settings.get("rows") == "own" else 1)
    with seeded(seed):
        net = fit_settings.build(x[:8].cpu(), layout, seed)
        plan = {**fit_settings.method.train(net, training, settings), "dataset_size": len(train)}
        plan["criterion"] = beta_nll if fit_settings.task in tasks_of(beta_nll) else None
        times = fit_settings.method.times(plan["epochs"] * len(batches), settings)
        if not times:
            plan["average"] = average
            if validation and fit_settings.given["patience"] is not None:
                plan |= {"validation": validation, "patience": fit_settings.given["patience"], "stop_by": "error"}
        recorder = Recorder(net, keep=len(times)) if times else None
        callbacks = () if recorder is None else (Recording(recorder, times),)
        history = fit(net, batches, **plan, callbacks=callbacks, seed=seed, progress=fit_settings.given["verbose"])
        net = fit_settings.method.finish(net, recorder, x[:SETTLING], settings, seed)
        net = fit_settings.method.after(net, batches_in_order(train), validation, settings, seed)
    return fit_settings.prepare(net).eval(), history


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of threads of torch inside the context; None leaves it unchanged."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
