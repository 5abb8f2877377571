"""The task determines the loss, the average of draws, and the criteria that fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.tasks import Criterion

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
VALUES = X @ torch.tensor([[1.0], [-2.0], [0.5]])


def dropped(outputs: int = 1) -> mt.Multitude:
    net = mt.mc_dropout(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, outputs)))
    net.training_draws = 4
    return net


def drawn(net: mt.Multitude) -> Tensor:
    """The draws that the next loss will average."""
    torch.manual_seed(1)
    draws = net(X)
    torch.manual_seed(1)
    return draws


def of_the_mixture(draws: Tensor) -> Tensor:
    """The negative log-likelihood of the Gaussian with the mean and variance of the mixture of the draws."""
    means, variances = draws[..., :1], F.softplus(draws[..., 1:]) + 1e-6
    mean = means.mean(0)
    variance = (variances + means.square()).mean(0) - mean.square()
    return -torch.distributions.Normal(mean, variance.sqrt()).log_prob(VALUES).mean()


LABELS = torch.arange(32) % 4
SOFT = F.one_hot(LABELS, 4) * 0.9 + 0.025


@pytest.mark.parametrize(
    ("outputs", "task", "y", "criterion", "reference"),
    [
        (1, "regression", VALUES, F.mse_loss, lambda draws: F.mse_loss(draws.mean(0), VALUES)),
        (2, "gaussian", VALUES, mt.gaussian_nll, of_the_mixture),
        (4, "classification", LABELS, F.cross_entropy, lambda d: F.nll_loss(d.softmax(-1).mean(0).log(), LABELS)),
        (4, "classification", SOFT, F.cross_entropy, lambda d: F.cross_entropy(d.softmax(-1).mean(0).log(), SOFT)),
    ],
)
def test_the_loss_is_that_of_the_averaged_draws(
    outputs: int, task: str, y: Tensor, criterion: Criterion, reference: Callable[[Tensor], Tensor]
) -> None:
    net = dropped(outputs)
    want = reference(drawn(net))
    # The variance of a mixture as a difference of squares loses digits.
    near = {"rtol": 1e-4, "atol": 1e-5} if task == "gaussian" else {}
    torch.testing.assert_close(net.loss(X, y, task=task), want, **near)
    net.task = task
    for options in ({}, {"criterion": criterion}):
        drawn(net)
        torch.testing.assert_close(net.loss(X, y, **options), want, **near)


@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_the_loss_of_members_follows_the_task(task: str) -> None:
    nets = [nn.Linear(3, 2 if task == "gaussian" else 1) for _ in range(3)]
    criterion = {"regression": F.mse_loss, "gaussian": mt.gaussian_nll}[task]
    want = sum(criterion(net(X), VALUES) for net in nets)
    net = mt.fuse(nets)
    torch.testing.assert_close(net.loss(X, VALUES, task=task), want)
    net.task = task
    torch.testing.assert_close(net.loss(X, VALUES), want)
    shared = mt.batch_ensemble(nets[0], members=2, init="pretrained")
    shared.task = task
    mean = torch.stack([criterion(p, VALUES) for p in shared(X)]).mean()
    torch.testing.assert_close(shared.loss(X, VALUES), mean)


NETWORKS = {
    "draws": dropped,
    "members": lambda: mt.deep_ensemble(nn.Linear(3, 1), 2),
    "mimo": lambda: mt.mimo(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), 2, example=X),
}


@pytest.mark.parametrize(
    ("kind", "criterion"),
    [
        ("draws", F.mse_loss),
        ("draws", partial(F.smooth_l1_loss, beta=0.5)),
        ("members", nn.HuberLoss()),
        ("mimo", nn.MSELoss()),
    ],
)
def test_a_criterion_for_another_task_is_an_error(kind: str, criterion: Criterion) -> None:
    net = NETWORKS[kind]()
    with pytest.raises(ValueError, match=r"is for task 'regression', and the task is 'classification': pass task="):
        net.loss(X, VALUES, criterion)
    with pytest.raises(ValueError, match=r"is for task 'regression', and the task is 'gaussian'"):
        net.loss(X, VALUES, criterion, task="gaussian")
    assert net.loss(X, VALUES, criterion, task="regression").isfinite()
    net.task = "regression"
    for other in (F.cross_entropy, nn.CrossEntropyLoss(), mt.gaussian_nll):
        with pytest.raises(ValueError, match="and the task is 'regression'"):
            net.loss(X, VALUES, other)


def test_a_users_criterion_needs_a_task_if_draws_are_averaged() -> None:
    net = dropped()

    def own(prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - target).abs().mean()

    with pytest.raises(ValueError, match="a criterion of your own needs a task"):
        net.loss(X, VALUES, own)
    want = own(drawn(net).mean(0), VALUES)
    torch.testing.assert_close(net.loss(X, VALUES, own, task="regression"), want)
    net.training_draws = 1
    torch.manual_seed(2)
    loss = net.loss(X, VALUES, own)  # nothing is averaged
    torch.manual_seed(2)
    torch.testing.assert_close(loss, own(net(X)[0], VALUES))


def test_values_are_not_accepted_as_classes_or_probabilities() -> None:
    net = mt.Multitude(nn.Linear(3, 2))
    for y in (torch.randn(32, 2), torch.rand(32, 2) + 1, torch.randn(32), torch.rand(32, 1)):
        with pytest.raises(ValueError, match=r"pass task='regression' or task='gaussian'"):
            net.loss(X, y)
    with pytest.raises(ValueError, match="pass task="):  # the cross-entropy of one class is 0 for any prediction
        mt.deep_ensemble(nn.Linear(3, 1), 2).loss(X, VALUES)
    with pytest.raises(ValueError, match="y must have the predictions' shape"):
        net.loss(X, torch.randn(32), task="regression")
    for task in ("counting", 3):
        with pytest.raises(ValueError, match="task must be one of classification, tokens, binary"):
            net.loss(X, VALUES, task=task)
        with pytest.raises(ValueError, match="task must be one of"):
            net.task = task


def test_fit_refuses_a_task_other_than_the_networks() -> None:
    net = dropped(2)
    net.task = "gaussian"
    with pytest.raises(ValueError, match=r"task must be 'gaussian', the network's own, got 'regression'"):
        mt.fit(net, [(X, VALUES)], 1, task="regression")


@pytest.mark.parametrize("outputs", [(), (2,)])
def test_adaptive_draws_of_values_with_and_without_an_axis_of_outputs(outputs: tuple[int, ...]) -> None:
    width = outputs[0] if outputs else 1
    layers = [nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, width)]
    net = mt.mc_dropout(nn.Sequential(*layers, *([] if outputs else [nn.Flatten(0)])))
    net.task = "regression"
    p = net.predict(X, draws="auto", tolerance=0.05, max_draws=64, seed=0)
    assert p.mean.shape == (32, *outputs) and p.draws is not None
    error = p.std.reshape(32, -1).amax(1) / p.draws.sqrt()
    assert bool(((error < 0.055) | (p.draws == 64)).all())


class Halved(nn.MSELoss):
    """Half the mean squared error, as users write their losses."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return super().forward(prediction, target) / 2


