"""Subspaces, weight averages and SWAG: weights drawn around a trajectory."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.decomposition import PCA
from torch import Tensor, nn

import multitudes as mt
from multitudes.methods.subspace import subspace, swa, swag
from multitudes.training.recorder import Recorder
from tests.zoo.cases import stacked_parameters

WAY = np.array(  # a hand-made trajectory of five weights
    [
        [1.0, 0.0, -2.0, 0.5, 3.0],
        [1.5, 0.3, -1.0, 0.4, 3.0],
        [0.5, 0.9, -1.5, 0.6, 3.0],
        [2.0, 0.6, -3.0, 0.1, 3.0],
        [1.2, 0.1, -2.5, 0.9, 3.0],
        [0.9, 0.7, -2.2, 0.2, 3.0],
    ]
)
DRAWS = 1500


def line() -> nn.Linear:
    """A network whose answers to the unit vectors are its weights."""
    return nn.Linear(5, 1, bias=False).double().eval()


def states(way: np.ndarray = WAY) -> list[dict[str, Tensor]]:
    return [{"weight": torch.tensor(row)[None]} for row in way]


def drawn_weights(net: mt.Multitude, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    with torch.no_grad():
        return net(torch.eye(5, dtype=torch.float64), draws=draws, seed=seed)[..., 0].numpy()


def assert_moments(weights: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """Equal to within five standard errors of normal samples."""
    n, variance = len(weights), np.diag(covariance)
    assert (np.abs(weights.mean(0) - mean) <= 5 * np.sqrt(variance / n) + 1e-12).all()
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / n)
    assert (np.abs(np.cov(weights.T) - covariance) <= 5 * error + 1e-12).all()


def trained_like(build: Callable[[], nn.Module], count: int = 4, seed: int = 0) -> tuple[nn.Module, list[dict]]:
    """A network, and checkpoints of others of its kind, as if they lay on its way."""
    torch.manual_seed(seed)
    others = [build() for _ in range(count)]
    return build().eval(), [other.state_dict() for other in others]


def normed() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 4)).train()
    with torch.no_grad():
        net(torch.randn(20, 3) * 3 + 1)
    return net


CONVERSIONS: dict[str, Callable[..., mt.Multitude]] = {
    "swag": swag,
    "diagonal": lambda model, checkpoints, **o: subspace(model, "diagonal", checkpoints, **o),
    "low_rank": lambda model, checkpoints, **o: subspace(model, "low_rank", checkpoints, rank=2, **o),
    "random": lambda model, checkpoints, **o: subspace(model, "random", checkpoints, **o),
    "dropout": lambda model, checkpoints, **o: subspace(model, "dropout", checkpoints, **o),
}


def by_hand(way: np.ndarray, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of SWAG, as algorithm 1 of the paper collects them."""
    mean, second, columns = np.zeros(5), np.zeros(5), []
    for n, theta in enumerate(way):
        mean = (n * mean + theta) / (n + 1)
        second = (n * second + theta**2) / (n + 1)
        columns.append(theta - mean)
    d = np.array(columns[-rank:]).T
    return mean, scale * (np.diag(second - mean**2) + d @ d.T / (rank - 1))


# -- the formulas ------------------------------------------------------------------------------------------


def test_the_diagonal_gaussian_has_the_trajectorys_mean_and_variances() -> None:
    net = subspace(line(), "diagonal", states())
    assert_moments(drawn_weights(net), WAY.mean(0), np.diag(WAY.var(0)))
    twice = subspace(line(), "diagonal", states(), scale=2.0)
    assert_moments(drawn_weights(twice), WAY.mean(0), 4 * np.diag(WAY.var(0)))


@pytest.mark.parametrize("rank", [1, 3])
def test_the_low_rank_gaussian_is_the_inverse_transform_of_a_pca(rank: int) -> None:
    net = subspace(line(), "low_rank", states(), rank=rank)
    pca = PCA(rank).fit(WAY)
    weights = drawn_weights(net)
    assert_moments(weights, WAY.mean(0), pca.components_.T @ pca.components_)
    z = pca.transform(weights)
    np.testing.assert_allclose(pca.inverse_transform(z), weights, atol=1e-12)
    assert all(stats.kstest(column, "norm").pvalue > 1e-3 for column in z.T)


def test_random_draws_have_uniform_directions_and_distances() -> None:
    net = subspace(line(), "random", states())
    steps = drawn_weights(net) - WAY[-1]
    distance = np.linalg.norm(steps, axis=1)
    assert stats.kstest(distance / 10, "uniform").pvalue > 1e-3
    direction = steps / distance[:, None]
    # A coordinate of a random direction in n dimensions: its square is Beta(1/2, (n - 1) / 2).
    assert all(stats.kstest(column**2, stats.beta(0.5, 2).cdf).pvalue > 1e-3 for column in direction.T)
    assert np.abs(np.cov(direction.T) - np.eye(5) / 5).max() < 0.03
    near = drawn_weights(subspace(line(), "random", states(), scale=0.5), draws=200) - WAY[-1]
    assert np.linalg.norm(near, axis=1).max() < 0.5


