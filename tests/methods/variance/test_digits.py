"""Variance networks on scikit-learn's digits: what the paper saw on MNIST and CIFAR."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.methods.variance import kappa, phase, sparsify, variance
from multitudes.methods.variance.layers import Absolute, VarianceLinear, variance_layers
from multitudes.methods.variance.transition import THRESHOLD
from tests.methods.test_digits import digits as load

CHANCE = 0.1
Data = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def digits() -> Data:
    return load()


def network(*after: nn.Module, width: int) -> nn.Module:
    """A small CNN; `after` is what follows its first dense layer, which is the one to convert, "dense"."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    model.add_module("dense", nn.Linear(128, width))
    for index, module in enumerate((*after, nn.Linear(width, 10))):
        model.add_module(f"after{index}", module)
    return model


def train_epoch(net: Multitude, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    net.train()
    for batch in torch.randperm(len(x)).split(64):
        net.loss(x[batch], y[batch], dataset_size=len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def accuracy(net: Multitude, data: Data, draws: int) -> float:
    return (net.predict(data[2], draws=draws, seed=0).label == data[3]).float().mean().item()


@pytest.mark.slow
def test_a_zero_centered_network_learns_with_uninformative_expectations(digits: Data) -> None:
    torch.manual_seed(0)
    net = variance(network(Absolute(), width=64), ["dense"], "zero")
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(25):
        train_epoch(net, optimizer, *digits[:2])
    assert accuracy(net, digits, draws=0) < 1.5 * CHANCE
    assert accuracy(net, digits, draws=50) > 0.93


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["approximate", "stochastic", "student"])
def test_log_alpha_rises_with_its_own_learning_rate(digits: Data, kl: str) -> None:
    torch.manual_seed(0)
    net = variance(network(nn.ReLU(), width=64), ["dense"], kl=kl)
    optimizer = torch.optim.Adam(net.parameter_groups(lr=3e-3, log_alpha=0.1))
    climb = [-5.0]
    for _ in range(3):
        for _ in range(20):
            train_epoch(net, optimizer, *digits[:2])
        climb.append(variance_layers(net)["dense"].log_alphas().item())
    assert climb == sorted(climb) and climb[-1] > 3.5
    assert accuracy(net, digits, draws=0) > 0.94  # not yet past the transition
    assert accuracy(net, digits, draws=50) > 0.94


# -- the phase transition ----------------------------------------------------------------------------------


@dataclass
class Record:
    """State of a network in training."""

    log_alpha: float
    deterministic: float
    ensemble: float
    share: float
    kappas: Tensor


@pytest.fixture(scope="module")
def history(digits: Data) -> tuple[Multitude, list[Record]]:
    """A network with one variance layer, followed by batch norm and a smooth ReLU, trained past the transition."""
    torch.manual_seed(0)
    net = variance(network(nn.BatchNorm1d(128), nn.Softplus(beta=5), width=128), ["dense"])
    optimizer = torch.optim.Adam(net.parameter_groups(lr=3e-3, log_alpha=0.5))
    epochs = 280
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 1 - 0.7 * epoch / epochs, lambda _: 1.0])
    records = []
    for epoch in range(1, epochs + 1):
        train_epoch(net, optimizer, *digits[:2])
        schedule.step()
        if epoch in (5, 10, 20, 40, 80, 120, 160, 200, 240, 280):
            found = kappa(net, *digits[:2])["dense"]
            reached = phase(net)["dense"]
            kappas = found.abs().clamp(min=1e-25).log10().flatten()
            accuracies = accuracy(net, digits, draws=0), accuracy(net, digits, draws=50)
            records.append(Record(reached.log_alpha, *accuracies, reached.share, kappas))
    return net, records


@pytest.mark.slow
def test_in_the_transition_expectations_fail_and_the_ensemble_does_not(history: tuple[Multitude, list[Record]]) -> None:
    _, records = history
    before, after = records[2], records[-1]
    assert before.deterministic > 0.94  # low variance: expectations do as well as the ensemble
    assert after.deterministic < 2.5 * CHANCE  # high variance: they say next to nothing
    assert min(record.ensemble for record in records) > 0.92 and after.ensemble > 0.94
    assert after.log_alpha > before.log_alpha + 3


@pytest.mark.slow
def test_the_transition_starts_as_large_kappas_emerge(history: tuple[Multitude, list[Record]]) -> None:
    _, records = history
    before, after = records[0], records[-1]
    assert before.share < 0.001 and after.share > 0.03
    assert after.kappas.quantile(0.99) > before.kappas.quantile(0.99) + 1  # in decades
    for record in records:
        if record.deterministic < record.ensemble - 0.1:
            assert record.share > 0.01


@pytest.mark.slow
def test_after_the_transition_expectations_can_be_left_out(
    history: tuple[Multitude, list[Record]], digits: Data
) -> None:
    """Eq. (11): N(mu, alpha mu^2) is as good as N(0, alpha mu^2)."""
    net = copy.deepcopy(history[0])
    old = variance_layers(net)["dense"]
    centred = VarianceLinear.of(old.expected(), parameterization="zero")
    centred.sigma.data = old.variance().sqrt().detach()
    net.network.dense = centred
    assert accuracy(net, digits, draws=0) < 1.5 * CHANCE
    assert abs(accuracy(net, digits, draws=50) - accuracy(history[0], digits, draws=50)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("to", ["zero", "mean"])
def test_nine_in_ten_weights_can_be_fixed(history: tuple[Multitude, list[Record]], digits: Data, to: str) -> None:
    net = history[0]
    whole = accuracy(net, digits, draws=50)
    sparse = sparsify(net, THRESHOLD, to)
    assert sparse.fixed > 0.9 and sparse.compression > 10
    assert accuracy(sparse.net, digits, draws=50) > whole - 0.01
    # The few of large kappa are those that matter.
    wrong = copy.deepcopy(net)
    layer = variance_layers(wrong)["dense"]
    layer.fix(layer.kappa.abs() >= THRESHOLD, torch.zeros_like(layer.weight))
    assert accuracy(wrong, digits, draws=50) < whole - 0.1
