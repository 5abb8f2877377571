"""Adaptive draws: each input gets as many as its prediction needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.draws.adaptive import schedule
from tests.zoo.of_parts import Of


def test_counts_double_up_to_the_maximum() -> None:
    for most in range(2, 300):
        counts = schedule(most)
        assert counts[-1] <= most < 2 * counts[-1] or counts == [most]
        assert counts[0] >= min(8, most)
        assert all(b == 2 * a for a, b in pairwise(counts))


def uneven() -> tuple[mt.Multitude, Tensor]:
    """Inputs whose predictions vary from hardly to wildly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
    return mt.mc_dropout(model).eval(), torch.randn(40, 6) * torch.logspace(-2, 1, 40)[:, None]


@pytest.fixture(scope="module")
def drawn() -> tuple[mt.Multitude, Tensor, mt.Predictive]:
    net, x = uneven()
    return net, x, net.predict(x, draws="auto", tolerance=0.03, max_draws=400, seed=5)


def test_adaptive_draws_stop_where_the_standard_error_is_small_enough(drawn) -> None:
    net, x, p = drawn
    assert p.draws.shape == (40,)
    assert p.draws.min() < 20
    assert p.draws.max() > 100
    many = net.predict(x, draws=800, seed=5).member_probs
    for i in range(40):
        took = int(p.draws[i])
        error = many[:took, i].std(0).max() / math.sqrt(took)
        assert error < 0.05 or took == schedule(400)[-1]  # its own draws, where batches are cut, are others
        assert (p.probs[i] - many[:, i].mean(0)).abs().max() < 0.2


def test_repeated_draws_change_no_quantity(drawn) -> None:
    net, x, p = drawn
    first = p.draws == schedule(400)[0]  # these saw the whole batch, so their draws are those of a fixed count
    want = net.predict(x, draws=schedule(400)[0], seed=5)[first]
    for quantity in ("probs", "entropy", "mutual_information", "variance"):
        torch.testing.assert_close(getattr(p[first], quantity), getattr(want, quantity), rtol=1e-4, atol=1e-6)


def test_adaptive_draws_are_repeatable_and_batched(drawn) -> None:
    net, x, p = drawn
    again = net.predict(x, draws="auto", tolerance=0.03, max_draws=400, seed=5)
    assert torch.equal(p.probs, again.probs)
    assert mt.Predictive.concat([p, again]).draws.shape == (80,)
    assert torch.equal(p[3:7].draws, p.draws[3:7])
    assert mt.predict(net, x, batch_size=16, draws="auto", tolerance=0.03).draws.shape == (40,)


def test_disagreement_of_members_needs_no_more_draws() -> None:
    net, x = uneven()
    still = mt.deep_ensemble(net, 4).eval().predict(x * 1e-4, draws="auto", tolerance=0.01, seed=1)
    assert (still.draws == schedule(200)[0]).all()


@pytest.mark.parametrize("options", [{"tolerance": 0}, {"tolerance": "small"}, {"max_draws": 1}, {"max_draws": 2.5}])
def test_adaptive_arguments_are_checked(options: dict[str, object]) -> None:
    net, x = uneven()
    with pytest.raises(ValueError, match=next(iter(options))):
        net.predict(x, draws="auto", **options)


@pytest.mark.parametrize("mix", [lambda x: x.softmax(0), lambda x: x.cumsum(0)], ids=["all rows", "earlier rows"])
def test_networks_that_mix_rows_are_refused_even_after_a_single_row(mix: Callable[[Tensor], Tensor]) -> None:
    net = mt.mc_dropout(Of(lambda net, x: mix(net.body(x)), body=nn.Sequential(nn.Linear(3, 3), nn.Dropout()))).eval()
    options = {"draws": "auto", "tolerance": 0.5, "task": "regression"}
    net.predict(torch.randn(1, 3), **options)
    with pytest.raises(ValueError, match="may depend on the other"):
        net.predict(torch.randn(4, 3), **options)


@pytest.mark.filterwarnings("ignore:vmap cannot run")
def test_a_network_that_modifies_its_input_is_refused_unless_that_is_idempotent() -> None:
    def writing(write: Callable[[Tensor], Tensor]) -> mt.Multitude:
        body = nn.Sequential(nn.Dropout(), nn.Linear(3, 3))
        return mt.mc_dropout(Of(lambda net, x: net.body(write(x)), body=body)).eval()

    for rows in (1, 4):
        with pytest.raises(ValueError, match=r"writes into its input|may depend on the other"):
            writing(lambda x: x.add_(1)).predict(torch.ones(rows, 3), draws="auto", task="regression")
    net = writing(torch.relu_)
    assert net.predict(torch.randn(4, 3), draws="auto", task="regression").draws.shape == (4,)
