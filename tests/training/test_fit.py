"""`fit`: the loop, its schedules, precisions, seeds, weight averages, errors, and two processes."""

from __future__ import annotations

import copy
import math
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import multitudes as mt
from multitudes.training.fit import fit
from multitudes.training.precision import check_precision
from multitudes.training.schedules import schedule_of
from tests.training.training_cases import Stream, X, Y, equal, loader, network, own_loader, run_in_two_processes

# -- the loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=1e-3)),
        ("adam", lambda p: torch.optim.Adam(p, 0.1, weight_decay=1e-3, fused=True)),
        ("adamw", lambda p: torch.optim.AdamW(p, 0.1, weight_decay=1e-3, fused=True)),
    ],
)
def test_fit_equals_a_loop_by_hand(name, make):
    net, own = network(), network()
    fit(net, loader(shuffle=False), 3, optimizer=name, lr=0.1, weight_decay=1e-3, schedule="constant")
    optimizer = make(own.parameters())
    for _ in range(3):
        for x, y in loader(shuffle=False):
            optimizer.zero_grad()
            F.cross_entropy(own(x), y).backward()
            optimizer.step()
    for a, b in zip(net.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_members_train_as_they_would_alone():
    net = mt.deep_ensemble(network(), 3, seed=0)
    alone = [net.member(i) for i in range(3)]
    fit(net, loader(shuffle=False), 2, clip=0.1)
    for i, member in enumerate(alone):
        fit(member, loader(shuffle=False), 2, clip=0.1)
        for a, b in zip(net.member(i).parameters(), member.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_the_learning_rate_follows_its_schedule_after_the_warm_up():
    rates = []
    fit(network(), loader(), 4, lr=0.2, schedule="linear", warmup=1, callbacks=[lambda p: rates.append(p.lr)])
    rates = [rate for i, rate in enumerate(rates) if i % 7 < 6]  # without the ends of epochs
    steps = [step / 24 for step in range(24)]
    assert rates == pytest.approx([0.2 * (1 - done) * min(1, 4 * done) for done in steps])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [(1 + math.cos(math.pi * t)) / 2 for t in (0, 0.25, 0.5, 0.75)]),
        ({"name": "cyclic", "cycles": 2}, [1, 0.5, 1, 0.5]),
        ({"name": "multistep", "milestones": [0.5, 0.7], "factor": 0.1}, [1, 1, 0.1, 0.01]),
        (lambda done: 1 + done, [1, 1.25, 1.5, 1.75]),
    ],
)
def test_schedules(schedule, factors):
    assert [schedule_of(schedule)(done) for done in (0, 0.25, 0.5, 0.75)] == pytest.approx(factors)


def test_history_and_progress_report_the_steps():
    seen = []
    history = fit(network(), loader(), 2, callbacks=[seen.append])
    assert [epoch.epoch for epoch in history] == [1, 2] and history[1].loss < history[0].loss
    steps = [p for p in seen if not p.epoch_ended]
    assert [(p.epoch, p.batch, p.batches, p.step) for p in steps[5:7]] == [(1, 6, 6, 6), (2, 1, 6, 7)]
    ends = [p for p in seen if p.epoch_ended]
    assert [p.loss for p in ends] == [epoch.loss for epoch in history]
    assert history[0].loss == pytest.approx(sum(p.loss for p in steps[:6]) / 6)


def test_a_callback_can_end_the_training():
    assert len(fit(network(), loader(), 5, callbacks=[lambda p: p.step == 8])) == 1


def test_data_of_unknown_length():
    rates = []
    fit(network(), Stream(48), 4, lr=1.0, schedule="linear", callbacks=[lambda p: rates.append(p.lr)])
    assert rates[3::3] == [0.75, 0.5, 0.25] and rates[4] == 0.625


def test_the_divergence_is_divided_by_the_number_of_examples():
    net = mt.variance(network())
    sizes = []
    net.loss = lambda x, y, criterion, dataset_size: sizes.append(dataset_size) or net(x).sum()
    fit(net, loader(), 1)
    fit(net, [(X, Y), (X[:4], Y[:4])], 1)
    fit(net, loader(), 1, dataset_size=7)
    fit(net, own_loader(X[:40], Y[:40], 40), 1)
    assert sizes == [96] * 6 + [100] * 2 + [7] * 6 + [40]
    with pytest.raises(ValueError, match="dataset_size must be given"):
        fit(net, iter([(X, Y)]), 1)


