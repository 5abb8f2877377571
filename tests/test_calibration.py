import copy
import math
import pickle

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from sklearn.isotonic import IsotonicRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes.calibrated import Calibrated
from multitudes.calibration import calibrate, fit_calibration
from multitudes.conformal import conformal_scores
from multitudes.predictive import Predictive
from multitudes.scaling import FLOOR
from tests.predictions import CLASSIFICATION, MOMENTS, close, raises, randn

CALIBRATED = ("probs", "log_probs", "label", "confidence", "entropy")


def sample(logits, seed=99):
    """Classes drawn from the probabilities of logits `[N, C]`, by numbers that no `randn` of these tests has used."""
    return logits.softmax(1).multinomial(1, generator=torch.Generator().manual_seed(seed))[:, 0]


def classifier(inputs=400, classes=5, members=3, sharpness=3.0, dtype=torch.float32):
    """Members that are about `sharpness` times as sure as they may be, and classes."""
    logits = randn(inputs, classes, scale=2.0)
    noise = randn(members, inputs, classes, scale=0.5, seed=1)
    return Predictive((sharpness * (logits + noise)).to(dtype)), sample(logits)


def nll(p, y):
    return float(mt.metrics.nll(p, y))


def scaled(p, y, scaling, **options):
    """The scaling alone, fitted to all of `y`, and the predictions that it gives."""
    calibration = fit_calibration(p, y, scaling=scaling, conformal=None, **options)
    return calibration.scaling, calibration(p)


# Temperature ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 3.0, 20.0])
def test_the_temperature_is_that_of_scipy(sharpness):
    p, y = classifier(sharpness=sharpness, dtype=torch.float64)

    def objective(log_temperature):
        return F.nll_loss(F.log_softmax(p.log_probs / math.exp(log_temperature), 1), y).item()

    best = scipy.optimize.minimize_scalar(objective, bounds=(-4, 4), method="bounded", options={"xatol": 1e-10})
    scaling, calibrated = scaled(p, y, "temperature")
    assert float(scaling.temperature) == pytest.approx(math.exp(best.x), rel=1e-5)
    close(calibrated.log_probs, F.log_softmax(p.log_probs / math.exp(best.x), 1), atol=1e-4)
    assert nll(calibrated, y) <= best.fun + 1e-10


def test_a_network_that_is_three_times_too_sure_is_brought_back():
    logits = randn(20000, 5)
    y = sample(logits)
    own, _ = scaled(Predictive(logits[None]), y, "temperature")
    assert float(own.temperature) == pytest.approx(1, abs=0.03)
    thrice, calibrated = scaled(Predictive(3 * logits[None]), y, "temperature")
    assert float(thrice.temperature) == pytest.approx(3 * float(own.temperature), rel=1e-4)
    close(calibrated.probs, logits.softmax(1), atol=0.01)


@settings(max_examples=60, deadline=None)
@given(
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0]),
    labels=st.sampled_from(["random", "right", "wrong", "drawn"]),
    inputs=st.integers(1, 40),
    members=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_the_nll_never_rises(scale, labels, inputs, members, seed):
    p = Predictive(randn(members, inputs, 4, scale=scale, seed=seed))
    y = {
        "random": torch.randint(0, 4, (inputs,), generator=torch.Generator().manual_seed(seed)),
        "right": p.label,
        "wrong": p.probs.argmin(1),
        "drawn": p.probs.multinomial(1, generator=torch.Generator().manual_seed(seed))[:, 0],
    }[labels]
    for scaling in ("temperature", "member_temperature", "vector"):
        fitted, calibrated = scaled(p, y, scaling)
        assert nll(calibrated, y) <= nll(p, y)
        if scaling != "vector":
            assert 0.01 - 1e-9 <= float(fitted.temperature.min()) <= float(fitted.temperature.max()) <= 100 + 1e-9


