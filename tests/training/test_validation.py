"""Validation: scores as other libraries compute them, the best weights, patience, and an unchanged training."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import log_loss, mean_pinball_loss, mean_squared_error
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes.training.fit import fit
from tests.training.training_cases import (
    HELD,
    HELD_X,
    HELD_Y,
    METHODS,
    WRONG,
    X,
    Y,
    equal,
    loader,
    network,
    own_loader,
    run_in_two_processes,
)
from tests.zoo.of_parts import Of

# -- scores ------------------------------------------------------------------------------------------------


def score(net: mt.Multitude, y: Tensor, **options: object) -> float:
    """Return the score of a network by a training that hardly changes it."""
    batches = [(HELD_X[:30], y[:30]), (HELD_X[30:], y[30:])]
    return fit(net, [(HELD_X, y)], 1, lr=1e-30, validation=batches, **options)[0].validation


def members(outputs: int, task: str) -> mt.Multitude:
    torch.manual_seed(2)
    return mt.deep_ensemble(nn.Linear(8, outputs), 3, task=task, seed=3)


def test_classes_are_scored_by_the_log_of_the_mean_probability():
    net = members(3, "classification")
    probs = net(HELD_X).detach().double().softmax(-1).mean(0)
    assert score(net, HELD_Y) == pytest.approx(log_loss(HELD_Y, probs, labels=[0, 1, 2]), rel=1e-6)
    assert score(net, HELD_Y, stop_by="error") == score(net, HELD_Y)
    soft = probs.roll(1, 0)
    want = -(soft * probs.log()).sum(1).mean().item()
    assert score(net, soft) == pytest.approx(want, rel=1e-6)


def test_binary_targets_are_scored_by_the_log_of_the_mean_probability():
    yes = (HELD_Y > 0).long()
    net = members(1, "binary")
    probs = net(HELD_X).sigmoid().mean(0).detach().double()
    assert score(net, yes) == pytest.approx(log_loss(yes, probs[:, 0]), rel=1e-6)
    labels = torch.stack([yes, (HELD_Y == 2).long()], 1)
    net = members(2, "multilabel")
    probs = net(HELD_X).sigmoid().mean(0).detach().double()
    want = (log_loss(labels[:, 0], probs[:, 0]) + log_loss(labels[:, 1], probs[:, 1])) / 2
    assert score(net, labels) == pytest.approx(want, rel=1e-6)


def test_ignored_tokens_do_not_count():
    torch.manual_seed(0)
    x, y = torch.randint(5, (6, 7)), torch.randint(5, (6, 7))
    y[:, 4:] = -100
    y[0, 1:] = -100
    net = mt.deep_ensemble(nn.Embedding(5, 5), 2, task="tokens", seed=0)
    probs = net(x).softmax(-1).mean(0)
    want = -probs.log().gather(2, y.clamp(min=0)[..., None])[..., 0][y >= 0].mean().item()
    history = fit(net, [(x, y)], 1, lr=1e-30, validation=[(x[:1], y[:1]), (x[1:], y[1:])])
    assert history[0].validation == pytest.approx(want, rel=1e-6)


def test_gaussians_are_scored_by_the_density_of_their_mixture_or_by_the_error_of_its_mean():
    y = HELD_X[:, :2] * 2 - 1
    net = members(4, "gaussian")
    means, raw = net(HELD_X).detach().double().chunk(2, 2)
    parts = Normal(means.movedim(0, -1), (nn.functional.softplus(raw) + 1e-6).sqrt().movedim(0, -1))
    mixture = MixtureSameFamily(Categorical(torch.ones(3, dtype=torch.float64)), parts)
    assert score(net, y) == pytest.approx(-mixture.log_prob(y.double()).mean().item(), rel=1e-6)
    want = math.sqrt(mean_squared_error(y, means.mean(0)))
    assert score(net, y, stop_by="error") == pytest.approx(want, rel=1e-6)


def test_values_are_scored_by_squared_errors_and_quantiles_by_their_pinball_loss():
    y = HELD_X[:, :1] * 2 - 1
    net = members(1, "regression")
    mean = net(HELD_X).mean(0).detach().double()
    assert score(net, y) == pytest.approx(mean_squared_error(y, mean), rel=1e-6)
    assert score(net, y, stop_by="error") == pytest.approx(math.sqrt(mean_squared_error(y, mean)), rel=1e-6)
    net = members(3, "quantiles")
    net.quantiles = (0.1, 0.5, 0.8)
    q = net(HELD_X).mean(0).detach().double()
    want = sum(mean_pinball_loss(y[:, 0], q[:, i], alpha=a) for i, a in enumerate(net.quantiles)) / 3
    assert score(net, y[:, 0]) == pytest.approx(want, rel=1e-6)


def test_validation_may_have_weights():
    weight = torch.rand(40, generator=torch.Generator().manual_seed(5))
    net = members(3, "classification")
    probs = net(HELD_X).detach().double().softmax(-1).mean(0)
    batches = [(HELD_X[:30], HELD_Y[:30], weight[:30]), (HELD_X[30:], HELD_Y[30:], weight[30:])]
    got = fit(net, [(HELD_X, HELD_Y)], 1, lr=1e-30, validation=batches)[0].validation
    assert got == pytest.approx(log_loss(HELD_Y, probs, sample_weight=weight, labels=[0, 1, 2]), rel=1e-6)


# -- the best weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["network", "deep ensemble", "masksembles", "variance"])
def test_the_weights_of_the_best_epoch_are_restored_in_place(method):
    net = METHODS[method]()
    places = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    seen: dict[int, dict[str, Tensor]] = {}

    def keep(p):
        if p.epoch_ended:
            seen[p.epoch] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            assert p.validation is not None and p.net.training
        else:
            assert p.validation is None

    rate = 0.5 if method == "variance" else 0.2
    history = fit(net, loader(), 6, lr=rate, validation=WRONG, seed=1, callbacks=[keep])
    assert len(history) == 6 and net.training
    best = min(history, key=lambda epoch: epoch.validation).epoch
    assert best < 6
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, seen[best][name]) and tensor.data_ptr() == places[name]


def test_the_moving_average_is_validated_and_its_best_epoch_kept():
    net = mt.Multitude(network())
    history = fit(net, loader(), 6, lr=0.2, seed=0, average=0.9, validation=WRONG)
    probs = net.eval().predict(WRONG[0][0]).probs
    score = -probs.gather(1, WRONG[0][1][:, None]).log().mean()
    assert score.item() == pytest.approx(min(epoch.validation for epoch in history), rel=1e-5)


def test_patience_counts_epochs_without_a_better_score():
    scores = iter([3.0, 2.0, 2.0, 2.5, 1.0, 1.5, 1.2, 1.1, 0.5])
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)

    def set_weight(p):  # mean squared error of w: the score that comes next
        if not p.epoch_ended:
            nn.init.constant_(net.weight, math.sqrt(next(scores)))

    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    settings = {"task": "regression", "lr": 1e-30, "validation": [(one, zero)], "callbacks": [set_weight]}
    history = fit(net, [(one, zero)], 9, patience=3, **settings)
    assert [e.validation for e in history] == pytest.approx([3, 2, 2, 2.5, 1, 1.5, 1.2, 1.1])
    assert net.weight.item() == pytest.approx(1.0)


def test_a_score_that_is_nan_is_never_the_best():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.runs += 1
            return self.layer(x) if self.training or self.runs == 2 else self.layer(x) * math.nan

    net = Broken()
    history = fit(net, [(X, Y)], 4, validation=HELD, patience=2)
    assert [math.isnan(epoch.validation) for epoch in history] == [True, False, True, True]
    assert net.runs == 2
    net = Broken()
    net.runs.fill_(7)
    history = fit(net, [(X, Y)], 5, validation=HELD, patience=2)
    assert len(history) == 2 and net.runs == 9  # without a best epoch, the last weights stay


def test_a_callback_that_ends_the_training_leaves_the_best_weights():
    net, other = network(), network()
    history = fit(net, loader(), 5, validation=WRONG, seed=0, callbacks=[lambda p: p.step == 8])
    assert len(history) == 1
    fit(other, loader(), 5, validation=WRONG, seed=0, callbacks=[lambda p: p.epoch_ended])
    assert equal(net, other)


# -- the training does not change --------------------------------------------------------------------------


class Memory(nn.Module):
    """Adds its output for the last batch, and a mean over all batches in any mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.before = nn.Linear(8, 3), 0.0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        out = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        out = out + 0.1 * self.before + self.mean
        self.before = out.detach().mean(0)
        return out


