"""Directions in weight space, against NumPy loops, scikit-learn and the conventions of Li et al."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import multitudes as mt
from multitudes.landscape.directions import Frame, between, dropped, filter_normalised, principal, random_direction
from multitudes.training.recorder import flat_weights, unflattened, weights_of


class Everything(nn.Module):
    """Layers whose filters lie in different places, and parameters that are none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(6, 8, 2, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.layer_norm = nn.LayerNorm([4, 4])
        self.fc = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(5))


def filters(name: str, weight: np.ndarray) -> list[np.ndarray]:
    """The filters of each layer above, one by one: what makes one output channel."""
    if name == "up.weight":  # [6 inputs, 4 outputs of each of 2 groups, ...]: inputs 0 to 2 make outputs 0 to 3
        return [weight[3 * group : 3 * group + 3, out] for group in range(2) for out in range(4)]
    return list(weight)


def test_filter_normalised_directions_have_the_filter_norms_of_the_weights():
    torch.manual_seed(0)
    network = Everything()
    direction = random_direction(network, seed=1)
    scaled = unflattened(filter_normalised(direction, network), network)
    plain = unflattened(direction, network)
    for name in ("conv.weight", "up.weight", "fc.weight"):
        theta = weights_of(network)[name].detach().numpy()
        pairs = zip(*(filters(name, w) for w in (theta, scaled[name].numpy(), plain[name].numpy())), strict=True)
        for own, new, old in pairs:
            assert np.linalg.norm(new) == pytest.approx(np.linalg.norm(own), rel=1e-5)
            cosine = (new * old).sum() / np.linalg.norm(new) / np.linalg.norm(old)
            assert cosine == pytest.approx(1, abs=1e-5)


def test_biases_norms_and_lone_vectors_do_not_move():
    network = Everything()
    scaled = unflattened(filter_normalised(random_direction(network), network), network)
    still = {name for name, part in scaled.items() if not part.any()}
    assert still == set(scaled) - {"conv.weight", "up.weight", "fc.weight"}


def test_a_filter_that_does_not_move_stays():
    network = nn.Linear(2, 2, bias=False)
    scaled = filter_normalised(torch.tensor([0.0, 0, 1, 0]), network)
    assert scaled.isfinite().all() and not scaled[:2].any()


def test_a_seed_gives_a_random_direction_again():
    network = nn.Linear(100, 100)
    first = random_direction(network, seed=3)
    assert torch.equal(first, random_direction(network, seed=3))
    assert not torch.equal(first, random_direction(network, seed=4))
    assert abs(first.std().item() - 1) < 0.05


def test_between_leads_from_one_solution_to_another():
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    want = flat_weights(b) - flat_weights(a)
    assert torch.equal(between(a, b), want)
    assert torch.equal(between(a.state_dict(), b), want)
    assert torch.equal(between(a.state_dict(), b.state_dict(), network=a), want)
    with pytest.raises(ValueError, match="pass the network that they are of as network="):
        between(a.state_dict(), b.state_dict())


def test_principal_directions_are_those_of_scikit_learn():
    pca = pytest.importorskip("sklearn.decomposition").PCA(3)
    network = nn.Linear(7, 2)
    rows = np.random.default_rng(0).normal(size=(10, 16)) * np.linspace(1, 5, 16)
    way = [unflattened(torch.tensor(row), network) for row in rows]
    pca.fit(rows)
    found = principal(way, network, 3).numpy()
    assert np.abs((found * pca.components_).sum(1)) == pytest.approx(np.ones(3), abs=1e-5)


def test_dropped_weights_are_zero_or_divided_by_what_is_kept():
    network = nn.Linear(200, 100)
    theta = flat_weights(network).detach()
    new = theta + dropped(network, p=0.3, seed=1)
    gone = new.abs() < 1e-7
    assert gone.float().mean() == pytest.approx(0.3, abs=0.02)
    assert torch.allclose(new[~gone], theta[~gone] / 0.7, atol=1e-6)
    assert not dropped(network, p=0.0).any()


def test_coordinates_lead_to_weights_and_back():
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 50, dtype=torch.float64)
    frame = Frame.through([a, b, c])
    assert torch.allclose(frame.directions @ frame.directions.T, torch.eye(2).double(), atol=1e-12)
    for point in (a, b, c):
        assert torch.allclose(frame.weights(frame.project(point)), point, atol=1e-12)
    at = frame.project(torch.stack([a, b, c]))
    assert torch.allclose(torch.cdist(at, at), torch.cdist(torch.stack([a, b, c]), torch.stack([a, b, c])))
    oblique = Frame.along(a, [b, b + c])
    assert torch.allclose(oblique.project(a + 2 * b - 3 * (b + c)), torch.tensor([2.0, -3.0]).double())


def test_wrong_arguments_are_told():
    network = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"direction must be a vector of the network's 6 weights, got shape \[3\]"):
        filter_normalised(torch.ones(3), network)
    with pytest.raises(ValueError, match="direction must be finite, got nan at index 1"):
        filter_normalised(torch.tensor([0, torch.nan, 0, 0, 0, 0]), network)
    with pytest.raises(ValueError, match="p must be 0 or more and below 1, got 1"):
        dropped(network, 1)
    with pytest.raises(ValueError, match="count=2 needs 3 checkpoints or more, got 2"):
        principal([network.state_dict()] * 2, network, 2)
    with pytest.raises(ValueError, match="seed must be"):
        random_direction(network, -1)
    with pytest.raises(ValueError, match="c lies on the line through a and b"):
        Frame.through([torch.zeros(2), torch.ones(2), 2 * torch.ones(2)])
    with pytest.raises(ValueError, match="the two directions lie on one line"):
        Frame.along(torch.zeros(2), [torch.ones(2), -torch.ones(2)])


def test_subspaces_and_directions_share_their_principal_directions():
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    way = [{name: torch.randn_like(tensor) for name, tensor in network.state_dict().items()} for _ in range(5)]
    found = mt.subspace(network, "low_rank", way, rank=2).network.trajectory_factor
    assert torch.equal(found, principal(way, network, 2))
