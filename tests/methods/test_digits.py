"""Every method, trained for real by one loop on scikit-learn's digits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import multitudes as mt
from tests.zoo.cases import METHODS


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(256, 10),
    )  # fmt: skip


def train(net: mt.Multitude, x: Tensor, y: Tensor, epochs: int) -> mt.Multitude:
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            net.loss(x[batch], y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method != "lora"])  # which adapts a trained one
def test_every_method_learns_the_digits(method: str) -> None:
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    net = train(METHODS[method](network(), 3, example=x[:8]) if method in ("packed", "masksembles", "mimo")
                else METHODS[method](network(), 3), x, y, epochs=30 if method == "mimo" else 12)  # fmt: skip
    p = mt.predict(net, test_x)
    assert (p.label == test_y).float().mean() > 0.93
    # The mixture's loss is at most the members' mean loss, and less where they differ (Jensen).
    members = torch.stack([F.nll_loss(log_probs, test_y) for log_probs in p.member_log_probs]).mean()
    assert F.nll_loss(p.log_probs, test_y) < members
    wrong = p.label != test_y
    assert p.entropy[wrong].mean() > 2 * p.entropy[~wrong].mean()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["packed", "batch_ensemble", "masksembles", "mimo"])
def test_a_pretrained_start_is_a_head_start(method: str) -> None:
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = train(mt.deep_ensemble(network(), 1), x, y, epochs=10).member(0).eval()
    accuracy = {}
    for init in ("fresh", "pretrained"):
        options = {"init": init, "seed": 0} | ({} if method == "batch_ensemble" else {"example": x[:256]})
        net = train(METHODS[method](model, 3, **options), x, y, epochs=1)
        accuracy[init] = (mt.predict(net, test_x).label == test_y).float().mean().item()
    assert accuracy["pretrained"] > accuracy["fresh"] + 0.02
