"""A method's row: what a study and the command line know of it. Each method's own file declares its rows, as `ROWS`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from multitudes.core.copying import copied
from multitudes.core.multitude import Multitude
from multitudes.training.recorder import Recorder
from multitudes.training.trainer import Progress

Settings = Mapping[str, Any]
Training = dict[str, Any]
"""Arguments of `mt.fit`, by name."""
Build = Callable[[nn.Module, Tensor, Settings, int], Multitude]


@dataclass(frozen=True)
class Method:
    """How one method is built, trained and finished; all its settings are plain values.

    Training is that of every network, which a method may change: its rates, its schedule, its number of epochs. Where a
    method is made of checkpoints, it says after which steps they are recorded, and is finished from them.
    """

    name: str
    build: Build
    """From a network, an example `[B, ...]` of its inputs, settings and a seed to what is trained. The network is
    fresh, or where the settings say `init="heads"`, trained but for its output layers."""
    settings: Settings
    """Every setting, with its default."""
    costs: str
    """What it costs, in a sentence."""
    pick: str
    """When to pick it, in a sentence."""
    place: int = 1000
    """Where it is listed: the lower, the earlier; methods of one place by name."""
    train: Callable[[Multitude, Training, Settings], Training] = lambda net, training, settings: training
    """The arguments of `fit`, changed as the method needs it."""
    times: Callable[[int, Settings], list[int]] = lambda steps, settings: []
    """Of a training of so many steps, those after which the network is recorded."""
    finish: Callable[[Multitude, Recorder | None, Tensor, Settings, int], Multitude] = lambda net, *_: net
    """From what was trained, what was recorded, training inputs `[N, ...]`, settings and a seed to what predicts."""
    after: Callable[[Multitude, Iterable[Any], Iterable[Any] | None, Settings, int], Multitude] = lambda net, *_: net
    """From what is finished, all training data and perhaps held-out data as batches `(x, y)`, settings and a seed to
    what predicts."""
    feature_maps: bool = False
    """Whether it needs feature maps, and so inputs of a kind that has them."""
    tables: bool = False
    """Whether it is for tables alone."""
    pretrained: bool = False
    """Whether it is for networks alone that were trained before."""

    def complete(self, given: Settings | None = None) -> dict[str, Any]:
        """All settings: the given ones, and the defaults of the rest."""
        given = given or {}
        for key in given:
            if key not in self.settings:
                choices = ", ".join(self.settings) or "none"
                raise ValueError(f"method {self.name!r} has no setting {key!r}; its settings are: {choices}")
        return {**self.settings, **given}


def by(convert: Callable[..., nn.Module]) -> Build:
    """A build that calls a conversion with those of the settings, the example and the seed that it has arguments for.

    What is no multitude becomes one.
    """
    arguments = inspect.signature(convert).parameters

    def build(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
        given = {**settings, "example": example, "seed": seed}
        net = convert(network, **{name: value for name, value in given.items() if name in arguments})
        return net if isinstance(net, Multitude) else Multitude(net)

    return build


def single(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    """The build of what is trained as one network."""
    return Multitude(copied(network))


def without(settings: Settings, *names: str) -> dict[str, Any]:
    """The settings but for these."""
    return {name: value for name, value in settings.items() if name not in names}


class Recording:
    """A callback of `fit` that records the network after the steps `times`, each of them once, also after a resume."""

    def __init__(self, recorder: Recorder, times: list[int]) -> None:
        self.recorder, self.times = recorder, times

    def __call__(self, progress: Progress) -> None:
        due = not progress.epoch_ended and progress.step in self.times
        if due and self.recorder.count <= self.times.index(progress.step):
            self.recorder.record()


def collect() -> dict[str, Method]:
    """The rows that the files and folders of `multitudes.methods` declare, by name, in their order."""
    package = importlib.import_module("multitudes.methods")
    names = [found.name for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    rows = [row for name in names for row in getattr(importlib.import_module(name), "ROWS", ())]
    return {row.name: row for row in sorted(rows, key=lambda row: (row.place, row.name))}


def chosen(methods: Mapping[str, Method], name: str) -> Method:
    """The method of this name, or an error that lists them."""
    if name not in methods:
        raise ValueError(f"method must be one of {', '.join(methods)}, got {name!r}")
    return methods[name]
