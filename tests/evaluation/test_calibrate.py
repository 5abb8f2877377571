import copy
import pickle

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes.evaluation.calibrate import Calibrated, calibrate, fit_calibration
from multitudes.evaluation.conformal import conformal_scores
from multitudes.tasks.predictive import Predictive
from tests.evaluation.calibration_cases import classifier, nll, sample, scaled
from tests.zoo.predictions import CLASSIFICATION, close, raises, randn

CALIBRATED = ("probs", "log_probs", "label", "confidence", "entropy")
every_scaling = pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic"])


# Predictions that are calibrated ----------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["temperature", "vector", "isotonic"])
def test_only_the_mean_is_calibrated(scaling):
    p, y = classifier()
    fitted, calibrated = scaled(p, y, scaling)
    by_hand = fitted.log_probs(p.log_probs)
    assert torch.equal(calibrated.log_probs, by_hand)
    assert torch.equal(calibrated.probs, by_hand.exp())
    assert torch.equal(calibrated.label, by_hand.argmax(1))
    assert torch.equal(calibrated.confidence, by_hand.exp().amax(1))
    close(calibrated.entropy, torch.distributions.Categorical(by_hand.exp()).entropy())
    for name in set(CLASSIFICATION) - set(CALIBRATED):
        assert torch.equal(getattr(calibrated, name), getattr(p, name)), name
    assert nll(calibrated, y) < nll(p, y)


@every_scaling
def test_calibrated_predictions_can_be_split_joined_and_copied(scaling):
    p, y = classifier()
    calibrated = fit_calibration(p, y, scaling=scaling, seed=0)(p)
    again = [
        mt.Predictive.concat([calibrated[:100], calibrated[100:]]),
        mt.Predictive.concat([pickle.loads(pickle.dumps(part)) for part in (calibrated[:100], calibrated[100:])]),
        copy.deepcopy(calibrated),
        calibrated.to(torch.float64).to(torch.float32),
        calibrated.cpu(),
    ]
    for other in again:
        close(other.probs, calibrated.probs)
        assert torch.equal(other.set(0.9), calibrated.set(0.9))
    assert repr(calibrated) == "Predictive(task='classification', members=3, inputs=400, outputs=[5], calibrated=True)"


@every_scaling
def test_pixels_are_calibrated_like_rows_without_ignored_ones(scaling):
    p, y = classifier(dtype=torch.float64)
    dense = Predictive(p.predictions.view(3, 40, 2, 5, 5).movedim(-1, 2))
    target = y.view(40, 2, 5).clone()
    target[:20, 0] = 255
    kept = (target != 255).flatten()
    rows, _ = scaled(p[kept], y[kept], scaling)
    pixels, calibrated = scaled(dense, target, scaling, ignore=255)
    for name, tensor in vars(rows).items():
        close(getattr(pixels, name), tensor)
    assert calibrated.probs.shape == (40, 5, 2, 5)
    flat = fit_calibration(p[kept], y[kept], scaling=scaling, conformal=None)(p[kept])
    for metric in (mt.metrics.nll, mt.metrics.ece, mt.metrics.brier):
        close(metric(calibrated, target, ignore=255), metric(flat, y[kept]))
    assert nll(flat, y[kept]) < nll(p[kept], y[kept])


# Networks ---------------------------------------------------------------------------------------------------


def network(outputs=3, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, outputs))


def data(inputs=300, outputs=3):
    x = randn(inputs, 4, scale=1.0)
    return x, sample(2 * x[:, :outputs])


NETWORKS = {
    "plain": network,
    "ensemble": lambda: mt.deep_ensemble(network(), members=3),
    "draws": lambda: mt.mc_dropout(network(dropout=0.2)),
    "shared": lambda: mt.batch_ensemble(network(), members=2),
}


@pytest.mark.parametrize(
    ("name", "scaling"), list(zip(NETWORKS, ["temperature", "member_temperature", "vector", "isotonic"], strict=True))
)
def test_calibration_does_not_change_the_network(name, scaling):
    net = NETWORKS[name]().train()
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    (x, y), state = data(), torch.get_rng_state()
    calibrated = calibrate(net, (x, y), scaling=scaling, conformal="raps", share=0.3, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(net.state_dict()[key], before[key]) for key in before)
    assert [module.training for module in net.modules()] == modes
    p = mt.predict(calibrated, [(x, y)], seed=0)
    close(p.probs, calibrated.predict(x, seed=0).probs)
    assert p.set(0.9).shape == (300, 3)
    torch.testing.assert_close(calibrated.eval()(x, seed=0), calibrated.net(x, seed=0))
    assert calibrated.members == getattr(net, "members", 1) and isinstance(calibrated.member(0), nn.Module)


