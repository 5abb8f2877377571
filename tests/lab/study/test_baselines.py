"""What predicts without a network, against closed forms and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, log_loss, roc_auc_score

from multitudes.lab import data as datasets
from multitudes.lab.data import Data, Part
from multitudes.lab.study.run.baselines import measure_baselines


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


def test_a_forest_and_a_linear_model_are_scikit_learns_at_their_defaults() -> None:
    data = table(3)
    found = measure_baselines(data)["baselines"]
    x, y, test, target = (each.numpy() for each in (data.train.x, data.train.y, data.test.x, data.test.y))
    forest = RandomForestClassifier(random_state=0).fit(x, y)
    assert found["random_forest"]["scores"]["accuracy"] == pytest.approx(forest.score(test, target))
    smooth = (100 * forest.predict_proba(test) + 1 / 3) / 101
    assert found["random_forest"]["scores"]["nll"] == pytest.approx(log_loss(target, smooth), rel=1e-6)
    inputs = data.normalised(data.train.x).numpy()
    linear = LogisticRegression(max_iter=1000).fit(inputs, y)
    probs = linear.predict_proba(data.normalised(data.test.x).numpy())
    assert found["linear"]["scores"]["nll"] == pytest.approx(log_loss(target, probs), rel=1e-6)
    assert found["linear"]["scores"]["balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(target, probs.argmax(1))
    )
    auroc = roc_auc_score(target, probs, multi_class="ovr")
    assert found["linear"]["scores"]["macro_auroc"] == pytest.approx(auroc)


def test_models_of_numbers_have_intervals_by_their_residuals_or_their_quantiles() -> None:
    data = table()
    found = measure_baselines(data)["baselines"]
    x, y, target = data.train.x.numpy(), data.train.y.double().numpy(), data.test.y.double().numpy()
    ridge = Ridge().fit(data.normalised(data.train.x).numpy(), y)
    off = ridge.predict(data.normalised(data.validation.x).numpy()) - data.validation.y.numpy()
    mean, reach = ridge.predict(data.normalised(data.test.x).numpy()), 1.6448536 * np.sqrt((off**2).mean())
    assert found["linear"]["scores"]["width_90"] == pytest.approx(2 * reach, rel=1e-5)
    assert found["linear"]["scores"]["coverage_90"] == pytest.approx((np.abs(mean - target) <= reach).mean())
    forest = RandomForestRegressor(random_state=0).fit(x, y).predict(data.test.x.numpy())
    assert found["random_forest"]["scores"]["rmse"] == pytest.approx(np.sqrt(((forest - target) ** 2).mean()))
    low, middle, high = (
        HistGradientBoostingRegressor(loss="quantile", quantile=level, random_state=0)
        .fit(x, y)
        .predict(data.test.x.numpy())
        for level in (0.05, 0.5, 0.95)
    )
    scores = found["gradient_boosting_quantiles"]["scores"]
    assert scores["coverage_90"] == pytest.approx(((low <= target) & (target <= high)).mean())
    assert scores["width_90"] == pytest.approx(np.abs(high - low).mean())
    assert scores["rmse"] == pytest.approx(np.sqrt(((middle - target) ** 2).mean()))
    assert "log_density" not in scores  # three quantiles are no density


def test_one_class_alone_in_training_is_no_error() -> None:
    data = table(3)
    one = Part(data.train.x[data.train.y == 1], data.train.y[data.train.y == 1])
    found = measure_baselines(Data("one", one, data.validation, data.test, classes=data.classes, columns=data.columns))
    assert found["baselines"]["linear"]["scores"]["accuracy"] == pytest.approx(float((data.test.y == 1).float().mean()))
