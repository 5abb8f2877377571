"""The contract of stochastic methods, on every kind of network."""

from __future__ import annotations

import pytest
import torch

import multitudes as mt
from tests.zoo.cases import CLASSES, slow_but_for
from tests.zoo.drawing_cases import CASES, LEARNING_CASES, NETWORKS, build

contract = pytest.mark.parametrize(("method", "network"), CASES)
learning = pytest.mark.parametrize(("method", "network"), LEARNING_CASES)


@contract
def test_a_seed_repeats_the_draws_and_keeps_torchs_state(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    state = torch.get_rng_state()
    expected, drawn = net(x, draws=0), net(x, draws=3, seed=1)
    assert expected.shape == (1, 7, CLASSES)
    assert torch.equal(net(x, draws=0), expected)
    assert torch.equal(net(x, draws=3, seed=1), drawn)
    assert not torch.allclose(net(x, draws=3, seed=2), drawn, atol=1e-4)
    assert torch.equal(torch.get_rng_state(), state)


@contract
def test_draws_do_not_depend_on_how_they_are_made(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    want = net(x, draws=5, seed=1)
    torch.testing.assert_close(net(x, draws=5, seed=1, memory=1), want, rtol=1e-4, atol=1e-5)
    net._draw_cache.runner = "one_by_one"
    torch.testing.assert_close(net(x, draws=5, seed=1), want, rtol=1e-4, atol=1e-5)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("method", "network"), slow_but_for(("mlp", "cnn", "separable", "transformer"), LEARNING_CASES)
)
def test_an_ensemble_of_networks_that_draw(method: str, network: str) -> None:
    net, (x, y) = build(method, network), NETWORKS[network].batch()
    ensemble = mt.deep_ensemble(net, 3, seed=1).eval()
    ensemble.draws = 4
    assert ensemble(x, seed=2).shape == (12, 7, CLASSES)
    mt.check(ensemble, x)
    for index, expected in enumerate(ensemble(x, draws=0)):
        member = ensemble.member(index).eval()
        torch.testing.assert_close(member(x, draws=0)[0], expected, rtol=1e-3, atol=1e-4)
        assert member.draws == 4
    torch.testing.assert_close(ensemble.kl(), sum(ensemble.member(i).kl() for i in range(3)), rtol=1e-4, atol=1e-4)
    loss = ensemble.train().loss(x, y, dataset_size=50)
    loss.backward()
    assert loss.isfinite()


@contract
def test_an_ensemble_of_trained_networks_that_draw(method: str, network: str) -> None:
    one, other = build(method, network, seed=0).eval(), build(method, network, seed=1).eval()
    x, _ = NETWORKS[network].batch()
    ensemble = mt.fuse([one, other]).eval()
    assert ensemble(x, draws=4, seed=2).shape == (8, 7, CLASSES)
    expected = torch.cat([one(x, draws=0), other(x, draws=0)])
    torch.testing.assert_close(ensemble(x, draws=0), expected, rtol=1e-4, atol=1e-5)