def test_scores_and_scaling_use_different_inputs():
    net, (x, y) = mt.deep_ensemble(network(), members=2).eval(), data()
    calibrated = calibrate(net, (x, y), share=0.25, seed=3)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    p = mt.predict(net, x)
    scaling = fit_calibration(p[order[75:]], y[order[75:]], conformal=None)
    assert torch.equal(calibrated.temperature, scaling.scaling.temperature)
    unseen = conformal_scores(scaling(p[order[:75]]), y[order[:75]])
    close(calibrated.scores, unseen.sort().values)


@pytest.mark.parametrize(("scaling", "conformal"), [(None, "lac"), ("vector", None)])
def test_a_scaling_or_scores_alone_use_all_data(scaling, conformal):
    net, (x, y) = network().eval(), data()
    calibrated = calibrate(net, (x, y), scaling=scaling, conformal=conformal)
    p = mt.predict(net, x)  # in the same batches as `calibrate`, so that no bit differs
    assert calibrated.calibration == fit_calibration(p, y, scaling=scaling, conformal=conformal)


def test_tensors_loaders_and_generators_give_the_same_calibration():
    net, (x, y) = network().eval(), data()
    loader = DataLoader(TensorDataset(x, y), 50)
    first, *others = (calibrate(net, form, seed=0).calibration for form in ((x, y), loader, iter(loader)))
    for other in others:
        for name, tensor in first.tensors.items():
            close(other.tensors[name], tensor, atol=1e-6)


def test_draws_and_task_reach_the_network():
    net, (x, _) = mt.mc_dropout(network(outputs=4, dropout=0.2)), data()
    target = randn(300, 2, scale=1.0, seed=5)
    calibrated = calibrate(net, [(x, target)], task="gaussian", draws=7, seed=1)
    assert calibrated.task == "gaussian" and net.task == "classification"
    expected = fit_calibration(net.predict(x, "gaussian", draws=7, seed=1), target, members=1, seed=1)
    close(calibrated.factor, expected.scaling.factor, rtol=1e-4)
    p = calibrated.predict(x, draws=5, seed=1)
    assert p.members == 5 and p.task == "gaussian"
    low, high = p.set(0.8)
    assert ((low <= target) & (target <= high)).double().mean() > 0.7
    with raises("task must be 'gaussian', for which the network was calibrated, got 'regression'"):
        calibrated.predict(x, task="regression")


@every_scaling
def test_a_state_dict_restores_a_calibration(scaling):
    x, y = data()
    saved = calibrate(mt.deep_ensemble(network(), members=2), (x, y), scaling=scaling, seed=0)
    fresh = calibrate(mt.deep_ensemble(network(), members=2), (x[:100], y[:100].flip(0)), scaling=scaling, seed=1)
    earlier = fresh.predict(x)
    kept = earlier.set(0.9).clone()
    assert not torch.equal(earlier.probs, saved.predict(x).probs)
    fresh.load_state_dict(load(save(saved.state_dict())))
    assert torch.equal(fresh.predict(x).probs, saved.predict(x).probs)
    assert torch.equal(fresh.predict(x).set(0.9), saved.predict(x).set(0.9))
    assert torch.equal(earlier.set(0.9), kept)  # predictions that were made before keep their calibration


def test_a_state_dict_with_other_settings_is_refused():
    x, y = data()
    lac = calibrate(network(), (x, y), conformal="lac", seed=0)
    with pytest.raises(ValueError, match="state dict has calibration settings .*'lac'.*, expected .*'aps'"):
        calibrate(network(), (x, y), seed=0).load_state_dict(lac.state_dict())
    with pytest.raises(ValueError, match="state dict has calibration settings .*'Temperature'.*, expected .*'Vector'"):
        calibrate(network(), (x, y), conformal="lac", scaling="vector", seed=0).load_state_dict(lac.state_dict())


def test_a_calibrated_network_can_be_copied_and_moved():
    x, y = data()
    calibrated = calibrate(network(), (x, y), seed=0)
    expected = calibrated.predict(x)
    for other in (copy.deepcopy(calibrated), pickle.loads(pickle.dumps(calibrated))):
        assert torch.equal(other.predict(x).probs, expected.probs) and torch.equal(other.scores, calibrated.scores)
    assert {"temperature", "scores", "shares"} == {name for name, _ in calibrated.named_buffers(recurse=False)}
    assert "scaling=Temperature" in repr(calibrated) and "temperature=" in repr(calibrated)
    scores = calibrated.scores
    half = calibrated.to(torch.bfloat16)
    assert half.scores.dtype == torch.float64 and torch.equal(half.scores, scores)
    assert next(half.net.parameters()).dtype == torch.bfloat16
    assert half.predict(x.bfloat16()).set(0.9).dtype == torch.bool
    assert calibrated.train().net.training and not calibrated.eval().net.training


