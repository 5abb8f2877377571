"""Checkpoints of a training: its state, and the safetensors file that stores it.

The file stores the network, the optimizer's state and the random state, so that a resumed training on a CPU ends with
the same weights as one that was never interrupted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multitudes.base.archives import below, grouped, read_tensors, write_tensors
from multitudes.base.checks import needed
from multitudes.base.sealed_files import DamagedError
from multitudes.networks.devices import device_in
from multitudes.training.recorder import check_fits, tensors_of

Tensors = dict[str, Tensor]
WITHIN_EPOCH = 30
"""Checkpoints within an epoch are written this many times less often than at its end."""
ENTRY = "training"
"""The header entry that holds everything except the tensors."""
TENSOR_FIELDS = ("epoch_random", "best", "average")
"""Fields of a `TrainingState` that are tensors by name."""


@dataclass
class TrainingState:
    """Progress of a training.

    `epoch` and `batch` count the finished ones; `batch`, `total` (of losses) and `seconds` are of the current epoch.
    """

    epoch: int = 0
    batch: int = 0
    batches: int | None = None
    """Batches per epoch, once known; the learning rate depends on it."""
    step: int = 0
    total: float = 0.0
    seconds: float = 0.0
    stopped: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    epoch_random: Tensors = field(default_factory=dict)
    """The random state at the start of the current epoch, which determines the order of its batches."""
    best: Tensors = field(default_factory=dict)
    """The weights and buffers of the epoch with the best validation score so far."""
    average: Tensors = field(default_factory=dict)
    best_score: float | None = None
    since_best: int = 0
    """Epochs validated since the best one."""


def random_state(device: torch.device) -> Tensors:
    """Return torch's random state, on the CPU and on the network's own device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Tensors, device: torch.device) -> None:
    """Restore a random state from `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@dataclass
class Checkpoint:
    """The file of a training, written whole or not at all."""

    path: Path
    every: float
    """The minimum seconds between two writes at ends of epochs."""
    of: str = ""
    """A name for what is trained, if tensors and settings alone do not identify it."""

    def __post_init__(self) -> None:
        needed("safetensors.torch", "safetensors", "checkpoint=")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.written, self.cost = time.monotonic(), 0.0

    def due(self, epoch_ended: bool) -> bool:
        """Return whether to write now: sooner at the end of an epoch, and at most 5 % of the time."""
        wait = self.every if epoch_ended else WITHIN_EPOCH * self.every
        return time.monotonic() - self.written >= max(wait, 20 * self.cost)

    def save(self, state: TrainingState, net: nn.Module, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        """Write everything that the rest of the training depends on."""
        start = time.monotonic()
        plain = {each.name: getattr(state, each.name) for each in fields(state) if each.name not in TENSOR_FIELDS}
        parts = {"net": tensors_of(net.state_dict()), "random": random_state(device_in(net))}
        parts |= {name: getattr(state, name) for name in TENSOR_FIELDS}
        slots = {str(index): values for index, values in optimizer.state_dict()["state"].items()}
        held = grouped(slots)
        parts["optimizer"] = tensors_of(held)
        numbers = {place: value for place, value in held.items() if place not in parts["optimizer"]}
        about = {"of": self.of, "state": plain, "optimizer": numbers, "settings": settings}
        write_tensors(self.path, grouped(parts), ENTRY, about, "checkpoint=")
        self.written = time.monotonic()
        self.cost = self.written - start if self.every else 0.0

    def load(self, state: TrainingState, net: nn.Module, optimizer: Optimizer, settings: dict[str, Any]) -> bool:
        """Restore the state from the file, if it exists; return whether it did."""
        if not self.path.exists():
            return False
        tensors, saved = _read(self.path, self.of)
        for name, value in settings.items():
            if saved["settings"].get(name) != value:
                raise ValueError(
                    f"checkpoint {str(self.path)!r} is of a training with {name}={saved['settings'].get(name)!r}, now "
                    f"it is {value!r}: remove the file to begin anew, or choose another"
                )
        weights = below("net", tensors)
        check_fits(net.state_dict(), weights, f"checkpoint {str(self.path)!r}")
        net.load_state_dict(weights, strict=False)  # not strict: non-tensors stay the network's own
        slots: dict[int, dict[str, Any]] = {}
        for place, value in (below("optimizer", tensors) | saved["optimizer"]).items():
            index, key = place.split("/", 1)
            slots.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
        for name, value in saved["state"].items():
            setattr(state, name, value)
        for name in TENSOR_FIELDS:
            setattr(state, name, below(name, tensors))
        set_random_state(below("random", tensors), device_in(net))
        return True


def saved_step(path: Path, of: str = "") -> int | None:
    """Return the number of steps of the training in a file; None if there is no file."""
    return int(_read(path, of)[1]["state"]["step"]) if path.exists() else None


def _read(path: Path, of: str) -> tuple[Tensors, dict[str, Any]]:
    try:
        tensors, saved = read_tensors(path, ENTRY, "checkpoint=")
    except DamagedError as error:
        raise ValueError(f"checkpoint {error}; remove the file to begin anew") from error
    if saved.get("of") != of:
        raise ValueError(f"checkpoint {str(path)!r} is of another training: remove the file to begin anew")
    return tensors, saved
