"""The methods that a study compares: how each is built, trained and finished, what it costs and when to pick it.

A method is one row of `METHODS`. Building it turns a network into a multitude. Training is that of every network, which
a method may change: its rates, its schedule, its number of epochs. Where a method is made of checkpoints, it says
after which steps they are recorded, and is finished from them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.checks import check_count, check_number
from multitudes.core.multitude import Multitude
from multitudes.data.kinds import kind_of_shape
from multitudes.methods.batch_ensemble import batch_ensemble
from multitudes.methods.deep_ensemble import deep_ensemble
from multitudes.methods.dropout import DROPOUTS, NORMS, drop_connect, mc_dropout
from multitudes.methods.masksembles import masksembles
from multitudes.methods.mimo import mimo
from multitudes.methods.packed import packed
from multitudes.methods.patching.conversion import patched
from multitudes.methods.smoothing import smooth
from multitudes.methods.snapshots import snapshots
from multitudes.methods.subspace import Subspace, subspace, swag
from multitudes.methods.variance.conversion import variance
from multitudes.training.batchnorm import norms
from multitudes.training.optimizers import can_fuse
from multitudes.training.recorder import Recorder
from multitudes.training.schedules import Schedule, schedule_of

__all__ = ["METHODS", "Method", "method_of", "methods_for"]

Settings = Mapping[str, Any]
Training = dict[str, Any]
"""Arguments of `mt.fit`, by name."""


# -- what a method is --------------------------------------------------------------------------------------


def _as_given(net: Multitude, training: Training, settings: Settings) -> Training:
    return training


def _never(steps: int, settings: Settings) -> list[int]:
    return []


def _as_trained(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    return net


@dataclass(frozen=True)
class Method:
    """How one method is built, trained and finished; all its settings are plain values."""

    name: str
    build: Callable[[nn.Module, Tensor, Settings, int], Multitude]
    """From a fresh network, an example `[B, ...]` of its inputs, settings and a seed to what is trained."""
    settings: Settings
    """Every setting, with its default."""
    costs: str
    """What it costs, in a sentence."""
    pick: str
    """When to pick it, in a sentence."""
    train: Callable[[Multitude, Training, Settings], Training] = _as_given
    """The arguments of `fit`, changed as the method needs it."""
    times: Callable[[int, Settings], list[int]] = _never
    """Of a training of so many steps, those after which the network is recorded."""
    finish: Callable[[Multitude, Recorder | None, Tensor, Settings, int], Multitude] = _as_trained
    """From what was trained, what was recorded, training inputs `[N, ...]`, settings and a seed to what predicts."""
    images: bool = False
    """Whether it needs feature maps, and so images."""

    def complete(self, given: Settings | None = None) -> dict[str, Any]:
        """All settings: the given ones, and the defaults of the rest."""
        given = given or {}
        for key in given:
            if key not in self.settings:
                choices = ", ".join(self.settings) or "none"
                raise ValueError(f"method {self.name!r} has no setting {key!r}; its settings are: {choices}")
        return {**self.settings, **given}

    def unfit(self, shape: tuple[int, ...]) -> str | None:
        """Why the method is not for inputs of this shape; None where it is."""
        kind = kind_of_shape(shape)
        if self.images and not kind.feature_maps:
            return f"method {self.name!r} smooths feature maps, and the inputs are no images but {kind.describe(shape)}"
        return None


def method_of(name: str) -> Method:
    """The method of this name, or an error that lists them."""
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


def methods_for(shape: tuple[int, ...]) -> list[str]:
    """The names of the methods for inputs of this shape.

    >>> [name for name in METHODS if name not in methods_for((13,))]
    ['smooth', 'smooth_dropout']
    """
    return [name for name, method in METHODS.items() if method.unfit(shape) is None]


# -- building ----------------------------------------------------------------------------------------------


def _single(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return Multitude(copy.deepcopy(network))


def _deep(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return deep_ensemble(network, **settings, seed=seed)


def _packed(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return packed(network, **settings, example=example, seed=seed)


def _batch_ensemble(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return batch_ensemble(network, **settings, seed=seed)


def _masksembles(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return masksembles(network, **settings, example=example, seed=seed)


def _mimo(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return mimo(network, **settings, example=example, seed=seed)


def _mc_dropout(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    """Dropout that is there stays on; where there is none, it is put into the residual blocks, or after activations."""
    p, where = settings["p"], settings["where"]
    if where is None and not _has_dropout(network):
        p = 0.1 if p is None else p
        try:
            return mc_dropout(network, p, where="block", example=example)
        except ValueError:  # no residual blocks
            where = "activation"
    return mc_dropout(network, 0.1 if p is None and where is not None else p, where=where, example=example)


def _drop_connect(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return drop_connect(network, **settings)


def _patched(network: nn.Module, example: Tensor, settings: Settings, seed: int, cross: bool = False) -> Multitude:
    """By default the norm and output layers are patched; where there is no norm layer, the output alone."""
    where = settings["where"]
    if where is None:
        where = "norm+output" if any(isinstance(layer, NORMS) for layer in network.modules()) else "output"
    return patched(network, **{**settings, "where": where}, cross=cross, example=example, seed=seed)


def _cross_patched(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return _patched(network, example, settings, seed, cross=True)


def _variance(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return variance(network, **_without(settings, "lr", "log_alpha_lr", "epochs_factor"), seed=seed)


def _smooth(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    return Multitude(smooth(network, **settings, example=example))


def _smooth_dropout(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    smoothed = smooth(network, **_without(settings, "p", "where"), example=example)
    return _mc_dropout(smoothed, example, settings, seed)


def _has_dropout(network: nn.Module) -> bool:
    return any(getattr(layer, "p", 0) > 0 for layer in network.modules() if type(layer) in DROPOUTS)


def _without(settings: Settings, *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


# -- training ----------------------------------------------------------------------------------------------


def _longer(net: Multitude, training: Training, settings: Settings) -> Training:
    """More epochs, for what learns more slowly; or fewer."""
    check_number("epochs_factor", settings["epochs_factor"], 0, above=True)
    return {**training, "epochs": max(1, round(settings["epochs_factor"] * training["epochs"]))}


def _variances(net: Multitude, training: Training, settings: Settings) -> Training:
    """Adam, and a rate of its own for log alpha, where one is given: noise that grows faster than the network learns
    drowns it, and at a lower rate it hardly moves from where it starts."""
    lr = settings["lr"]
    if lr is None:
        lr = training.get("lr") if training.get("optimizer") in ("adam", "adamw") else None
    lr = 1e-3 if lr is None else lr
    alpha = settings["log_alpha_lr"]
    groups = net.parameter_groups(lr=lr) if alpha is None else net.parameter_groups(lr=lr, log_alpha=alpha)
    fused = can_fuse(net.parameters()) or None
    return {**_longer(net, training, settings), "optimizer": torch.optim.Adam(groups, fused=fused), "lr": None}


def _wandering(net: Multitude, training: Training, settings: Settings) -> Training:
    """The rate falls as it would, but stays at a floor: checkpoints that no longer move would all be the same."""
    floor = settings["floor_rate"]
    check_number("floor_rate", floor, 0, high=1)
    falling: Schedule = schedule_of(training.get("schedule", "cosine"))
    return {**training, "schedule": lambda done: max(floor, falling(done))}


def _cyclic(net: Multitude, training: Training, settings: Settings) -> Training:
    return {**training, "schedule": {"name": "cyclic", "cycles": settings["members"]}}


# -- checkpoints -------------------------------------------------------------------------------------------


def _in_the_end(steps: int, settings: Settings) -> list[int]:
    """Evenly spread over the last `share` of the steps, or in a short training over as many as it takes."""
    count, share = check_count("checkpoints", settings["checkpoints"]), settings["share"]
    check_number("share", share, 0, high=1, above=True)
    if steps < count:
        raise ValueError(f"checkpoints={count} do not fit into {steps} training steps: train longer")
    share = max(share, count / steps)
    return [round(steps * (1 - share * (count - 1 - index) / count)) for index in range(count)]


def _after_cycles(steps: int, settings: Settings) -> list[int]:
    members = check_count("members", settings["members"])
    if members > steps:
        raise ValueError(f"members={members} do not fit into {steps} training steps: train longer")
    return [-(-(index + 1) * steps // members) for index in range(members)]


def _swag(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    recorded = _recorded(recorder)
    return _settled(swag(net, recorded, rank=settings["rank"], scale=settings["scale"], data=x), seed)


def _subspace(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    options = _without(settings, "checkpoints", "share", "floor_rate")
    return _settled(subspace(net, checkpoints=_recorded(recorder), data=x, **options), seed)


def _snapshots(net: Multitude, recorder: Recorder | None, x: Tensor, settings: Settings, seed: int) -> Multitude:
    return snapshots(net, _recorded(recorder))


def _recorded(recorder: Recorder | None) -> Recorder:
    if recorder is None:
        raise ValueError("recorder must hold the checkpoints of the training, got None")
    return recorder


def _settled(net: Multitude, seed: int) -> Multitude:
    """With batch norm, draws that stay: their statistics take a pass over the data, and are not in a state dict."""
    return net.samples(seed=seed) if isinstance(net, Subspace) and norms(net.network) else net


# -- the methods -------------------------------------------------------------------------------------------

_MEMBERS = {"members": 4}
_DROPOUT = {"p": None, "where": None}
_PATCHES = {"components": 5, "where": None, "tau": 1.0, "rho": 1.0, "spread": 0.1}
_SMOOTH = {"kernel": [1, 1], "prob": "tanh", "tau": 10.0, "growing": False}
_WAY = {"checkpoints": 10, "share": 0.4, "floor_rate": 0.3}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "single", _single, {},
            "One network: the yardstick of all costs.",
            "Pick it when one answer is enough; everything here is measured against it.",
        ),
        Method(
            "deep", _deep, _MEMBERS,
            "As many networks as there are members, to train, to keep and to run.",
            "Pick it when you can pay for it, or need the yardstick: as a rule the best answers.",
        ),
        Method(
            "packed", _packed, {**_MEMBERS, "alpha": 2, "gamma": 1, "gamma_layers": None},
            "About one network: the members are narrow, alpha / members of its width.",
            "Pick it first: independent members, the best value for its price.",
        ),
        Method(
            "batch_ensemble", _batch_ensemble, {**_MEMBERS, "factors": "normal", "spread": None},
            "The parameters of one network and two vectors a layer for each member; the time of all members.",
            "Pick it when parameters are dear and time is not.",
        ),
        Method(
            "masksembles", _masksembles, {**_MEMBERS, "scale": 2.0},
            "The parameters of one network; the time of all members.",
            "Pick it when no parameter may be added, and scale shall set how much the members share.",
        ),
        Method(
            "mimo", _mimo, {"members": 3, "repetition": 0.5, "batch_repetition": 1},
            "A forward of one network, whatever the number of members.",
            "Pick it when a forward must cost no more than now, and the network is wide for its task.",
        ),
        Method(
            "mc_dropout", _mc_dropout, _DROPOUT,
            "One network to train; a forward a draw from the first dropout layer on.",
            "Pick it when you have a network with dropout, today.",
        ),
        Method(
            "drop_connect", _drop_connect, {"p": 0.1},
            "One network to train; a forward a draw.",
            "Pick it when there is no good place for dropout.",
        ),
        Method(
            "patched", _patched, _PATCHES,
            "Some copies of small layers, norms and the output; a forward a draw.",
            "Pick it when the network has batch norm, which dropout harms.",
        ),
        Method(
            "cross_patched", _cross_patched, _PATCHES,
            "Some copies of small layers, norms and the output; a forward a draw.",
            "Pick it in place of patched when draws shall differ more finely, each weight on its own.",
        ),
        Method(
            "variance", _variance,
            {"layers": None, "parameterization": "layer", "log_alpha": -5.0, "kl": "approximate", "lr": None,
             "log_alpha_lr": None, "epochs_factor": 1.0},
            "A number more a layer, twice the multiply-adds of one network in training, and a forward a draw.",
            "Pick it when you want diverse draws of high variance, or a sparse network.",
            train=_variances,
        ),
        Method(
            "smooth", _smooth, _SMOOTH,
            "One network and a small blur before each down-sampling: no parameter, little time.",
            "Pick it when images may be shifted or noisy and a single forward must do.",
            images=True,
        ),
        Method(
            "smooth_dropout", _smooth_dropout, {**_SMOOTH, **_DROPOUT},
            "As mc_dropout, and a small blur before each down-sampling.",
            "Pick it when you can make only a few draws: smoothing does the work of many.",
            images=True,
        ),
        Method(
            "swag", _single, {**_WAY, "rank": None, "scale": 0.5},
            "One network to train; twelve of them to keep, and a forward a draw.",
            "Pick it when you can record the last part of a training.",
            train=_wandering, times=_in_the_end, finish=_swag,
        ),
        Method(
            "subspace", _single, {**_WAY, "kind": "diagonal", "rank": 5, "scale": None},
            "One network to train; a few directions to keep, and a forward a draw.",
            "Pick it to see how much is gained around one solution, without leaving it.",
            train=_wandering, times=_in_the_end, finish=_subspace,
        ),
        Method(
            "snapshots", _single, _MEMBERS,
            "One network to train; as many as there are members to keep and to run.",
            "Pick it when you can train one network only, with a cyclic learning rate.",
            train=_cyclic, times=_after_cycles, finish=_snapshots,
        ),
    )
}  # fmt: skip
"""The methods by name, the single network first."""
