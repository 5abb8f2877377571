"""Checkpoints: an interrupted training ends like an uninterrupted one, and signals wait for the current step."""

from __future__ import annotations

import signal

import pytest
from torch import nn

from multitudes.training.checkpoint import Checkpoint
from multitudes.training.fit import fit
from tests.training.training_cases import HELD, METHODS, WRONG, Killed, Stream, equal, kill_at, loader, network

CASES = [
    ("network", {"optimizer": "sgd", "data": Stream(16)}),
    ("network", {"optimizer": "adamw", "average": 0.9, "validation": WRONG, "patience": 3}),
    ("packed", {"optimizer": "adam"}),
    ("deep ensemble", {"validation": WRONG, "patience": 3}),
    ("batch ensemble", {"validation": WRONG, "patience": 3}),
    ("masksembles", {"validation": WRONG, "patience": 3}),
    ("dropout", {"optimizer": "adam"}),
    ("variance", {"optimizer": "sgd"}),
    ("variance", {"validation": WRONG, "patience": 3}),
    ("mimo", {"optimizer": "adam"}),
    ("dropout members", {"validation": WRONG, "patience": 3}),
]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("method", "options"), CASES)
def test_an_interrupted_training_ends_like_an_uninterrupted_one(method, options, tmp_path):
    options = {"seed": 3, "checkpoint_seconds": 0, "lr": 0.05, "data": loader(), "epochs": 6} | options
    whole, pieces, again = (METHODS[method]() for _ in range(3))
    history = fit(whole, **options)
    for step, at_the_end in ((2, False), (6, False), (6, True), (7, False), (12, False), (12, True), (13, False)):
        with pytest.raises(Killed):
            fit(METHODS[method](), checkpoint=tmp_path / "c", callbacks=[kill_at(step, at_the_end)], **options)
    resumed = fit(pieces, checkpoint=tmp_path / "c", **options)
    ended = fit(again, checkpoint=tmp_path / "c", callbacks=[kill_at(1)], **options)  # does not run again
    assert equal(whole, pieces) and equal(whole, again)  # the same operations on the same memory layout
    for one in (resumed, ended):
        assert [(e.loss, e.validation) for e in one] == [(e.loss, e.validation) for e in history]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_is_written_only_when_it_is_due(tmp_path):
    seen = []
    fit(network(), loader(), 1, checkpoint=tmp_path / "c", callbacks=[lambda p: seen.append((tmp_path / "c").exists())])
    assert not any(seen) and (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 3}, r"'.*/c' belongs to a training with epochs=2, but now epochs=3: delete"),
        ({"lr": 0.1}, r"with lr=\[0.05\], but now lr=\[0.1\]"),
        ({"average": 0.5}, "with average=None, but now average=0.5"),
        ({"validation": HELD}, "with stop_by=None, but now stop_by='score'"),
        ({"net": nn.Sequential(nn.Linear(8, 3))}, "does not fit the model: '1.bias' is unexpected"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(options, message, tmp_path):
    fit(network(), loader(), 2, checkpoint=tmp_path / "c")
    options = {"net": network(), "epochs": 2} | options
    with pytest.raises(ValueError, match=message):
        fit(data=loader(), checkpoint=tmp_path / "c", **options)


# -- signals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 5, 6, 7, 24])
def test_ctrl_c_saves_the_current_step(step, tmp_path):
    def interrupt(p):
        if p.step == step and not p.epoch_ended:
            signal.raise_signal(signal.SIGINT)

    whole, pieces = METHODS["dropout"](), METHODS["dropout"]()
    settings = {"seed": 3, "checkpoint": tmp_path / "c"}
    history = fit(whole, loader(), 4, seed=3)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        fit(METHODS["dropout"](), loader(), 4, callbacks=[interrupt], **settings)
    resumed = fit(pieces, loader(), 4, callbacks=[lambda p: seen.append(p.step)], **settings)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert min(seen, default=25) == (step if step % 6 == 0 else step + 1)  # with the end of an epoch
    assert equal(whole, pieces) and [epoch.loss for epoch in resumed] == [epoch.loss for epoch in history]


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("batch", [0, 1])
def test_ctrl_c_during_validation_saves_the_last_step(epoch, batch, tmp_path):
    class Interrupts:
        """Batches that press Ctrl-C at one of them."""

        epochs = 0

        def __iter__(self):
            self.epochs += 1
            for number, each in enumerate(HELD):
                if (self.epochs - 1, number) == (epoch, batch):  # the first pass is before the training
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


def test_a_second_ctrl_c_and_one_without_a_checkpoint_do_not_wait(tmp_path):
    def interrupt(times):
        def callback(p):
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            pytest.fail("Ctrl-C waited")

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
def test_checkpoints_are_written_after_epochs_and_within_long_ones(tmp_path, monkeypatch, seconds, saved):
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
