"""Paths between optima: quadratic losses have closed forms, trained networks have barriers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.landscape.weight_space.path import Path, tunnel
from multitudes.training.batch_norm import Batches, statistics
from multitudes.training.recorder import flat_weights, unflattened


def spirals(count: int = 300) -> tuple[Tensor, Tensor]:
    """Three arms, in order."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat_interleave(count // 3)
    r = torch.linspace(0.1, 1, count // 3).repeat(3)
    angle = 4 * r + 2.1 * y + 0.1 * torch.randn(count, generator=generator)
    return torch.stack([r * angle.cos(), r * angle.sin()], 1), y


def trained(seed: int, normed: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(2, 24), nn.BatchNorm1d(24) if normed else nn.Identity(), nn.ReLU(), nn.Linear(24, 24)]
    network = nn.Sequential(*layers, nn.ReLU(), nn.Linear(24, 3))
    x, y = spirals()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(250):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval()


@pytest.fixture(scope="module")
def optima() -> tuple[nn.Module, nn.Module]:
    return trained(0), trained(1)


@pytest.fixture(scope="module")
def found(optima) -> Path:
    return tunnel(optima[0], *optima, spirals())


# A quadratic loss -------------------------------------------------------------------------------------------


def regression() -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Data of a linear regression, its solution, and the Hessian of the mean squared error."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.5, 1.5, 1.0])
    best = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    return (x, (x @ best)[:, None]), best, 2 * x.T @ x / len(x)


def linear(weights: Tensor) -> nn.Module:
    network = nn.Linear(4, 1, bias=False).double()
    network.weight.data.copy_(weights[None])
    return network


A, B = torch.tensor([2.0, 0.0, -1.0, 1.0]).double(), torch.tensor([-1.0, 1.0, 1.0, 3.0]).double()


def test_without_segments_each_point_minimises_the_loss_in_its_hyperplane():
    data, best, hessian = regression()
    options = {"points": 5, "steps": 400, "lr": 0.05, "criterion": F.mse_loss}
    path = tunnel(linear(A), linear(A), linear(B), data, between=False, **options)
    way = (B - A) / (B - A).norm()
    inverse = torch.linalg.inv(hessian)
    for t, weights in zip(path.t[2:-1:2], path.weights[2:-1:2], strict=True):
        offset = way @ (A + t * (B - A) - best)  # how far the hyperplane is from the solution
        want = best + inverse @ way * offset / (way @ inverse @ way)
        torch.testing.assert_close(weights, want, atol=2e-3, rtol=0)


@pytest.mark.slow
def test_a_tunnel_minimises_the_mean_loss_on_its_segments():
    data, best, hessian = regression()
    options = {"points": 4, "steps": 1500, "lr": 0.05, "criterion": F.mse_loss}
    found, alone = (
        tunnel(linear(A), linear(A), linear(B), data, between=way, **options).weights for way in (True, False)
    )

    def mean_loss(first: Tensor, second: Tensor) -> float:
        """Over a line from 0 to 1 the means of (1-u)^2, u (1-u) and u^2 are 1/3, 1/6 and 1/3."""
        off = torch.stack([A, first, second, B]) - best
        products = off @ hessian @ off.T / 2
        squares, neighbours = products.diagonal(), products.diagonal(1)
        return float((squares[:-1] + squares[1:] + neighbours).sum() / 9)

    # Two points are free within the hyperplanes, base + N move, with N normal to the way. Where the slope is zero:
    normal = torch.linalg.svd((B - A)[None])[2][1:].T
    inner = normal.T @ hessian @ normal
    bases = [torch.lerp(A, B, share) - best for share in (1 / 3, 2 / 3)]
    pull = [4 * bases[0] + A - best + bases[1], 4 * bases[1] + bases[0] + B - best]
    system = torch.cat([torch.cat([4 * inner, inner], 1), torch.cat([inner, 4 * inner], 1)])
    moves = torch.linalg.solve(system, -torch.cat([normal.T @ hessian @ each for each in pull])).view(2, 3)
    least = mean_loss(*(best + base + normal @ move for base, move in zip(bases, moves, strict=True)))
    straight = mean_loss(best + bases[0], best + bases[1]) - least
    assert mean_loss(found[2], found[4]) - least < 0.002 * straight
    assert mean_loss(alone[2], alone[4]) - least > 0.02 * straight  # the lowest points are not the lowest lines


# Trained networks -------------------------------------------------------------------------------------------


def test_the_tunnel_removes_most_of_the_barrier(found):
    assert found.linear_barrier > 0.3
    assert found.barrier < 0.5 * found.linear_barrier
    assert found.scores.loss.max() < 0.5 * found.linear.loss.max()


def test_a_tunnel_is_scored_at_points_and_midpoints(found):
    torch.testing.assert_close(found.weights[1::2], (found.weights[:-1:2] + found.weights[2::2]) / 2)
    assert found.t.tolist() == pytest.approx([place / 16 for place in range(17)])


def test_the_ends_are_not_changed(optima, found):
    for index, network in ((0, optima[0]), (-1, optima[1])):
        x, y = spirals()
        assert torch.equal(found.weights[index], flat_weights(network))
        assert found.scores.loss[index].item() == found.linear.loss[index].item()
        assert found.scores.loss[index].item() == pytest.approx(F.cross_entropy(network(x), y).item(), rel=1e-6)
    assert found.scores.agreement[0, 0] == found.scores.agreement[-1, 1] == 1


def test_the_tunnel_stays_in_the_hyperplanes(optima, found):
    first, last = found.weights[0].double(), found.weights[-1].double()
    way = last - first
    share = (found.weights.double() - first) @ way / (way @ way)
    torch.testing.assert_close(share, found.t, atol=1e-5, rtol=0)
    assert (found.weights[8] - (first + last) / 2).norm() > 0.1


def test_the_losses_are_those_of_the_weights(optima, found):
    x, y = spirals()
    network = copy.deepcopy(optima[0])
    with torch.no_grad():
        for index in range(len(found.t)):
            network.load_state_dict(found.state(index, network), strict=False)
            answer = network(x)
            assert found.scores.loss[index].item() == pytest.approx(F.cross_entropy(answer, y).item(), rel=1e-4)
            share = (answer.argmax(1) == optima[0](x).argmax(1)).double().mean()
            assert found.scores.agreement[index, 0].item() == pytest.approx(share.item(), abs=0.005)
            middle = torch.lerp(found.weights[0], found.weights[-1], float(found.t[index]))
            network.load_state_dict(unflattened(middle, network), strict=False)
            loss = F.cross_entropy(network(x), y).item()
            assert found.linear.loss[index].item() == pytest.approx(loss, rel=1e-4)


def test_batch_norm_statistics_are_recomputed_before_measuring():
    a, b, (x, y) = trained(0, normed=True), trained(1, normed=True), spirals()
    path = tunnel(a, a, b, (x, y), points=5, steps=60)
    assert path.scores.loss[-1].item() == pytest.approx(F.cross_entropy(b(x), y).item(), rel=1e-6)
    network = copy.deepcopy(a)
    network.load_state_dict(path.state(4, network), strict=False)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    network.load_state_dict(statistics(network, {}, Batches((x[order], y[order]))), strict=False)
    assert path.scores.loss[4].item() == pytest.approx(F.cross_entropy(network(x), y).item(), rel=1e-4)
