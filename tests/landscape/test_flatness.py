"""Sharpness and variance of the loss, against closed forms and plain loops."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.weight_space.flatness import expected_sharpness, loss_variance, sharpness
from multitudes.networks.seeds import mixed


def quadratic(eigenvalues: list[float]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A loss `1/2 w^T diag(eigenvalues) w` at its minimum."""
    network = nn.Linear(len(eigenvalues), 1, bias=False).double()
    nn.init.zeros_(network.weight)
    x = torch.diag(torch.tensor(eigenvalues).double().sqrt()) * (len(eigenvalues) / 2) ** 0.5
    return network, (x, torch.zeros(len(eigenvalues), 1).double())


def linear(slope: list[float]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A loss `slope . w`."""
    return nn.Linear(len(slope), 1, bias=False).double(), (torch.tensor([slope]).double(), torch.zeros(1, 1))


def identity(prediction: Tensor, target: Tensor) -> Tensor:
    return prediction.mean()


def drawing() -> tuple[mt.Multitude, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = mt.mc_dropout(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)))
    return net, (torch.randn(60, 6), torch.randint(3, (60,)))


def test_sharpness_at_the_minimum_of_a_quadratic_loss_is_half_its_largest_eigenvalue() -> None:
    network, data = quadratic([1.0, 3.0, 0.5])
    found = sharpness(network, data, rho=0.2, steps=40, criterion=F.mse_loss)
    assert found.value == pytest.approx(0.5 * 3.0 * 0.2**2, rel=1e-6)
    assert (found.gains.diff(dim=1) >= -1e-12).all()  # no step descends on a convex loss


def test_sharpness_of_a_linear_loss_is_its_slope() -> None:
    network, data = linear([3.0, 4.0])
    assert sharpness(network, data, rho=0.1, steps=2, criterion=identity).value == pytest.approx(0.5)


def test_sharpness_exceeds_the_best_of_a_random_search() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    data = torch.randn(20, 2), torch.randint(2, (20,))
    found = sharpness(network, data, rho=0.5)
    best = -math.inf
    with torch.no_grad():
        base = F.cross_entropy(network(data[0]), data[1]).item()
        for _ in range(500):
            other = copy.deepcopy(network)
            eps = torch.randn(17)
            nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(network.parameters()) + 0.5 * eps / eps.norm(), other.parameters()
            )
            best = max(best, F.cross_entropy(other(data[0]), data[1]).item() - base)
    assert found.value > best > 0
    assert found.loss == pytest.approx(base, rel=1e-5)


def test_expected_sharpness_of_a_quadratic_loss_is_its_trace_over_the_ball() -> None:
    network, data = quadratic([1.0, 3.0, 0.5])
    found = expected_sharpness(network, data, 0.2, 1500, criterion=F.mse_loss)
    want = 0.5 * 4.5 * 0.2**2 / (3 + 2)  # E eps_i^2 = rho^2 / (n + 2), uniform in a ball of n dimensions
    assert abs(found.value - want) < 4 * found.standard_error
    assert found.standard_error < 0.05 * want


def test_expected_sharpness_of_a_linear_loss_is_the_mean_of_its_positive_half() -> None:
    network, data = linear([3.0, 4.0, 0.0, 0.0])
    found = expected_sharpness(network, data, 0.2, 1500, criterion=identity)
    n = 4
    mean_size = math.gamma(n / 2 + 1) / (math.sqrt(math.pi) * math.gamma((n + 3) / 2))  # E |eps_1| in the unit ball
    assert abs(found.value - 5 * 0.2 * mean_size / 2) < 4 * found.standard_error


def test_expected_sharpness_of_gaussian_losses_is_their_deviation() -> None:
    """Eq. (21), with c = 1 / sqrt(2 pi) for the rectified Gaussian distribution."""
    net, data = drawing()
    found = expected_sharpness(net, data, rho=None, samples=600)
    assert found.value == pytest.approx(found.losses.std().item() / math.sqrt(2 * math.pi), rel=0.1)
    averaged = expected_sharpness(net, data, rho=None, samples=300, draws=8)
    assert averaged.value < found.value / 2  # ensembles flatten: 1 / sqrt(8)


def test_the_variance_of_the_loss_falls_like_one_over_the_draws() -> None:
    net, data = drawing()
    found = loss_variance(net, data, draws=4096)
    assert found.exponent == pytest.approx(-1, abs=0.1)
    assert found.constant == pytest.approx(found.predicted, rel=0.2)
    assert (found.variances.diff() < 0).all()


def test_the_variance_of_the_loss_is_over_separate_ensembles() -> None:
    net, (x, y) = drawing()
    found = loss_variance(net, [(x, y)], sizes=(1, 5), draws=50, seed=3)
    probs = net.predict(x, draws=50, seed=mixed(3, 0)).member_probs.double().numpy()
    for size, variance in zip((1, 5), found.variances.tolist(), strict=True):
        losses = []
        for start in range(0, 50, size):
            mean = probs[start : start + size].mean(0)
            losses.append(-np.log(mean[np.arange(60), y.numpy()]).mean())
        assert variance == pytest.approx(np.var(losses, ddof=1), rel=1e-5)