MAKERS = {"memory": Memory, "memory of members": lambda: mt.deep_ensemble(Memory(), 2, seed=0)} | METHODS


@pytest.mark.parametrize("method", ["network", "packed", "dropout", "variance", "mimo", "memory", "memory of members"])
def test_training_is_the_same_with_validation_and_without(method):
    plain, validated = MAKERS[method](), MAKERS[method]()
    want = fit(plain, loader(), 3, seed=4)
    ends: list[dict[str, Tensor]] = []

    def keep(p):
        if p.epoch_ended:
            ends.append({name: tensor.clone() for name, tensor in validated.state_dict().items()})

    held = DataLoader(TensorDataset(HELD_X, HELD_Y), 16, shuffle=True)
    got = fit(validated, loader(), 3, seed=4, validation=held, callbacks=[keep])
    assert [epoch.loss for epoch in got] == [epoch.loss for epoch in want]
    assert all(torch.equal(tensor, ends[-1][name]) for name, tensor in plain.state_dict().items())


# -- inputs and bad arguments -------------------------------------------------------------------------------


def read(net, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    hidden, _ = net.lstm(net.embedding(input_ids) * attention_mask[..., None])
    return {"logits": net.head(hidden[:, -1])}


@pytest.mark.parametrize("method", [lambda model: model, lambda model: mt.deep_ensemble(model, 2), mt.mc_dropout])
def test_mappings_of_keyword_arguments_are_validated(method):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2))
    model = Of(read, embedding=nn.Embedding(7, 8), lstm=nn.LSTM(8, 8, batch_first=True), head=head)
    ids = torch.randint(7, (12, 5))
    batch = {"input_ids": ids, "attention_mask": torch.ones(12, 5), "labels": (ids[:, -1] > 3).long()}
    history = fit(method(model), [batch], 8, optimizer="adam", lr=0.05, validation=[batch], patience=8)
    assert history[-1].validation < history[0].validation


