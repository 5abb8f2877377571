"""Conclusions of a study: baselines, the loss plane and the importance of columns, against closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, stats
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, log_loss, roc_auc_score
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.lab import data as datasets
from multitudes.lab.data import Data, Part
from multitudes.lab.data.tables.features import Category, Number
from multitudes.lab.report.input_examples import important_columns, unsure_rows
from multitudes.lab.report.run_results import Results, read_results
from multitudes.lab.study.results.importance import importance
from multitudes.lab.study.run.baselines import measure_baselines
from multitudes.lab.study.run.conclusion import write_landscape
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from multitudes.tasks.gaussian import join_gaussian
from tests.lab.report.fake_run import table_data, write_run

# -- baselines ---------------------------------------------------------------------------------------------


def table(classes: int = 0) -> Data:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype("float32")
    y = 10 + 5 * x[:, 0] * x[:, 1] + rng.normal(size=400)
    target = torch.from_numpy(y).float()
    if classes:
        target = torch.from_numpy(np.digitize(y, np.quantile(y, np.linspace(0, 1, classes + 1)[1:-1])))
    parts = [Part(torch.from_numpy(x[rows]), target[rows]) for rows in (slice(250), slice(250, 300), slice(300, 400))]
    return Data("table", *parts, classes=tuple("abcd"[:classes]), columns=("p", "q", "r"))


def test_chance_and_constant_of_classes() -> None:
    data = datasets.load("digits")
    found = measure_baselines(data)["baselines"]
    assert list(found) == ["chance", "constant"]
    assert found["chance"]["scores"]["nll"] == pytest.approx(math.log(10))
    assert found["chance"]["scores"]["brier"] == pytest.approx(0.9)
    shares = np.bincount(data.train.y, minlength=10) / len(data.train)
    target = data.test.y.numpy()
    assert found["constant"]["scores"]["nll"] == pytest.approx(-np.log(shares[target]).mean())
    assert found["constant"]["scores"]["accuracy"] == pytest.approx((target == shares.argmax()).mean())


def test_the_constant_of_a_regression_is_a_gaussian() -> None:
    data = table()
    scores = measure_baselines(data)["baselines"]["constant"]["scores"]
    y, target = data.train.y.double().numpy(), data.test.y.double().numpy()
    expected = stats.norm(y.mean(), y.std())
    assert scores["log_density"] == pytest.approx(expected.logpdf(target).mean())
    assert scores["rmse"] == pytest.approx(np.sqrt(((target - y.mean()) ** 2).mean()))

    def crps(value: float) -> float:
        below = integrate.quad(lambda x: expected.cdf(x) ** 2, -60, value, limit=200)[0]
        return below + integrate.quad(lambda x: (1 - expected.cdf(x)) ** 2, value, 80, limit=200)[0]

    assert scores["crps"] == pytest.approx(np.mean([crps(value) for value in target]), rel=1e-5)


def test_gradient_boosting_is_that_of_scikit_learn() -> None:
    data = table(3)
    found = measure_baselines(data)["baselines"]["gradient_boosting"]
    expected = HistGradientBoostingClassifier(random_state=0).fit(data.train.x.numpy(), data.train.y.numpy())
    probs, target = expected.predict_proba(data.test.x.numpy()), data.test.y.numpy()
    assert found["scores"]["accuracy"] == pytest.approx(expected.score(data.test.x.numpy(), target))
    assert found["scores"]["nll"] == pytest.approx(log_loss(target, probs), rel=1e-6)
    assert found["scores"]["brier"] == pytest.approx(brier_score_loss(target, probs, scale_by_half=False), rel=1e-6)


def test_regressors_have_the_deviation_of_the_validation_part() -> None:
    data = table()
    scores = measure_baselines(data)["baselines"]["gradient_boosting"]["scores"]
    expected = HistGradientBoostingRegressor(random_state=0).fit(data.train.x.numpy(), data.train.y.double().numpy())
    held_out = expected.predict(data.validation.x.numpy()) - data.validation.y.numpy()
    mean, target = expected.predict(data.test.x.numpy()), data.test.y.numpy()
    assert scores["rmse"] == pytest.approx(np.sqrt(((mean - target) ** 2).mean()), rel=1e-6)
    density = stats.norm(mean, np.sqrt((held_out**2).mean())).logpdf(target).mean()
    assert scores["log_density"] == pytest.approx(density, rel=1e-6)


@pytest.mark.parametrize("classes", [0, 3])
def test_rows_add_up_to_the_scores(classes: int) -> None:
    for own in measure_baselines(table(classes))["baselines"].values():
        for name, values in own["rows"].items():
            mean = math.sqrt(np.mean(values)) if name == "rmse" else np.mean(values)
            assert len(values) == own["count"] == 100 and mean == pytest.approx(own["scores"][name], rel=1e-4)


@pytest.mark.parametrize("present", [[0, 1], [1]])
def test_classes_missing_from_training_give_finite_scores(present: list[int]) -> None:
    data = table(3)
    rows = torch.isin(data.train.y, torch.tensor(present))
    train = Part(data.train.x[rows], data.train.y[rows])
    other = Data("table", train, data.validation, data.test, classes=data.classes, columns=data.columns)
    found = measure_baselines(other)["baselines"]
    assert all(math.isfinite(score) for own in found.values() for score in own["scores"].values())
    if len(present) == 1:
        share = float((data.test.y == present[0]).float().mean())
        assert found["linear"]["scores"]["accuracy"] == pytest.approx(share)


def test_forest_and_linear_model_are_those_of_scikit_learn() -> None:
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


def test_intervals_of_regressors_come_from_residuals_or_quantiles() -> None:
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


# -- the loss plane ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    options = {"data": "digits", "methods": ["single", "deep"], "seeds": 1, "epochs": 1, "limit": 96, "shift": []}
    run = prepare(Spec.of(**options), tmp_path_factory.mktemp("study") / "run")
    for job in run.jobs:
        run_job(job.directory)
    return run


def test_the_plane_goes_through_three_members_of_the_deep_ensemble(run):
    table = json.loads(write_landscape(run, points=4, images=50).read_text())["plane"]
    assert (len(table["x"]), len(table["y"])) == (4, 4) and [len(row) for row in table["loss"]] == [4] * 4
    trained = Trained.read(run.job("deep", 0).directory)
    x, y = trained.data.normalised(trained.data.test.x[:50]), trained.data.test.y[:50]
    with torch.no_grad():
        losses = [float(F.cross_entropy(trained.multitude.member(i)(x), y)) for i in range(3)]
    assert [spot["loss"] for spot in table["points"]] == pytest.approx(losses, rel=1e-5)
    assert [spot["name"] for spot in table["points"]] == [f"deep-0, member {i}" for i in range(3)]
    first, second = table["points"][:2]
    assert (first["x"], first["y"], second["y"]) == pytest.approx((0, 0, 0), abs=1e-6) and second["x"] > 0


def test_the_plane_is_measured_again_only_for_other_results(run):
    path = write_landscape(run, points=3, images=20)
    before = path.stat().st_mtime_ns
    assert write_landscape(run, points=3, images=20).stat().st_mtime_ns == before
    job = run.job("single", 0)
    job.write_metrics({**job.metrics, "seconds": 1.0})
    assert write_landscape(run, points=3, images=20).stat().st_mtime_ns != before


def test_a_run_without_three_comparable_networks_has_no_plane(tmp_path):
    run = prepare(Spec.of(data="digits", methods=["single"], seeds=1, epochs=1, limit=64, shift=[]), tmp_path / "run")
    run_job(run.jobs[0].directory)
    assert write_landscape(run) is None and not (tmp_path / "run" / "landscape.json").exists()


# -- importance --------------------------------------------------------------------------------------------


class Known(nn.Module):
    """Predicts `3 a - b` with the deviation `exp(c)`, in the targets' units, from standardised inputs `[B, 3]`."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.mean, self.std = data.train.x.mean(0), data.train.x.std(0, correction=0)
        self.target_mean, self.target_std = data.target_mean, data.target_std

    def forward(self, x: Tensor) -> Tensor:
        own = self.std * x + self.mean
        mean = (3 * own[:, :1] - own[:, 1:2] - self.target_mean) / self.target_std
        return join_gaussian(mean, (own[:, 2:].exp() / self.target_std).square())


