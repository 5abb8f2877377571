"""Run many weight settings of a network at once, as `Members` whose tensors are overwritten.

On a CPU, images use the channels-last layout, and batches are split to fit its caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.ensemble.members import Members
from multitudes.networks.calls import Input, call, plain_attention, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.devices import Meter
from multitudes.networks.stochastic import expecting
from multitudes.networks.verification import rows_interact
from multitudes.training.recorder import State, weights_of

CACHED = 12e6
"""Bytes that fit in the caches of a CPU."""
MOST_SETTINGS = 16
MOST_WEIGHTS = 2**26
"""Maximum number of weights in memory, over all settings."""
FEWEST_ROWS = 16


class Fused:
    """K copies of a network that predict the same inputs with other weights.

    >>> fused = Fused(nn.Linear(2, 3), 4, [torch.ones(5, 2)])
    >>> states = [{"weight": torch.full((3, 2), float(k)), "bias": torch.zeros(3)} for k in range(4)]
    >>> [predictions[:, 0, 0].tolist() for predictions in fused.predict(states)]
    [[0.0, 2.0, 4.0, 6.0]]
    """

    def __init__(self, model: nn.Module, settings: int, inputs: list[Any]) -> None:
        self.members = Members((copied(model) for _ in range(settings)), settings).unshare().eval()
        self.inputs: list[list[Input]] = [[x] for x in inputs]
        if isinstance(inputs[0], Tensor) and not inputs[0].is_cuda:
            if _takes_channels_last(model, inputs[0]):
                self.members.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                inputs = [x.to(memory_format=torch.channels_last) for x in inputs]
            rows = _rows_at_a_time(model, inputs[0])
            self.inputs = [[x] if rows is None else list(x.split(rows)) for x in inputs]

    def predict(self, states: list[State]) -> Iterator[Tensor]:
        """Yield the predictions `[len(states), B, ...]` of each batch of inputs, for at most K settings."""
        for member, state in zip(self.members.network, states, strict=False):
            own = dict(member.named_parameters()) | dict(member.named_buffers())
            for name, value in state.items():
                own[name].data.copy_(value)
        with expecting(self.members.network):
            for parts in self.inputs:
                yield torch.cat([self.members(part)[: len(states)] for part in parts], 1)


def settings_at_once(model: nn.Module, x: Input) -> int:
    """Return how many settings to run at once; on a CPU, 32 inputs of all settings fit in its caches."""
    weights = sum(weight.numel() for weight in weights_of(model).values())
    most = MOST_SETTINGS
    if not tensors_in(x)[0].is_cuda:
        most = min(most, max(4, int(CACHED / (32 * _bytes_of_a_row(model, x)))))
    return max(1, min(most, MOST_WEIGHTS // weights))


@torch.no_grad()
def _takes_channels_last(model: nn.Module, x: Tensor) -> bool:
    """Return True if a network runs on channels-last images; a `view` in its code may fail."""
    if x.dim() != 4:
        return False
    try:
        with expecting(model), plain_attention():
            own = copied(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            call(own, x[:FEWEST_ROWS].to(memory_format=torch.channels_last))
    except (RuntimeError, ValueError):
        return False
    return True


def _rows_at_a_time(model: nn.Module, x: Tensor) -> int | None:
    """Return how many rows fit in the caches; None if predictions depend on other rows of the batch."""
    if rows_interact(model, lambda x: call(model, x).unsqueeze(0), x[: 2 * FEWEST_ROWS]):
        return None
    return max(FEWEST_ROWS, int(CACHED / _bytes_of_a_row(model, x)))


@torch.no_grad()
def _bytes_of_a_row(model: nn.Module, x: Input) -> float:
    """Return the peak memory of the feature maps of one input."""
    few = x[:FEWEST_ROWS] if isinstance(x, Tensor) else x
    with expecting(model), plain_attention(), Meter() as meter:
        call(model, few)
    return max(1.0, meter.peak / len(tensors_in(few)[0]))
