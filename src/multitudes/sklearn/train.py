"""Train one network on rows of a table by a method, with early stopping on held-out rows."""

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
    """Batches of rows `(x, y)` or `(x, y, weight)` for training, shuffled by the seed each epoch.

    A last batch of a single row is skipped, since it has no variance to normalise by. With `streams` of M, a batch
    concatenates M batches, each in its own order.
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


def in_order(rows: TensorDataset) -> list[tuple[Tensor, ...]]:
    """Return all rows as batches, in order."""
    return list(zip(*(tensor.split(1024) for tensor in rows.tensors), strict=True))


def made(module: Any, inputs: int, outputs: int) -> nn.Module:
    """Make the user's network: a copy of a given one, or the result of a class or a function."""
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
    """Settings to build and train a network; `given` are the checked arguments of an estimator."""

    method: Method
    settings: Mapping[str, Any]
    task: str
    outputs: int
    quantiles: tuple[float, ...] | None
    device: torch.device
    given: Mapping[str, Any]

    def built(self, example: Tensor, layout: Any, seed: int) -> Multitude:
        """Build the network, converted by the method, for inputs like these `[B, F]`, on the device."""
        inputs, module = example.shape[1], self.given["module"]
        network = tabular(inputs, self.outputs, layout) if module is None else made(module, inputs, self.outputs)
        with evaluating(network), torch.no_grad():
            try:
                shape = list(call(network, example).shape)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"module must take rows of {inputs} features, got: {reason}") from error
        if shape != [len(example), self.outputs]:
            raise ValueError(f"module must give {self.outputs} outputs for each row, got predictions of shape {shape}")
        return self.prepared(self.method.build(network, example, self.settings, seed))

    def prepared(self, net: Multitude) -> Multitude:
        """Set the network's task and move it to the device."""
        if self.quantiles is None:
            net.task = self.task
        else:
            net.quantiles = self.quantiles
        return net.to(self.device)

    def training(self, rows: int) -> dict[str, Any]:
        """Return the training settings for this many rows: those of studies, overridden by given arguments."""
        own = {name: self.given[name] for name in ("epochs", "lr", "weight_decay", "batch_size")}
        return {**table_training(rows), **{name: value for name, value in own.items() if value not in (None, "auto")}}


def trained(
    recipe: Recipe, train: TensorDataset, held: TensorDataset | None, layout: Any, seed: int
) -> tuple[Multitude, list[Epoch]]:
    """Train a network on rows; return the best one by the held-out rows, if any, and its epochs.

    Methods made of checkpoints of a whole training, such as snapshots, have no early stopping or averaging.
    """
    train = TensorDataset(*(tensor.to(recipe.device) for tensor in train.tensors))
    validation = None
    if held is not None:
        validation = in_order(TensorDataset(*(tensor.to(recipe.device) for tensor in held.tensors)))
    x, training, settings = train.tensors[0], recipe.training(len(train)), recipe.settings
    size, average = training.pop("batch_size"), training.pop("average")
    del training["patience"]
    batches = RowBatches(train, size, seed, settings["members"] if settings.get("rows") == "own" else 1)
    with seeded(seed):
        net = recipe.built(x[:8].cpu(), layout, seed)
        plan = {**recipe.method.train(net, training, settings), "dataset_size": len(train)}
        plan["criterion"] = beta_nll if recipe.task in tasks_of(beta_nll) else None
        times = recipe.method.times(plan["epochs"] * len(batches), settings)
        if not times:
            plan["average"] = average
            if validation and recipe.given["patience"] is not None:
                plan |= {"validation": validation, "patience": recipe.given["patience"], "stop_by": "error"}
        recorder = Recorder(net, keep=len(times)) if times else None
        callbacks = () if recorder is None else (Recording(recorder, times),)
        history = fit(net, batches, **plan, callbacks=callbacks, seed=seed, progress=recipe.given["verbose"])
        net = recipe.method.finish(net, recorder, x[:SETTLING], settings, seed)
        net = recipe.method.after(net, in_order(train), validation, settings, seed)
    return recipe.prepared(net).eval(), history


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the context; None leaves it unchanged."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