def _of_task(network: nn.Module, task: str) -> Multitude:
    net = Multitude(network)
    net.task = task
    return net


def numbers() -> Data:
    x = torch.randn(3, 1500, 3, generator=torch.Generator().manual_seed(0))
    parts = [Part(each, 3 * each[:, 0] - each[:, 1]) for each in x]
    return Data("plane", *parts, columns=("a", "b", "c"), numbers="standard")


def test_shuffling_a_column_of_a_linear_function_has_a_closed_form() -> None:
    data = numbers()
    found = importance(_of_task(Known(data), "gaussian"), data)
    assert found["rows"] == 1000 and list(found["columns"])[:2] == ["a", "b"]
    assert found["base"][0] == pytest.approx(0, abs=1e-4)
    for name, slope, at in (("a", 3, 0), ("b", 1, 1)):
        score = sum(found["columns"][name]["score"]) / 3
        assert score == pytest.approx(slope * math.sqrt(2) * float(data.test.x[:, at].std()), rel=0.08)
        assert found["columns"][name]["uncertainty"] == pytest.approx([0, 0, 0], abs=1e-5)
    # The deviation depends on c alone, whose values are the same in another order: no error, and the same mean.
    assert found["columns"]["c"]["score"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert found["columns"]["c"]["uncertainty"] == pytest.approx([0, 0, 0], abs=1e-4)


class Matching(nn.Module):
    """Certain of class 1 where the number and the category agree, and of no class where nothing is a category."""

    def forward(self, x: Tensor) -> Tensor:
        agree = (x[:, 0] > 0) == (x[:, 1] > 0)
        known = (x[:, 1:] > 0).sum(1) == 1
        logit = torch.where(agree, 8.0, -8.0) * known
        return torch.stack([torch.zeros_like(logit), logit], 1)


def test_all_features_of_a_column_move_together() -> None:
    generator = torch.Generator().manual_seed(0)
    first, category = torch.rand(600, generator=generator) < 0.5, torch.rand(600, generator=generator) < 0.5
    x = torch.stack([2.0 * first - 1, category.float(), (~category).float()], 1)
    part = Part(x, (first == category).long())
    features = (Number("n"), Category("c", known=("u", "v")))
    data = Data("match", part, part, part, ("no", "yes"), ("n", "c=u", "c=v"), features=features, numbers="standard")
    found = importance(_of_task(Matching(), "classification"), data)
    assert found["base"][0] == 1.0 and found["base"][1] < 0.01
    for name in ("n", "c"):  # of independent halves, every second pair disagrees
        assert sum(found["columns"][name]["score"]) / 3 == pytest.approx(0.5, abs=0.06)
        assert found["columns"][name]["uncertainty"] == pytest.approx([0, 0, 0], abs=1e-6)  # there is always one


# -- on the page -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory: Path = write_run(tmp_path_factory.mktemp("run"), ["single", "packed"], [0], data=table_data())
    columns = {name: {"score": [1.0 - at, 2.0 - at], "uncertainty": [at, -3.0 * at]} for at, name in enumerate("bac")}
    own = {"rows": 90, "base": [1.0, 1.0], "columns": columns}
    Run(directory).write_table("importance.json", {"score": "rmse", "uncertainty": "std", "methods": {"packed": own}})
    return read_results(directory)


def test_bars_are_proportional_to_the_largest_change(results: Results) -> None:
    found = important_columns(results)
    (panel,) = found["panels"]
    assert [name for name, _ in panel["lines"]] == ["b", "a", "c"]
    assert [cells[0] for _, cells in panel["lines"]] == [("+1.5", 1.0), ("+0.5", 1 / 3), ("−0.5", -1 / 3)]
    assert [cells[1][1] for _, cells in panel["lines"]] == [0.0, -0.5, -1.0]


def test_the_most_uncertain_rows_are_shown_with_their_raw_values(results: Results) -> None:
    found = unsure_rows(results)
    best = next(row.name for row in results.board if not row.baseline)
    std, low, high, target = results.tensors(best, "std", "low", "high", "target")[0]
    assert found["columns"] == ["b", "a", "c"]  # as they matter
    assert [row for row, _, _ in found["rows"]] == std.argsort(descending=True, stable=True)[:10].tolist()
    for row, values, (shown, inside) in found["rows"]:
        x = results.table.test.x[row]
        assert [float(value.replace("−", "-")) for value in values] == pytest.approx(x[[1, 0, 2]].tolist(), rel=1e-3)
        assert inside == bool(low[row] <= target[row] <= high[row])
        assert float(shown[2].replace("−", "-")) == pytest.approx(float(target[row]), rel=1e-3)
