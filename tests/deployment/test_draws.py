"""Draws for CUDA graphs: a function of the input and of a seed's random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.deployment.engines import TorchEngine
from multitudes.deployment.fusion import count_convolutions, fuse_convolutions
from multitudes.deployment.graph_draws import draw_function, noise_of
from multitudes.deployment.operation_graph import CannotTrace, check_synchronization, trace
from multitudes.deployment.preparation import prepare_network
from tests.zoo import cases, drawing_cases
from tests.zoo.of_parts import Of

QUICK = {("mc_dropout", "resnet"), ("drop_connect", "mlp"), ("patched_cross", "cnn"), ("variance", "vit"),
         ("laplace", "group_norm")}  # fmt: skip
CASES = [
    pytest.param(method, network, marks=() if (method, network) in QUICK else pytest.mark.slow)
    for method in (*drawing_cases.LEARNING, "laplace")
    for network in cases.NETWORKS
]


def filled(net: mt.Multitude, x: Tensor, draws: int, seed: int) -> tuple[TorchEngine, list[Tensor]]:
    plain = TorchEngine(net, None, x)
    noise = noise_of(plain, x, draws)
    noise.seed(seed)
    noise.fill()
    return plain, noise.numbers


@pytest.mark.parametrize(("method", "network"), CASES)
def test_the_numbers_of_a_seed_give_the_draws_of_the_network(method: str, network: str) -> None:
    net = drawing_cases.build(method, network).eval()
    x = cases.NETWORKS[network].batch(5)[0]
    with torch.no_grad():
        quick, _ = prepare_network(net, x, {"draws": 2, "seed": 0})
        plain, numbers = filled(quick, x, draws=4, seed=7)
        call = draw_function(plain, x)
        want = net(x, draws=4, seed=7)
        torch.testing.assert_close(call(x, *numbers), want, rtol=1e-4, atol=1e-5)
        graph = trace(call, [x, *numbers])
        fuse_convolutions(graph)
        check_synchronization(graph, [x, *numbers])
        torch.testing.assert_close(graph(x, *numbers), want, rtol=1e-4, atol=1e-5)
        _, others = filled(quick, x, draws=4, seed=8)
        torch.testing.assert_close(graph(x, *others), net(x, draws=4, seed=8), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_members_draw_from_their_own_numbers() -> None:
    net, x = mt.deep_ensemble(drawing_cases.build("mc_dropout", "cnn"), 3).eval(), cases.NETWORKS["cnn"].batch(5)[0]
    plain, numbers = filled(net, x, draws=4, seed=1)
    torch.testing.assert_close(draw_function(plain, x)(x, *numbers), net(x, draws=4, seed=1))


@torch.no_grad()
def test_without_a_seed_numbers_follow_torchs_random_state() -> None:
    net = drawing_cases.build("mc_dropout", "mlp").eval()
    x = cases.NETWORKS["mlp"].batch(5)[0]
    plain = TorchEngine(net, None, x)
    noise = noise_of(plain, x, 3)
    torch.manual_seed(5)
    noise.seed(None)
    noise.fill()
    assert not torch.equal(noise.numbers[0][0], noise.numbers[0][1])
    torch.manual_seed(5)
    torch.testing.assert_close(draw_function(plain, x)(x, *noise.numbers), net(x, draws=3))


@torch.no_grad()
def test_convolutions_after_the_first_draw_are_fused_too() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.drop(net.stem(x).relu())
        return net.head((x + net.two(net.one(x).relu())).relu().mean((2, 3)))

    convs = {name: nn.Conv2d(c, 8, 3, padding=1) for name, c in (("stem", 3), ("one", 8), ("two", 8))}
    model = Of(forward, drop=nn.Dropout(0.3), head=nn.Linear(8, 3), **convs)
    net, x = mt.mc_dropout(model).eval(), torch.randn(4, 3, 8, 8)
    plain, numbers = filled(net, x, draws=3, seed=0)
    graph = trace(draw_function(plain, x), [x, *numbers])
    assert fuse_convolutions(graph) == count_convolutions(graph) == 3
    torch.testing.assert_close(graph(x, *numbers), net(x, draws=3, seed=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["swag", "subspace"])
def test_draws_without_shared_computation_are_refused(method: str) -> None:
    net = drawing_cases.build(method, "mlp").eval()
    x = cases.NETWORKS["mlp"].batch(5)[0]
    with pytest.raises(CannotTrace, match="share no computation"):
        noise_of(TorchEngine(net, None, x), x, 3)


def test_synchronization_is_detected() -> None:
    """The meta device stands in for a GPU."""
    with pytest.raises(CannotTrace, match="copies between devices"):
        check_synchronization(lambda x: x + torch.zeros(3).to("meta"), [torch.ones(3, device="meta")])
    check_synchronization(lambda x: x[x > 0].sum(), [torch.ones(3)])
    check_synchronization(lambda x: x[torch.zeros(2, dtype=torch.int64, device="meta")], [torch.ones(3, device="meta")])
