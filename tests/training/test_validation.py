"""Validation in training: the best weights, patience, and a training that goes on as it would without."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes.training.fit import fit

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
HELD_X = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
HELD_Y = (HELD_X[:, 0] > 0).long() + (HELD_X[:, 1] > 1).long()
HELD = [(HELD_X[:24], HELD_Y[:24]), (HELD_X[24:], HELD_Y[24:])]


def network(dropout: float = 0.0, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, outputs))


def loader() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), 16, shuffle=True)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, b.state_dict()[name]) for name, p in a.state_dict().items())


METHODS = {
    "network": lambda: network(0.3),
    "deep ensemble": lambda: mt.deep_ensemble(network(0.3), 3, seed=0),
    "packed": lambda: mt.packed(network(), 4, 2, seed=0),
    "batch ensemble": lambda: mt.batch_ensemble(network(), 4, seed=0),
    "masksembles": lambda: mt.masksembles(network(), 4, 2.0, seed=0),
    "dropout": lambda: mt.mc_dropout(network(0.3)),
    "variance": lambda: mt.variance(network(), seed=0),
    "mimo": lambda: mt.mimo(network(), 2, seed=0),
    "dropout members": lambda: mt.deep_ensemble(mt.mc_dropout(network(0.3)), 2, seed=0),
}


# -- the best weights --------------------------------------------------------------------------------------


def wrong() -> list[tuple[Tensor, Tensor]]:
    """What nobody learns from the training data."""
    return [(HELD_X, (HELD_Y + 1) % 3)]


@pytest.mark.parametrize("method", METHODS)
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
    history = fit(net, loader(), 6, lr=rate, validation=wrong(), seed=1, callbacks=[keep])
    assert len(history) == 6 and net.training
    best = min(history, key=lambda epoch: epoch.validation).epoch
    assert best < 6, "or nothing is restored"
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, seen[best][name]) and tensor.data_ptr() == places[name]


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
    assert len(history) == 2 and net.runs == 9, "where there is no best, the last weights stay"


def test_a_callback_that_ends_the_training_leaves_the_best_weights():
    net, other = network(), network()
    history = fit(net, loader(), 5, validation=wrong(), seed=0, callbacks=[lambda p: p.step == 8])
    assert len(history) == 1
    fit(other, loader(), 5, validation=wrong(), seed=0, callbacks=[lambda p: p.epoch_ended])
    assert equal(net, other)


# -- a training that goes on as it is ----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_training_is_the_same_with_validation_and_without(method):
    plain, validated = METHODS[method](), METHODS[method]()
    want = fit(plain, loader(), 3, seed=4)
    ends: list[dict[str, Tensor]] = []

    def keep(p):
        if p.epoch_ended:
            ends.append({name: tensor.clone() for name, tensor in validated.state_dict().items()})

    held = DataLoader(TensorDataset(HELD_X, HELD_Y), 16, shuffle=True)
    got = fit(validated, loader(), 3, seed=4, validation=held, callbacks=[keep])
    assert [epoch.loss for epoch in got] == [epoch.loss for epoch in want]
    assert all(torch.equal(tensor, ends[-1][name]) for name, tensor in plain.state_dict().items())


class Remembers(nn.Module):
    """Adds what it gave to the batch before, and a mean over all batches that it has seen in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.before = nn.Linear(8, 3), 0.0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        out = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        out = out + 0.1 * self.before + self.mean
        self.before = out.detach().mean(0)
        return out


@pytest.mark.parametrize("make", [Remembers, lambda: mt.deep_ensemble(Remembers(), 2, seed=0)])
def test_what_a_network_remembers_between_batches_is_left_alone(make):
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    validated = make()
    want = [epoch.loss for epoch in fit(plain, loader(), 3, seed=4)]
    assert [epoch.loss for epoch in fit(validated, loader(), 3, seed=4, validation=HELD)] == want


class Killed(Exception):
    pass


def kill_at(step, at_the_end=False):
    def callback(p):
        if p.step == step and p.epoch_ended == at_the_end:
            raise Killed

    return callback


