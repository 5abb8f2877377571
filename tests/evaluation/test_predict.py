import io
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import multitudes as mt
from multitudes.base import progress
from multitudes.evaluation.predict import predict
from multitudes.tasks.predictive import Predictive
from tests.zoo.predictions import raises, randn

# predict: over tensors and loaders --------------------------------------------------------------------------


class Fake(nn.Module):
    """Three linear members that record their inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(3, 4, 6))
        self.seen = []

    def predict(self, x, task="classification"):
        self.seen.append(x)
        x = x["x"] if isinstance(x, dict) else x[0] + x[1] if isinstance(x, tuple) else x
        if x.isnan().any():
            raise ValueError("x holds NaN")
        return Predictive(x @ self.weight, task)


class Unbatched(IterableDataset):
    """A stream of batches of unknown number."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


X = randn(10, 4, seed=3)
Y = torch.arange(10)


@pytest.fixture
def net():
    return Fake()


@pytest.mark.parametrize(
    "data",
    [
        X,
        [X],
        list(X.split(3)),
        (X, Y),
        (X,),
        iter(X.split(3)),
        [(X[:7], Y[:7]), (X[7:], Y[7:])],
        [[X[:7], Y[:7]], [X[7:], Y[7:]]],
        [{"x": X[:7], "labels": Y[:7]}, {"x": X[7:], "label": Y[7:]}],
        [({"x": X}, Y)],
        [((X, torch.zeros(10, 4)), Y)],
        DataLoader(TensorDataset(X, Y), batch_size=4),
        DataLoader(TensorDataset(X), batch_size=4),
        DataLoader([{"x": x, "label": y} for x, y in zip(X, Y, strict=True)], batch_size=3),
        DataLoader(Unbatched(X.split(3)), batch_size=None),
        Unbatched(X.split(3)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_predict_joins_the_predictions_of_all_batches(net, data):
    p = predict(net, data)
    torch.testing.assert_close(p.predictions, (X @ net.weight).detach())


@pytest.mark.parametrize(
    ("inputs", "batch_size", "sizes"),
    [(10, None, [10]), (10, 4, [4, 3, 3]), (10, 1, [1] * 10), (10, 99, [10]), (600, None, [200, 200, 200])],
)
def test_a_tensor_is_split_into_equal_batches(net, inputs, batch_size, sizes):
    predict(net, randn(inputs, 4), batch_size=batch_size)
    assert [len(x) for x in net.seen] == sizes


def test_predict_keeps_no_graph_and_no_targets(net):
    p = predict(net, [{"x": X, "labels": Y, "note": "kept"}])
    assert not p.predictions.requires_grad and torch.is_grad_enabled()
    assert net.seen[0].keys() == {"x", "note"}


def test_predict_passes_the_task_on_only_if_there_is_one(net):
    assert predict(net, X).task == "classification"
    assert predict(net, X, task="gaussian").task == "gaussian"
    net.predict = lambda x: Predictive(x @ net.weight, "regression")
    assert predict(net, X).task == "regression"


@pytest.mark.parametrize(
    ("data", "of_parameters", "asked"),
    [(X, "meta", None), ([(X, Y)], "cpu", "meta"), ([{"x": X}], "meta", None), ([((X, X), Y)], "cpu", "meta")],
)
def test_inputs_move_to_the_device_of_the_parameters_or_to_device(data, of_parameters, asked):
    net, seen = Fake().to(of_parameters), []
    net.predict = lambda x: seen.append(x) or Predictive(torch.zeros(2, 10, 3))
    predict(net, data, **({"device": asked} if asked else {}))
    values = seen[0].values() if isinstance(seen[0], dict) else seen[0] if isinstance(seen[0], tuple) else seen
    assert {value.device.type for value in values} == {asked or of_parameters}


def test_each_batch_leaves_the_device_before_the_next(net, monkeypatch):
    moved = []
    monkeypatch.setattr(Predictive, "cpu", lambda self: moved.append(len(net.seen)) or self)
    predict(net, X, batch_size=3)
    assert moved == [1, 2, 3, 4]


def test_inputs_of_a_network_without_parameters_are_not_moved():
    class Bare(nn.Module):
        def predict(self, x):
            return Predictive(torch.stack([x, -x]))

    assert torch.equal(predict(Bare(), X).predictions, torch.stack([X, -X]))


def test_a_batch_with_nan_is_named(net):
    poisoned = X.clone()
    poisoned[5, 2] = math.nan
    with raises("batch 2 of data: x holds NaN") as caught:
        predict(net, poisoned, batch_size=2)
    assert str(caught.value.__cause__) == "x holds NaN"
    assert len(net.seen) == 3


A_BATCH = "a batch must be, or start with, a tensor, a mapping or a tuple"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "data must hold at least one batch, got none"),
        (iter(()), "data must hold at least one batch, got none"),
        (X[:0], "data must hold at least one input, got shape [0, 4]"),
        (torch.tensor(1.0), "data must hold at least one input, got shape []"),
        (TensorDataset(X, Y), "data must come in batches, got a TensorDataset: wrap it in a DataLoader"),
        (X.numpy(), f"batch 0 of data: {A_BATCH}, got ndarray"),
        ([X, "rabbit"], f"batch 1 of data: {A_BATCH}, got str"),
        ([()], f"batch 0 of data: {A_BATCH}, got tuple"),
        (X.split(3), "data must be one batch (x, y) or a list of batches, got a tuple of 4"),
    ],
    ids=["list", "iterator", "no inputs", "scalar", "dataset", "array", "text", "empty batch", "tuple of batches"],
)
def test_invalid_data_is_refused(net, data, sentence):
    with raises(sentence):
        predict(net, data)


