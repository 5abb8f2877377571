"""Hand-made trajectories, and networks to draw weights around."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.methods.subspace import subspace, swag

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
