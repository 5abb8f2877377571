"""What validation scores a network by in training, as other libraries compute it."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import log_loss, mean_pinball_loss, mean_squared_error
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

import multitudes as mt
from multitudes.training.fit import fit
from tests.training.test_validation import HELD_X, HELD_Y


def score(net: mt.Multitude, y: Tensor, **options: object) -> float:
    """What validation says of a network whose learning rate is next to nothing."""
    batches = [(HELD_X[:30], y[:30]), (HELD_X[30:], y[30:])]
    return fit(net, [(HELD_X, y)], 1, lr=1e-30, validation=batches, **options)[0].validation


def members(outputs: int, task: str) -> mt.Multitude:
    torch.manual_seed(2)
    return mt.deep_ensemble(nn.Linear(8, outputs), 3, task=task, seed=3)


def test_classes_are_scored_by_the_log_of_the_mean_probability():
    net = members(3, "classification")
    probs = net(HELD_X).detach().double().softmax(-1).mean(0)
    assert score(net, HELD_Y) == pytest.approx(log_loss(HELD_Y, probs, labels=[0, 1, 2]), rel=1e-6)
    assert score(net, HELD_Y, stop_by="error") == score(net, HELD_Y)
    soft = probs.roll(1, 0)
    want = -(soft * probs.log()).sum(1).mean().item()
    assert score(net, soft) == pytest.approx(want, rel=1e-6)


def test_yes_and_no_are_scored_by_the_log_of_the_mean_probability():
    yes = (HELD_Y > 0).long()
    net = members(1, "binary")
    probs = net(HELD_X).sigmoid().mean(0).detach().double()
    assert score(net, yes) == pytest.approx(log_loss(yes, probs[:, 0]), rel=1e-6)
    labels = torch.stack([yes, (HELD_Y == 2).long()], 1)
    net = members(2, "multilabel")
    probs = net(HELD_X).sigmoid().mean(0).detach().double()
    want = (log_loss(labels[:, 0], probs[:, 0]) + log_loss(labels[:, 1], probs[:, 1])) / 2
    assert score(net, labels) == pytest.approx(want, rel=1e-6)


def test_tokens_that_are_ignored_do_not_count():
    torch.manual_seed(0)
    x, y = torch.randint(5, (6, 7)), torch.randint(5, (6, 7))
    y[:, 4:] = -100
    y[0, 1:] = -100
    net = mt.deep_ensemble(nn.Embedding(5, 5), 2, task="tokens", seed=0)
    probs = net(x).softmax(-1).mean(0)
    want = -probs.log().gather(2, y.clamp(min=0)[..., None])[..., 0][y >= 0].mean().item()
    history = fit(net, [(x, y)], 1, lr=1e-30, validation=[(x[:1], y[:1]), (x[1:], y[1:])])
    assert history[0].validation == pytest.approx(want, rel=1e-6)


def test_gaussians_are_scored_by_the_density_of_their_mixture_or_by_the_error_of_its_mean():
    y = HELD_X[:, :2] * 2 - 1
    net = members(4, "gaussian")
    means, raw = net(HELD_X).detach().double().chunk(2, 2)
    parts = Normal(means.movedim(0, -1), (nn.functional.softplus(raw) + 1e-6).sqrt().movedim(0, -1))
    mixture = MixtureSameFamily(Categorical(torch.ones(3, dtype=torch.float64)), parts)
    assert score(net, y) == pytest.approx(-mixture.log_prob(y.double()).mean().item(), rel=1e-6)
    want = math.sqrt(mean_squared_error(y, means.mean(0)))
    assert score(net, y, stop_by="error") == pytest.approx(want, rel=1e-6)


def test_values_are_scored_by_squared_errors_and_quantiles_by_their_pinball_loss():
    y = HELD_X[:, :1] * 2 - 1
    net = members(1, "regression")
    mean = net(HELD_X).mean(0).detach().double()
    assert score(net, y) == pytest.approx(mean_squared_error(y, mean), rel=1e-6)
    assert score(net, y, stop_by="error") == pytest.approx(math.sqrt(mean_squared_error(y, mean)), rel=1e-6)
    net = members(3, "quantiles")
    net.quantiles = (0.1, 0.5, 0.8)
    q = net(HELD_X).mean(0).detach().double()
    want = sum(mean_pinball_loss(y[:, 0], q[:, i], alpha=a) for i, a in enumerate(net.quantiles)) / 3
    assert score(net, y[:, 0]) == pytest.approx(want, rel=1e-6)


def test_validation_may_have_weights():
    weight = torch.rand(40, generator=torch.Generator().manual_seed(5))
    net = members(3, "classification")
    probs = net(HELD_X).detach().double().softmax(-1).mean(0)
    batches = [(HELD_X[:30], HELD_Y[:30], weight[:30]), (HELD_X[30:], HELD_Y[30:], weight[30:])]
    got = fit(net, [(HELD_X, HELD_Y)], 1, lr=1e-30, validation=batches)[0].validation
    assert got == pytest.approx(log_loss(HELD_Y, probs, sample_weight=weight, labels=[0, 1, 2]), rel=1e-6)