# What is wrong ----------------------------------------------------------------------------------------------

FOR_CLASSES = (
    "must be one of 'temperature', 'member_temperature', 'vector', 'isotonic', None, 'auto' for classification"
)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scaling": "platt"}, f"scaling {FOR_CLASSES}, got 'platt'"),
        ({"scaling": "variance"}, f"scaling {FOR_CLASSES}, got 'variance'"),
        ({"conformal": "scaled"}, "conformal must be one of 'aps', 'lac', 'raps', None, 'auto' for classification, "
                                  "got 'scaled'"),
        ({"task": "gaussian", "conformal": "aps"}, "conformal must be one of 'scaled', 'absolute', None, 'auto' "
                                                   "for gaussian, got 'aps'"),
        ({"task": "counting"}, "task must be one of classification, tokens, binary, multilabel, regression, gaussian, "
                               "quantiles, got 'counting'"),
        ({"scaling": None, "conformal": None}, "scaling and conformal must not both be None: "
                                               "there is nothing to calibrate"),
        ({"share": 1.0}, "share must be above 0 and below 1, got 1.0"),
        ({"share": 0.001}, "share=0.001 of 300 inputs leaves none for the scores: pass more data"),
        ({"share": 0.999}, "share=0.999 of 300 inputs leaves none for the scaling: pass more data"),
        ({"seed": 0.5}, "seed must be None or a whole number, 0 or more and below 2**63, got 0.5"),
        ({"ignore": "no"}, "ignore must be an integer label or None, got 'no'"),
        ({"k_reg": 2}, "k_reg need conformal='raps', got conformal='aps'"),
        ({"conformal": "raps", "k_reg": 1.5}, "k_reg must be a whole number, 0 or more, got 1.5"),
        ({"conformal": None, "randomized": True},
         "randomized=True needs conformal='aps' or 'raps', got conformal=None"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_settings_raise_an_error(options, sentence):
    with raises(sentence):
        calibrate(network(), data(), **options)


X, Y = data()
NO_TARGETS = "data must have targets: pass (x, y), or batches of inputs and targets"


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        (X, {}, NO_TARGETS),
        ([X, X], {}, NO_TARGETS),
        ((X, Y[1:]), {}, "data must have one target for each of the 300 inputs, got 299"),
        ([(X, Y), (X, Y[1:])], {}, "batch 1 of data: 300 inputs have targets of shape [299]"),
        ([], {}, "data must hold at least one batch, got none"),
        ((X, Y.index_fill(0, torch.tensor([4, 9]), 7)), {}, "target must lie within 0 and 2, got 7 at index [4]"),
        (
            (X, torch.full_like(Y, 255)),
            {"ignore": 255},
            "target must hold classes to fit the scaling, got only ignored ones",
        ),
    ],
)
def test_invalid_data_is_refused(given, options, sentence):
    with raises(sentence):
        calibrate(network(), given, **options)


def test_calibrating_twice_is_refused():
    calibrated = calibrate(network(), (X, Y), seed=0)
    assert isinstance(calibrated, Calibrated)
    with raises("net is calibrated already: calibrate its network, net.net"):
        calibrate(calibrated, (X, Y))
    for again in (calibrated.calibration, lambda p: fit_calibration(p, Y)):
        with raises("predictive is calibrated already: pass the predictions of the network itself"):
            again(calibrated.predict(X))
    with raises("net must be a multitude or a network, got function"):
        calibrate(network, (X, Y))


def test_calibrations_refuse_predictions_of_another_kind():
    p, y = classifier(members=4)
    calibration = fit_calibration(p, y, scaling="member_temperature", members=2)
    with raises("number of predictions must be a multiple of 2 members, got 3"):
        calibration(Predictive(p.predictions[:3]))
    with raises("predictive must have the calibration's task classification, got regression"):
        calibration(Predictive(p.predictions, "regression"))
    with raises("members must divide the 4 predictions per input, got 3"):
        fit_calibration(p, y, members=3)
    one, unscored = fit_calibration(p, y, conformal=None)(p), fit_calibration(p, y, scaling=None)(p)
    for other in (p, fit_calibration(p, y.flip(0), conformal=None)(p), unscored):
        with raises("parts must have the same calibration or none, got different ones"):
            Predictive.concat([one, other])
    for predictions in (p, one):
        with raises("set needs a network with conformal scores: calibrated = mt.calibrate(net, data) first"):
            predictions.set(0.9)
