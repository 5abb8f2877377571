"""Many settings of a network's weights at once: `Fused`.

The settings run as `Members` that are filled anew. Which runner and memory layout is fastest depends on the network
and the machine, so that all are timed on the first of the data. On a CPU the rows that run at a time fit its caches.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, call_with, plain_attention, tensors_in
from multitudes.core.copying import copied
from multitudes.core.draws.memory import Meter
from multitudes.core.draws.stochastic import expecting
from multitudes.core.members import Members
from multitudes.training.recorder import State, weights_of

__all__ = ["Fused", "settings_at_once"]

CACHED = 12e6
"""Bytes that what runs at a time may hold on a CPU: more does not stay in its caches."""
MOST_SETTINGS = 16
MOST_WEIGHTS = 2**26
"""The most weights, of all settings together, in memory at once."""
FEWEST_ROWS = 16


@dataclass(frozen=True)
class Plan:
    """How to run the settings: by which runner of which members, in which layout, on how many inputs at a time."""

    members: Members
    runner: str
    channels_last: bool
    rows: int | None

    def parts(self, x: Input) -> list[Input]:
        """A batch, in parts and in the layout of the plan."""
        if not isinstance(x, Tensor):
            return [x]
        x = x.to(memory_format=torch.channels_last) if self.channels_last else x
        return [x] if self.rows is None else list(x.split(self.rows))


class Fused:
    """K copies of a network, to be filled with weights, which answer each of `inputs` together.

    >>> fused = Fused(nn.Linear(2, 3), 4, [torch.ones(5, 2)])
    >>> fused.load([{"weight": torch.full((3, 2), float(k)), "bias": torch.zeros(3)} for k in range(4)])
    >>> [answers[:, 0, 0].tolist() for answers in fused.answers()]
    [[0.0, 2.0, 4.0, 6.0]]
    """

    def __init__(self, model: nn.Module, settings: int, inputs: list[Input]) -> None:
        plan = _fastest(model, settings, inputs[0])
        plan.members.runner = plan.runner
        self.members = plan.members
        self.inputs = [plan.parts(x) for x in inputs]
        self.loaded = 0

    def load(self, states: list[State]) -> None:
        """Fill the copies; where there are more copies than states, the last one is used again."""
        for index, member in enumerate(self.members.network):
            own = dict(member.named_parameters()) | dict(member.named_buffers())
            for name, value in states[min(index, len(states) - 1)].items():
                own[name].data.copy_(value)
        self.loaded = len(states)

    def answers(self) -> Iterator[Tensor]:
        """The answers `[K, B, ...]` to each of the inputs."""
        with expecting(self.members.network):
            for parts in self.inputs:
                yield torch.cat([self.members(part)[: self.loaded] for part in parts], 1)


def settings_at_once(model: nn.Module, x: Input) -> int:
    """How many settings to run together: on a CPU so many that 32 inputs of all of them stay in its caches."""
    weights = sum(weight.numel() for weight in weights_of(model).values())
    most = MOST_SETTINGS
    if not tensors_in(x)[0].is_cuda:
        most = min(most, max(4, int(CACHED / (32 * _bytes_of_a_row(model, x)))))
    return max(1, min(most, MOST_WEIGHTS // weights))


def _fastest(model: nn.Module, settings: int, x: Input) -> Plan:
    """The plan that takes least time on the first of the data; one that cannot run the network is left out."""
    times: list[tuple[float, Plan]] = []
    for plan in _plans(model, settings, x):
        try:
            plan.members.runner = plan.runner
            times.append((_seconds_for_a_row(plan.members, plan.parts(x)[0]), plan))
        except (RuntimeError, ValueError):  # an error of the network itself is raised again by the loop
            continue
    if not times:
        return Plan(_settings_of(model, settings), "loop", False, None)
    return min(times, key=lambda timed: timed[0])[1]


def _settings_of(model: nn.Module, settings: int) -> Members:
    """Return copies of a network, each with weights of its own, frozen ones too."""
    return Members((copied(model) for _ in range(settings)), settings).unshare().eval()


def _plans(model: nn.Module, settings: int, x: Input) -> Iterator[Plan]:
    members = _settings_of(model, settings)
    cuda = tensors_in(x)[0].is_cuda
    independent = not cuda and isinstance(x, Tensor) and _rows_are_independent(model, x)
    row = _bytes_of_a_row(model, x) if independent else 0.0
    for channels_last in (False, True) if isinstance(x, Tensor) and x.dim() == 4 else (False,):
        if channels_last:
            members = copied(members).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for runner in ("loop", "packed", "vmapped") if cuda else ("loop", "packed"):
            size = row * (settings if runner == "packed" else 1)
            yield Plan(members, runner, channels_last, max(FEWEST_ROWS, int(CACHED / size)) if independent else None)


@torch.no_grad()
def _rows_are_independent(model: nn.Module, x: Tensor) -> bool:
    """Whether a prediction depends on its own input alone: batch norm without statistics uses the whole batch."""
    few = x[: 2 * FEWEST_ROWS]
    with expecting(model), plain_attention():
        whole = call_with(model, {}, few)
        parts = torch.cat([call_with(model, {}, part) for part in few.tensor_split(2) if len(part)])
    return bool((whole - parts).norm() <= 1e-4 * whole.norm())


@torch.no_grad()
def _bytes_of_a_row(model: nn.Module, x: Input) -> float:
    """The memory that one input's feature maps take, at most at a time."""
    few = x[:FEWEST_ROWS] if isinstance(x, Tensor) else x
    with expecting(model), plain_attention(), Meter() as meter:
        call_with(model, {}, few)
    return max(1.0, meter.peak / len(tensors_in(few)[0]))


@torch.no_grad()
def _seconds_for_a_row(members: Members, x: Input) -> float:
    taken = []
    with expecting(members.network), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that a runner is slow has no use here
        for _ in range(3):
            start = time.perf_counter()
            members(x).sum().item()  # waits for a GPU
            taken.append(time.perf_counter() - start)
    return min(taken[1:]) / len(tensors_in(x)[0])
