"""Networks that write into their input in place: each member or draw would get another input."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt


class Normalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.first(x.sub_(0.5).div_(2)).relu()))


METHODS = [
    lambda model: mt.deep_ensemble(model, members=3),
    lambda model: mt.fuse([model, Normalising()]),
    lambda model: mt.batch_ensemble(model, members=3),
    lambda model: mt.masksembles(model, members=3),
    lambda model: mt.heads(model, members=3),
    lambda model: mt.mc_dropout(model),
    lambda model: mt.drop_connect(model, 0.3),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_network_that_writes_into_its_input_is_refused_or_right(
    method: Callable[[nn.Module], mt.Multitude], gradients: bool
) -> None:
    net = method(Normalising()).eval()
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


def test_an_error_says_that_the_input_was_written() -> None:
    net = mt.deep_ensemble(Normalising(), members=3).eval()
    with pytest.raises(ValueError, match=r"the network writes into its input x in place.*x = x\.clone\(\)"):
        net(torch.randn(5, 4))


def test_one_network_may_write_into_its_input() -> None:
    model = Normalising().eval()
    x = torch.randn(5, 4)
    torch.testing.assert_close(mt.Multitude(model)(x.clone())[0], model(x))


def test_an_input_may_be_written_where_that_changes_nothing_the_second_time() -> None:
    net = mt.deep_ensemble(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)), members=3).eval()
    for _ in range(2):
        x = torch.randn(5, 4)
        want = torch.stack([net.member(index)[1](x.relu()) for index in range(3)])
        torch.testing.assert_close(net(x), want)
