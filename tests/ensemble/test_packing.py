"""Packed and vmapped members: state that code writes, hooks, modes, settings, arguments, noise, gradients."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from tests.zoo.cases import CLASSES, NETWORKS, Cnn
from tests.zoo.hard_networks import HARD, Aliased
from tests.zoo.of_parts import Of

RUNNERS = ("loop", "packed", "vmapped")


class Freezes(Cnn):
    """A network whose state outside of tensors changes as it runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.seen = kind, 0, []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.kind == "counter":
            self.calls += 1
        elif self.kind == "collects":
            self.seen.append(x)
        elif self.kind == "python":
            x = x * random.random()
        elif self.kind == "numpy":
            x = x * float(np.random.rand())
        return x


@pytest.mark.parametrize("kind", ["counter", "collects", "python", "numpy"])
@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_code_that_changes_state_is_refused_and_leaves_the_networks_alone(kind: str, runner: str) -> None:
    model = Freezes(kind)
    states = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
    net = mt.fuse([model, model])
    net.runner, x = runner, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    drawing = kind in ("python", "numpy")
    with pytest.raises(ValueError, match="random numbers" if drawing else "writes its"):
        net(x)
    assert states == [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
    for index in range(2):
        member = net.member(index)
        assert type(member) is Freezes and vars(member).keys() == vars(model).keys()
        assert (member.calls, member.seen) == (0, [])
    net.runner = "auto"
    with torch.no_grad():
        assert net(x).shape == (2, 2, CLASSES)


class Reads(Cnn):
    """Multiplies its output by a setting, wherever that is kept."""

    of_class = 1.0

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.gain = place, 1.0
        self.gains = [{"gain": [1.0]}]
        self.config = SimpleNamespace(inner=SimpleNamespace(gain=1.0))

    def forward(self, x: Tensor) -> Tensor:
        gain = {
            "attribute": self.gain,
            "nested": self.gains[0]["gain"][0],
            "object": self.config.inner.gain,
            "class": self.of_class,
        }
        return super().forward(x) * gain[self.place]

    def set(self, gain: float) -> None:
        """All but one in place: nothing else that the module holds becomes another object."""
        if self.place == "attribute":
            self.gain = gain
        self.gains[0]["gain"][0] = self.config.inner.gain = gain
        type(self).of_class = gain


@pytest.mark.parametrize(
    ("place", "training"), [("attribute", True), ("nested", False), ("object", True), ("class", False)]
)
def test_settings_that_change_are_noticed(place: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reads, "of_class", 1.0)
    net = mt.fuse([Reads(place), Reads(place)]).train(training)
    net.runner = "packed"
    x = torch.randn(2, 3, 8, 8)
    before = net(x)
    for member in net.network:
        member.set(4.0)
    torch.testing.assert_close(net(x), 4 * before)


class DiffersWhenPacked(Cnn):
    """In training it gives other predictions."""

    def forward(self, x: Tensor) -> Tensor:
        packed = not isinstance(self.conv1.weight, Tensor)
        return super().forward(x) * (1.0 if packed or not self.training else 3.0)


class StatisticsDifferWhenPacked(nn.Module):
    """In training it gives the same predictions, and other statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Cnn()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and isinstance(self.net.conv1.weight, Tensor):
            self.seen.add_(x.mean())
        return self.net(x)


@pytest.mark.parametrize("kind", [DiffersWhenPacked, StatisticsDifferWhenPacked])
def test_packing_is_proven_in_training_too(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 3, 8, 8)
    net = mt.fuse([kind(), kind()])
    net.runner = "packed"
    net.eval()
    net(x)  # in evaluation it is right
    net.train()
    buffers, state = [b.clone() for b in net.buffers()], torch.get_rng_state()
    with pytest.raises(ValueError, match="gives other predictions|buffer '0.seen' gets other values"):
        net(x)
    assert all(map(torch.equal, net.buffers(), buffers)) and torch.equal(torch.get_rng_state(), state)


def test_proving_it_in_training_leaves_statistics_and_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    one, two = mt.fuse([model, model]), mt.fuse([model, model])
    one.runner = two.runner = "packed"
    x = torch.randn(6, 4)
    assert two.refusal("packed", x) == ""
    for net in (one, two):
        torch.manual_seed(0)
        net(x)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


def aliases(net: Any, x: Tensor) -> Tensor:
    x = F.relu(input=net.conv(x))
    x = torch.cat([x, torch.tanh(input=x)], axis=1)
    x = torch.cat(tensors=(x, -x), dim=1)
    x = F.avg_pool2d(input=x, kernel_size=2)
    return net.last(torch.flatten(input=x.mean(axis=(2, 3)), start_dim=1))


def test_arguments_by_other_names_are_packed_as_well() -> None:
    net = mt.fuse([Of(aliases, conv=nn.Conv2d(3, 4, 3), last=nn.Linear(16, 3)) for _ in range(2)])
    x = torch.randn(2, 3, 8, 8)
    want = net(x)
    net.runner = "packed"
    torch.testing.assert_close(net(x), want)


def test_arguments_that_a_network_does_not_take_are_refused() -> None:
    x = torch.randn(2, 3, 8, 8)
    for runner in RUNNERS:
        net = mt.fuse([Aliased(), Aliased()])
        net.runner = runner
        assert net({"x": x}).shape == net((x,)).shape == (2, 2, 4)
        for wrong in ((x, None, 1.0, 2.0), {"x": x, "other": x}, {"y": x}):
            with pytest.raises((ValueError, TypeError)):
                net(wrong)
    net = mt.fuse([Aliased(), Aliased()])
    assert not torch.equal(net((x, torch.ones(1))), net(x))


def test_hooks_keep_seeing_each_members_tensors() -> None:
    model = Cnn()
    seen: list[torch.Size] = []
    model.conv1.register_forward_hook(lambda _, __, y: seen.append(y.shape))
    net = mt.fuse([model, model, model])
    with pytest.raises(ValueError, match="'conv1' has hooks"):
        net.runner = "packed"
    net(torch.randn(2, 3, 8, 8))
    assert seen == [torch.Size([2, 12, 8, 8])] * 3


@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_a_half_frozen_network_runs_in_the_modes_of_its_modules(runner: str) -> None:
    models = [NETWORKS["resnet"].model(seed).train().double() for seed in (0, 1)]
    net = mt.fuse(models)
    net.runner = runner
    x = NETWORKS["resnet"].batch()[0].double()
    net(x), [model(x) for model in models]
    for model in (*net.network, *models):
        model.layer1.eval()
        model.bn1.eval()
    for _ in range(3):  # half of the statistics move, in the first mode and the second
        torch.testing.assert_close(net(x), torch.stack([model(x) for model in models]), rtol=1e-6, atol=1e-8)
        for member, model in zip(net.network, models, strict=True):
            for (name, got), want in zip(member.named_buffers(), model.buffers(), strict=True):
                torch.testing.assert_close(
                    got, want, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.parametrize("runner", ["packed", "vmapped"])
def test_members_in_different_modes_run_one_after_the_other(runner: str) -> None:
    net = mt.fuse([NETWORKS["resnet"].model(seed).train() for seed in (0, 1)])
    x, _ = NETWORKS["resnet"].batch()
    net(x)
    net.member(1).layer1.eval()
    net.runner = "auto"
    want = torch.stack([copy.deepcopy(net.member(index))(x) for index in range(2)])
    torch.testing.assert_close(net(x), want)
    with pytest.raises(ValueError, match="training mode"):
        net.runner = runner


@pytest.mark.parametrize("name", ["aliased", *(pytest.param(n, marks=pytest.mark.slow) for n in ("unet", "attention"))])
def test_the_packed_runner_compiles_as_one_graph(name: str) -> None:
    torch.compiler.reset()
    build, shape = HARD[name]
    net = mt.fuse([build().eval() for _ in range(2)])
    net.runner = "packed"
    x = torch.randn(3, *shape)
    want = net(x)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)


def test_packing_that_differs_from_its_network_is_not_used_compiled_either() -> None:
    torch.compiler.reset()
    build, shape = HARD["asks"]
    net = mt.fuse([build() for _ in range(2)])
    net.runner = "packed"
    with pytest.raises(ValueError, match="gives other predictions|gives other values"):
        torch.compile(net, backend="eager")(torch.randn(3, *shape))


NOISE = {
    "rand": lambda h: h * (torch.rand(h.shape) > 0.5),
    "randn": lambda h: h + torch.randn(h.size()),
    "randint": lambda h: h * torch.randint(5, h.shape),
    "drop path": lambda h: h * torch.rand((h.shape[0], 1)).round(),
    "permutation": lambda h: h[torch.randperm(h.shape[0])],
    "like": lambda h: h + torch.randn_like(h),
    "normal": lambda h: h + torch.normal(0.0, 1.0, (16,)),
    "dropout": lambda h: h + F.dropout(torch.ones(16)),
    "method": lambda h: h.new_empty(h.shape).bernoulli_(0.5) * h,
}


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("training", [True, False])
def test_noise_of_the_networks_own_is_each_members_own_or_refused(kind: str, training: bool) -> None:
    model = Of(lambda net, x: net.last(NOISE[kind](net.first(x))), first=nn.Linear(8, 16), last=nn.Linear(16, 3))
    net = mt.fuse([model, model]).train(training)
    try:
        net.runner = "packed"
        one, other = net(torch.randn(64, 8))
    except ValueError:
        return
    assert not torch.allclose(one, other)


def squared(net: Any, x: Tensor) -> Tensor:
    return net.inner(x) ** 2


def doubled(net: Any, x: Tensor) -> Tensor:
    return net.inner(x) * 2


@pytest.mark.parametrize(("runner", "members"), [("packed", 2), ("vmapped", 2), ("auto", 8)])
def test_a_module_that_is_replaced_added_or_removed_is_noticed(runner: str, members: int) -> None:
    net = mt.fuse([nn.Sequential(Of(squared, inner=nn.Linear(6, 4))) for _ in range(members)]).eval()
    net.runner = runner
    x = torch.randn(3, 6)
    plain = net(x).sqrt()
    for member in net.network:
        member[0] = Of(doubled, inner=member[0].inner).eval()
    torch.testing.assert_close(net(x).abs(), 2 * plain)
    for member in net.network:
        member.append(nn.Tanh().eval())
    torch.testing.assert_close(net(x).abs(), (2 * plain).tanh())
    for member in net.network:
        del member[1]
    torch.testing.assert_close(net(x).abs(), 2 * plain)


def test_an_input_that_fails_proves_nothing() -> None:
    build, shape = HARD["asks"]
    net = mt.fuse([build() for _ in range(2)])
    net.runner = "packed"
    with pytest.raises(ValueError, match="does not fit"):
        net(torch.randn(3, shape[0] + 1))
    with pytest.raises(ValueError, match="gives other predictions|gives other values"):
        net(torch.randn(3, *shape))


# -- gradients ---------------------------------------------------------------------------------------------


class _Through(torch.autograd.Function):
    """Round, with the gradient of what was rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Through(Cnn):
    def forward(self, x: Tensor) -> Tensor:
        return _Through.apply(super().forward(x))


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_functions_of_the_networks_own_are_right_or_refused(training: bool) -> None:
    net = mt.fuse([Through(), Through()]).train(training)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        want = net(x)
        net.runner = "packed"
        if not training:
            torch.testing.assert_close(net(x), want)
    with pytest.raises(ValueError, match="switches gradients off"):
        net(x)