def test_temperatures_stay_within_bounds_where_the_best_one_does_not():
    p = Predictive(randn(1, 200, 4))
    right, _ = scaled(p, p.label, "temperature")
    random, _ = scaled(p, torch.arange(200) % 4, "temperature")
    wrong, calibrated = scaled(p, p.probs.argmin(1), "temperature")
    assert 0.01 <= float(right.temperature) < 0.1
    assert float(random.temperature) > 5
    assert 20 < float(wrong.temperature) <= 100 and calibrated.probs.amax() < 0.4


def test_a_temperature_of_one_changes_no_bit():
    p = Predictive(randn(2, 10, 4))
    y = torch.zeros(10, dtype=torch.long)
    calibration = fit_calibration(p, y, conformal=None).with_tensors({"temperature": torch.tensor(1.0).double()})
    assert torch.equal(calibration(p).log_probs, p.log_probs)


def test_classes_that_a_network_excludes_stay_excluded():
    p, y = classifier()
    logits = torch.cat([p.predictions, torch.full((3, 400, 1), -math.inf)], 2)
    for scaling in ("temperature", "member_temperature", "vector"):
        _, calibrated = scaled(Predictive(logits), y, scaling)
        assert calibrated.log_probs[:, :5].isfinite().all() and calibrated.probs[:, 5].amax() == 0
        assert nll(calibrated, y) < nll(p, y)


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector"])
def test_a_fit_is_the_same_however_many_rows_are_looked_at_together(scaling, monkeypatch):
    p, y = classifier(dtype=torch.float64)
    whole, _ = scaled(p, y, scaling)
    monkeypatch.setattr("multitudes.scaling._CHUNK", 200)
    parts, _ = scaled(p, y, scaling)
    for name, tensor in vars(whole).items():
        close(getattr(parts, name), tensor)


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic"])
def test_a_fit_may_happen_in_inference_mode(scaling):
    p, y = classifier()
    outside = fit_calibration(p, y, scaling=scaling, seed=0)
    with torch.inference_mode():
        assert fit_calibration(*classifier(), scaling=scaling, seed=0).equals(outside)


# Temperatures of the members --------------------------------------------------------------------------------


def test_the_members_temperatures_are_the_best_together():
    p, y = classifier(dtype=torch.float64)
    p = Predictive(p.predictions * torch.tensor([0.3, 1.0, 4.0]).double().view(3, 1, 1))

    def objective(log_temperatures):
        probs = [F.softmax(logits / math.exp(t), 1) for logits, t in zip(p.predictions, log_temperatures, strict=True)]
        return -torch.stack(probs).mean(0).gather(1, y[:, None]).log().mean().item()

    best = scipy.optimize.minimize(objective, np.zeros(3), method="BFGS", options={"gtol": 1e-9})
    scaling, calibrated = scaled(p, y, "member_temperature")
    close(scaling.temperature, np.exp(best.x), rtol=1e-3)
    assert nll(calibrated, y) <= best.fun + 1e-9
    assert nll(calibrated, y) < nll(scaled(p, y, "temperature")[1], y)


def test_members_are_scaled_themselves():
    p, y = classifier()
    scaling, calibrated = scaled(p, y, "member_temperature")
    by_hand = Predictive(p.predictions / scaling.temperature.float().view(3, 1, 1))
    for name in CLASSIFICATION:
        close(getattr(calibrated, name), getattr(by_hand, name))


def test_the_draws_of_a_member_share_its_temperature():
    p, y = classifier(members=6)
    scaling, calibrated = scaled(p, y, "member_temperature", members=3)
    assert scaling.temperature.shape == (3,)
    close(calibrated.predictions, p.predictions / scaling.temperature.float().repeat_interleave(2).view(6, 1, 1))


def test_one_members_temperature_is_the_temperature():
    p, y = classifier(members=1, dtype=torch.float64)
    one, _ = scaled(p, y, "member_temperature")
    close(one.temperature, scaled(p, y, "temperature")[0].temperature[None], rtol=1e-6)


# Vector scaling ---------------------------------------------------------------------------------------------