def test_bfloat16_is_tried_once_in_a_child_process(monkeypatch):
    def set_trial(code):
        monkeypatch.setattr("multitudes.training.precision._TRIAL", code)

    monkeypatch.delenv("MULTITUDES_BFLOAT16_TRIED", raising=False)
    crashes = {"import os, signal; os.kill(os.getpid(), signal.SIGILL)": "signal 4", "raise ValueError": "ValueError"}
    for code, reason in crashes.items():
        set_trial(code)
        check_precision("bfloat16", "cuda")
        with pytest.raises(ValueError, match=f"does not work on this CPU.*{reason}.*'float32', or set ONEDNN"):
            fit(nn.Linear(8, 3), [(X, Y)], 1, precision="bfloat16")
    set_trial("")
    check_precision("bfloat16", "cpu")
    assert os.environ["MULTITUDES_BFLOAT16_TRIED"]
    set_trial("raise SystemExit(3)")
    check_precision("bfloat16", "cpu")


def test_a_seed_makes_training_repeatable_and_keeps_the_random_state():
    nets = [network(0.5) for _ in range(3)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for net, seed in zip(nets, (5, 5, 6), strict=True):
        fit(net, loader(), 2, seed=seed)
    assert torch.equal(before, torch.get_rng_state())
    assert equal(nets[0], nets[1]) and not equal(nets[0], nets[2])


def test_any_number_of_networks_can_be_compiled_in_one_process(monkeypatch):
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    for width in range(1, 11):  # more than torch compiles versions of one function
        net = mt.Multitude(nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)))
        fit(net, [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))], epochs=2, compile=True)
    assert len(graphs) == 10


@pytest.mark.parametrize(
    ("way", "backend", "tolerance"),
    [
        ({"precision": "bfloat16"}, None, 2e-2),
        ({"channels_last": True}, None, 1e-4),
        ({"compile": True}, "aot_eager", 1e-4),
        pytest.param({"compile": True}, "inductor", 1e-4, marks=pytest.mark.slow),  # which compiles C++
    ],
)
def test_bfloat16_channels_last_and_compilation_learn_the_same(way, backend, tolerance, monkeypatch):
    torch.manual_seed(0)
    x, y = torch.rand(64, 1, 8, 8), torch.arange(64) % 2
    x[y == 1, :, :4] += 1
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, other = ([e.loss for e in fit(mt.Multitude(copy.deepcopy(model)), [(x, y)], 5, **w)] for w in ({}, way))
    assert other == pytest.approx(plain, rel=tolerance)
    assert other != plain or "precision" not in way


# -- moving averages of weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mt.Multitude, partial(mt.deep_ensemble, members=3), partial(mt.tabm, members=3)])
def test_the_network_ends_with_the_average_of_the_steps(make):
    steps = []

    def copy_weights(p):
        if not p.epoch_ended:
            steps.append({name: value.detach().clone() for name, value in p.net.named_parameters()})

    options = {"epochs": 2, "optimizer": "adamw", "lr": 0.01, "seed": 1}
    plain = make(network())
    averaged = copy.deepcopy(plain)
    want = {name: p.detach().clone() for name, p in plain.named_parameters()}
    fit(plain, loader(), callbacks=[copy_weights], **options)
    for step, weights in enumerate(steps, 1):
        rate = min(0.8, (1 + step) / (10 + step))
        want = {name: rate * want[name] + (1 - rate) * weights[name] for name in want}
    fit(averaged, loader(), average=0.8, **options)
    for name, parameter in averaged.named_parameters():
        torch.testing.assert_close(parameter, want[name])


# -- bad losses --------------------------------------------------------------------------------------------


class Explodes(nn.Module):
    def forward(self, x):
        return x / 0


