"""`explain` combines analyses of a few networks on one page."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multitudes as mt
from multitudes.landscape import explain, hessian_spectrum, similarity
from multitudes.landscape.figures import coloured

torch.manual_seed(0)
X = torch.randn(96, 4)
Y = (X[:, 0] * X[:, 1] > 0).long()


def network(norm: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(1)
    net = mt.deep_ensemble(network(), 3, seed=0)
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        net.loss(X, Y).backward()
        optimizer.step()
    return net.eval()


@pytest.fixture(scope="module")
def why(trained):
    return explain(trained, (X, Y), points=5, batches=2)


def test_its_parts_are_the_single_analyses(trained, why):
    assert torch.equal(why.similarity.disagreement, similarity(trained, X).disagreement)
    accuracy = torch.stack([(trained.member(i)(X).argmax(1) == Y).double().mean() for i in range(3)])
    torch.testing.assert_close(why.diversity.accuracy, accuracy)
    losses = torch.stack([F.cross_entropy(trained.member(i)(X), Y) for i in range(3)])
    torch.testing.assert_close(why.plane.scores.loss.float(), losses.detach())
    assert why.plane.loss.shape == (5, 5)
    first = explain(trained, (X[:32], Y[:32]), points=2, batches=1).spectrum
    alone = hessian_spectrum(trained.member(0), (X[:32], Y[:32]), 1, batch_size=32)
    torch.testing.assert_close(first.largest, alone.largest, rtol=1e-3, atol=0)


def test_two_networks_have_a_line_between_them_and_no_map(trained):
    why = explain(
        {"left": trained.member(0), "right": trained.member(1)}, [(X[:50], Y[:50]), (X[50:], Y[50:])], points=4
    )
    assert why.plane.loss.shape == (4,) and why.map is None
    assert set(why.figures()) == {"similarity", "diversity", "plane", "spectrum"}


def test_batch_norm_statistics_are_recomputed():
    nets = [network(norm=True).train() for _ in range(2)]
    for net in nets:
        for _ in range(20):
            net(X)
    states = [copy.deepcopy(net.state_dict()) for net in nets]
    why = explain(nets, (X, Y), points=3, batches=1)
    assert bool(why.plane.loss.isfinite().all())
    for net, state in zip(nets, states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items()) and net.training


def test_networks_at_chance_have_no_diversity_plane():
    wrong = [nn.Linear(4, 2) for _ in range(2)]
    rare = int((Y == 1).double().mean() < 0.5)
    for scale, net in enumerate(wrong, 1):
        nn.init.zeros_(net.weight)
        net.bias.data = scale * F.one_hot(torch.tensor(rare), 2).float()
    why = explain(wrong, (X, Y), points=2, batches=1)
    assert why.diversity is None and "diversity" not in why.figures()


def test_the_page_has_every_figure_and_works_offline(why, tmp_path):
    page = why.save(tmp_path / "why.html").read_text()
    assert page.count("plotly-graph-div") >= 5 and "<script src=" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["why.html"]


# -- numbers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regression():
    """Three members that predict a mean and a variance of the sum of the inputs, and the targets `[N, 1]`."""
    torch.manual_seed(2)
    net = mt.deep_ensemble(network(), 3, seed=0, task="gaussian")
    y = X.sum(1, keepdim=True)
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        net.loss(X, y).backward()
        optimizer.step()
    return net.eval(), y


def test_networks_that_predict_numbers_are_compared_by_their_means_and_variances(regression):
    net, y = regression
    why = explain(net, (X, y), points=3, batches=1)
    ours = [torch.distributions.Normal(*_moments(net.member(index)(X))) for index in range(3)]
    distance = (ours[0].mean - ours[1].mean).square().mean().sqrt()
    assert why.similarity.disagreement[0, 1] == pytest.approx(float(distance), rel=1e-5)
    kl = torch.distributions.kl_divergence
    both = (kl(ours[0], ours[1]) + kl(ours[1], ours[0])).mean() / 2
    assert why.similarity.divergence[0, 1] == pytest.approx(float(both), rel=1e-4)
    assert why.similarity.divergence[1, 1] == 0
    losses = torch.stack([mt.gaussian_nll(net.member(index)(X), y) for index in range(3)])
    torch.testing.assert_close(why.plane.scores.loss.float(), losses.detach())
    assert why.diversity is None and why.map is not None
    assert set(why.figures()) == {"similarity", "map", "plane", "spectrum"}


def _moments(answer):
    mean, raw = answer.detach().chunk(2, 1)
    return mean, (F.softplus(raw) + 1e-6).sqrt()


def test_the_colour_scale_of_a_negative_loss_starts_at_its_minimum():
    shown, scale = coloured(torch.tensor([-3.0, 6.0]), "loss")
    assert shown.tolist() == [0.0, 1.0]
    assert scale["colorbar"]["title"] == "log10 (1 + loss - lowest)"
    assert coloured(torch.tensor([1.0, 100.0]), "loss")[0].tolist() == [0.0, 2.0]


def test_networks_of_two_tasks_are_not_compared(regression, trained):
    with pytest.raises(ValueError, match="solutions must have one task, got classification and gaussian"):
        explain([regression[0], trained], (X, Y))
