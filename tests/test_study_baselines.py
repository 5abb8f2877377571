"""What predicts without a network, against closed forms and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import brier_score_loss, log_loss

from multitudes import data as datasets
from multitudes.data import Data, Part
from multitudes.study.baselines import measure_baselines


def table(classes: int = 0) -> Data:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype("float32")
    y = 10 + 5 * x[:, 0] * x[:, 1] + rng.normal(size=400)
    target = torch.from_numpy(y).float()
    if classes:
        target = torch.from_numpy(np.digitize(y, np.quantile(y, np.linspace(0, 1, classes + 1)[1:-1])))
    parts = [Part(torch.from_numpy(x[rows]), target[rows]) for rows in (slice(250), slice(250, 300), slice(300, 400))]
    return Data("table", *parts, classes=tuple("abcd"[:classes]), columns=("p", "q", "r"))


def test_chance_and_the_constant_of_classes() -> None:
    data = datasets.load("digits")
    found = measure_baselines(data)["baselines"]
    assert list(found) == ["chance", "constant"]
    assert found["chance"]["scores"]["nll"] == pytest.approx(math.log(10))
    assert found["chance"]["scores"]["brier"] == pytest.approx(0.9)
    shares = np.bincount(data.train.y, minlength=10) / len(data.train)
    target = data.test.y.numpy()
    assert found["constant"]["scores"]["nll"] == pytest.approx(-np.log(shares[target]).mean())
    assert found["constant"]["scores"]["accuracy"] == pytest.approx((target == shares.argmax()).mean())


def test_the_constant_gaussian_of_numbers() -> None:
    data = table()
    scores = measure_baselines(data)["baselines"]["constant"]["scores"]
    y, target = data.train.y.double().numpy(), data.test.y.double().numpy()
    judge = stats.norm(y.mean(), y.std())
    assert scores["log_density"] == pytest.approx(judge.logpdf(target).mean())
    assert scores["rmse"] == pytest.approx(np.sqrt(((target - y.mean()) ** 2).mean()))

    def crps(value: float) -> float:
        below = integrate.quad(lambda x: judge.cdf(x) ** 2, -60, value, limit=200)[0]
        return below + integrate.quad(lambda x: (1 - judge.cdf(x)) ** 2, value, 80, limit=200)[0]

    assert scores["crps"] == pytest.approx(np.mean([crps(value) for value in target]), rel=1e-5)


def test_gradient_boosting_is_scikit_learns_at_its_defaults() -> None:
    data = table(3)
    found = measure_baselines(data)["baselines"]["gradient_boosting"]
    judge = HistGradientBoostingClassifier(random_state=0).fit(data.train.x.numpy(), data.train.y.numpy())
    probs, target = judge.predict_proba(data.test.x.numpy()), data.test.y.numpy()
    assert found["scores"]["accuracy"] == pytest.approx(judge.score(data.test.x.numpy(), target))
    assert found["scores"]["nll"] == pytest.approx(log_loss(target, probs), rel=1e-6)
    assert found["scores"]["brier"] == pytest.approx(brier_score_loss(target, probs, scale_by_half=False), rel=1e-6)


def test_gradient_boosting_of_numbers_has_the_deviation_of_the_validation_part() -> None:
    data = table()
    scores = measure_baselines(data)["baselines"]["gradient_boosting"]["scores"]
    judge = HistGradientBoostingRegressor(random_state=0).fit(data.train.x.numpy(), data.train.y.double().numpy())
    held_out = judge.predict(data.validation.x.numpy()) - data.validation.y.numpy()
    mean, target = judge.predict(data.test.x.numpy()), data.test.y.numpy()
    assert scores["rmse"] == pytest.approx(np.sqrt(((mean - target) ** 2).mean()), rel=1e-6)
    density = stats.norm(mean, np.sqrt((held_out**2).mean())).logpdf(target).mean()
    assert scores["log_density"] == pytest.approx(density, rel=1e-6)


@pytest.mark.parametrize("classes", [0, 3])
def test_rows_add_up_to_the_scores(classes: int) -> None:
    for own in measure_baselines(table(classes))["baselines"].values():
        for name, values in own["rows"].items():
            mean = math.sqrt(np.mean(values)) if name == "rmse" else np.mean(values)
            assert len(values) == own["count"] == 100 and mean == pytest.approx(own["scores"][name], rel=1e-4)


def test_a_class_that_training_has_not_gives_no_infinite_score() -> None:
    data = table(3)
    few = Part(data.train.x[data.train.y < 2], data.train.y[data.train.y < 2])
    other = Data("table", few, data.validation, data.test, classes=data.classes, columns=data.columns)
    for own in measure_baselines(other)["baselines"].values():
        assert all(math.isfinite(score) for score in own["scores"].values())