@pytest.mark.quick(4)
@pytest.mark.parametrize("method", METHODS)
def test_a_training_that_was_interrupted_ends_like_one_that_was_not(method, tmp_path):
    whole, pieces = METHODS[method](), METHODS[method]()
    settings = {"seed": 3, "checkpoint_seconds": 0, "lr": 0.2, "validation": wrong(), "patience": 3}
    history = fit(whole, loader(), 8, **settings)
    for step in (2, 6, 7, 12, 13, 20):
        for at_the_end in (False, True):
            if at_the_end and step % 6:
                continue
            with pytest.raises(Killed):
                callbacks = [kill_at(step, at_the_end)]
                fit(METHODS[method](), loader(), 8, checkpoint=tmp_path / "c", callbacks=callbacks, **settings)
    resumed = fit(pieces, loader(), 8, checkpoint=tmp_path / "c", **settings)
    again = METHODS[method]()
    ended = fit(again, loader(), 8, checkpoint=tmp_path / "c", callbacks=[kill_at(1)], **settings)
    assert equal(whole, pieces) and equal(whole, again)
    for one in (resumed, ended):
        assert [(e.loss, e.validation) for e in one] == [(e.loss, e.validation) for e in history]


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("batch", [0, 1])
def test_ctrl_c_while_scores_are_computed_saves_the_last_step(epoch, batch, tmp_path):
    class Interrupts:
        """Held-out batches, at one of which Ctrl-C is pressed."""

        epochs = 0

        def __iter__(self):
            self.epochs += 1
            for number, each in enumerate(HELD):
                if (self.epochs - 1, number) == (epoch, batch):  # the first look is before the training
                    signal.raise_signal(signal.SIGINT)
                yield each

    whole, pieces, seen = METHODS["dropout"](), METHODS["dropout"](), []
    history = fit(whole, loader(), 4, seed=3, validation=HELD)
    settings = {"seed": 3, "checkpoint": tmp_path / "c"}
    with pytest.raises(KeyboardInterrupt):
        fit(METHODS["dropout"](), loader(), 4, validation=Interrupts(), **settings)
    resumed = fit(pieces, loader(), 4, validation=HELD, callbacks=[lambda p: seen.append(p)], **settings)
    assert seen[0].epoch_ended and seen[0].epoch == epoch
    assert equal(whole, pieces)
    assert [(e.loss, e.validation) for e in resumed] == [(e.loss, e.validation) for e in history]


# -- any input, bad arguments ------------------------------------------------------------------------------


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(7, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden, _ = self.lstm(self.embedding(input_ids) * attention_mask[..., None])
        return {"logits": self.head(hidden[:, -1])}


@pytest.mark.parametrize("method", [lambda model: model, lambda model: mt.deep_ensemble(model, 2), mt.mc_dropout])
def test_mappings_of_keyword_arguments_are_validated_on(method):
    torch.manual_seed(0)
    model = Sequences()
    if method is mt.mc_dropout:
        model.head = nn.Sequential(nn.Dropout(0.5), model.head)
    ids = torch.randint(7, (12, 5))
    batch = {"input_ids": ids, "attention_mask": torch.ones(12, 5), "labels": (ids[:, -1] > 3).long()}
    history = fit(method(model), [batch], 8, optimizer="adam", lr=0.05, validation=[batch], patience=8)
    assert history[-1].validation < history[0].validation


def test_a_generator_of_held_out_batches_is_enough_for_all_epochs():
    history = fit(network(), loader(), 3, validation=iter(HELD))
    assert all(epoch.validation > 0 for epoch in history)


def test_batches_of_a_loader_are_those_of_one_epoch():
    part = mt.data.Part(X, Y)
    data = mt.data.Data("rows", part, part, part, classes=("a", "b", "c"), columns=tuple("abcdefgh"))
    held = mt.data.Loader(part, data, 16)
    plain, other = network(), network()
    want = [e.validation for e in fit(plain, loader(), 2, seed=1, validation=list(mt.data.Loader(part, data, 16)))]
    assert [e.validation for e in fit(other, loader(), 2, seed=1, validation=held)] == want


def test_without_validation_there_are_no_scores():
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


def test_validation_that_weighs_nothing_is_one_sentence():
    with pytest.raises(ValueError, match="validation must have at least one target with a weight above 0"):
        fit(network(), loader(), 2, validation=[(HELD_X, HELD_Y, torch.zeros(40))])


def test_a_checkpoint_of_a_training_with_another_validation_is_refused(tmp_path):
    fit(network(), loader(), 2, checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match=r"belongs to a training with stop_by=None, but now stop_by='score'"):
        fit(network(), loader(), 2, checkpoint=tmp_path / "c", validation=HELD)


# -- two processes -----------------------------------------------------------------------------------------

WORKER = """
import json, os, sys, torch
from accelerate import Accelerator
from safetensors.torch import save_file
from tests.training.test_validation import X, Y, fit, mt, network, wrong

folder, rank = sys.argv[1], int(os.environ["RANK"])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
accelerator = Accelerator(cpu=True)
torch.manual_seed(rank)  # a different state must not lead to different decisions
net = mt.deep_ensemble(network(), 2, seed=0)
batches = list(zip(X.split(16), Y.split(16)))
history = fit(net, batches, 9, lr=0.2, accelerator=accelerator, validation=wrong(), patience=2)
save_file(dict(net.named_parameters()), f"{folder}/{rank}.safetensors")
open(f"{folder}/{rank}.json", "w").write(json.dumps([epoch.validation for epoch in history]))
accelerator.wait_for_everyone()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_agree_on_the_best_epoch_and_on_the_last(tmp_path):
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env |= {"PYTHONPATH": os.pathsep.join([str(Path(mt.__file__).parents[1]), str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    try:
        assert [worker.wait(timeout=600) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()  # where one has failed, the other still waits for it
    scores = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert scores[0] == scores[1]
    assert len(scores[0]) == scores[0].index(min(scores[0])) + 3 < 9
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
