"""A training that is asked to end saves the step at hand, and saves itself often enough before."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes.training.checkpoint import Checkpoint
from multitudes.training.fit import fit

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def loader() -> DataLoader:
    """Six batches."""
    return DataLoader(TensorDataset(X, Y), 16, shuffle=True)


def network() -> mt.Multitude:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
    return mt.mc_dropout(nn.Sequential(*layers))


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, b.state_dict()[name]) for name, p in a.state_dict().items())


@pytest.mark.parametrize("step", [1, 5, 6, 7, 24])
def test_ctrl_c_and_requests_to_end_save_the_step_at_hand(step, tmp_path):
    def interrupt(p):
        if p.step == step and not p.epoch_ended:
            signal.raise_signal(signal.SIGINT)

    whole, pieces = network(), network()
    settings = {"seed": 3, "checkpoint": tmp_path / "c"}
    history = fit(whole, loader(), 4, seed=3)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        fit(network(), loader(), 4, callbacks=[interrupt], **settings)
    resumed = fit(pieces, loader(), 4, callbacks=[lambda p: seen.append(p.step)], **settings)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert min(seen, default=25) == (step if step % 6 == 0 else step + 1), "it goes on there, also with an epoch's end"
    assert equal(whole, pieces) and [epoch.loss for epoch in resumed] == [epoch.loss for epoch in history]


def test_a_second_ctrl_c_does_not_wait_and_without_a_checkpoint_neither_does_the_first(tmp_path):
    def interrupt(times):
        def callback(p):
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            pytest.fail("it waited")

        return callback

    for times, options in ((1, {}), (2, {"checkpoint": tmp_path / "c"})):
        with pytest.raises(KeyboardInterrupt):
            fit(network(), loader(), 1, callbacks=[interrupt(times)], **options)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("seconds", "saved"),
    [
        (0.1, [24]),
        (2.0, [12, 24, 24]),  # an epoch of 12 s: after every second one, and at the end
        (5.0, [6, 12, 18, 24, 24]),
        (300.0, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 24]),  # an epoch of half an hour: every 10 minutes
    ],
)
def test_a_training_is_saved_after_epochs_and_within_long_ones(tmp_path, monkeypatch, seconds, saved):
    clock, seen = [0.0], []

    def save(checkpoint, state, *_):
        seen.append(state.step)
        checkpoint.written = clock[0]

    def step(p):
        clock[0] += 0 if p.epoch_ended else seconds

    monkeypatch.setattr("multitudes.training.checkpoint.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(Checkpoint, "save", save)
    fit(network(), loader(), 4, checkpoint=tmp_path / "c", callbacks=[step])
    assert seen == saved