def test_dropout_zeroes_weights_of_the_optimum_and_keeps_their_mean() -> None:
    weights = drawn_weights(subspace(line(), "dropout", states(), p=0.3))
    kept = weights != 0
    np.testing.assert_allclose(weights, kept * WAY[-1] / 0.7, atol=1e-12)
    assert_moments(weights, WAY[-1], np.diag(WAY[-1] ** 2 * 0.3 / 0.7))
    assert stats.binomtest(int((~kept).sum()), kept.size, 0.3).pvalue > 1e-3


def test_each_draw_can_have_its_own_dropout_probability() -> None:
    weights = drawn_weights(subspace(line(), "dropout", states(), p=(0.2, 0.6)))
    kept = [row != 0 for row in weights if row.any()]
    p = np.array([1 - (WAY[-1][k] / row[k])[0] for k, row in zip(kept, weights[weights.any(1)], strict=True)])
    assert 0.2 <= p.min() < 0.22 and 0.58 < p.max() <= 0.6
    # All n weights are zero, and p is not seen, with probability p^n.
    grid = np.linspace(0.2, 0.6, 4001)
    assert abs(p.mean() - np.average(grid, weights=1 - grid**5)) < 5 * p.std() / np.sqrt(len(p))


@pytest.mark.parametrize(("rank", "scale"), [(3, 0.5), (6, 0.5), (2, 1.0)])
def test_swag_draws_have_the_mean_and_the_covariance_of_the_formula(rank: int, scale: float) -> None:
    net = swag(line(), states(), rank=rank, scale=scale)
    mean, covariance = by_hand(WAY, rank, scale)
    assert_moments(drawn_weights(net), mean, covariance)
    factor, std = net.trajectory_factor.numpy(), net.trajectory_std.numpy()
    np.testing.assert_allclose(factor.T @ factor + np.diag(std**2), covariance, atol=1e-12)


def test_swag_uses_moments_of_checkpoints_that_the_recorder_dropped() -> None:
    model = line()
    recorder = Recorder(model, keep=3)
    for state in states():
        model.load_state_dict(state)
        recorder.record()
    model.reset_parameters()
    mean, covariance = by_hand(WAY, 3, 0.5)
    assert_moments(drawn_weights(swag(model, recorder)), mean, covariance)
    np.testing.assert_allclose(swa(model, recorder).member(0).weight.detach()[0], WAY.mean(0))
    kept = subspace(model, "diagonal", recorder)
    np.testing.assert_allclose(kept.trajectory_std, WAY[-3:].std(0))
    np.testing.assert_allclose(kept.weight.detach()[0], WAY[-3:].mean(0))


def test_zero_draws_are_the_center() -> None:
    eye = torch.eye(5, dtype=torch.float64)
    for kind in ("random", "dropout", "diagonal", "low_rank"):
        net = subspace(line(), kind, states(), rank=2)
        centre = WAY[-1] if kind in ("random", "dropout") else WAY.mean(0)
        np.testing.assert_allclose(net(eye, draws=0)[0, :, 0].detach(), centre)
        np.testing.assert_allclose(net.weight[0].detach(), centre)
    np.testing.assert_allclose(swag(line(), states())(eye, draws=0)[0, :, 0].detach(), WAY.mean(0))


def test_every_weight_of_a_deep_network_gets_its_own_deviation() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    for moving in model.state_dict():
        checkpoints = [{k: v + i * (k == moving) for k, v in model.state_dict().items()} for i in range(3)]
        for net in (swag(model, checkpoints), subspace(model, "diagonal", checkpoints)):
            members = net.networks(4, seed=0)
            for name, stacked in stacked_parameters(members).items():
                assert bool((stacked.std(0) > 0).all()) == (name == moving)


# -- the floor ---------------------------------------------------------------------------------------------


