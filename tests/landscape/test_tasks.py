"""The task of a network defines the loss and how draws are averaged, in all analyses of weights."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape import plane, random_direction, sharpness, tunnel
from multitudes.landscape.weight_space.weight_loss import WeightLoss
from multitudes.networks.seeds import mixed

OUTPUTS = {"classification": 3, "regression": 1, "gaussian": 2}


def dropping(task: str) -> mt.Multitude:
    torch.manual_seed(0)
    net = mt.mc_dropout(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, OUTPUTS[task])))
    net.task = task
    return net.eval()


def rows(task: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 5, generator=generator)
    return x, torch.randint(3, (40,), generator=generator) if task == "classification" else 2 * x[:, :1] + 1


def by_hand(task: str, drawn: Tensor, y: Tensor) -> float:
    """The loss of the averaged prediction of draws `[D, B, C]`, by its formula."""
    if task == "classification":
        return -drawn.softmax(2).mean(0)[torch.arange(len(y)), y].log().mean().item()
    if task == "regression":
        return (drawn.mean(0) - y).square().mean().item()
    means, variances = drawn[..., :1], F.softplus(drawn[..., 1:]) + 1e-6
    mean = means.mean(0)
    variance = (variances + means.square()).mean(0) - mean.square()
    return 0.5 * ((2 * math.pi * variance).log() + (y - mean).square() / variance).mean().item()


@pytest.mark.parametrize("task", OUTPUTS)
def test_the_task_defines_the_loss_and_how_draws_are_averaged(task: str) -> None:
    net, (x, y) = dropping(task), rows(task)
    found = plane(net, (x, y), along=[random_direction(net)], points=3, seeds=(3,), draws=4)
    loss = WeightLoss(net, [(x, y)], draws=4, seed=3)
    with torch.no_grad():
        want, drawn = by_hand(task, net(x, draws=4, seed=3), y), by_hand(task, net(x, draws=4, seed=mixed(3, 0)), y)
    assert found.scores.loss.item() == pytest.approx(want, rel=1e-4)
    assert found.loss[0, 1].item() == pytest.approx(want, rel=1e-4)
    assert (found.accuracy is not None) == (task == "classification")
    assert loss.value(loss.start).item() == pytest.approx(drawn, rel=1e-4)


@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_a_path_minimises_the_loss_of_the_task(task: str) -> None:
    net, data = dropping(task), rows(task)
    torch.manual_seed(1)
    other = {name: torch.randn_like(value) for name, value in net.network.state_dict().items()}
    path = tunnel(net, net.network, other, data, points=3, steps=60, lr=0.05)
    assert path.scores.loss[0].item() == pytest.approx(by_hand(task, net(data[0], draws=0), data[1]), rel=1e-5)
    assert path.scores.loss[2] < 0.5 * path.linear.loss[2]


@pytest.mark.parametrize(
    "analysis", [sharpness, lambda net, data, **o: plane(net, data, along=[random_direction(net)], **o)]
)
@pytest.mark.parametrize(
    ("task", "criterion", "of"),
    [
        ("classification", F.mse_loss, "regression"),
        ("regression", nn.CrossEntropyLoss(), "classification"),
        ("gaussian", F.mse_loss, "regression"),
        ("regression", mt.gaussian_nll, "gaussian"),
    ],
)
def test_a_criterion_that_contradicts_the_task_is_refused(analysis, task: str, criterion, of: str) -> None:
    with pytest.raises(
        ValueError, match=f"criterion .* is for task '{of}'.*, and the task is '{task}': set network.task='{of}'"
    ):
        analysis(dropping(task), rows(task), criterion=criterion)


@pytest.mark.parametrize("network", [dropping("classification"), dropping("classification").network])
def test_a_custom_criterion_requires_a_task_to_average_draws(network: nn.Module) -> None:
    options = {"points": 1, "along": [random_direction(network)], "criterion": lambda p, y: p.mean(), "seeds": (0,)}
    if isinstance(network, mt.Multitude):
        plane(network, rows("classification"), **options, draws=2)
        network = mt.Multitude(network.network)  # without a task
        assert plane(network, rows("classification"), **options).loss.isfinite().all()
    with pytest.raises(ValueError, match="set network.task=, one of classification, tokens, binary"):
        plane(network, rows("classification"), **options, draws=2)


def test_a_plain_network_has_the_task_of_its_criterion() -> None:
    net, (x, y) = dropping("regression"), rows("regression")
    along, options = [random_direction(net)], {"points": 1, "seeds": (3,), "draws": 4}
    found = plane(net.network, (x, y), along=along, criterion=F.mse_loss, **options)
    assert found.scores.loss.item() == plane(net, (x, y), along=along, **options).scores.loss.item()
    with pytest.raises(ValueError, match=r"cross entropy, got targets of shape \[40, 1\]"):
        plane(net.network, (x, y), along=along)  # the cross entropy of one class is always 0
    wide = nn.Linear(5, 2)
    with pytest.raises(ValueError, match="classes as targets for cross entropy"):
        plane(wide, (x, x[:, :2]), along=[random_direction(wide)])
    soft = x[:, :2].softmax(1)  # probabilities are targets of cross entropy
    found = plane(wide, (x, soft), along=[random_direction(wide)], points=3)
    assert found.loss[1].item() == pytest.approx(F.cross_entropy(wide(x), soft).item(), rel=1e-6)


OF_OTHER_TASKS = {
    "binary": ((1,), torch.tensor([0, 1] * 20)),
    "multilabel": ((3,), torch.tensor([0, 1, 1] * 40).view(40, 3)),
    "tokens": ((3, 3), torch.tensor([0, 1, 2, -100, 0, 1] * 20).view(40, 3)),
    "quantiles": ((3,), torch.linspace(-1, 1, 40)),
}


def of_other_task(task: str, drawn: Tensor, y: Tensor) -> float:
    """The loss of draws `[D, B, ...]` of the other tasks, by its formula."""
    if task == "tokens":
        probs = drawn.softmax(-1).mean(0)[y != -100]
        return -probs[torch.arange(len(probs)), y[y != -100]].log().mean().item()
    if task == "quantiles":
        off, tau = y[:, None] - drawn.mean(0), torch.tensor([0.05, 0.5, 0.95])
        return torch.maximum(tau * off, (tau - 1) * off).mean().item()
    return F.binary_cross_entropy(drawn.sigmoid().mean(0), y.view(drawn.shape[1:]).float()).item()


@pytest.mark.parametrize("task", OF_OTHER_TASKS)
def test_the_loss_of_the_other_tasks_is_that_of_the_network(task: str) -> None:
    shape, y = OF_OTHER_TASKS[task]
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    outputs = torch.Size(shape).numel()
    net = mt.mc_dropout(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, outputs), nn.Unflatten(1, shape)))
    net.eval().task = task
    batches = [(x[:25], y[:25]), (x[25:], y[25:])]
    want = of_other_task(task, net(x, draws=0), y)
    loss = WeightLoss(net, batches)
    assert loss.value(loss.start).item() == pytest.approx(want, rel=1e-5)
    along = {"along": [random_direction(net)], "points": 1}
    assert plane(net, batches, **along).scores.loss.item() == pytest.approx(want, rel=1e-5)
    drawn = of_other_task(task, net(x, draws=3, seed=3), y)
    assert plane(net, (x, y), **along, seeds=(3,), draws=3).scores.loss.item() == pytest.approx(drawn, rel=1e-4)
    loss = WeightLoss(net, (x, y), draws=3, seed=3)
    drawn = of_other_task(task, net(x, draws=3, seed=mixed(3, 0)), y)
    assert loss.value(loss.start).item() == pytest.approx(drawn, rel=1e-4)


def test_ambiguous_class_axes_are_refused() -> None:
    network = nn.Sequential(nn.Linear(5, 9), nn.Unflatten(1, (3, 3)))
    x, y = torch.randn(40, 5), torch.randint(3, (40, 3))
    for analysis in (sharpness, lambda net, data: plane(net, data, along=[random_direction(net)], points=1)):
        with pytest.raises(ValueError, match="may have their classes in dim 1 or last, and no task was chosen"):
            analysis(network, (x, y))
        net = mt.Multitude(network)
        net.task = "tokens"
        analysis(net, (x, y))
    with pytest.raises(ValueError, match="may have their classes in dim 2 or last"):
        mt.landscape.similarity([network, copy.deepcopy(network)], x)
    with pytest.raises(
        ValueError,
        match="solutions must have task classification, regression, gaussian, got a multitude of task tokens",
    ):
        mt.landscape.similarity([net, net], x)