def test_validation_data_may_be_a_generator_or_a_loader():
    history = fit(network(), loader(), 3, validation=iter(HELD))
    assert all(epoch.validation > 0 for epoch in history)
    want, got = (
        [epoch.validation for epoch in fit(network(), loader(), 2, seed=1, validation=validation)]
        for validation in (list(own_loader()), own_loader())
    )
    assert got == want
    assert [epoch.validation for epoch in fit(network(), loader(), 2)] == [None, None]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"patience": 3}, r"patience=3 needs a validation score: pass validation="),
        ({"patience": 0, "validation": HELD}, "patience must be a whole number, 1 or more, got 0"),
        ({"validation": []}, "validation must hold at least one batch, got none"),
        ({"validation": (HELD_X, HELD_Y)}, r"validation must be a list of batches, got a single tuple"),
        ({"validation": 3}, "validation must be an iterable of batches, got int"),
        ({"validation": [HELD_X]}, r"batch 0 of validation must have targets, \(x, y\), got an input alone"),
        ({"validation": [(HELD_X[:, :5], HELD_Y)]}, r"batch 0 of validation: x of shape \[40, 5\]"),
        ({"validation": [(HELD_X, HELD_Y + 1)]}, r"batch 0 of validation: y must hold classes 0 to 2, got 3"),
        ({"validation": [(HELD_X, HELD_Y[:0])]}, r"batch 0 of validation: y must be a tensor with at least one"),
        ({"validation": [(HELD_X / 0, HELD_Y), (HELD_X * math.nan, HELD_Y)]}, r"batch 1 of validation: x holds"),
        (
            {"validation": HELD, "stop_by": "accuracy"},
            "stop_by must be one of score, error, got 'accuracy'",
        ),
        ({"validation": [(HELD_X, HELD_Y, HELD_X)]}, r"batch 0 of validation must be \(x, y\), or \(x, y, weight\)"),
    ],
)
def test_bad_arguments_are_named_before_the_first_step(options, sentence):
    steps = []
    with pytest.raises(ValueError, match=sentence):
        fit(network(), loader(), 2, callbacks=[lambda p: steps.append(p.epoch_ended)], **options)
    assert True not in steps and (not steps or "batch 1" in sentence)


def test_validation_without_weight_is_refused():
    with pytest.raises(ValueError, match="validation must have at least one target with a weight above 0"):
        fit(network(), loader(), 2, validation=[(HELD_X, HELD_Y, torch.zeros(40))])


# -- two processes -----------------------------------------------------------------------------------------

WORKER = """
import json
net = mt.deep_ensemble(network(), 2, seed=0)
history = fit(net, batches, 9, lr=0.2, accelerator=accelerator, validation=WRONG, patience=2)
save_file(dict(net.named_parameters()), f"{folder}/{rank}.safetensors")
open(f"{folder}/{rank}.json", "w").write(json.dumps([epoch.validation for epoch in history]))
"""


@pytest.mark.slow
def test_two_processes_agree_on_the_best_epoch_and_on_the_last(tmp_path):
    run_in_two_processes(WORKER, tmp_path)
    scores = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert scores[0] == scores[1]
    assert len(scores[0]) == scores[0].index(min(scores[0])) + 3 < 9
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