class Sign(nn.Module):
    """Right on every input where its weight is above 0, and wrong on every one where it is below."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([-self.weight * x, self.weight * x], 1)


ONES = (torch.ones(4, 1), torch.ones(4, dtype=torch.int64))
AROUND_HALF = [{"weight": torch.tensor([w])} for w in (-0.5, 1.5)]  # mean 0.5, deviation 1


def test_draws_below_the_floor_are_rejected() -> None:
    net = subspace(Sign().eval(), "diagonal", AROUND_HALF, data=ONES, floor=1.0, tries=50)
    weights = net(torch.ones(1, 1), draws=1000, seed=0)[:, 0, 1].detach().numpy()
    assert stats.kstest(weights, stats.truncnorm(-0.5, np.inf, loc=0.5).cdf).pvalue > 1e-3
    torch.testing.assert_close(net.networks(5, seed=0)(torch.ones(1, 1)), net(torch.ones(1, 1), draws=5, seed=0))
    free = subspace(Sign().eval(), "diagonal", AROUND_HALF)(torch.ones(1, 1), draws=1000, seed=0)[:, 0, 1]
    assert stats.kstest(free.detach().numpy(), stats.norm(loc=0.5).cdf).pvalue > 1e-3


def test_if_all_tries_fail_the_center_is_used_with_a_warning() -> None:
    net = subspace(Sign().eval(), "diagonal", AROUND_HALF, data=ONES, floor=1.0, tries=2)
    with pytest.warns(UserWarning, match="no draw reached accuracy 1 in 2 tries, so the center is used"):
        weights = net(torch.ones(1, 1), draws=1000, seed=0)[:, 0, 1].detach()
    fallen_back = int((weights == 0.5).sum())
    assert stats.binomtest(fallen_back, 1000, stats.norm.cdf(-0.5) ** 2).pvalue > 1e-3
    assert weights.min() > 0


def test_a_floor_needs_labels_and_a_centre_above_it() -> None:
    with pytest.raises(ValueError, match=r"floor=0.8 needs data=\(x, y\) to measure the accuracy on"):
        subspace(Sign(), "random", floor=0.8)
    with pytest.raises(ValueError, match="floor=0.8 is above the accuracy of the center on data, 0.000"):
        subspace(Sign(-1.0), "random", floor=0.8, data=ONES)
    with pytest.raises(ValueError, match="accuracy needs classes as targets"):
        subspace(Sign(1.0), "random", floor=0.8, data=ONES[0])


def test_the_floor_is_measured_with_the_draws_own_statistics() -> None:
    class Normed(Sign):
        def __init__(self) -> None:
            super().__init__(1.0)
            self.norm = nn.BatchNorm1d(2, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(super().forward(x))

    # Only with statistics of its own does a weight, whatever its size, tell -1 from 1.
    data = torch.tensor([[-1.0], [1.0]]).repeat(5, 1), torch.tensor([0, 1]).repeat(5)
    checkpoints = [Normed().state_dict() | {"norm.running_mean": torch.tensor([0.0, 50.0])} for _ in range(2)]
    net = subspace(Normed().eval(), "random", checkpoints, scale=0.5, data=data, floor=1.0, tries=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (net(data[0], draws=20).argmax(2) == data[1]).all()


# -- wrong input -------------------------------------------------------------------------------------------


def test_bad_arguments_are_errors() -> None:
    model, few = line(), states()[:1]
    for wrong, sentence in (
        (lambda: subspace(model, "pca", few), "kind must be one of random, dropout, diagonal, low_rank, got 'pca'"),
        (lambda: subspace(model, "diagonal"), "kind='diagonal' needs checkpoints"),
        (lambda: subspace(model, "diagonal", few), "checkpoints must be 2 or more, got 1"),
        (lambda: subspace(model, "low_rank", states()[:5]), "rank=5 needs 6 checkpoints or more, got 5"),
        (lambda: subspace(model, "low_rank", states()[:1] * 4, rank=2), "the checkpoints span 0 directions only"),
        (lambda: subspace(model, "low_rank", states(), rank=0), "rank must be a whole number, 1 or more, got 0"),
        (lambda: subspace(model, "dropout", few, p=1.0), r"p must be a probability in \[0, 1\)"),
        (lambda: subspace(model, "dropout", few, p=(0.5, 0.1)), r"p must be a probability in \[0, 1\)"),
        (lambda: subspace(model, "dropout", few, p="0.1"), r"p must be a probability in \[0, 1\)"),
        (lambda: subspace(model, "random", few, scale=0), "scale must be above 0, got 0"),
        (lambda: subspace(model, "random", few, floor=1.5, data=1), "floor must be 0 or more and at most 1, got 1.5"),
        (lambda: subspace(model, "random", few, tries=0), "tries must be a whole number, 1 or more, got 0"),
        (lambda: subspace(model, "random", [{}]), r"checkpoints\[0\] does not fit the model: 'weight' is missing"),
        (lambda: swag(model, few), "checkpoints must be 2 or more, got 1"),
        (lambda: swag(model, states(), rank=7), "rank must be 2 to 6, the number of checkpoints, got 7"),
        (lambda: swag(model, states(), rank=1), "rank must be 2 to 6, the number of checkpoints, got 1"),
        (lambda: swag(model, states(), scale=-1), "scale must be above 0, got -1"),
        (lambda: swag(model, states(WAY * np.nan)), r"checkpoints\[0\] holds NaN or infinite weights in 'weight'"),
        (lambda: swa(model, states(WAY + np.inf)), r"checkpoints\[0\] holds NaN or infinite weights in 'weight'"),
        (lambda: swag(nn.ReLU(), [{}, {}]), "has no weights to draw"),
        (lambda: swag("model", states()), "model must be an nn.Module, or a function that builds one, got str"),
        (lambda: swag(swag(model, states()), states()), "model already draws its weights around a trajectory"),
        (lambda: swag(mt.batch_ensemble(model, 2), states()), "model is a multitude of members already"),
        (lambda: swa(model, []), "checkpoints must be 1 or more, got 0"),
        (lambda: mt.deep_ensemble(swag(model, states())), "cannot be reset"),
        (lambda: swag(model, states()).networks(0), "draws must be a whole number, 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            wrong()
