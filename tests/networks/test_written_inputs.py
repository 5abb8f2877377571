"""Networks that modify their input in place, which would change the input of other members or draws."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import multitudes as mt
from tests.zoo.of_parts import Of


def normalizing() -> nn.Module:
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    return Of(lambda net, x: net.body(x.sub_(0.5).div_(2)), body=body)


METHODS = [
    lambda model: mt.deep_ensemble(model, members=3),
    lambda model: mt.batch_ensemble(model, members=3),
    lambda model: mt.masksembles(model, members=3),
    lambda model: mt.heads(model, members=3),
    lambda model: mt.mc_dropout(model),
    lambda model: mt.drop_connect(model, 0.3),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_network_that_modifies_its_input_is_refused_or_right(
    method: Callable[[nn.Module], mt.Multitude], gradients: bool
) -> None:
    net = method(normalizing()).eval()
    members = [net.member(index) for index in range(net.members)]
    for _ in range(3):
        x = torch.randn(5, 4)
        with torch.set_grad_enabled(gradients):
            try:
                predictions = net(x.clone())
            except ValueError as refusal:
                assert re.search(r"writes into its input.*x\.clone\(\)", str(refusal))
            else:
                assert len(predictions) == net.members
                torch.testing.assert_close(predictions, torch.stack([member(x.clone()) for member in members]))


def test_one_network_may_modify_its_input_and_members_may_not() -> None:
    model = normalizing().eval()
    with pytest.raises(ValueError, match=r"the network writes into its input x in place.*x = x\.clone\(\)"):
        mt.deep_ensemble(model, members=3).eval()(torch.randn(5, 4))
    x = torch.randn(5, 4)
    torch.testing.assert_close(mt.Multitude(model)(x.clone())[0], model(x))


def test_an_idempotent_change_of_the_input_is_allowed() -> None:
    net = mt.deep_ensemble(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)), members=3).eval()
    for _ in range(2):
        x = torch.randn(5, 4)
        want = torch.stack([net.member(index)[1](x.relu()) for index in range(3)])
        torch.testing.assert_close(net(x), want)
