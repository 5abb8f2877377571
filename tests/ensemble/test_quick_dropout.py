"""Dropout with sixteen bits a number: the rate, the scale, and `nn.Dropout` where somebody watches."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.packing.quick_dropout import FEW, QuickDropout
from multitudes.networks.random_functions import STILL, RandomFrom

LARGE = 3 * FEW + 1  # not a multiple of four


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_and_the_mean_of_what_is_left(rate: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(40, LARGE)
    y = QuickDropout(rate)(x)
    zeros = int((y == 0).sum())
    assert stats.binomtest(zeros, y.numel(), rate).pvalue > 1e-4
    assert y[y > 0].unique().tolist() == pytest.approx([1 / (1 - rate)], rel=1e-4)


def test_numbers_are_independent_of_their_neighbours_and_of_the_next_draw() -> None:
    torch.manual_seed(0)
    layer, x = QuickDropout(0.5), torch.ones(LARGE)
    first, second = (layer(x) > 0).double(), (layer(x) > 0).double()
    for other in (second, *(first.roll(shift) for shift in (1, 2, 3, 4, 8, 64))):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1].item()) < 5 / LARGE**0.5
    for lane in range(4):  # each of the four in a word
        assert abs(first[lane::4].mean().item() - 0.5) < 5 * 0.5 / (LARGE / 4) ** 0.5


def test_the_gradient_is_the_mask_and_a_seed_repeats_it() -> None:
    layer, x = QuickDropout(0.3), torch.randn(2, LARGE, requires_grad=True)
    torch.manual_seed(1)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient * x, y)
    torch.manual_seed(1)
    assert torch.equal(layer(x), y)
    assert torch.equal(layer.eval()(x), x)


def test_where_torch_is_watched_it_is_torch_s_own() -> None:
    x, layer = torch.randn(LARGE), QuickDropout(0.4)

    def seeded(module: nn.Module) -> Tensor:
        torch.manual_seed(2)
        return module(x)

    with RandomFrom(STILL):
        assert torch.equal(layer(x), nn.Dropout(0.4)(x))
    drawn = torch.vmap(layer, randomness="different")(torch.ones(3, LARGE))
    assert not torch.equal(drawn[0], drawn[1])
    for module in (QuickDropout(0.0), QuickDropout(1.0)):
        assert torch.equal(seeded(module), seeded(nn.Dropout(module.p)))


def test_methods_take_it_as_dropout() -> None:
    net = mt.mc_dropout(mt.models.mlp(6, 3, hidden=(64,), dropout=0.5))
    p = net.predict(torch.randn(40, 6), draws=20, seed=0)
    assert p.mutual_information.min() > 0
    members = mt.deep_ensemble(mt.models.mlp(6, 3, hidden=(64,), dropout=0.5), 3, seed=0)
    members.runner = "packed"
    x = torch.randn(2000, 6)
    assert not torch.equal(members(x), members(x)) and torch.equal(members.eval()(x), members(x))
