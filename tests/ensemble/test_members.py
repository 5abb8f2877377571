"""Members that share no weight: plain networks in a list, run by three runners, each learning as it would alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from tests.zoo.cases import CLASSES, NETWORKS, Cnn
from tests.zoo.hard_networks import HARD, MAY_REFUSE
from tests.zoo.of_parts import Of

RUNNERS = ("loop", "packed", "vmapped")
EVERY_WAY = pytest.mark.parametrize(
    ("network", "runner"),
    [(name, runner) for name in NETWORKS for runner in RUNNERS],
)


def trained(network: str, count: int = 3) -> list[nn.Module]:
    return [NETWORKS[network].model(seed=seed) for seed in range(count)]


@EVERY_WAY
@pytest.mark.parametrize("training", [False, True])
def test_predictions_statistics_and_gradients_are_those_of_each_network_alone(
    network: str, runner: str, training: bool
) -> None:
    models = [model.train(training).double() for model in trained(network)]
    net = mt.fuse(models)
    net.runner = runner
    x, y = NETWORKS[network].batch()
    x = x.double()
    together = net(x)
    losses = torch.stack([F.cross_entropy(prediction, y) for prediction in together])
    losses.sum().backward()
    for index, model in enumerate(models):
        alone, member = model(x), net.member(index)
        torch.testing.assert_close(together[index], alone)
        F.cross_entropy(alone, y).backward()
        for (name, got), want in zip(member.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(got, want, msg=name)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(member.get_parameter(name).grad, parameter.grad, rtol=1e-6, atol=1e-9)
    if training:  # the second step starts from the first one's statistics
        torch.testing.assert_close(net.loss(x, y), sum(F.cross_entropy(model(x), y) for model in models))


@pytest.mark.parametrize("network", list(NETWORKS))
def test_member_reverses_fuse(network: str) -> None:
    models = trained(network)
    net = mt.fuse(models)
    assert list(net.state_dict()) == [f"{index}.{name}" for index in range(3) for name in models[0].state_dict()]
    assert [type(child) for child in net.children()] == [type(model) for model in models]
    for index, model in enumerate(models):
        member = net.member(index)
        assert repr(member) == repr(model)
        for name, tensor in model.state_dict().items():
            assert torch.equal(member.state_dict()[name], tensor)


# -- networks that are hard to run packed ------------------------------------------------------------------


@pytest.mark.parametrize("name", list(HARD))
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("training", [False, True])
def test_networks_that_mix_channels_are_right_or_refused(name: str, runner: str, training: bool) -> None:
    build, shape = HARD[name]
    torch.manual_seed(0)
    models = [build().train() for _ in range(3)]
    for model in models:
        model(torch.randn(4, *shape))
        model.train(training)
    net = mt.fuse(models)
    x = torch.randn(5, *shape)
    try:
        net.runner = runner
        together = net(x)
    except ValueError:
        assert (name, runner) in MAY_REFUSE
        return
    for index, model in enumerate(models):
        torch.testing.assert_close(together[index], model(x), rtol=1e-4, atol=1e-5)
    together.square().sum().backward()
    for index, model in enumerate(models):
        model(x).square().sum().backward()
        for parameter_name, parameter in model.named_parameters():
            got = net.member(index).get_parameter(parameter_name).grad
            got, want = (torch.zeros_like(parameter) if g is None else g for g in (got, parameter.grad))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", list(HARD))
def test_check_proves_hard_networks_right(name: str) -> None:
    build, shape = HARD[name]
    mt.check(mt.deep_ensemble(build(), members=2), torch.randn(3, *shape))


def test_check_finds_members_that_mix() -> None:
    net = mt.fuse([Cnn() for _ in range(2)])
    net._predictions = lambda x: net._runners.loop(x).flip(0)
    with pytest.raises(ValueError, match="member 0 differs from net.member"):
        mt.check(net, torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5)])
@pytest.mark.parametrize("first", [True, False])
def test_members_draw_their_own_dropout(runner: str, layer: nn.Module, first: bool) -> None:
    conv = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(layer, conv) if first else nn.Sequential(conv, layer)
    net = mt.fuse([model.train()] * 3)
    net.runner = runner
    torch.manual_seed(0)
    one, two, three = net(torch.ones(8, 4, 5, 5))
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)


# -- the rest ----------------------------------------------------------------------------------------------


def test_clipping_treats_members_one_by_one() -> None:
    models = [model.train() for model in trained("cnn")]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(3.0)
    net = mt.fuse(models)
    x, y = NETWORKS["cnn"].batch()
    net.loss(x, y).backward()
    norms = net.clip_grad_norm_(0.1)
    for index, model in enumerate(models):
        F.cross_entropy(model(x), y).backward()
        want = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norms[index], want, rtol=1e-4, atol=1e-5)
        for name, parameter in model.named_parameters():
            got = net.member(index).get_parameter(name).grad
            torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_memory_format_is_the_members_own() -> None:
    models = trained("resnet", 2)
    net = mt.fuse(models).to(memory_format=torch.channels_last)
    assert net.member(1).conv1.weight.is_contiguous(memory_format=torch.channels_last)
    x, _ = NETWORKS["resnet"].batch()
    torch.testing.assert_close(net(x)[1], models[1](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("training", [True, False])
def test_an_ensemble_of_multitudes_is_a_multitude(runner: str, training: bool) -> None:
    case = NETWORKS["cnn"]
    inner = [mt.batch_ensemble(case.model(seed), members=2, seed=seed).train(training) for seed in range(3)]
    net = mt.fuse(inner)
    x, y = case.batch()
    with pytest.raises(ValueError, match="runner must be one of auto, loop, packed, vmapped, got 'fast'"):
        net.runner = "fast"
    if runner != "loop":
        with pytest.raises(ValueError, match=f"runner '{runner}' cannot run this network: its members are multitudes"):
            net.runner = runner
        return
    net.runner = runner
    want = torch.cat([one(x) for one in inner])
    assert want.shape == (6, 7, CLASSES)
    torch.testing.assert_close(net(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.loss(x, y), sum(one.loss(x, y) for one in inner), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.member(1)(x), inner[1](x), rtol=1e-4, atol=1e-5)
    one = x[:1]
    torch.testing.assert_close(net(one), torch.cat([each(one) for each in inner]), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_draws_of_members_that_are_multitudes_run_at_once() -> None:
    drops = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, 5))
    net = mt.fuse([mt.batch_ensemble(mt.mc_dropout(drops), 2, seed=seed) for seed in range(3)]).eval()
    x = torch.randn(2, 6)
    several = net(x, draws=4, seed=0)
    assert several.shape == (24, 2, 5)
    torch.testing.assert_close(net(x, draws=2, seed=0).unflatten(0, (6, 2)), several.unflatten(0, (6, 4))[:, :2])


RELU, TANH = (nn.Sequential(nn.Linear(2, 2), activation) for activation in (nn.ReLU(), nn.Tanh()))


@pytest.mark.parametrize(
    ("networks", "sentence"),
    [
        ([], "at least one"),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], r"networks\[1\].*'weight'.*\[3, 2\].*\[2, 2\]"),
        ([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], "only one of them has 'bias'"),
        ([nn.Linear(2, 2), nn.Linear(2, 2).double()], "float64"),
        ([nn.Linear(2, 2), "net"], "nn.Module"),
        ([nn.LazyLinear(2), nn.LazyLinear(2)], "has no shape yet"),
        ([RELU, TANH], r"networks\[1\] and networks\[0\] differ in module '1': class is Tanh and ReLU"),
        ([nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1, stride=2)], r"stride is \(2, 2\) and \(1, 1\)"),
    ],
)
def test_networks_that_differ_cannot_be_fused(networks: list[nn.Module], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mt.fuse(networks)


def test_the_fused_networks_are_left_as_they_were() -> None:
    models = trained("cnn")
    before = [copy.deepcopy(model.state_dict()) for model in models]
    net = mt.fuse(models).train()
    net.loss(*NETWORKS["cnn"].batch()).backward()
    torch.optim.SGD(net.parameters(), 1.0).step()
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_a_networks_own_names_never_clash_with_a_multitudes() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("members", "network", "task", "notes", "loss", "runner", "member", "predict")
            for name in names:
                self.add_module(name, nn.Linear(4, 4))
            self.names = names

        def forward(self, x: Tensor) -> Tensor:
            for name in self.names:
                x = self._modules[name](x)
            return x

    x = torch.randn(3, 4)
    for method in (mt.deep_ensemble, mt.packed, mt.batch_ensemble, mt.masksembles, mt.mimo):
        net = method(Clash(), 2)
        assert net.members == 2
        assert net(x).shape == (2, 3, 4)
        net.loss(x, torch.tensor([0, 1, 2])).backward()
        mt.check(net, x)
        assert net.predict(x).probs.shape == (3, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 2.0), ([1.0], [5.0]), ([1, [2]], [1, [3]]), ({"gain": 1}, {"gain": 2}), ({1, 2}, {1, 3}),
        (SimpleNamespace(gain=1.0), SimpleNamespace(gain=3.0)), (F.relu, torch.tanh), (nn.ReLU, nn.Tanh),
        (partial(F.softmax, dim=1), partial(F.softmax, dim=2)), (F.relu, None),
    ],
)  # fmt: skip
def test_networks_whose_settings_differ_are_not_fused(one: Any, other: Any) -> None:
    networks = [Of(nn.Linear.forward, layer=nn.Linear(3, 2), setting=each) for each in (one, other, copy.deepcopy(one))]
    with pytest.raises(ValueError, match=r"networks\[1\] and networks\[0\] differ in the network itself: setting is"):
        mt.fuse(networks[:2])
    assert mt.fuse(networks[::2]).members == 2


def test_members_are_modules_that_can_be_hooked_pruned_and_replaced_each_by_itself() -> None:
    net = mt.deep_ensemble(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), 2).eval()
    x = torch.randn(2, 4)
    net.member(1)[0].register_forward_hook(lambda layer, args, output: setattr(layer, "seen", output.sum().item()))
    net(x)
    assert net.member(1)[0].seen == pytest.approx(float(net.member(1)[0](x).sum()), abs=1e-5)
    assert not hasattr(net.member(0)[0], "seen")
    nn.utils.prune.l1_unstructured(net.member(0)[1], "weight", amount=0.5)
    assert int((net.member(0)[1].weight == 0).sum()) == 6
    nn.utils.parametrizations.weight_norm(net.member(1)[1])
    torch.testing.assert_close(net(x), torch.stack([net.member(0)(x), net.member(1)(x)]))


@pytest.mark.parametrize("runner", ["auto", "packed", "vmapped"])
def test_a_change_of_one_member_is_noticed_by_every_runner(runner: str) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))

    build = network()
    x = torch.randn(2, 3, 6, 6)
    build(x)
    changes: list[Callable[[nn.Module], Any]] = [
        lambda member: member.__setitem__(1, nn.Tanh()),
        lambda member: setattr(member[0], "padding", (2, 2)) or setattr(member[0], "dilation", (2, 2)),
        lambda member: member[0].register_forward_hook(lambda layer, args, output: 2 * output),
        lambda member: setattr(member, "1", nn.Identity()),
        lambda member: member[3].weight.data.mul_(3),
        lambda member: setattr(member[3], "weight", nn.Parameter(torch.ones_like(member[3].weight))),
    ]
    for change in changes:
        net = mt.deep_ensemble(build, members=3, seed=0).eval()
        net.runner = runner
        with torch.no_grad():
            net(x)
            change(net.member(1))
            want = torch.stack([net.member(index)(x) for index in range(3)])
            try:
                got = net(x)
            except ValueError as refusal:
                assert runner != "auto" and "cannot run this network" in str(refusal)
                continue
        torch.testing.assert_close(got, want)


def test_a_recurrent_layer_that_a_hook_has_looked_at_runs_without_it() -> None:
    net = mt.deep_ensemble(Of(lambda net, x: net.rnn(x)[0][:, -1], rnn=nn.LSTM(4, 3, batch_first=True)), 2).eval()
    x = torch.randn(5, 6, 4)
    hook = net.member(0).rnn.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    want = net(x)
    hook.remove()
    torch.testing.assert_close(net(x), want)
    torch.testing.assert_close(torch.stack([net.member(index)(x) for index in range(2)]), want)