def test_the_vectors_are_those_of_scipy():
    p, y = classifier(classes=3, dtype=torch.float64)
    log_probs, one_hot = p.log_probs.numpy(), F.one_hot(y).numpy()

    def objective(at):
        logits = at[:3] * log_probs + at[3:]
        losses = scipy.special.logsumexp(logits, 1) - (logits * one_hot).sum(1)
        return losses.mean() + (((at[:3] - 1) ** 2).sum() + (at[3:] ** 2).sum()) / (2 * len(y))

    start = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    best = scipy.optimize.minimize(objective, start, method="BFGS", options={"gtol": 1e-9})
    scaling, calibrated = scaled(p, y, "vector")
    close(torch.cat([scaling.weight, scaling.bias]), best.x, atol=1e-5)
    close(calibrated.log_probs, F.log_softmax(torch.from_numpy(best.x[:3] * log_probs + best.x[3:]), 1), atol=1e-4)


def test_a_class_that_never_comes_gets_less_but_not_nothing():
    p, y = classifier()
    seen = y != 4
    scaling, calibrated = scaled(p[seen], y[seen], "vector")
    assert float(scaling.bias[4]) == float(scaling.bias.min()) > -20
    assert calibrated.probs[:, 4].mean() < p.probs[seen][:, 4].mean() and calibrated.log_probs.isfinite().all()


# Isotonic regression ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True])
def test_isotonic_scaling_is_that_of_scikit_learn(dense):
    p, y = classifier(dtype=torch.float64)
    new = Predictive(randn(2, 50, 5, scale=9.0, seed=3, dtype=torch.float64))  # beyond what was seen, on both sides
    if dense:
        p, y = Predictive(p.predictions.view(3, 100, 2, 2, 5).movedim(-1, 2)), y.view(100, 2, 2)
    calibration = fit_calibration(p, y, scaling="isotonic", conformal=None)
    rows, own = (p.probs.movedim(1, -1).reshape(-1, 5), y.flatten()) if dense else (p.probs, y)
    expected = np.stack([
        IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(rows[:, c], (own == c).double())
        .predict(new.probs[:, c]) for c in range(5)
    ], 1)  # fmt: skip
    expected = expected.clip(min=FLOOR)
    close(calibration(new).probs, expected / expected.sum(1, keepdims=True), atol=1e-9)
    if dense:
        images = Predictive(new.predictions.view(2, 25, 2, 5).movedim(-1, 2))
        close(calibration(images).probs.movedim(1, -1).reshape(50, 5), expected / expected.sum(1, keepdims=True))


@pytest.mark.parametrize("inputs", [1, 2, 400])
def test_isotonic_scaling_gives_probabilities_of_which_none_is_zero(inputs):
    p, y = classifier(inputs)
    _, calibrated = scaled(p, y, "isotonic")
    close(calibrated.probs.sum(1), torch.ones(inputs))
    assert calibrated.probs.amin() > FLOOR / 10 and calibrated.log_probs.isfinite().all()


def test_isotonic_scaling_of_calibrated_predictions_changes_little():
    logits = randn(20000, 3, scale=1.0)
    p = Predictive(logits[None])
    _, calibrated = scaled(p, sample(logits), "isotonic")
    assert (calibrated.probs - p.probs).abs().mean() < 0.02


# The variance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_the_factor_of_the_variance_is_that_of_scipy(task):
    p = Predictive(randn(3, 200, 4), task)
    y = p.mean + 7 * p.std * randn(*p.mean.shape, scale=1.0, seed=1)

    def objective(log_factor):
        variance = p.variance.double().numpy() * math.exp(log_factor)
        return -scipy.stats.norm.logpdf(y.numpy(), p.mean.numpy(), variance**0.5).mean()

    best = scipy.optimize.minimize_scalar(objective, bounds=(-10, 10), method="bounded", options={"xatol": 1e-9})
    scaling, calibrated = scaled(p, y, "variance")
    assert float(scaling.factor) == pytest.approx(math.exp(best.x), rel=1e-4)
    close(calibrated.mean, p.mean, atol=1e-5)
    for name in ("epistemic_variance", "aleatoric_variance", "variance"):
        close(getattr(calibrated, name), math.exp(best.x) * getattr(p, name), rtol=1e-3, atol=1e-4)


