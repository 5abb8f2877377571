"""A frozen multitude: draws that were made once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.draws.frozen_noise import Frozen, scrambled
from multitudes.evaluation.calibrate import calibrate
from multitudes.networks.stochastic import stochastic_layers
from tests.zoo import cases, drawing_cases
from tests.zoo.drawing_cases import CASES, NETWORKS

DRAWS_WEIGHTS = ("drop_connect", "patched", "patched_cross", "subspace", "swag", "laplace")
IN_ORDER = [case for case in CASES if case.values[0] in DRAWS_WEIGHTS and case.values[1] != "resnet"]
"""A residual network's shortcuts are registered after the layers that run beside them."""


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, 5)).eval()


class Jitter(mt.Stochastic):
    """A layer of the user's own, with a weight, that asks for both kinds of numbers."""

    def __init__(self, noise: str = "rows") -> None:
        super().__init__()
        self.noise = noise
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.expects:
            return x
        shape = x.shape if self.noise == "rows" else x.shape[1:]
        noise = self.normal(shape, like=x)
        noise.mul_(self.scale)  # the numbers are the layer's own to change
        return x + noise * (self.uniform(shape, like=x) < 0.5)


@pytest.mark.parametrize("method, network", CASES)
def test_a_frozen_network_answers_the_same_each_time_row_by_row(method: str, network: str) -> None:
    net = drawing_cases.build(method, network).eval()
    x, _ = NETWORKS[network].batch()
    frozen = mt.freeze(net, 3, seed=0)
    assert not stochastic_layers(frozen.network) and frozen.members == 3
    with torch.no_grad():
        once, state = frozen(x), torch.get_rng_state()
        assert torch.equal(frozen(x), once) and torch.equal(torch.get_rng_state(), state)
        assert once.std(0).max() > 1e-4
        alone = torch.cat([frozen(row) for row in x.split(1)], 1)
    torch.testing.assert_close(alone, once, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mt.freeze(net, 3, seed=0)(x), frozen(x), rtol=0, atol=0)


@pytest.mark.parametrize("method, network", IN_ORDER)
def test_where_weights_are_drawn_the_frozen_networks_are_the_seeded_draws(method: str, network: str) -> None:
    net = drawing_cases.build(method, network).eval()
    x, _ = NETWORKS[network].batch()
    with torch.no_grad():
        torch.testing.assert_close(mt.freeze(net, 4, seed=7)(x), net(x, draws=4, seed=7), rtol=1e-4, atol=1e-5)
    ours = ("multitudes.ensemble.", "multitudes.methods.")
    assert not any(type(m).__module__.startswith(ours) for m in mt.freeze(net, 1).member(0).modules())


@pytest.mark.parametrize("assignment", ["network", "layer", "row", "element"])
@pytest.mark.parametrize("mixing", ["uniform", "learned"])
def test_every_assignment_of_components_is_frozen_as_it_is_drawn(assignment: str, mixing: str) -> None:
    net = mt.family(mlp(), 3, assignment, sigma=0.2, mixing=mixing, seed=0).eval()
    x = torch.randn(7, 6)
    with torch.no_grad():
        torch.testing.assert_close(mt.freeze(net, 5, seed=1)(x), net(x, draws=5, seed=1))


def test_frozen_members_have_their_own_draws_member_major() -> None:
    net = mt.deep_ensemble(mt.drop_connect(mlp(), 0.3), 3, seed=0).eval()
    x = torch.randn(7, 6)
    with torch.no_grad():
        torch.testing.assert_close(mt.freeze(net, 4, seed=7)(x), net(x, draws=4, seed=7))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mc_dropout", "variance", "variance_zero", "patched", "drop_connect", "jitter"])
@pytest.mark.parametrize("network", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_frozen_predictions_are_distributed_as_draws_are(method: str, network: str) -> None:
    if method == "jitter":
        if network == "cnn":
            network = "mlp"
        net = mt.Multitude(nn.Sequential(Jitter(), NETWORKS[network].model()))
    else:
        net = drawing_cases.build(method, network)
    x, _ = NETWORKS[network].batch(3)
    count = 600
    with torch.no_grad():
        frozen = mt.freeze(net.eval(), count, seed=1)(x).double()
        drawn = net(x, draws=count, seed=2).double()
    for power in (1, 2):  # means, and mean squares
        one, two = frozen**power, drawn**power
        deviation = ((one.var(0) + two.var(0)) / count).sqrt()
        assert ((one.mean(0) - two.mean(0)).abs() <= 5 * deviation + 1e-6).all()


def test_a_users_own_layer_is_frozen_under_its_own_names() -> None:
    for noise in ("rows", "weights"):
        net = mt.Multitude(nn.Sequential(Jitter(noise), nn.Linear(6, 5))).eval()
        frozen = mt.freeze(net, 4)
        names = ("0.scale", "0.frozen", "1.weight", "1.bias")
        assert set(frozen.state_dict()) == {f"{index}.{name}" for index in range(4) for name in names}
        assert all(isinstance(member[0], Frozen) and member[0].noise == noise for member in frozen.network)
        x = torch.randn(7, 6)
        apart = frozen(x) - frozen(torch.zeros_like(x)) - (frozen(x[:1]) - frozen(torch.zeros(1, 6)))
        torch.testing.assert_close(apart[:, :1], torch.zeros(4, 1, 5), atol=1e-5, rtol=0)  # the noise is one


def test_layers_that_draw_inside_layers_that_draw_are_frozen_too() -> None:
    class Outer(Jitter):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Jitter()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.inner(x))

    frozen = mt.freeze(mt.Multitude(nn.Sequential(Outer(), nn.Linear(6, 5))).eval(), 2)
    x = torch.randn(7, 6)
    assert not stochastic_layers(frozen.network) and torch.equal(frozen(x), frozen(x))


