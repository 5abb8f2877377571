"""Binary, multilabel and token tasks: losses, predictions, scores and sets against independent computations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torchmetrics.functional.classification import multilabel_accuracy
from torchmetrics.functional.text import perplexity as torchmetrics_perplexity

import multitudes as mt
from multitudes.tasks import task_of
from tests.zoo.predictions import PER_INPUT, REFERENCES

B, L, T, C = 40, 3, 6, 5
X = torch.randn(B, 8, generator=torch.Generator().manual_seed(0))


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(*shape: int, high: int = 2, seed: int = 2) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def some_ignored(y: Tensor) -> Tensor:
    return y.masked_fill(numbers(*y.shape, seed=3) > 0.8, -100)


def token_logits(tokens: int = T, classes: int = C) -> nn.Module:
    """A class for each token: `[B, 8] -> [B, tokens, classes]`."""
    return mlp(tokens * classes, nn.Unflatten(1, (tokens, classes)))


def mlp(outputs: int, *last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, outputs), *last)


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], Tensor]] = {
    "binary [B]": ("binary", lambda: mlp(1, nn.Flatten(0)), labels(B)),
    "binary [B, 1]": ("binary", lambda: mlp(1), labels(B)),
    "binary with a channel": ("binary", lambda: mlp(1), labels(B, 1)),
    "dense binary": ("binary", lambda: mlp(6, nn.Unflatten(1, (1, 2, 3))), labels(B, 2, 3)),
    "multilabel": ("multilabel", lambda: mlp(L), labels(B, L)),
    "tokens": ("tokens", token_logits, some_ignored(labels(B, T, high=C))),
    "as many tokens as classes": ("tokens", partial(token_logits, C, C), some_ignored(labels(B, C, high=C))),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def member_probs(predictions: Tensor, task: str) -> np.ndarray:
    """Probabilities of all classes, in the last axis, in float64; of no and yes where there is one logit."""
    z = predictions.double()
    if task == "tokens":
        return z.softmax(-1).numpy()
    if task == "binary" and z.dim() > 2:
        z = z[:, :, 0]
    return torch.stack([1 - z.sigmoid(), z.sigmoid()], -1).numpy()


def target_of(y: Tensor, task: str) -> np.ndarray:
    return (y[:, 0] if task == "binary" and y.dim() in (2, 4) and y.shape[1] == 1 else y).numpy()


# Losses -----------------------------------------------------------------------------------------------------


@every_network
@pytest.mark.parametrize(("draws", "dtype"), [(1, torch.bfloat16), (4, torch.float32)])
def test_the_loss_is_the_mean_nll_of_the_averaged_draws(name: str, draws: int, dtype: torch.dtype) -> None:
    task, build, y = NETWORKS[name]
    torch.manual_seed(0)
    net, x = mt.mc_dropout(build().to(dtype), task=task), X.to(dtype)
    net.training_draws = draws
    net.train()
    torch.manual_seed(1)
    probs = member_probs(net(x).detach().float(), task).mean(0)
    target = target_of(y, task)
    kept = target != -100
    own = np.take_along_axis(probs, np.where(kept, target, 0)[..., None], -1)[..., 0]
    torch.manual_seed(1)
    loss = net.loss(x, y)
    assert loss.item() == pytest.approx(-np.log(own[kept]).mean(), rel=2e-2 if dtype == torch.bfloat16 else 1e-5)
    for given in (y.int(), y if task == "tokens" else y.bool(), y if task == "tokens" else y.float()):
        torch.manual_seed(1)
        torch.testing.assert_close(net.loss(x, given), loss)


@pytest.mark.parametrize(
    ("weights", "dtype", "draws"),
    [
        (torch.float64, torch.float32, 3),
        (torch.bfloat16, torch.float32, 1),
        (torch.float32, torch.bfloat16, 3),
        (torch.float64, torch.bfloat16, 1),
    ],
)
def test_class_weights_may_have_another_dtype(weights: torch.dtype, dtype: torch.dtype, draws: int) -> None:
    for name, criterion in (
        ("tokens", nn.CrossEntropyLoss(weight=torch.arange(1, C + 1).to(weights))),
        ("tokens", partial(F.cross_entropy, weight=torch.arange(1, C + 1).to(weights))),
        ("multilabel", nn.BCEWithLogitsLoss(pos_weight=torch.arange(1, L + 1).to(weights))),
        ("binary [B, 1]", nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2], dtype=weights))),
    ):
        task, build, y = NETWORKS[name]
        net, x = mt.mc_dropout(build().to(dtype), task=task).train(), X.to(dtype)
        net.training_draws = draws
        torch.manual_seed(1)
        z = task_of(task).averaged(net(x)).detach().double()
        if task == "tokens":
            want = F.cross_entropy(z.movedim(-1, 1), y, weight=torch.arange(1, C + 1).double())
        else:
            weight = torch.arange(1, L + 1).double() if task == "multilabel" else torch.tensor([2.0]).double()
            want = F.binary_cross_entropy_with_logits(z, y.view_as(z).double(), pos_weight=weight)
        torch.manual_seed(1)
        loss = net.loss(x, y, criterion)
        assert loss.item() == pytest.approx(want.item(), rel=2e-2 if torch.bfloat16 in (dtype, weights) else 1e-5)


# Predictions ------------------------------------------------------------------------------------------------


@every_network
def test_quantities_are_those_of_the_members_probabilities(name: str) -> None:
    task, build, y = NETWORKS[name]
    torch.manual_seed(0)
    p = mt.deep_ensemble(build(), 4, task=task).predict(X)
    probs = np.moveaxis(member_probs(p.predictions, task), -1, 2)
    for quantity in PER_INPUT[:-1]:
        found, want = getattr(p, quantity), REFERENCES[quantity](probs)
        assert found.shape == want.shape == torch.Size(target_of(y, task).shape)
        np.testing.assert_allclose(found.numpy(), want, rtol=1e-4, atol=1e-6, err_msg=quantity)


@every_network
def test_probabilities_lie_along_the_right_axis(name: str) -> None:
    task, build, _ = NETWORKS[name]
    p = mt.deep_ensemble(build(), 3, task=task).predict(X)
    probs = member_probs(p.predictions, task)
    probs = probs if task == "tokens" else probs[..., 1]
    np.testing.assert_allclose(p.member_probs.numpy(), probs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(p.probs.numpy(), probs.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(p.log_probs.exp(), p.probs)
    if task == "tokens":
        torch.testing.assert_close(p.probs.sum(-1), torch.ones(p.probs.shape[:-1]))
    part = mt.Predictive.concat([p[:10], p[10:]])
    assert torch.equal(part.probs, p.probs) and repr(part) == repr(p)
    drawn = mt.mc_dropout(build(), task=task).predict(X, draws="auto", seed=0, max_draws=16)
    assert drawn.task == task and drawn.probs.shape == p.probs.shape


def test_one_logit_is_two_classes_to_the_last_digit() -> None:
    z = torch.tensor([[-120.0, -3.0, 0.0, 3.0, 120.0], [-110.0, 1.0, 0.0, 4.0, 130.0]])
    one, two = mt.Predictive(z, "binary"), mt.Predictive(torch.stack([torch.zeros_like(z), z], 2))
    torch.testing.assert_close(one.log_probs, two.log_probs[:, 1])
    torch.testing.assert_close(one.entropy, two.entropy)
    assert one.log_probs[0].item() == pytest.approx(np.logaddexp(-120, -110) - math.log(2), rel=1e-6)
    assert repr(one) == "Predictive(task='binary', members=2, inputs=5, outputs=[])"
    with pytest.raises(ValueError, match="max_logit needs task classification or tokens, got predictions of binary"):
        _ = one.max_logit
    with pytest.raises(ValueError, match=r"must be \[S, B\] or \[S, B, 1, \.\.\.\], one logit.*task='multilabel'"):
        mt.Predictive(numbers(2, 5, 3), "binary")


# Scores -----------------------------------------------------------------------------------------------------


@every_network
def test_scores_are_those_of_rows_of_classes(name: str) -> None:
    task, build, y = NETWORKS[name]
    torch.manual_seed(0)
    net = mt.deep_ensemble(build(), 3, task=task)
    result = mt.evaluate(net, [(X[:25], y[:25]), (X[25:], y[25:])])
    probs, target = member_probs(net.predict(X).predictions, task).mean(0), target_of(y, task)
    kept = target != -100
    probs, target = probs[kept], target[kept]
    own = probs[np.arange(len(target)), target]
    assert result["accuracy"] == pytest.approx((probs.argmax(-1) == target).mean())
    assert result["nll"] == pytest.approx(-np.log(own).mean(), rel=1e-5)
    assert result["brier"] == pytest.approx(((probs - np.eye(probs.shape[-1])[target]) ** 2).sum(-1).mean(), rel=1e-5)
    assert result.counts["nll"] == len(target)
    confidence, right = probs.max(-1), probs.argmax(-1) == target
    bins = np.ceil(confidence * 15)
    gaps = [abs(right[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).sum() for b in np.unique(bins)]
    assert result["ece"] == pytest.approx(sum(gaps) / len(target), rel=1e-5)
    if task == "tokens":
        logits = net.predict(X).log_probs
        assert result["perplexity"] == pytest.approx(torchmetrics_perplexity(logits, y, ignore_index=-100).item(), 1e-4)
    if name == "multilabel":
        p = net.predict(X).probs
        assert result["auroc"] == pytest.approx(roc_auc_score(y.numpy(), p.numpy(), average="macro"))
        assert result["accuracy"] == pytest.approx(multilabel_accuracy(p, y, L, average="macro").item())
    if name in ("binary [B]", "binary with a channel"):
        assert result["auroc"] == pytest.approx(roc_auc_score(target, net.predict(X).probs.numpy()))


def test_out_of_distribution_scores_are_of_inputs_tokens_or_pixels() -> None:
    for name, rows in (("binary [B, 1]", B), ("multilabel", B), ("tokens", B * T)):
        task, build, y = NETWORKS[name]
        net = mt.deep_ensemble(build(), 2, task=task)
        result = mt.evaluate(net, (X, y), ood=3 * X)
        assert result.counts["ood/entropy/auroc"] == 2 * rows
        assert ("ood/max_logit/auroc" in result) == (task == "tokens")
        entropy = [net.predict(x).entropy.numpy() for x in (X, 3 * X)]
        scores = [each.mean(1) if task == "multilabel" else each.ravel() for each in entropy]
        known = np.repeat([0, 1], rows)
        assert result["ood/entropy/auroc"] == pytest.approx(roc_auc_score(known, np.concatenate(scores)))


# Calibration ------------------------------------------------------------------------------------------------


@every_network
def test_a_temperature_lowers_the_nll_and_sets_hold_their_targets(name: str) -> None:
    task, build, _ = NETWORKS[name]
    torch.manual_seed(0)
    net = mt.deep_ensemble(build(), 3, task=task)
    for parameter in net.parameters():
        parameter.data *= 3  # too sure
    x = numbers(2000, 8, seed=5)
    p = net.predict(x)
    probs = torch.from_numpy(member_probs(p.predictions / 4, task)).mean(0)
    torch.manual_seed(1)
    y = torch.distributions.Categorical(probs).sample()
    y = some_ignored(y) if task == "tokens" else y
    calibrated = mt.calibrate(net, (x[:1000], y[:1000]), seed=0)
    assert calibrated.temperature > 1.5
    before, after = (mt.evaluate(each, (x[1000:], y[1000:]))["nll"] for each in (net, calibrated))
    assert after < before
    found = calibrated.predict(x[1000:])
    sets = found.set(0.8)
    assert sets.shape == (*probs[1000:].shape,) if task == "tokens" else sets.shape[1] == 2
    by_class = sets if task == "tokens" else sets.movedim(1, -1)
    own = y[1000:]
    held = by_class.gather(-1, own.clamp(min=0)[..., None])[..., 0][own != -100]
    assert 0.75 < held.double().mean() < 0.99
    assert torch.equal(found.label, net.predict(x[1000:]).label)  # a temperature keeps labels
    stream = mt.temporal(calibrated, frames=2)
    torch.testing.assert_close(stream(x[:4]).probs, calibrated.predict(x[:4]).probs)


def test_impossible_calibrations_are_errors() -> None:
    net = mt.Multitude(token_logits())
    net.task = "tokens"
    y = labels(B, T, high=C)
    with pytest.raises(ValueError, match="scaling must be one of 'temperature', 'member_temperature', None, 'auto'"):
        mt.calibrate(net, (X, y), scaling="vector")
    with pytest.raises(ValueError, match="target must hold classes to fit the scaling, got only ignored ones"):
        mt.calibrate(net, (X, torch.full_like(y, -100)), conformal=None)
