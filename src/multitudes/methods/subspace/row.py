"""SWAG and subspaces in studies: one training, whose last part is recorded."""

from __future__ import annotations

from torch import Tensor

from multitudes.core.checks import check_count, check_number
from multitudes.core.multitude import Multitude
from multitudes.methods.registry import Method, Settings, Training, single, without
from multitudes.methods.subspace.conversion import Subspace, subspace, swag
from multitudes.training.batchnorm import norms
from multitudes.training.recorder import Recorder
from multitudes.training.schedules import Schedule, schedule_of


def _train(net: Multitude, training: Training, settings: Settings) -> Training:
    """The rate falls as it would, but stays at a floor: checkpoints that no longer move would all be the same."""
    floor = settings["floor_rate"]
    check_number("floor_rate", floor, 0, high=1)
    falling: Schedule = schedule_of(training.get("schedule", "cosine"))
    return {**training, "schedule": lambda done: max(floor, falling(done))}


def _times(steps: int, settings: Settings) -> list[int]:
    """Evenly spread over the last `share` of the steps, or in a short training over as many as it takes."""
    count, share = check_count("checkpoints", settings["checkpoints"]), settings["share"]
    check_number("share", share, 0, high=1, above=True)
    if steps < count:
        raise ValueError(f"checkpoints={count} do not fit into {steps} training steps: train longer")
    share = max(share, count / steps)
    return [round(steps * (1 - share * (count - 1 - index) / count)) for index in range(count)]


def _swag(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    return _settled(swag(net, recorder or [], data=x, **without(settings, *_RECORDING)), seed)


def _subspace(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    return _settled(subspace(net, checkpoints=recorder or [], data=x, **without(settings, *_RECORDING)), seed)


def _settled(net: Multitude, seed: int) -> Multitude:
    """With batch norm, draws that stay: their statistics take a pass over the data, and are not in a state dict."""
    return net.networks(seed=seed) if isinstance(net, Subspace) and norms(net.network) else net


_RECORDING = {"checkpoints": 10, "share": 0.4, "floor_rate": 0.3}
ROWS = (
    Method(
        "swag", single, {**_RECORDING, "rank": None, "scale": 0.5},
        "One network to train; twelve of them to keep, and a forward a draw.",
        "Pick it when you can record the last part of a training.",
        place=130, train=_train, times=_times, finish=_swag,
    ),
    Method(
        "subspace", single, {**_RECORDING, "kind": "diagonal", "rank": 5, "scale": None},
        "One network to train; a few directions to keep, and a forward a draw.",
        "Pick it to see how much is gained around one solution, without leaving it.",
        place=140, train=_train, times=_times, finish=_subspace,
    ),
)  # fmt: skip
