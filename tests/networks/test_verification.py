"""Verification of fast runners: differences, side effects and caching."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.calls import verdict_key
from multitudes.networks.verification import Verdicts, difference


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def test_equal_runners_have_no_difference_and_change_nothing() -> None:
    network, x = _network(), torch.randn(5, 4)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    assert difference(network, x, lambda x: network(x)[None], lambda x: network(x)[None], buffers=True) == ""
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def doubled(network: nn.Module, x: Tensor) -> Tensor:
    return 2 * network(x)[None]


def running_twice(network: nn.Module, x: Tensor) -> Tensor:
    network(x)
    return network(x)[None]


def inspecting(network: nn.Module, x: Tensor) -> Tensor:
    y = network(x)[None]
    return y if y.sum() > 0 else y.clone()


@pytest.mark.parametrize(
    ("fast", "reason"),
    [
        (doubled, "it gives other predictions"),
        (lambda network, x: network(x[:, :2])[None], "it fails: mat1 and mat2 shapes cannot be multiplied"),
        (running_twice, "buffer '1.running_mean' gets other values"),
        (inspecting, "its code inspects values"),
    ],
)
def test_differences_are_described(fast: Callable[..., Tensor], reason: str) -> None:
    network, x = _network(), torch.randn(5, 4)
    assert difference(network, x, partial(fast, network), lambda x: network(x)[None], buffers=True).startswith(reason)


def test_a_gate_at_zero_hides_no_difference() -> None:
    network, x = _network(), torch.randn(5, 4)
    nn.init.zeros_(network.get_parameter("2.weight"))
    plain = lambda x: network(x)[None]  # noqa: E731
    mixing = lambda x: network[2](network[1](network[0](x)).flip(0))[None]  # noqa: E731
    torch.testing.assert_close(mixing(x), plain(x))
    assert difference(network.eval(), x, mixing, plain) == "it gives other predictions"


def test_the_differing_layer_is_named() -> None:
    network, x = _network(), torch.randn(5, 4)
    reason = difference(network, x, partial(doubled, network), lambda x: network(x)[None], layer=lambda: "layer '1'")
    assert reason == "layer '1' gives other values"


def test_verdicts_are_cached_by_kind_of_input_and_mode() -> None:
    network, verdicts, found = nn.Linear(4, 3), Verdicts(), []

    def ask(runner: str, x: Tensor) -> str:
        return verdicts.reason(runner, network, x, lambda: found.append(x) or "it differs")

    assert ask("fast", torch.randn(5, 4)) == "it differs"
    assert ask("fast", torch.randn(7, 4)) == "it differs" and len(found) == 1
    ask("fast", torch.randn(1, 4))  # of one row, all lengths are equal
    ask("fast", torch.randn(2, 7, 4))
    ask("fast", torch.randn(5, 4, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        ask("fast", torch.randn(5, 4))
    network.eval()
    ask("fast", torch.randn(5, 4))
    assert len(found) == 6
    assert verdict_key(network, torch.randn(5, 4)) == verdict_key(network, torch.randn(9, 4))


@pytest.mark.parametrize("method", [mt.batch_ensemble, mt.masksembles, mt.deep_ensemble, mt.heads, mt.lora])
@pytest.mark.parametrize("training", [True, False])
def test_autocast_does_not_cache_moved_weights(method: Callable[..., Any], training: bool) -> None:
    net = method(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4)), 3, seed=0)
    net, x = net.train(training), torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        first = net(x)  # which is verified with moved weights
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(first, net(x), rtol=0, atol=0)
