"""A factory in the place of a network: each member is built by the user's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multitudes as mt
from tests.surgery.test_initialize import CLASSES, INPUTS, METHODS, Net, X, inner
from tests.zoo.cases import stacked_parameters


def by_hand(seed: int, count: int, factory: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [factory() for _ in range(count)]


def test_each_member_of_a_factory_is_built_as_alone() -> None:
    def build() -> nn.Module:
        model = Net()
        nn.init.kaiming_normal_(model.first.weight, mode="fan_out")
        nn.init.zeros_(model.norm.weight)
        return model

    before = torch.get_rng_state()
    net = mt.deep_ensemble(build, 4, seed=3)
    assert torch.equal(torch.get_rng_state(), before), "a seed leaves torch's random state alone"
    for index, want in enumerate(by_hand(3, 4, build)):
        got = net.member(index).state_dict()
        assert all(torch.equal(got[name], tensor) for name, tensor in want.state_dict().items())
    torch.manual_seed(3)
    unseeded = mt.deep_ensemble(build, 4)
    assert torch.equal(stacked_parameters(unseeded)["first.weight"], stacked_parameters(net)["first.weight"])


@pytest.mark.parametrize("method", ["batch_ensemble", "masksembles", "variance"])
def test_a_shared_network_is_built_once_as_alone(method: str) -> None:
    calls = []

    def build() -> nn.Module:
        calls.append(Net())
        return calls[-1]

    net = METHODS[method](build, seed=5)
    assert len(calls) == 1
    (want,) = by_hand(5, 1, Net)
    assert torch.equal(inner(net, "second").weight, want.second.weight)
    again = METHODS[method](Net, seed=5)
    for one, two in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_packed_members_are_channels_of_what_the_factory_builds() -> None:
    def build() -> nn.Module:
        model = Net()
        nn.init.zeros_(model.norm.weight)
        nn.init.constant_(model.head.bias, 2.0)
        return model

    net = mt.packed(build, 4, 2, example=X, seed=0)
    own = stacked_parameters(net)
    assert not own["norm.weight"].any()
    assert torch.equal(own["head.bias"], torch.full((4, CLASSES), 2.0))
    assert own["first.weight"].shape == (4, 16, INPUTS)
    rows = {tuple(row.tolist()) for model in by_hand(0, 1, build) for row in F.normalize(model.first.weight)}
    member = F.normalize(own["first.weight"][0])
    close = [min(torch.tensor(row).sub(own).abs().max() for row in rows) < 1e-5 for own in member]
    assert all(close), "each unit is one of the built network's, scaled"


def test_mimo_has_a_built_network_for_each_input_and_output() -> None:
    net = mt.mimo(Net, 3, example=X, seed=0)
    built = by_hand(0, 1, Net)[0]
    torch.testing.assert_close(net.network.first.weight[:, :INPUTS], built.first.weight / 3**0.5)
    torch.testing.assert_close(net.network.head.weight[:CLASSES], built.head.weight)
    assert not torch.allclose(net.network.head.weight[:CLASSES], net.network.head.weight[CLASSES : 2 * CLASSES])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: 3, "model must build an nn.Module, got a function that returns a int"),
        (nn.Linear, "model is a function that builds a network, so it must take no arguments"),
        (3, "model must be an nn.Module, or a function that builds one, got int"),
        (lambda kept=[]: kept[0] if kept else kept.append(Net()) or kept[0], "must build a new network in every call"),
    ],
    ids=["a number", "arguments", "no function", "the same"],
)
def test_what_is_no_factory_is_told(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mt.deep_ensemble(model, 3)


def test_every_other_verb_takes_a_factory_once() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    states = [dropping().state_dict() for _ in range(3)]
    for net in (
        mt.mc_dropout(dropping), mt.drop_connect(dropping, 0.1), mt.snapshots(dropping, states),
        mt.swa(dropping, states), mt.swag(dropping, states), mt.subspace(dropping, "random"),
    ):  # fmt: skip
        assert net(X).shape[-2:] == (16, CLASSES)
    smoothed = mt.smooth(lambda: mt.models.resnet18(classes=4))
    assert smoothed(torch.zeros(1, 3, 32, 32)).shape == (1, 4)


def test_lazy_networks_are_asked_to_run_once() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    makes = [*METHODS.values(), lambda m: mt.drop_connect(m, 0.1), lambda m: mt.mc_dropout(m, 0.1, "activation")]
    for make in makes:
        with pytest.raises(ValueError, match="'0.weight' has no shape yet: run the network once before converting it"):
            make(lazy)
