"""Scalings: temperatures, vectors, isotonic regression, variances; and whether a scaling helps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from multitudes.evaluation.calibrate import fit_calibration, helpful_scaling
from multitudes.evaluation.temperature import FLOOR
from multitudes.tasks.predictive import Predictive
from tests.evaluation.calibration_cases import classifier, nll, scaled
from tests.zoo.predictions import CLASSIFICATION, close, raises, randn

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


@pytest.mark.slow
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


@pytest.mark.parametrize(("labels", "low", "high"), [("right", 0.01, 0.1), ("random", 5, 100), ("wrong", 20, 100)])
def test_temperatures_stay_within_bounds(labels, low, high):
    p = Predictive(randn(1, 200, 4))
    y = {"right": p.label, "random": torch.arange(200) % 4, "wrong": p.probs.argmin(1)}[labels]
    scaling, calibrated = scaled(p, y, "temperature")
    assert low <= float(scaling.temperature) <= high
    assert labels != "wrong" or calibrated.probs.amax() < 0.4


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
def test_a_fit_is_the_same_in_chunks_of_any_size(scaling, monkeypatch):
    p, y = classifier(dtype=torch.float64)
    whole, _ = scaled(p, y, scaling)
    monkeypatch.setattr("multitudes.evaluation.temperature._CHUNK", 200)
    parts, _ = scaled(p, y, scaling)
    for name, tensor in vars(whole).items():
        close(getattr(parts, name), tensor)


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic"])
def test_a_fit_may_happen_in_inference_mode(scaling):
    p, y = classifier()
    outside = fit_calibration(p, y, scaling=scaling, seed=0)
    with torch.inference_mode():
        assert fit_calibration(*classifier(), scaling=scaling, seed=0) == outside


# Temperatures of the members --------------------------------------------------------------------------------


def test_the_members_temperatures_minimize_the_joint_nll():
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


@pytest.mark.parametrize("draws", [1, 2])
def test_draws_of_a_member_share_its_temperature(draws):
    p, y = classifier(members=3 * draws)
    scaling, calibrated = scaled(p, y, "member_temperature", members=3)
    assert scaling.temperature.shape == (3,)
    by_hand = Predictive(p.predictions / scaling.temperature.float().repeat_interleave(draws).view(-1, 1, 1))
    for name in CLASSIFICATION:
        close(getattr(calibrated, name), getattr(by_hand, name))


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


def test_a_class_without_targets_keeps_a_small_probability():
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
def test_isotonic_probabilities_are_never_zero(inputs):
    p, y = classifier(inputs)
    _, calibrated = scaled(p, y, "isotonic")
    close(calibrated.probs.sum(1), torch.ones(inputs))
    assert calibrated.probs.amin() > FLOOR / 10 and calibrated.log_probs.isfinite().all()


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


def test_variances_shrink_to_a_floor():
    p = Predictive(torch.cat([randn(3, 50, 1, scale=1.0), torch.full((3, 50, 1), 2.0)], 2), "gaussian")
    scaling, calibrated = scaled(p, p.mean, "variance")  # nothing to be unsure of
    assert float(scaling.factor) == 1e-12 and calibrated.variance.amax() < 2e-6 and calibrated.variance.amin() > 0


def test_a_variance_of_zero_cannot_be_scaled():
    with raises(
        "scaling='variance' needs variances above 0, got 0 at index [0]: "
        "use members that differ, task='gaussian', or scaling=None"
    ):
        fit_calibration(Predictive(randn(1, 5), "regression"), torch.zeros(5), scaling="variance")


# Whether a scaling helps ----------------------------------------------------------------------------------


def binary_case(rows, seed):
    """Logits `[1, N, 2]` and classes drawn with their probabilities."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(rows, generator=generator)
    y = (torch.rand(rows, generator=generator) < z.sigmoid()).long()
    return torch.stack([torch.zeros(rows), z], 1)[None], y


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_overconfident_and_underconfident_predictions_are_scaled(factor):
    z, y = binary_case(400, seed=0)
    scaling = helpful_scaling(Predictive(factor * z), y, 1)
    assert scaling is not None
    assert scaling.tensors["temperature"].item() == pytest.approx(factor, rel=0.4)


def test_calibrated_predictions_are_rarely_scaled():
    kept = [helpful_scaling(Predictive(z), y, 1) for z, y in (binary_case(100, seed) for seed in range(20))]
    assert sum(scaling is not None for scaling in kept) <= 2


def test_a_few_correct_rows_do_not_raise_confidence():
    z = torch.tensor([[[3.0, 0.0], [0.0, 3.0]]]).repeat(1, 30, 1)
    y = torch.tensor([0, 1]).repeat(30)
    assert helpful_scaling(Predictive(z), y, 1) is None


def test_variances_that_are_too_small_are_scaled():
    target = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    narrow = torch.tensor([0.0, -3.0]).expand(1, 200, 2)  # variance 0.05, where 1 is right
    scaling = helpful_scaling(Predictive(narrow.contiguous(), task="gaussian"), target, 1)
    assert scaling is not None
    assert scaling(Predictive(narrow.contiguous(), task="gaussian")).variance.mean().item() == pytest.approx(1, rel=0.2)


def test_fewer_than_twenty_rows_are_not_enough():
    z, y = binary_case(19, seed=0)
    assert helpful_scaling(Predictive(5 * z), y, 1) is None
