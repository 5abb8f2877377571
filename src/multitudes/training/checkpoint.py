"""Checkpoints: the state of a training, and the safetensors file that stores it.

The file holds the network, the optimizer's state and the random state. On a CPU, a resumed training ends with the same
weights as an uninterrupted one.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from multitudes.base.archives import join_parts, read_tensors, tensors_of_part, write_tensors
from multitudes.base.checks import needed
from multitudes.base.sealed_files import DamagedError
from multitudes.networks.devices import device_in
from multitudes.training.recorder import check_fits, tensors_of

Tensors = dict[str, Tensor]
WITHIN_EPOCH = 30
"""Factor of the minimum seconds between writes, for writes within an epoch."""
ENTRY = "training"
"""Header entry of everything except tensors."""
TENSOR_FIELDS = ("epoch_random", "best", "average")
"""Fields of `TrainingState` that map names to tensors."""


@dataclass
class TrainingState:
    """Progress of a training.

    `epoch` and `batch` count finished epochs and batches. `batch`, `total` (sum of losses) and `seconds` refer to the
    current epoch.
    """

    epoch: int = 0
    batch: int = 0
    batches: int | None = None
    """Batches per epoch, once known."""
    step: int = 0
    total: float = 0.0
    seconds: float = 0.0
    stopped: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    epoch_random: Tensors = field(default_factory=dict)
    """Random state at the start of the current epoch; it determines the order of batches."""
    best: Tensors = field(default_factory=dict)
    """Weights and buffers of the epoch with the best validation score."""
    average: Tensors = field(default_factory=dict)
    best_score: float | None = None
    since_best: int = 0
    """Validated epochs since the best one."""


def random_state(device: torch.device) -> Tensors:
    """Return torch's random states of the CPU and of the network's device."""
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
    """The file that stores a training; writing is atomic."""

    path: Path
    every: float
    """Minimum seconds between writes after epochs."""
    of: str = ""
    """Name of the training; files with another name are refused."""

    def __post_init__(self) -> None:
        needed("safetensors.torch", "safetensors", "checkpoint=")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.written, self.cost = time.monotonic(), 0.0

    def due(self, epoch_ended: bool) -> bool:
        """Return whether to write now; writes take at most 5 % of the time."""
        wait = self.every if epoch_ended else WITHIN_EPOCH * self.every
        return time.monotonic() - self.written >= max(wait, 20 * self.cost)

    def save(self, state: TrainingState, net: nn.Module, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        """Write everything that a resumed training needs."""
        start = time.monotonic()
        plain = {each.name: getattr(state, each.name) for each in fields(state) if each.name not in TENSOR_FIELDS}
        parts = {"net": tensors_of(net.state_dict()), "random": random_state(device_in(net))}
        parts |= {name: getattr(state, name) for name in TENSOR_FIELDS}
        slots = {str(index): values for index, values in optimizer.state_dict()["state"].items()}
        entries = join_parts(slots)
        parts["optimizer"] = tensors_of(entries)
        numbers = {place: value for place, value in entries.items() if place not in parts["optimizer"]}
        about = {"of": self.of, "state": plain, "optimizer": numbers, "settings": settings}
        write_tensors(self.path, join_parts(parts), ENTRY, about, "checkpoint=")
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
                    f"checkpoint {str(self.path)!r} belongs to a training with {name}={saved['settings'].get(name)!r}, "
                    f"but now {name}={value!r}: delete the file to start over, or choose another"
                )
        weights = tensors_of_part("net", tensors)
        check_fits(net.state_dict(), weights, f"checkpoint {str(self.path)!r}")
        net.load_state_dict(weights, strict=False)  # not strict: state dicts may hold non-tensors
        slots: dict[int, dict[str, Any]] = {}
        for place, value in (tensors_of_part("optimizer", tensors) | saved["optimizer"]).items():
            index, key = place.split("/", 1)
            slots.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
        for name, value in saved["state"].items():
            setattr(state, name, value)
        for name in TENSOR_FIELDS:
            setattr(state, name, tensors_of_part(name, tensors))
        set_random_state(tensors_of_part("random", tensors), device_in(net))
        return True


def saved_step(path: Path, of: str = "") -> int | None:
    """Return the number of steps that a checkpoint has reached; None if there is no file."""
    return int(_read(path, of)[1]["state"]["step"]) if path.exists() else None


def _read(path: Path, of: str) -> tuple[Tensors, dict[str, Any]]:
    try:
        tensors, saved = read_tensors(path, ENTRY, "checkpoint=")
    except DamagedError as error:
        raise ValueError(f"checkpoint {error}; delete the file to start over") from error
    if saved.get("of") != of:
        raise ValueError(
            f"checkpoint {str(path)!r} belongs to another training: delete the file to start over, or choose another"
        )
    return tensors, saved


class DeferredSignals:
    """Defer SIGINT (Ctrl-C) and SIGTERM inside a `with` block, until `deliver` or the end of the block.

    A second Ctrl-C is delivered at once. Outside the main thread this has no effect.

    >>> try:
    ...     with DeferredSignals() as signals:
    ...         signal.raise_signal(signal.SIGINT)
    ...         print(signals.pending)
    ... except KeyboardInterrupt:
    ...     print("now")
    True
    now
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def pending(self) -> bool:
        """True if a signal has arrived."""
        return self._number is not None

    def deliver(self) -> None:
        """Restore the handlers, and raise the signal that has arrived."""
        self._release()
        number, self._number = self._number, None
        if number is not None:
            signal.raise_signal(number)

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.deliver()
        self._release()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = number == self._number == signal.SIGINT
        self._number = number
        if again:
            self.deliver()

    def _release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