def test_variances_are_scaled_down_too_but_not_below_their_floor():
    p = Predictive(torch.cat([randn(3, 50, 1, scale=1.0), torch.full((3, 50, 1), 2.0)], 2), "gaussian")
    scaling, calibrated = scaled(p, p.mean, "variance")  # nothing to be unsure of
    assert float(scaling.factor) == 1e-12 and calibrated.variance.amax() < 2e-6 and calibrated.variance.amin() > 0


def test_a_variance_of_zero_cannot_be_scaled():
    with raises(
        "scaling='variance' needs variances above 0, got 0 at index [0]: "
        "use members that differ, task='gaussian', or scaling=None"
    ):
        fit_calibration(Predictive(randn(1, 5), "regression"), torch.zeros(5), scaling="variance")


# Predictions that are calibrated ----------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["temperature", "vector", "isotonic"])
def test_the_mean_is_calibrated_and_the_members_are_what_they_were(scaling):
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


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic"])
def test_calibrated_predictions_can_be_taken_apart_and_put_together(scaling):
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


def test_predictions_of_different_calibrations_cannot_be_joined():
    p, y = classifier()
    one = fit_calibration(p, y, conformal=None)(p)
    others = [p, fit_calibration(p, y.flip(0), conformal=None)(p), fit_calibration(p, y, scaling=None)(p)]
    for other in others:
        with raises("parts must have the same calibration, or none, got predictions that differ in it"):
            Predictive.concat([one, other])


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic"])
def test_pixels_are_calibrated_as_rows_are_and_ignored_ones_do_not_count(scaling):
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


def test_predictions_without_scores_have_no_set():
    p, y = classifier(20)
    for predictions in (p, fit_calibration(p, y, conformal=None)(p)):
        with raises("set needs a network with conformal scores: calibrated = mt.calibrate(net, data) first"):
            predictions.set(0.9)


def test_regression_keeps_its_moments_where_nothing_is_scaled():
    p, y = Predictive(randn(3, 50), "regression"), randn(50, seed=1)
    calibrated = fit_calibration(p, y)(p)
    for name in MOMENTS:
        assert torch.equal(getattr(calibrated, name), getattr(p, name))
    low, high = calibrated.set(0.9)
    assert ((low <= y) & (y <= high)).double().mean() >= 0.9


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


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_calibrated_alike_and_stays_as_it_is(name, scaling):
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


def test_scores_come_from_inputs_that_the_scaling_has_not_seen():
    net, (x, y) = mt.deep_ensemble(network(), members=2).eval(), data()
    calibrated = calibrate(net, (x, y), share=0.25, seed=3)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    p = mt.predict(net, x)
    scaling = fit_calibration(p[order[75:]], y[order[75:]], conformal=None)
    assert torch.equal(calibrated.temperature, scaling.scaling.temperature)
    unseen = conformal_scores(scaling(p[order[:75]]), y[order[:75]])
    close(calibrated.scores, unseen.sort().values)


@pytest.mark.parametrize(("scaling", "conformal"), [(None, "lac"), ("vector", None)])
def test_one_of_the_two_gets_all_the_data(scaling, conformal):
    net, (x, y) = network().eval(), data()
    calibrated = calibrate(net, (x, y), scaling=scaling, conformal=conformal)
    p = mt.Multitude(net).predict(x)
    assert calibrated.calibration.equals(fit_calibration(p, y, scaling=scaling, conformal=conformal))


def test_tensors_loaders_and_generators_are_read_alike():
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


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic"])
def test_a_state_dict_brings_everything_back(scaling):
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


def test_a_state_dict_of_another_kind_is_refused():
    x, y = data()
    lac = calibrate(network(), (x, y), conformal="lac", seed=0)
    with pytest.raises(ValueError, match="the state dict is of a calibration with .*'lac'.*this one has .*'aps'"):
        calibrate(network(), (x, y), seed=0).load_state_dict(lac.state_dict())
    with pytest.raises(ValueError, match="the state dict is of a calibration with .*'Temperature'.*has .*'Vector'"):
        calibrate(network(), (x, y), conformal="lac", scaling="vector", seed=0).load_state_dict(lac.state_dict())


