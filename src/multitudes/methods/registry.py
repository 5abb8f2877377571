"""`Method`: the row of a method for studies and the command line. Each method's file declares its rows in `ROWS`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.networks.copies import copied
from multitudes.training.recorder import Recorder
from multitudes.training.trainer import Progress

Settings = Mapping[str, Any]
Training = dict[str, Any]
"""Keyword arguments of `mt.fit`."""
Build = Callable[[nn.Module, Tensor, Settings, int], Multitude]


@dataclass(frozen=True)
class Method:
    """Settings of one method, all plain values, and functions that build, train and finish it."""

    name: str
    build: Build
    """(network, example `[B, ...]` of its inputs, settings, seed) -> the multitude to train. The network is fresh, or
    with `init="heads"` in the settings, pretrained except for its output layers."""
    settings: Settings
    """All settings with their defaults."""
    costs: str
    """Costs relative to one network, in short sentences."""
    pick: str
    """Advice when to pick it, in short sentences."""
    place: int = 1000
    """Position in lists, lowest first; ties are sorted by name."""
    train: Callable[[Multitude, Training, Settings], Training] = lambda net, training, settings: training
    """(multitude, arguments of `fit`, settings) -> the arguments to train with."""
    times: Callable[[int, Settings], list[int]] = lambda steps, settings: []
    """(number of training steps, settings) -> the steps after which to record the network."""
    finish: Callable[[Multitude, Recorder | None, Tensor, Settings, int], Multitude] = lambda net, *_: net
    """(trained multitude, recorder if any, training inputs `[N, ...]`, settings, seed) -> the multitude to predict
    with."""
    after: Callable[[Multitude, Iterable[Any], Iterable[Any] | None, Settings, int], Multitude] = lambda net, *_: net
    """Last step, with targets. (result of `finish`, batches `(x, y)` of the training data, held-out batches or None,
    settings, seed) -> the multitude to predict with."""
    feature_maps: bool = False
    """True if it needs inputs that have feature maps."""
    tables: bool = False
    """True if it is only for tables."""
    pretrained: bool = False
    """True if it is only for pretrained networks."""

    def complete(self, given: Settings | None = None) -> dict[str, Any]:
        """Return all settings: the given ones, and defaults for the rest."""
        given = given or {}
        for key in given:
            if key not in self.settings:
                choices = ", ".join(self.settings) or "none"
                raise ValueError(f"method {self.name!r} has no setting {key!r}; its settings are: {choices}")
        return {**self.settings, **given}


def by(convert: Callable[..., nn.Module]) -> Build:
    """Return a build function that calls `convert` with the settings, example and seed that it has parameters for.

    A result that is not a multitude is wrapped in one.
    """
    arguments = inspect.signature(convert).parameters

    def build(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
        given = {**settings, "example": example, "seed": seed}
        net = convert(network, **{name: value for name, value in given.items() if name in arguments})
        return net if isinstance(net, Multitude) else Multitude(net)

    return build


def single(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    """Build the multitude of a method that trains one network."""
    return Multitude(copied(network))


def without(settings: Settings, *names: str) -> dict[str, Any]:
    """Return the settings without these names."""
    return {name: value for name, value in settings.items() if name not in names}


class Recording:
    """Callback of `fit` that records the network after each of the steps `times`, once even after a resume."""

    def __init__(self, recorder: Recorder, times: list[int]) -> None:
        self.recorder, self.times = recorder, times

    def __call__(self, progress: Progress) -> None:
        due = not progress.epoch_ended and progress.step in self.times
        if due and self.recorder.count <= self.times.index(progress.step):
            self.recorder.record()


def collect() -> dict[str, Method]:
    """Return the rows of all modules and packages in `multitudes.methods`, by name, in order."""
    package = importlib.import_module("multitudes.methods")
    names = [module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    rows = [row for name in names for row in getattr(importlib.import_module(name), "ROWS", ())]
    return {row.name: row for row in sorted(rows, key=lambda row: (row.place, row.name))}


def method_named(name: str, methods: Mapping[str, Method]) -> Method:
    """Return the method of this name, or raise an error that lists all names."""
    if name not in methods:
        raise ValueError(f"method must be one of {', '.join(methods)}, got {name!r}")
    return methods[name]
