"""Frozen multitudes: deterministic networks from draws."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.draws.frozen_noise import FrozenNoise, hash_numbers
from multitudes.evaluation.calibrate import calibrate
from multitudes.networks.stochastic import stochastic_layers
from tests.zoo import drawing_cases
from tests.zoo.drawing_cases import CASES, NETWORKS

DRAWS_WEIGHTS = ("drop_connect", "patched", "patched_cross", "subspace", "swag", "laplace")
IN_ORDER = [case for case in CASES if case.values[0] in DRAWS_WEIGHTS and case.values[1] != "resnet"]
"""Without residual networks, whose shortcuts are registered after layers that run later."""


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, 5)).eval()


class Jitter(mt.Stochastic):
    """A user's layer with a weight that requests both kinds of random numbers."""

    def __init__(self, noise: str = "rows") -> None:
        super().__init__()
        self.noise = noise
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.expects:
            return x
        shape = x.shape if self.noise == "rows" else x.shape[1:]
        noise = self.normal(shape, like=x)
        noise.mul_(self.scale)  # a layer may change its numbers in place
        return x + noise * (self.uniform(shape, like=x) < 0.5)


@pytest.mark.parametrize("method, network", CASES)
def test_a_frozen_network_repeats_its_predictions_row_by_row(method: str, network: str) -> None:
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
def test_frozen_draws_of_weights_are_the_draws_of_the_seed(method: str, network: str) -> None:
    net = drawing_cases.build(method, network).eval()
    x, _ = NETWORKS[network].batch()
    with torch.no_grad():
        torch.testing.assert_close(mt.freeze(net, 4, seed=7)(x), net(x, draws=4, seed=7), rtol=1e-4, atol=1e-5)
    ours = ("multitudes.ensemble.", "multitudes.methods.")
    assert not any(type(m).__module__.startswith(ours) for m in mt.freeze(net, 1).member(0).modules())


ASSIGNMENTS = [("network", "uniform"), ("layer", "learned"), ("row", "uniform"), ("element", "learned")]


@pytest.mark.parametrize(("assignment", "mixing"), ASSIGNMENTS)
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
@pytest.mark.parametrize(
    ("method", "network"),
    [("mc_dropout", "cnn"), ("variance", "mlp"), ("variance_zero", "cnn"), ("patched", "mlp"), ("drop_connect", "mlp"),
     ("jitter", "mlp")],
)  # fmt: skip
def test_frozen_predictions_are_distributed_as_draws_are(method: str, network: str) -> None:
    if method == "jitter":
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


def test_a_users_layer_keeps_its_names() -> None:
    for noise in ("rows", "weights"):
        net = mt.Multitude(nn.Sequential(Jitter(noise), nn.Linear(6, 5))).eval()
        frozen = mt.freeze(net, 4)
        names = ("0.scale", "0.frozen", "1.weight", "1.bias")
        assert set(frozen.state_dict()) == {f"{index}.{name}" for index in range(4) for name in names}
        assert all(isinstance(member[0], FrozenNoise) and member[0].noise == noise for member in frozen.network)
        x = torch.randn(7, 6)
        apart = frozen(x) - frozen(torch.zeros_like(x)) - (frozen(x[:1]) - frozen(torch.zeros(1, 6)))
        torch.testing.assert_close(
            apart[:, :1], torch.zeros(4, 1, 5), atol=1e-5, rtol=0
        )  # all rows have the same noise


class Nested(Jitter):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Jitter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


def conv_dropout() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda: mt.Multitude(nn.Sequential(Nested(), nn.Linear(6, 5))), [(7, 6)]),
        (lambda: mt.subspace(mt.mc_dropout(mlp(0.5)), "random", scale=0.1), [(7, 6)]),
        (lambda: mt.mc_dropout(conv_dropout()), [(4, 3, 8, 8), (4, 3, 11, 11)]),
    ],
    ids=["nested layers", "weights and dropout", "maps of any size"],
)
def test_all_noise_of_a_network_is_frozen(build: Callable[[], mt.Multitude], shapes: list[tuple[int, ...]]) -> None:
    frozen = mt.freeze(build().eval(), 2)
    assert not stochastic_layers(frozen.network)
    for shape in shapes:
        x = torch.randn(shape)
        assert torch.equal(frozen(x), frozen(x))


@pytest.mark.parametrize("runner", ["loop", "packed", "vmapped"])
def test_every_runner_gives_a_frozen_network_the_same_noise(runner: str) -> None:
    net = mt.freeze(drawing_cases.build("mc_dropout", "cnn").eval(), 3, seed=0)
    x, _ = NETWORKS["cnn"].batch()
    want = net(x)
    net.runner = runner
    torch.testing.assert_close(net(x), want)


def test_a_multitude_without_draws_is_copied() -> None:
    shared = mt.batch_ensemble(mlp(), 3).eval()
    assert torch.equal(mt.freeze(shared)(torch.ones(2, 6)), shared(torch.ones(2, 6)))
    net = mt.deep_ensemble(mlp(), 3)
    frozen = mt.freeze(net)
    assert type(frozen) is type(net) and frozen is not net and frozen.members == 3
    assert torch.equal(frozen(torch.ones(2, 6)), net(torch.ones(2, 6)))
    assert not {p.data_ptr() for p in frozen.parameters()} & {p.data_ptr() for p in net.parameters()}


def test_freezing_does_not_change_the_network_or_the_random_state() -> None:
    net = mt.family(mt.mc_dropout(mlp(0.5)), 3, "network", seed=0).train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    frozen = mt.freeze(net, 2, seed=0)
    assert torch.equal(torch.get_rng_state(), state) and net.training and frozen.training
    assert all(module.training for module in [*net.modules(), *frozen.modules()])
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not frozen.network._forward_pre_hooks and not frozen.network._forward_hooks
    assert len(net.network._forward_pre_hooks) == 1


def test_without_a_seed_frozen_networks_differ() -> None:
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
    hashed = hash_numbers(torch.arange(100_000))
    assert hashed.unique().numel() == 100_000 and int(hashed.max()) < 2**32


def test_wrong_arguments_are_named() -> None:
    net: Any = mt.mc_dropout(mlp(0.5))
    for draws in (0, -1, 2.5, True, "auto"):
        with pytest.raises(ValueError, match="draws must be a whole number, 1 or more"):
            mt.freeze(net, draws)
    with pytest.raises(ValueError, match="seed must be None or a whole number"):
        mt.freeze(net, 2, seed=-1)
    with pytest.raises(ValueError, match="net must be a multitude, got Sequential"):
        mt.freeze(net.network, 2)