def test_a_calibrated_network_is_a_module_like_any_other():
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"scaling": "platt"},
            "scaling must be one of 'temperature', 'member_temperature', 'vector', 'isotonic', None, 'auto' "
            "for classification, got 'platt'",
        ),
        ({"scaling": "variance"}, "scaling must be one of 'temperature', 'member_temperature', 'vector', 'isotonic', "
                                  "None, 'auto' for classification, got 'variance'"),
        ({"conformal": "scaled"}, "conformal must be one of 'aps', 'lac', 'raps', None, 'auto' for classification, "
                                  "got 'scaled'"),
        ({"task": "gaussian", "conformal": "aps"}, "conformal must be one of 'scaled', 'absolute', None, 'auto' "
                                                   "for gaussian, got 'aps'"),
        ({"task": "counting"}, "task must be one of classification, regression, gaussian, got 'counting'"),
        ({"scaling": None, "conformal": None}, "scaling and conformal must not both be None: "
                                               "there is nothing to calibrate"),
        ({"share": 1.0}, "share must be above 0 and below 1, got 1.0"),
        ({"share": 0.001}, "share=0.001 of 300 inputs leaves none for the scores: pass more data"),
        ({"share": 0.999}, "share=0.999 of 300 inputs leaves none for the scaling: pass more data"),
        ({"seed": 0.5}, "seed must be None or a whole number, 0 or more and below 2**63, got 0.5"),
        ({"ignore": "no"}, "ignore must be an integer label or None, got 'no'"),
        ({"k_reg": 2}, "k_reg must be left out but for 'raps', got conformal='aps'"),
        ({"conformal": "raps", "k_reg": 1.5}, "k_reg must be a whole number, 0 or more, got 1.5"),
        ({"conformal": None, "randomized": True}, "randomized=True is for 'aps' and 'raps', got conformal=None"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_told_in_a_sentence(options, sentence):
    with raises(sentence):
        calibrate(network(), data(), **options)


def test_data_without_targets_cannot_calibrate():
    x, y = data()
    sentence = "data must have targets to calibrate with: pass (x, y), or batches of inputs and targets"
    for inputs in (x, (x,), [x, x], DataLoader(TensorDataset(x))):
        with raises(sentence):
            calibrate(network(), inputs)
    with raises("data must have one target for each of the 300 inputs, got 299"):
        calibrate(network(), (x, y[1:]))
    with raises("batch 1 of data: 300 inputs have targets of shape [299]"):
        calibrate(network(), [(x, y), (x, y[1:])])
    with raises("data must hold at least one batch, got none"):
        calibrate(network(), [])
    with raises("target must lie within 0 and 2, got 7 at index [4]"):
        calibrate(network(), (x, y.index_fill(0, torch.tensor([4, 9]), 7)))
    with raises("target must hold classes to fit the scaling to, got only 255, the ignored"):
        calibrate(network(), (x, torch.full_like(y, 255)), ignore=255)


def test_what_is_calibrated_already_is_not_calibrated_again():
    x, y = data()
    calibrated = calibrate(network(), (x, y), seed=0)
    assert isinstance(calibrated, Calibrated)
    with raises("net is calibrated already: calibrate its network, net.net"):
        calibrate(calibrated, (x, y))
    for again in (calibrated.calibration, lambda p: fit_calibration(p, y)):
        with raises("predictive is calibrated already: pass the predictions of the network itself"):
            again(calibrated.predict(x))
    with raises("net must be an nn.Module, got function"):
        calibrate(network, (x, y))


def test_predictions_that_a_calibration_does_not_know_are_refused():
    p, y = classifier(members=4)
    calibration = fit_calibration(p, y, scaling="member_temperature", members=2)
    with raises("predictions must be as many of each of the 2 members, got 3"):
        calibration(Predictive(p.predictions[:3]))
    with raises("predictive must be of task classification, as the calibration is, got regression"):
        calibration(Predictive(p.predictions, "regression"))
    with raises("members must divide the 4 predictions of each input, got 3"):
        fit_calibration(p, y, members=3)
