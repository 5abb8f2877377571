"""Verification of fast runners: what counts as a difference, what is left of a trial, and what is cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.calls import verdict_key
from multitudes.networks.verification import Verdicts, difference


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


class Finds:
    """Counts how often a difference is looked for."""

    count = 0

    def __call__(self) -> str:
        self.count += 1
        return "it differs"


def test_a_runner_that_computes_the_same_has_no_difference_and_leaves_nothing() -> None:
    network, x = _network(), torch.randn(5, 4)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    assert difference(network, x, lambda x: network(x)[None], lambda x: network(x)[None], buffers=True) == ""
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def _doubled(network: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: 2 * network(x)[None]


def _failing(network: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: network(x[:, :2])[None]


def _running_twice(network: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        network(x)
        return network(x)[None]

    return run


def _looking(network: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = network(x)[None]
        return y if y.sum() > 0 else y.clone()

    return run


@pytest.mark.parametrize(
    ("fast", "reason"),
    [
        (_doubled, "it gives other predictions"),
        (_failing, "it fails: mat1 and mat2 shapes cannot be multiplied"),
        (_running_twice, "buffer '1.running_mean' gets other values"),
        (_looking, "its code inspects values"),
    ],
)
def test_a_difference_is_told_in_words(fast: Callable[..., Callable[[Tensor], Tensor]], reason: str) -> None:
    network, x = _network(), torch.randn(5, 4)
    assert difference(network, x, fast(network), lambda x: network(x)[None], buffers=True).startswith(reason)


def test_a_gate_at_zero_hides_nothing() -> None:
    network, x = _network(), torch.randn(5, 4)
    nn.init.zeros_(network.get_parameter("2.weight"))
    plain = lambda x: network(x)[None]  # noqa: E731
    mixing = lambda x: network[2](network[1](network[0](x)).flip(0))[None]  # noqa: E731
    torch.testing.assert_close(mixing(x), plain(x))
    assert difference(network.eval(), x, mixing, plain) == "it gives other predictions"


def test_the_layer_is_named_where_it_is_known() -> None:
    network, x = _network(), torch.randn(5, 4)
    reason = difference(network, x, _doubled(network), lambda x: network(x)[None], layer=lambda: "layer '1'")
    assert reason == "layer '1' gives other values"


def test_a_verdict_is_found_once_for_each_kind_of_use() -> None:
    network, verdicts, find = nn.Linear(4, 3), Verdicts(), Finds()

    def ask(runner: str, x: Tensor) -> str:
        return verdicts.reason(runner, network, x, find)

    assert ask("fast", torch.randn(5, 4)) == "it differs"
    assert ask("fast", torch.randn(7, 4)) == "it differs" and find.count == 1
    ask("fast", torch.randn(1, 4))  # of one row, all lengths are equal
    ask("fast", torch.randn(2, 7, 4))
    ask("fast", torch.randn(5, 4, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        ask("fast", torch.randn(5, 4))
    network.eval()
    ask("fast", torch.randn(5, 4))
    assert find.count == 6
    assert verdict_key(network, torch.randn(5, 4)) == verdict_key(network, torch.randn(9, 4))


@pytest.mark.parametrize("method", [mt.batch_ensemble, mt.masksembles, mt.deep_ensemble, mt.heads, mt.lora])
@pytest.mark.parametrize("training", [True, False])
def test_casts_of_moved_weights_do_not_stay_in_the_cache_of_autocast(
    method: Callable[..., Any], training: bool
) -> None:
    net = method(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4)), 3, seed=0)
    net, x = net.train(training), torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        first = net(x)  # which is verified with moved weights
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(first, net(x), rtol=0, atol=0)