KNOWN = [F.mse_loss, nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), partial(F.l1_loss), Halved()]


@pytest.mark.parametrize("criterion", KNOWN)
def test_no_known_criterion_broadcasts_targets_against_predictions(criterion: Criterion) -> None:
    for net in (mt.deep_ensemble(nn.Linear(3, 1), 2, task="regression"), dropped()):
        net.task = "regression"
        with pytest.raises(ValueError, match=r"y must have the predictions' shape \[32, 1\], got \[32\]"):
            net.loss(X, VALUES[:, 0], criterion)


def test_subclasses_of_torchs_criteria_belong_to_their_task() -> None:
    with pytest.raises(ValueError, match="criterion Halved is for task 'regression'"):
        dropped().loss(X, VALUES, Halved())
    net = dropped(3)
    margin = nn.MultiMarginLoss()
    want = margin(drawn(net).softmax(-1).mean(0).log(), torch.arange(32) % 3)
    torch.testing.assert_close(net.loss(X, torch.arange(32) % 3, margin), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64])
def test_integers_of_any_type_are_classes_or_values(dtype: torch.dtype) -> None:
    y = torch.arange(32) % 2
    net = mt.Multitude(nn.Linear(3, 2))
    torch.testing.assert_close(net.loss(X, y.to(dtype)), F.cross_entropy(net(X)[0], y))
    torch.testing.assert_close(net.loss(X, (y == 1)), F.cross_entropy(net(X)[0], y))
    net = mt.Multitude(nn.Linear(3, 1), 1)
    want = F.mse_loss(net(X)[0], y[:, None].float())
    torch.testing.assert_close(net.loss(X, y[:, None].to(dtype), task="regression"), want)


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        (torch.zeros(31).long(), r"y of shape \[31\] .* does not fit predictions of shape \[32, 2\]"),
        (torch.zeros(32, 1).long(), r"y of shape \[32, 1\] .* does not fit"),
        (torch.zeros(32, 2).long(), r"y of shape \[32, 2\] .* does not fit"),
        ([0] * 32, "y must be a tensor with at least one target, got list"),
        (None, "y must be a tensor with at least one target, got NoneType"),
        (torch.zeros(0).long(), r"y must be a tensor with at least one target, got shape \[0\]"),
    ],
)
def test_targets_that_do_not_fit_are_errors(y: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mt.Multitude(nn.Linear(3, 2)).loss(X, y)


STATES = [{name: tensor + 0.1 * i for name, tensor in nn.Linear(3, 2).state_dict().items()} for i in range(4)]
CONVERSIONS = {
    "deep_ensemble": partial(mt.deep_ensemble, members=2),
    "packed": partial(mt.packed, members=2, alpha=1),
    "batch_ensemble": partial(mt.batch_ensemble, members=2),
    "masksembles": partial(mt.masksembles, members=2, layers=["2"]),
    "mimo": partial(mt.mimo, members=2),
    "mc_dropout": partial(mt.mc_dropout, p=0.1, layers=["2"]),
    "drop_connect": partial(mt.drop_connect, p=0.1),
    "patched": partial(mt.patched, layers="output"),
    "family": mt.family,
    "variance": partial(mt.variance, layers=["0"]),
    "fuse": lambda model, task: mt.fuse([model, model], task=task),
    "snapshots": lambda model, task: mt.snapshots(nn.Linear(3, 2), STATES, task=task),
    "swa": lambda model, task: mt.swa(nn.Linear(3, 2), STATES, task=task),
    "swag": lambda model, task: mt.swag(nn.Linear(3, 2), STATES, task=task),
    "subspace": lambda model, task: mt.subspace(nn.Linear(3, 2), "random", task=task),
}


@pytest.mark.parametrize("method", CONVERSIONS)
def test_every_method_takes_a_task(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    net = CONVERSIONS[method](model, task="gaussian")
    assert net.task == net.predict(X).task == "gaussian"
    assert net.predict(X).mean.shape == (32, 1)
    with pytest.raises(ValueError, match="task must be one of"):
        CONVERSIONS[method](model, task="counting")


def test_conversions_keep_the_task() -> None:
    net = mt.mc_dropout(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2)), task="gaussian")
    for made in (mt.deep_ensemble(net, 2), mt.fuse([net, net]), mt.freeze(net), mt.packed(net, 2, 1)):
        assert made.task == "gaussian"
