"""Adaptive draws: each input gets as many as its prediction needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multitudes.networks.calls import Input, InputError, select_rows, tensor_versions, tensors_in
from multitudes.networks.stochastic import stochastic_layers
from multitudes.networks.verification import rows_interact
from multitudes.tasks.predictive import Predictive

FEWEST = 8
"""The minimum number of draws per input; fewer often agree by chance, which hides their spread."""


def _check(net: Any, x: Input, tolerance: float, max_draws: int) -> None:
    """Check a network, its input and the settings of adaptive draws."""
    if not stochastic_layers(net.network):
        raise InputError("draws='auto': this network has no layer that draws")
    if not (isinstance(tolerance, (int, float)) and tolerance > 0):
        raise InputError(f"tolerance must be above 0, got {tolerance!r}")
    if isinstance(max_draws, bool) or not isinstance(max_draws, int) or max_draws < 2:
        raise InputError(f"max_draws must be a whole number, 2 or more, got {max_draws!r}")
    if len(tensors_in(x)[0]) == 1:
        return
    verdicts = net._draw_cache.verdicts
    if verdicts.reason("rows", net.network, x, lambda: rows_interact(net.network, net._predictions, x)):
        raise InputError(
            "draws='auto' makes more draws for some inputs than for others, and this network's prediction for one "
            "input may depend on the others, or the first dimension of x is not the batch: pass a number of draws"
        )


def schedule(max_draws: int) -> list[int]:
    """Return the numbers of draws after which inputs may stop: each is twice the last, up to `max_draws`.

    >>> schedule(200), schedule(10)
    ([12, 24, 48, 96, 192], [10])
    """
    doublings = max(0, (max_draws // FEWEST).bit_length() - 1)
    return [(max_draws >> doublings) << i for i in range(doublings + 1)]


def predict_adaptively(
    net: Any,
    x: Input,
    read: Callable[..., Predictive],
    tolerance: float,
    max_draws: int,
    seed: int | None,
    memory: str | float | None,
) -> Predictive:
    """Make draws until the standard error of each input's mean prediction, by `read`, is below `tolerance`.

    The numbers of draws double, so an input that stops early repeats its draws to reach the common number. This changes
    no mean over draws, only the share of pairs that disagree. `Predictive.draws` holds the number for each input.
    """
    _check(net, x, tolerance, max_draws)
    counts = schedule(max_draws)
    batch = tensors_in(x)[0].shape[0]
    waiting = torch.arange(batch, device=tensors_in(x)[0].device)
    taken = torch.full_like(waiting, counts[-1])
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    so_far: Tensor | None = None
    answers: Tensor | None = None
    done = 0
    for count in counts:
        some = select_rows(x, waiting)
        written = tensor_versions(some)
        fresh = net.draw_numbers(some, range(done, count), seed, memory)  # [D, M, B', ...]
        if tensor_versions(some) != written and not net._rewrites:
            net.check_rewrites(some)
        so_far = fresh if so_far is None else torch.cat([so_far, fresh])
        done = count
        if answers is None:
            answers = so_far.new_empty(counts[-1], fresh.shape[1], batch, *fresh.shape[3:])
        sure = _standard_error(so_far, read) < tolerance
        if count == counts[-1]:
            sure = torch.ones_like(sure)
        settled = so_far[:, :, sure]
        answers[:, :, waiting[sure]] = settled.repeat(counts[-1] // count, *[1] * (settled.dim() - 1))
        taken[waiting[sure]] = count
        waiting, so_far = waiting[~sure], so_far[:, :, ~sure]
        if not len(waiting):
            break
    assert answers is not None
    return read(answers.transpose(0, 1).flatten(0, 1), draws=taken)


def _standard_error(drawn: Tensor, read: Callable[..., Predictive]) -> Tensor:
    """Return the largest standard error of each input's mean prediction, `[B]`, from draws `[D, M, B, ...]`."""
    draws, members = drawn.shape[:2]
    values = read(drawn.flatten(0, 1)).member_values.unflatten(0, (draws, members))
    error = (values.var(0).mean(0) / (draws * members)).sqrt()
    return error.reshape(len(error), -1).amax(1)
