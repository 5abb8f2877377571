"""Costs of a method, against closed forms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from multitudes.core.multitude import Multitude
from multitudes.methods.batch_ensemble import batch_ensemble
from multitudes.methods.deep_ensemble import deep_ensemble
from multitudes.methods.dropout import drop_connect, mc_dropout
from multitudes.methods.mimo import mimo
from multitudes.methods.snapshots import snapshots
from multitudes.methods.subspace import swag
from multitudes.methods.variance import variance
from multitudes.study.costs import BATCH, inference_cost, multiply_adds, parameters, training_cost, with_ratios

FIRST, SECOND, LAST = 8 * 8 * 9 * 1 * 4, 4 * 4 * 9 * 4 * 6, 2 * 2 * 6 * 10
"""Multiply-adds of the layers: points of the output x weights of a point's sum x channels."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip


def drawing(net: Multitude, draws: int) -> Multitude:
    net.draws = draws
    return net


def around(model: nn.Module) -> Multitude:
    states = [{name: value + i for name, value in model.state_dict().items()} for i in range(3)]
    return swag(model, states)


@pytest.mark.parametrize(
    ("net", "want"),
    [
        (Multitude(network()), FIRST + SECOND + LAST),
        (deep_ensemble(network(), 5), 5 * (FIRST + SECOND + LAST)),
        (batch_ensemble(network(), 3), 3 * (FIRST + SECOND + LAST)),
        (snapshots(network(), [network().state_dict()] * 2), 2 * (FIRST + SECOND + LAST)),
        (mimo(network(), 3, example=torch.zeros(2, 1, 8, 8)), 3 * FIRST + SECOND + 3 * LAST),
        # What comes before the first layer that draws is computed once.
        (drawing(mc_dropout(network()), 7), FIRST + 7 * (SECOND + LAST)),
        (drawing(drop_connect(network(), 0.1), 7), 7 * (FIRST + SECOND + LAST)),
        # A mean and a variance of each random layer: of the first one once.
        (drawing(variance(network()), 7), 2 * FIRST + 7 * (2 * SECOND + LAST)),
    ],
    ids=["single", "deep", "batch_ensemble", "snapshots", "mimo", "mc_dropout", "drop_connect", "variance"],
)
def test_multiply_adds_are_those_of_all_members_and_draws(net: Multitude, want: int) -> None:
    assert multiply_adds(net, torch.randn(5, 1, 8, 8)) == want


def test_multiply_adds_of_weights_around_a_trajectory_include_making_them() -> None:
    """Each draw is a forward, and the product of its noise with the columns of D, three checkpoints of all weights."""
    net = drawing(around(network()), 7)
    assert multiply_adds(net, torch.randn(5, 1, 8, 8)) == 7 * (FIRST + SECOND + LAST + 3 * parameters(network()))


@pytest.mark.parametrize("runner", ["loop", "packed", "stacked"])
def test_multiply_adds_are_the_same_by_every_runner(runner: str) -> None:
    net = deep_ensemble(network(), 3)
    net.runner = runner
    assert multiply_adds(net, torch.randn(2, 1, 8, 8)) == 3 * (FIRST + SECOND + LAST)


def test_parameters_of_members_add_up_and_shared_ones_count_once() -> None:
    single = 4 * 9 + 4 + 6 * 4 * 9 + 6 + 24 * 10 + 10
    assert parameters(network()) == single
    assert parameters(deep_ensemble(network(), 4)) == 4 * single
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert parameters(tied) == 9 + 3 + 3


# -- training ----------------------------------------------------------------------------------------------


def by_sgd(net: Multitude) -> dict[str, Any]:
    return {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}


def test_the_memory_of_a_step_is_that_of_weights_gradients_and_the_optimizers_state() -> None:
    """Of many weights and a small batch, a step holds them, their gradients and what the optimizer keeps."""
    net = Multitude(nn.Linear(10_000, 10, bias=False))
    x, y = torch.randn(2, 10_000), torch.tensor([0, 1])
    weights = 4 * 100_000
    assert training_cost(net, x, y, by_sgd).peak_bytes == pytest.approx(2 * weights, rel=0.01)
    adam = training_cost(net, x, y, lambda net: {"optimizer": "adam", "lr": 0.1})
    assert adam.peak_bytes >= 4 * weights  # and two moments, and what a step needs in passing


def test_the_memory_of_a_step_grows_with_the_batch_by_its_activations() -> None:
    net = Multitude(nn.Sequential(nn.Linear(4, 1000), nn.Sigmoid(), nn.Linear(1000, 2)))

    def peak(batch: int) -> int:
        return training_cost(net, torch.randn(batch, 4), torch.zeros(batch, dtype=torch.long), by_sgd).peak_bytes

    # Backwards: the sigmoid's output, its gradient and its input's.
    assert 2 * 4 * 1000 * 64 <= peak(128) - peak(64) <= 4 * 4 * 1000 * 64


def test_a_deep_ensemble_takes_its_members_memory() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    x, y = torch.randn(256, 64), torch.zeros(256, dtype=torch.long)
    single, deep = (training_cost(net, x, y, by_sgd) for net in (Multitude(model), deep_ensemble(model, 6)))
    assert deep.peak_bytes / single.peak_bytes == pytest.approx(6, rel=0.25)
    assert deep.seconds > 0


def test_measuring_changes_neither_the_network_nor_the_random_state() -> None:
    net = deep_ensemble(network(), 2)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    training_cost(net, x, torch.tensor([0, 1, 2, 3]), by_sgd)
    inference_cost(net, x)
    multiply_adds(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


# -- inference ---------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Takes 20 milliseconds, however many inputs there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.02)
        return x


def test_measuring_a_step_does_not_fail_at_a_rate_that_only_a_warm_up_bears() -> None:
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    found = training_cost(Multitude(network()), x, y, lambda net: {"optimizer": "sgd", "lr": 1e6, "warmup": 0})
    assert found.seconds > 0


def test_speed_is_inputs_by_seconds() -> None:
    found = inference_cost(Multitude(Slow()), torch.randn(500, 2))
    assert found.batch == BATCH == 256
    assert 0.1 * 256 / 0.02 < found.per_second < 256 / 0.02  # a machine that is busy takes longer
    assert inference_cost(Multitude(Slow()), torch.randn(500, 2), batch=16).batch == 16
    assert inference_cost(Multitude(Slow()), torch.randn(5, 2)).batch == 5


def test_each_cost_is_also_a_ratio_to_the_single_networks() -> None:
    found = with_ratios(
        {"parameters": 8, "inference_per_second": 10.0}, {"parameters": 2, "inference_per_second": 40.0}
    )
    assert found["parameters_ratio"] == 4.0 and found["inference_per_second_ratio"] == 0.25
