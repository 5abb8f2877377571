"""Directions in weight space, against NumPy loops and the conventions of Li et al."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from multitudes.landscape.weight_space.directions import Frame, filter_normalised, random_direction
from multitudes.training.recorder import unflattened, weights_of


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
    assert torch.equal(direction, random_direction(network, seed=1)) and abs(direction.std().item() - 1) < 0.1
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