def test_a_bad_loss_names_the_step_and_the_layer():
    model = nn.Sequential(nn.Linear(8, 8), Explodes(), nn.Linear(8, 3))
    with pytest.raises(FloatingPointError, match=r"at step 1 \(epoch 1\) of training a Multitude: .* layer '1' \(Expl"):
        fit(model, loader(), 1)
    with pytest.raises(FloatingPointError, match=r"training a Members: the output of layer '0\.1' \(Explodes\)"):
        net = mt.deep_ensemble(model, 2)
        net.runner = "packed"
        fit(net, loader(), 1)
    assert net.runner == "packed"


def test_bad_inputs_and_weights_are_named_and_change_no_parameter():
    net = network()
    before = {name: p.clone() for name, p in net.named_parameters()}
    with pytest.raises(FloatingPointError, match=r"step 1 .*the input holds NaN"):
        fit(net, [(X * math.nan, Y)], 1)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    with pytest.raises(FloatingPointError, match=r"step 2 .*the input holds NaN"):
        fit(net, [(X, Y), (X / 0, Y)], 1)
    nn.init.constant_(net[4].bias, math.nan)
    with pytest.raises(FloatingPointError, match=r"the weights '4.bias' hold NaN"):
        fit(net, loader(), 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epochs": 0}, "epochs must be a whole number, 1 or more, got 0"),
        ({"optimizer": "sdg"}, "optimizer must be one of sgd, adam, adamw, or a torch optimizer, got 'sdg'"),
        ({"lr": -1}, "lr must be above 0, got -1"),
        ({"schedule": "cosin"}, "schedule must be one of constant, cosine, cyclic, linear, multistep, got 'cosin'"),
        ({"schedule": {"name": "cyclic", "turns": 2}}, "schedule 'cyclic' does not accept these settings: .*turns"),
        ({"warmup": 1}, "warmup must be 0 or more and below 1, got 1"),
        ({"precision": "half"}, "precision must be one of auto, float32, bfloat16, got 'half'"),
        ({"clip": 0}, "clip must be above 0, got 0"),
        ({"seed": -1}, "seed must be None or a whole number, .* got -1"),
        ({"optimizer": lambda p: torch.optim.SGD(p, 1), "lr": 0.1}, "lr=0.1 applies to an optimizer by name only"),
        ({"data": []}, "data must hold at least one batch in every epoch, got none in epoch 1"),
        ({"data": [X]}, r"batch 0 of data must have targets, \(x, y\), got an input alone"),
        ({"data": (X, Y)}, r"data must be a list of batches, got a single tuple: pass \[\(x, y\)\]"),
        ({"data": {"x": X, "labels": Y}}, "data must be a list of batches, got a single dict"),
        ({"data": TensorDataset(X, Y)}, "data must come in batches, got a TensorDataset: wrap it in a DataLoader"),
        ({"data": None}, "data must be an iterable of batches, got NoneType"),
        *(({"average": wrong}, f"average must be above 0 and below 1, got {wrong}") for wrong in (0.0, 1.0, -1)),
        ({"net": "resnet"}, "net must be a multitude or a network, got str"),
        ({"net": nn.ReLU()}, "net must have parameters with requires_grad, got none"),
    ],
)
def test_bad_arguments_are_named(options, sentence):
    options = {"net": network(), "data": loader(), "epochs": 1} | options
    with pytest.raises(ValueError, match=sentence):
        fit(options.pop("net"), options.pop("data"), options.pop("epochs"), **options)


# -- two processes -----------------------------------------------------------------------------------------

WORKER = """
net = mt.deep_ensemble(nn.Sequential(nn.Linear(8, 3)), 2, seed=0)
fit(net, batches, 2, accelerator=accelerator, clip=0.5)
save_file(net.state_dict(), f"{folder}/{rank}.safetensors")
"""


@pytest.mark.slow
def test_two_processes_train_as_one_with_batches_of_twice_the_size(tmp_path):
    run_in_two_processes(WORKER, tmp_path)
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    net = mt.deep_ensemble(nn.Sequential(nn.Linear(8, 3)), 2, seed=0)
    fit(net, list(zip(X.split(32), Y.split(32), strict=True)), 2, clip=0.5)
    for name, weight in net.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight)
