"""Views of a network: shared parts, own attributes, and rebuilding after changes."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.views import Views, view
from tests.zoo.of_parts import Of


class Remembers(nn.Module):
    """Rows see each other, so that members run one by one; and each call depends on those before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.parts = [self.first, self.last]
        self.steps, self.gain, self.seen = 0, 1.0, [0.0]
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts[0](x)
        h = (h - h.mean(0)) * self.gain
        h = h if self.hidden is None else h + self.hidden
        self.hidden = h.detach().amax(0)
        self.steps += 1
        self.seen.append(float(h.detach().sum()))
        return self.parts[1](h) + sum(self.seen) + self.steps


@pytest.fixture
def net() -> Any:
    return mt.batch_ensemble(Remembers(), 3, seed=0)


def run(net: mt.Multitude, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net(x)


@pytest.mark.parametrize("training", [True, False])
def test_each_member_writes_its_own_attributes(net: Any, training: bool) -> None:
    alone = [net.member(index).train(training) for index in range(3)]
    net.train(training)
    for number in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
        torch.testing.assert_close(run(net, x), torch.stack([one(x) for one in alone]), rtol=1e-4, atol=1e-4)
    assert net.network.steps == 3 and net.network.seen == pytest.approx(alone[2].seen, rel=1e-4, abs=1e-4)


def test_written_attributes_survive_copies_and_other_changes(net: Any) -> None:
    alone = [net.member(index).eval() for index in range(3)]
    x = torch.randn(5, 4)
    for number in range(4):
        torch.testing.assert_close(run(net.eval(), x), torch.stack([one(x) for one in alone]), rtol=1e-4, atol=1e-4)
        if number == 0:
            net = copy.deepcopy(net)
        if number == 1:  # a setting changes, outside of every forward
            for each in (net.network, *alone):
                each.gain = 2.0
    net.network.steps = 10  # and one that was written
    for one in alone:
        one.steps = 10
    torch.testing.assert_close(run(net, x), torch.stack([one(x) for one in alone]), rtol=1e-4, atol=1e-4)


def test_views_follow_modes_hooks_children_and_lists(net: Any) -> None:
    plain = mt.batch_ensemble(OverTheBatch(), 2, seed=0).eval()
    x = torch.randn(5, 4)
    run(plain, x)
    modes: list[bool] = []
    handle = plain.get_submodule("norm").register_forward_hook(lambda module, *_: modes.append(module.training))
    run(plain, x)  # looks again at how members run
    assert not any(modes)
    modes.clear()
    run(plain, x)
    assert not any(modes) and len(modes) == 2
    run(plain.train(), x)
    handle.remove()
    assert modes[-2:] == [True, True]
    before = run(plain.eval(), x)
    plain.network.scales.append(3.0)
    torch.testing.assert_close(run(plain.eval(), x), 3 * before)
    plain.network.act = nn.Identity()
    assert not torch.allclose(run(plain, x), 3 * before)
    doubled = plain.get_submodule("last").register_forward_pre_hook(lambda module, args: (0 * args[0],))
    assert torch.allclose(run(plain, x)[:, 0], run(plain, x)[:, 1])
    doubled.remove()
    pickled = io.BytesIO()
    torch.save(plain, pickled)
    pickled.seek(0)
    torch.testing.assert_close(run(torch.load(pickled, weights_only=False), x), run(plain, x))


class OverTheBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)
        self.norm, self.act, self.scales = nn.BatchNorm1d(6, track_running_stats=True), nn.Tanh(), [1.0]

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.seen = h.detach()  # each member writes its own, so that they run one by one
        scale = 1.0
        for each in self.scales:
            scale *= each
        return self.last(self.act(self.norm(h - h.mean(0)))) * scale


def test_a_view_shares_tensors_and_unchanged_layers() -> None:
    network = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.BatchNorm1d(3))
    twin = view(network, {"0.0": {"in_features": 7}})
    assert twin is not network and twin[0] is not network[0] and twin[1] is network[1] and twin[0][1] is network[0][1]
    assert twin[0][0].weight is network[0][0].weight and twin[0][0].in_features == 7 and network[0][0].in_features == 3
    network.double()
    assert twin[0][0].weight.dtype == torch.float64
    views = Views(network, lambda network: [view(network, {"0.0": {"in_features": 7}})])
    views.versions.look()
    first = views.current()[0]
    assert views.current()[0] is first
    network[0].eval()
    views.versions.look()
    assert views.current()[0] is not first and not views.current()[0][0].training


def test_draws_of_a_network_that_writes_attributes_run_alone() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.5), Of(remembering, inner=nn.Linear(6, 6), last=None), nn.Linear(6, 3)
    )
    net = mt.heads(mt.mc_dropout(model), 2, layers=["2", "3"], seed=0).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = net(torch.randn(5, 4), draws=4, seed=0)
    assert drawn.shape == (8, 5, 3) and not torch._C._functorch.is_batchedtensor(drawn)
    held = net.get_submodule("2").layer.last
    assert held is None or not torch._C._functorch.is_batchedtensor(held)


def remembering(net: Any, x: Tensor) -> Tensor:
    net.last = net.inner(x)
    return net.last


def row_wise(net: Any, x: Tensor) -> Tensor:
    h = net.act(net.first(x))
    return net.last(h - h.mean(0) if net.centred else h)


class OverRows(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - super().forward(x).mean(0)


@pytest.mark.parametrize(("training", "rows"), [(True, "shared"), (True, "own"), (False, "own")])
@pytest.mark.parametrize(
    "change",
    [
        lambda network: setattr(network, "centred", True),
        lambda network: setattr(network, "act", OverRows()),
        lambda network: setattr(network.act, "__class__", OverRows),
        lambda network: setattr(network.act, "forward", lambda x: x - x.mean(0)),
    ],
    ids=["setting", "child", "class", "function"],
)
def test_members_are_not_batched_once_a_network_mixes_rows(change: Any, training: bool, rows: str) -> None:
    parts = {"first": nn.Linear(4, 6), "act": nn.Tanh(), "last": nn.Linear(6, 3), "centred": False}
    net = mt.batch_ensemble(Of(row_wise, **parts), 3, rows=rows, seed=0).train(training)
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    run(net, x)
    net.loss(x, y, task="regression")
    change(net.network)
    torch.testing.assert_close(run(net, x), torch.stack([net.member(index)(x) for index in range(3)]))
    if rows == "own" and training:
        with pytest.raises(ValueError, match="rows='own'"):
            net.loss(x, y, task="regression")


def test_a_member_keeps_hooks_and_written_attributes(net: Any) -> None:
    x = torch.randn(5, 4)
    net.eval().get_submodule("last").register_forward_hook(lambda module, args, answer: 2 * answer)
    run(net, x)
    want = run(net, x)
    net = mt.batch_ensemble(Remembers(), 3, seed=0).eval()
    net.get_submodule("last").register_forward_hook(lambda module, args, answer: 2 * answer)
    run(net, x)
    torch.testing.assert_close(torch.stack([net.member(index)(x) for index in range(3)]), want, rtol=1e-4, atol=1e-4)
