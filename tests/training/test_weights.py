"""Weights of rows and classes, for every task and criterion."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

import multitudes as mt
from multitudes.tasks.gaussian import beta_nll
from multitudes.training.fit import fit

G = torch.Generator().manual_seed(0)
X = torch.randn(12, 8, generator=G)
WEIGHT = torch.rand(12, generator=G) * 3
CLASSES = torch.randint(3, (12,), generator=G)
VALUES = torch.randn(12, 2, generator=G)
YES = torch.randint(2, (12, 1), generator=G)


class Focal(nn.Module):
    """A user's criterion: a mean over rows."""

    def forward(self, prediction: Tensor, y: Tensor) -> Tensor:
        log_prob = F.log_softmax(prediction, 1).gather(1, y[:, None])[:, 0]
        return -((1 - log_prob.exp()) ** 2 * log_prob).mean()


class Doubled(nn.CrossEntropyLoss):
    """A subclass of a known criterion with another forward."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * F.cross_entropy(input, target)


CASES = {
    "classes": ("classification", 3, CLASSES, None),
    "probabilities": ("classification", 3, torch.rand(12, 3, generator=G).softmax(1), None),
    "smoothed": ("classification", 3, CLASSES, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "margin": ("classification", 3, CLASSES, nn.MultiMarginLoss()),
    "own": ("classification", 3, CLASSES, Focal()),
    "subclass": ("classification", 3, CLASSES, Doubled()),
    "binary": ("binary", 1, YES, None),
    "binary without channel": ("binary", 1, YES[:, 0], None),
    "multilabel": ("multilabel", 2, torch.randint(2, (12, 2), generator=G), None),
    "positives": ("multilabel", 2, VALUES.sigmoid(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 3.0]))),
    "soft margin": ("multilabel", 2, torch.randint(2, (12, 2), generator=G), nn.MultiLabelSoftMarginLoss()),
    "regression": ("regression", 2, VALUES, None),
    "huber": ("regression", 2, VALUES, nn.HuberLoss(delta=0.5)),
    "huber by function": ("regression", 2, VALUES, partial(F.huber_loss, delta=0.5)),
    "gaussian": ("gaussian", 4, VALUES, None),
    "beta": ("gaussian", 4, VALUES, partial(beta_nll, beta=0.7)),
    "quantiles": ("quantiles", 5, VALUES[:, 0], None),
}


def brute(net: mt.Multitude, index: int, y: Tensor, criterion, weight: Tensor) -> Tensor:
    """Return the mean over rows of weight times loss, from each row alone."""
    alone = mt.Multitude(net.member(index))
    alone.task = net.task
    rows = [weight[i] * alone.loss(X[i : i + 1], y[i : i + 1], criterion) for i in range(len(y))]
    return torch.stack(rows).sum() / len(y)


MAKERS = {"network": lambda model, _: mt.Multitude(model), "deep": mt.deep_ensemble, "batch": mt.batch_ensemble}
PAIRS = [(case, list(MAKERS)[number % 3]) for number, case in enumerate(CASES)] + [
    ("classes", "deep"),
    ("own", "batch"),
]


@pytest.mark.parametrize(("case", "method"), PAIRS)
def test_the_loss_is_the_mean_of_weight_times_loss_over_rows(case, method):
    task, outputs, y, criterion = CASES[case]
    torch.manual_seed(1)
    net = MAKERS[method](nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, outputs)), 3)
    net.task = task
    each = torch.stack([brute(net, i, y, criterion, WEIGHT) for i in range(net.members)])
    want = each.mean() if method == "batch" else each.sum()
    got = net.loss(X, y, criterion, weight=WEIGHT)
    torch.testing.assert_close(got, want)
    parameters = list(net.parameters())
    if method == "deep":  # other members are copies
        torch.testing.assert_close(torch.autograd.grad(got, parameters), torch.autograd.grad(want, parameters))
    torch.testing.assert_close(net.loss(X, y, criterion, weight=torch.ones(12)), net.loss(X, y, criterion))


def test_draws_are_averaged_before_their_loss_is_weighted():
    torch.manual_seed(0)
    net = mt.mc_dropout(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)), task="classification")
    net.train()
    net.training_draws = 4
    torch.manual_seed(5)
    loss = net.loss(X, CLASSES, weight=WEIGHT)
    torch.manual_seed(5)
    probs = net(X).softmax(-1).mean(0)
    torch.testing.assert_close(loss, -(WEIGHT * probs[torch.arange(12), CLASSES].log()).mean())


def test_a_criterion_keeps_its_class_weights_and_its_reduction():
    own = torch.tensor([0.5, 2.0, 3.0])
    net = mt.Multitude(nn.Linear(8, 3))
    logits = net(X)[0]
    want = (WEIGHT * own[CLASSES] * F.cross_entropy(logits, CLASSES, reduction="none")).sum() / own[CLASSES].sum()
    for criterion in (nn.CrossEntropyLoss(own), partial(F.cross_entropy, weight=own)):
        torch.testing.assert_close(net.loss(X, CLASSES, criterion, weight=WEIGHT), want)
    total = nn.CrossEntropyLoss(reduction="sum")
    want = (WEIGHT * F.cross_entropy(logits, CLASSES, reduction="none")).sum()
    torch.testing.assert_close(net.loss(X, CLASSES, total, weight=WEIGHT), want)


@pytest.mark.parametrize("shape", [(12, 1), (12,), (1,)])
def test_row_weights_in_a_criterion_apply_to_each_member(shape):
    model = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0 if shape == (12,) else 1))
    net = mt.batch_ensemble(model, 3, task="binary", seed=0)
    y = YES[:, 0].float() if shape == (12,) else YES.float()
    criterion = nn.BCEWithLogitsLoss(weight=torch.rand(shape))
    want = torch.stack([criterion(each, y) for each in net(X)]).mean()
    torch.testing.assert_close(net.loss(X, y, criterion), want)


@pytest.mark.parametrize("shifted", [False, True])
def test_tokens_have_weights_per_row_or_per_token(shifted):
    torch.manual_seed(0)
    x, y = torch.randint(5, (4, 6)), torch.randint(5, (4, 6))
    y[0, 2:], y[1, 0] = -100, -100
    net = mt.Multitude(nn.Embedding(5, 5))
    net.task, net.next_tokens = "tokens", shifted
    targets = torch.cat([y[:, 1:], torch.full((4, 1), -100)], 1) if shifted else y
    log_probs = net(x)[0].log_softmax(-1)
    losses = -log_probs.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    losses = torch.where(targets < 0, 0.0, losses)
    rows = torch.tensor([2.0, 0.5, 1.0, 3.0])
    count = (targets >= 0).sum()
    torch.testing.assert_close(net.loss(x, y, weight=rows), (rows[:, None] * losses).sum() / count)
    each = torch.rand(4, 6)
    moved = torch.cat([each[:, 1:], torch.zeros(4, 1)], 1) if shifted else each
    torch.testing.assert_close(net.loss(x, y, weight=each), (moved * losses).sum() / count)
    torch.testing.assert_close(net.loss(x, y, weight=torch.ones(4)), net.loss(x, y))


def test_mimo_permutes_weights_with_their_rows():
    net = mt.mimo(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), 3, batch_repetition=2, seed=0)

    def loss(y: Tensor, weight: Tensor | None) -> Tensor:
        torch.manual_seed(3)  # the same orders
        return net.loss(X, y, weight=weight)

    torch.testing.assert_close(loss(CLASSES, torch.ones(12)), loss(CLASSES, None))
    alone = [loss(CLASSES, row) for row in torch.eye(12)]
    torch.testing.assert_close(loss(CLASSES, WEIGHT), (torch.stack(alone) * WEIGHT).sum())
    for i in range(12):
        others = (CLASSES + 1) % 3
        others[i] = CLASSES[i]
        torch.testing.assert_close(loss(others, torch.eye(12)[i]), alone[i])  # other targets have no weight
    with pytest.raises(ValueError, match="weight must have one number for each of the 12 inputs, got 3"):
        net.loss(X, CLASSES, weight=WEIGHT[:3])


def test_members_that_are_multitudes_get_the_weights():
    inner = [mt.batch_ensemble(nn.Linear(8, 3), 2, seed=i) for i in range(2)]
    net = mt.fuse(inner)
    want = sum(one.loss(X, CLASSES, weight=WEIGHT) for one in inner)
    torch.testing.assert_close(net.loss(X, CLASSES, weight=WEIGHT), want)


def test_fit_applies_the_weights_of_its_batches():
    torch.manual_seed(0)
    net = nn.Linear(8, 3)
    own = copy.deepcopy(net)
    batches = [(X[:8], CLASSES[:8], WEIGHT[:8]), (X[8:], CLASSES[8:], WEIGHT[8:])]
    fit(net, batches, 3, lr=0.1, momentum=0, schedule="constant")
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    for x, y, weight in batches * 3:
        optimizer.zero_grad()
        (weight * F.cross_entropy(own(x), y, reduction="none")).mean().backward()
        optimizer.step()
    torch.testing.assert_close(net.state_dict(), own.state_dict())


@pytest.mark.parametrize(
    ("third", "sentence"),
    [
        (
            torch.arange(12),
            r"batch 0 of data must be \(x, y\), or .* of the 12 rows, got \[12\] \(torch.int",
        ),
        (WEIGHT[:5], r"one floating-point weight for each of the 12 rows, got \[5\]"),
        (["a"] * 12, "for each of the 12 rows, got list"),
        (WEIGHT - 2, "must have finite weights, 0 or more, got -"),
        (WEIGHT / 0, "must have finite weights, 0 or more, got inf"),
    ],
)
def test_invalid_weights_are_refused(third, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(nn.Linear(8, 3), [(X, CLASSES, third)], 1)


def test_a_criterion_that_is_not_a_mean_over_rows_cannot_be_weighted():
    net = mt.Multitude(nn.Linear(8, 3))
    net.task = "classification"
    with pytest.raises(ValueError, match=r"criterion must be a mean over the rows .* the mean over rows is"):
        net.loss(X, CLASSES, lambda p, y: F.cross_entropy(p, y) * p.std(), weight=WEIGHT)
    with pytest.raises(ValueError, match=r"weight must hold one number for each of 12 rows, got shape \[5\]"):
        net.loss(X, CLASSES, weight=WEIGHT[:5])


def test_a_users_criterion_is_weighted_in_half_precision():
    net = nn.Linear(8, 3).bfloat16()
    x = X.bfloat16()
    want = (WEIGHT.bfloat16() * torch.stack([Focal()(net(x)[i : i + 1], CLASSES[i : i + 1]) for i in range(12)])).mean()
    torch.testing.assert_close(mt.Multitude(net).loss(x, CLASSES, Focal(), weight=WEIGHT), want)


# -- classes -----------------------------------------------------------------------------------------------

RARE = torch.tensor([0] * 8 + [1] * 3 + [2])


def first_loss(net: nn.Module, *batches: tuple[Tensor, ...], **options: object) -> float:
    return fit(net, list(batches), 1, lr=1e-30, **options)[0].loss


def test_balanced_weights_equal_those_of_scikit_learn():
    weights = compute_class_weight("balanced", classes=np.arange(3), y=RARE.numpy())
    net = nn.Linear(8, 3)
    probs = net(X).detach().double().softmax(1)
    sample = weights[RARE]
    want = log_loss(RARE, probs, sample_weight=sample, labels=[0, 1, 2]) * sample.mean()
    assert first_loss(net, (X, RARE), class_weight="balanced") == pytest.approx(want, rel=1e-6)
    assert first_loss(net, (X, RARE), class_weight=weights.tolist()) == pytest.approx(want, rel=1e-6)
    assert first_loss(net, (X, RARE), class_weight=torch.tensor(weights)) == pytest.approx(want, rel=1e-6)
    rows = torch.rand(12, generator=torch.Generator().manual_seed(2))
    both = sample * rows.double().numpy()
    want = log_loss(RARE, probs, sample_weight=both, labels=[0, 1, 2]) * both.mean()
    assert first_loss(net, (X, RARE, rows), class_weight="balanced") == pytest.approx(want, rel=1e-6)


def test_balanced_weights_of_binary_targets_equal_those_of_scikit_learn():
    yes = (RARE > 0).long()
    weights = compute_class_weight("balanced", classes=np.arange(2), y=yes.numpy())
    net = nn.Linear(8, 1)
    probs = net(X).detach().double().sigmoid()[:, 0]
    want = log_loss(yes, probs, sample_weight=weights[yes]) * weights[yes].mean()
    for y in (yes, yes[:, None], yes.float(), yes.bool()):
        got = first_loss(net, (X, y), class_weight="balanced", task="binary")
        assert got == pytest.approx(want, rel=1e-6)


def test_pixels_have_the_weights_of_their_classes():
    torch.manual_seed(0)
    x, y = torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5))
    y[0, 0] = -100
    net = nn.Conv2d(2, 3, 1)
    own = torch.tensor([1.0, 5.0, 0.5])
    losses = F.cross_entropy(net(x), y, reduction="none")
    rows = torch.tensor([1.0, 2.0, 0.0, 1.0])
    want = (own[y.clamp(min=0)] * rows[:, None, None] * losses).sum() / (y >= 0).sum()
    got = first_loss(net, (x, y, rows), class_weight=own, task="classification")
    assert got == pytest.approx(want.item(), rel=1e-5)


def test_class_weights_apply_to_validation():
    net = nn.Linear(8, 3)
    weights = compute_class_weight("balanced", classes=np.arange(3), y=RARE.numpy())
    held = RARE.roll(5)
    probs = net(X).detach().double().softmax(1)
    want = log_loss(held, probs, sample_weight=weights[held], labels=[0, 1, 2])
    history = fit(
        net, [(X, RARE)], 1, lr=1e-30, class_weight="balanced", validation=[(X[:7], held[:7]), (X[7:], held[7:])]
    )
    assert history[0].validation == pytest.approx(want, rel=1e-6)


def test_counting_classes_keeps_the_random_state_of_the_training():
    loader = torch.utils.data.DataLoader(list(zip(X, RARE, strict=True)), 4, shuffle=True)
    nets = [nn.Linear(8, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    fit(nets[0], loader, 2, seed=0, class_weight="balanced")
    weights = compute_class_weight("balanced", classes=np.arange(3), y=RARE.numpy())
    fit(nets[1], loader, 2, seed=0, class_weight=weights.tolist())
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"class_weight": "even"}, "class_weight must be None, 'balanced', or one finite number, .* got 'even'"),
        ({"class_weight": [1.0, -1.0, 1.0]}, r"class_weight must be None, 'balanced', or one finite number"),
        ({"class_weight": []}, r"class_weight must be None, 'balanced', or one finite number"),
        ({"class_weight": [1.0, 2.0]}, "class_weight must hold one number for each class, got 2, but y contains 2"),
        ({"class_weight": [1.0, 2.0, 3.0, 4.0]}, "for each of the 3 classes, got 4"),
        ({"class_weight": "balanced", "data": iter([(X, RARE)])}, "a list_iterator can be iterated only"),
        (
            {"class_weight": [1.0, 2.0], "task": "regression"},
            "class_weight needs task .*, got task 'regression'",
        ),
        (
            {"class_weight": "balanced", "data": [(X, X[:, :3].softmax(1))]},
            "needs classes as targets, got probabilities",
        ),
        ({"class_weight": [1, 1, 1], "data": [(X, X[:, :3].softmax(1))]}, "needs classes as targets, got probab"),
    ],
)
def test_invalid_class_weights_are_named(options, sentence):
    options = {"data": [(X, RARE)]} | options
    with pytest.raises(ValueError, match=sentence):
        fit(nn.Linear(8, 3), options.pop("data"), 1, **options)