def test_ambiguous_pairs_and_invalid_batch_sizes_are_refused(net):
    with raises("batch_size must be a whole number, 1 or more, got 0"):
        predict(net, X, batch_size=0)
    with raises("batch_size is only for tensors; data is a list with its own batches"):
        predict(net, [X], batch_size=4)
    with pytest.raises(ValueError, match="can be inputs and targets, or two batches; pass a list"):
        predict(net, X.split(5))


def kinds_of_predictors():
    plain = nn.Sequential(nn.Linear(4, 3))
    multitude = mt.fuse([plain, nn.Sequential(nn.Linear(4, 3))])
    calibrated = mt.calibrate(multitude, (X, Y % 3), seed=0)
    return {
        "plain": plain,
        "multitude": multitude,
        "calibrated": calibrated,
        "stream": mt.temporal(calibrated, frames=1),
    }


@pytest.mark.parametrize("kind", ["plain", "multitude", "calibrated", "stream"])
def test_every_kind_of_predictor_is_accepted(kind):
    predictors = kinds_of_predictors()
    p = predict(predictors[kind], (X, Y % 3))
    assert p.probs.shape == (10, 3)
    result = mt.evaluate(predictors[kind], [(X, Y % 3)])
    want = -p.log_probs[torch.arange(10), Y % 3].mean()
    assert result["nll"] == pytest.approx(want.item(), rel=1e-5)
    stream = mt.temporal(predictors[kind], frames=3) if kind != "stream" else predictors[kind]
    frame = stream(X)
    torch.testing.assert_close(frame.probs, p.probs)
    if kind == "stream":
        with raises("net must be a multitude or a network, got a Stream: pass its net"):
            mt.temporal(stream)
    if kind in ("calibrated", "stream"):
        got = type(predictors[kind]).__name__
        with raises(f"net must be a multitude or a network, got a {got}: pass its network, net.net"):
            mt.fit(predictors[kind], [(X, Y % 3)], 1)
    else:
        mt.fit(predictors[kind], [(X, Y % 3)], 1)


def test_a_predict_method_must_return_a_predictive():
    class Own(nn.Linear):
        def predict(self, x):
            return self(x).argmax(1)

    net = Own(4, 3)
    with raises("batch 0 of data: net.predict must give a Predictive, got a Tensor: pass mt.Multitude(net)"):
        predict(net, X)
    with raises("net.predict must give a Predictive, got a Tensor: pass mt.Multitude(net)"):
        mt.temporal(net)(X)
    assert predict(mt.Multitude(net), X).probs.shape == (10, 3)
    mt.fit(net, [(X, Y % 3)], 1)


# The progress bar -------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(text):
    """What a terminal shows after `text`: a carriage return goes back, and what follows overwrites."""
    line = ""
    for piece in text.split("\r"):
        line = piece + line[len(piece) :]
    return line.rstrip()


@pytest.fixture
def run(monkeypatch, net):
    """Predicts with a clock by which each batch takes `seconds`; returns what was written to stderr."""

    def run(seconds, data=None, stderr=None, **options):
        clock = [100.0]
        stderr = stderr or Terminal()
        monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(progress.sys, "stderr", stderr)
        slow = Fake.predict

        def predict_slowly(self, x):
            clock[0] += seconds
            return slow(self, x)

        monkeypatch.setattr(Fake, "predict", predict_slowly)
        try:
            predict(net, list(X.split(1)) if data is None else data, **options)
        finally:
            monkeypatch.undo()
        return stderr.getvalue()

    return run


@pytest.mark.parametrize(
    ("seconds", "terminal", "options", "shown"),
    [
        (0.15, True, {}, False),  # a short run
        (0.5, True, {}, True),
        (0.5, False, {}, False),
        (0.15, False, {"progress": True}, True),
        (0.5, True, {"progress": False}, False),
    ],
)
def test_progress_is_shown_for_long_runs_on_a_terminal_or_when_asked_for(run, seconds, terminal, options, shown):
    text = run(seconds, stderr=Terminal() if terminal else io.StringIO(), **options)
    assert ("10 batches" in text) == shown and bool(text) == shown


def test_progress_starts_after_two_seconds(run):
    lines = run(seconds=0.5).split("\r")
    assert lines[1] == " 40% [========            ] 4 batches, 2.0 batches/s"
    assert lines[-3] == "100% [====================] 10 batches, 2.0 batches/s"


def test_progress_without_a_known_length_has_no_percentage(run):
    text = run(seconds=1.0, data=(x for x in X.split(1)))
    assert "10 batches, 1.0 batches/s" in text and "%" not in text


def test_the_terminal_is_left_clean_after_an_error(run):
    text = run(seconds=0.5)
    assert "batches/s" in text and screen(text) == ""
    stderr = Terminal()
    with raises("batch 1 of data: x holds NaN"):
        run(seconds=5.0, data=[X, X * math.nan], stderr=stderr)
    assert "batches/s" in stderr.getvalue() and screen(stderr.getvalue()) == ""