@pytest.mark.parametrize("runner", ["loop", "packed", "vmapped"])
def test_every_runner_gives_a_frozen_network_the_same_noise(runner: str) -> None:
    net = mt.freeze(drawing_cases.build("mc_dropout", "cnn").eval(), 3, seed=0)
    x, _ = NETWORKS["cnn"].batch()
    want = net(x)
    net.runner = runner
    torch.testing.assert_close(net(x), want)


def test_a_frozen_network_takes_maps_of_any_size() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    frozen = mt.freeze(mt.mc_dropout(model).eval(), 2)
    for size in (8, 11):
        x = torch.randn(4, 3, size, size)
        assert torch.equal(frozen(x), frozen(x))


def test_drawn_weights_with_dropout_in_the_network_are_both_frozen() -> None:
    model = mt.mc_dropout(mlp(0.5))
    net = mt.subspace(model, "random", scale=0.1).eval()
    frozen = mt.freeze(net, 3)
    x = torch.randn(7, 6)
    assert not stochastic_layers(frozen.network) and torch.equal(frozen(x), frozen(x))


def test_a_multitude_that_draws_nothing_is_copied() -> None:
    net = mt.deep_ensemble(mlp(), 3)
    frozen = mt.freeze(net)
    assert type(frozen) is type(net) and frozen is not net and frozen.members == 3
    assert torch.equal(frozen(torch.ones(2, 6)), net(torch.ones(2, 6)))
    assert not {p.data_ptr() for p in frozen.parameters()} & {p.data_ptr() for p in net.parameters()}


def test_freezing_leaves_the_network_and_the_random_state_as_they_were() -> None:
    net = mt.family(mt.mc_dropout(mlp(0.5)), 3, "network", seed=0).train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    frozen = mt.freeze(net, 2, seed=0)
    assert torch.equal(torch.get_rng_state(), state) and net.training and frozen.training
    assert all(module.training for module in [*net.modules(), *frozen.modules()])
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not frozen.network._forward_pre_hooks and not frozen.network._forward_hooks
    assert len(net.network._forward_pre_hooks) == 1


def test_without_a_seed_each_freezing_is_another() -> None:
    net = mt.mc_dropout(mlp(0.5)).eval()
    x = torch.randn(7, 6)
    assert not torch.equal(mt.freeze(net, 2)(x), mt.freeze(net, 2)(x))
    torch.manual_seed(5)
    one = mt.freeze(net, 2)(x)
    torch.manual_seed(5)
    assert torch.equal(mt.freeze(net, 2)(x), one)


def test_a_frozen_network_can_be_copied_pickled_moved_and_trained() -> None:
    net = mt.freeze(mt.Multitude(nn.Sequential(nn.Linear(6, 6), Jitter(), nn.Linear(6, 5))), 2)
    x, y = torch.randn(7, 6), torch.arange(7) % 5
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))
    net.loss(x, y).backward()
    assert all(p.grad is not None for p in net.parameters())
    assert net.double()(x.double()).dtype == torch.float64 and net.member(1)[1].frozen.dtype == torch.int64


def test_a_calibrated_network_is_frozen_with_its_calibration() -> None:
    net = mt.mc_dropout(mlp(0.5)).eval()
    x, y = torch.randn(60, 6), torch.arange(60) % 5
    calibrated = calibrate(net, (x, y), seed=0)
    frozen = mt.freeze(calibrated, draws=3, seed=0)
    assert torch.equal(frozen.predict(x).probs, frozen.predict(x).probs)
    assert frozen.calibration == calibrated.calibration and frozen.members == 3


def test_the_numbers_of_frozen_layers_are_uniform_and_normal() -> None:
    class Ask(mt.Stochastic):
        noise = "weights"

        def forward(self, x: Tensor) -> Tensor:
            u, z = self.uniform((100_000,), like=x), self.normal((100_000,), like=x)
            return torch.stack([u, z]).expand(len(x), -1, -1)

    frozen = mt.freeze(mt.Multitude(Ask()), 2, seed=0)
    (u, z), (other, _) = frozen(torch.zeros(1))[:, 0]
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.001
    assert abs(z.mean()) < 0.02 and abs(z.var() - 1) < 0.02 and abs((z**4).mean() - 3) < 0.1
    for one, two in ((u, z), (u, other), (u[1:], u[:-1])):
        assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.015
    share = torch.histc(u, 20, 0, 1) / len(u)
    assert (share - 0.05).abs().max() < 0.004


def test_the_hash_has_no_collisions_among_neighbours() -> None:
    hashed = scrambled(torch.arange(100_000))
    assert hashed.unique().numel() == 100_000 and int(hashed.max()) < 2**32


def test_wrong_arguments_are_errors() -> None:
    net: Any = mt.mc_dropout(mlp(0.5))
    for draws in (0, -1, 2.5, True, "auto"):
        with pytest.raises(ValueError, match="draws must be a whole number, 1 or more"):
            mt.freeze(net, draws)
    with pytest.raises(ValueError, match="seed must be None or a whole number"):
        mt.freeze(net, 2, seed=-1)
    with pytest.raises(ValueError, match="net must be a multitude, got Sequential"):
        mt.freeze(net.network, 2)


def test_members_that_share_weights_are_frozen_as_they_are() -> None:
    net = cases.build("batch_ensemble", cases.NETWORKS["mlp"].model(), "mlp").eval()
    x, _ = cases.NETWORKS["mlp"].batch()
    assert torch.equal(mt.freeze(net, 8)(x), net(x))
