"""The recipe for tables, and its section."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn import datasets, metrics

from recipes import tables as recipe
from recipes import tables_models as models
from recipes.report import tables as report
from recipes.report.raw import Raw
from tests.recipes.recipe_cases import raw_of, smoke, with_data

CPU = torch.device("cpu")


@pytest.fixture
def numbers() -> tuple[models.Table, Any]:
    """A noisy linear target of three columns, one of them constant."""
    generator = np.random.default_rng(0)
    x = np.column_stack([generator.normal(size=400), generator.integers(0, 4, 400), np.ones(400)])
    y = 10 + 3 * x[:, 0] + x[:, 1] + generator.normal(size=400)
    return models.Table(x[:300], y[:300], x[300:], 0, CPU), y[300:]


@pytest.fixture
def classes() -> tuple[models.Table, Any]:
    x, y = datasets.load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(150)
    return models.Table(x[order[:110]], y[order[:110]], x[order[110:]], 3, CPU), y[order[110:]]


# -- measuring ---------------------------------------------------------------------------------------------


def test_scores_of_numbers_are_those_of_a_normal_distribution() -> None:
    generator = np.random.default_rng(0)
    mean, std, y = generator.normal(size=6), generator.uniform(0.5, 2, 6), generator.normal(size=6)
    answer = models.Answer(mean=mean, std=std, low=mean - 1, high=mean + 1)
    found = recipe.of_numbers(answer, y)
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(y, mean))
    assert found["nll"] == pytest.approx(-stats.norm(mean, std).logpdf(y).mean())
    assert found["coverage"] == np.mean(np.abs(y - mean) <= 1) and found["width"] == pytest.approx(2.0)

    def crps(mean: float, std: float, y: float) -> float:
        below, _ = integrate.quad(lambda t: stats.norm.cdf(t, mean, std) ** 2, mean - 12 * std, y)
        above, _ = integrate.quad(lambda t: stats.norm.sf(t, mean, std) ** 2, y, mean + 12 * std)
        return below + above

    assert found["crps"] == pytest.approx(statistics.fmean(map(crps, mean, std, y)), rel=1e-5)


def test_scores_of_classes_are_those_of_scikit_learn() -> None:
    probs = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.5, 0.5, 0.0]])
    y = np.array([0, 2, 2])
    found = recipe.of_classes(models.Answer(probs=probs), y)
    assert found["accuracy"] == pytest.approx(2 / 3) and "coverage" not in found
    assert found["nll"] == pytest.approx(-(math.log(0.7) + math.log(0.8) + math.log(1e-6)) / 3)
    assert found["brier"] == pytest.approx(metrics.brier_score_loss(y, probs, labels=[0, 1, 2], scale_by_half=False))
    sets = np.array([[True, True, False], [False, False, True], [True, True, False]])
    found = recipe.of_classes(models.Answer(probs=probs, sets=sets), y)
    assert found["coverage"] == pytest.approx(2 / 3) and found["width"] == pytest.approx(5 / 3)


# -- models ------------------------------------------------------------------------------------------------


def test_held_out_rows_are_stratified_and_not_used_for_training(classes: tuple[models.Table, Any]) -> None:
    table, _ = classes
    kept, held = table.held_out(0)
    assert sorted([*kept, *held]) == list(range(110)) and len(held) == 17
    assert np.bincount(table.y[held]).min() >= 5
    assert not np.array_equal(held, table.held_out(1)[1])


@pytest.mark.parametrize("method", models.METHODS)
def test_every_method_predicts_in_the_units_of_the_target(method: str, numbers: tuple[models.Table, Any]) -> None:
    table, y = numbers
    found = recipe.of_numbers(models.METHODS[method](table, 0, True), y)
    assert all(math.isfinite(value) for value in found.values())
    assert found["rmse"] < 1.1 * np.std(y) and 0.7 < found["coverage"] <= 1
    if method == "linear":  # which is right here: noise of deviation 1
        assert found["rmse"] == pytest.approx(1, abs=0.15)
        assert found["nll"] == pytest.approx(0.5 * math.log(2 * math.pi) + 0.5, abs=0.15)
        assert found["width"] == pytest.approx(2 * stats.norm.ppf(0.95), abs=0.8)


@pytest.mark.parametrize("method", [name for name in models.METHODS if name not in models.NETWORKS or name == "packed"])
def test_methods_predict_probabilities(method: str, classes: tuple[models.Table, Any]) -> None:
    table, y = classes
    answer = models.METHODS[method](table, 0, True)
    np.testing.assert_allclose(answer.probs.sum(1), 1, rtol=1e-5)
    assert answer.probs.shape == (40, 3) and (answer.sets is not None) == (method in models.NETWORKS)
    assert recipe.of_classes(answer, y)["accuracy"] > (0.2 if method == "constant" else 0.5)


def test_conformal_intervals_contain_nine_of_ten_new_targets() -> None:
    generator, inside = np.random.default_rng(0), []
    for _ in range(400):
        answer = models.with_errors(np.zeros(50), generator.normal(size=59))
        new = generator.normal(size=50)
        inside.append(np.mean((answer.low <= new) & (new <= answer.high)))
    assert statistics.fmean(inside) == pytest.approx(54 / 60, abs=0.01)  # the 54th smallest of 59


def test_the_package_stops_early_with_its_best_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    x, x_held = torch.randn(64, 2, generator=generator), torch.randn(40, 2, generator=generator)
    noise, noise_held = torch.randn(64, generator=generator), torch.randn(40, generator=generator)
    torch.manual_seed(0)
    net = models.package_network(x, 0)
    scores: list[float] = []
    original = models.score_of

    def noted(answer: torch.Tensor, y: torch.Tensor) -> float:
        scores.append(original(answer, y))
        return scores[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "score_of", noted)
        models.train_package(net, (x, noise), (x_held, noise_held), False, 100)
    best = scores.index(min(scores))
    assert len(scores) == best + 1 + models.PATIENCE < 100  # noise cannot be learned
    assert original(models.answers(net, x_held, False), noise_held) == pytest.approx(min(scores), rel=1e-4)


def test_normal_scores_skip_constant_columns(numbers: tuple[models.Table, Any]) -> None:
    table, _ = numbers
    x, held, test = models.normal_scores(table, *table.held_out(0))
    assert [part.shape[1] for part in (x, held, test)] == [2, 2, 2]
    assert abs(x[:, 0].mean()) < 0.1 and x[:, 0].std() == pytest.approx(1, abs=0.15)


# -- pieces ------------------------------------------------------------------------------------------------


def run(only: str, out: Path, data: Path) -> Raw:
    arguments = ["--data-root", str(data), "--out", str(out), "--device", "cpu", "--scale", "smoke", "--only", only]
    recipe.main(arguments)
    return Raw(out)


def test_a_piece_is_a_method_on_the_splits_of_a_table(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(120, 3))
    order = np.stack([generator.permutation(120) for _ in range(20)])
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci/energy.npz", X=x, y=x.sum(1), train_idx=order[:, :100], test_idx=order[:, 100:])
    raw = run("energy-constant,energy-linear,diabetes-linear,iris-forest", tmp_path / "run", tmp_path)
    linear, constant = raw["energy-linear"], raw["energy-constant"]
    assert linear["rows"] == [100, 20] and linear["features"] == 3 and linear["classes"] == 0
    want = [np.sqrt(np.mean((x[o[100:]].sum(1) - x[o[:100]].sum(1).mean()) ** 2)) for o in order[:2]]
    assert constant["scores"]["rmse"] == pytest.approx(want, rel=1e-4)
    assert max(linear["scores"]["rmse"]) < 0.02
    assert raw["diabetes-linear"]["rows"] == [397, 45] and raw["iris-forest"]["rows"] == [120, 30]
    assert set(raw.pieces["energy-linear"]["data"]) == {"uci/energy.npz"}
    assert set(raw.pieces["iris-forest"]["data"]) == {"scikit-learn/iris"}


# -- the page ----------------------------------------------------------------------------------------------

REGRESSION = [name for name in report.NAMES if report.main_score(name) == "rmse"]


def made_up(folder: Path, given: Mapping[str, Mapping[str, Sequence[float]]], scale: str = "full") -> Raw:
    """Pieces by `method -> scores of every split`: `rmse` of 7 tables, and `accuracy` of 4, 1 minus a tenth of it."""
    pieces = {}
    for name in report.NAMES:
        for method, scores in given.items():
            own = {"seconds": [1.0] * 3, "coverage": [0.9] * 3, "width": [1.0] * 3, "nll": [0.5] * 3, **scores}
            if name in REGRESSION:
                own |= {"crps": own["rmse"]}
            else:
                own |= {"accuracy": [1 - value / 10 for value in own.pop("rmse")], "brier": [0.1] * 3}
            about = {"rows": [90, 10], "features": 3, "classes": 0 if name in REGRESSION else 3}
            pieces[f"{name}-{method}"] = {"table": name, "method": method, **about, "scores": own}
    return raw_of(folder, pieces, scale=scale)


def held(raw: Raw) -> list[bool | None]:
    return [claim.holds for claim in report.section(raw).claims]


def test_the_section_works_without_results(tmp_path: Path) -> None:
    section = report.section(Raw(tmp_path / "none"))
    assert not section.figures and [claim.holds for claim in section.claims] == [None] * 6


def test_claims_follow_from_the_numbers(tmp_path: Path) -> None:
    low, middle, high = [1.0, 1.1, 0.9], [2.0, 2.1, 1.9], [3.0, 3.1, 2.9]
    others = {method: {"rmse": middle} for method in ("boosting", "forest", "package", "linear", "constant")}
    assert held(made_up(tmp_path / "good", {"tabm": {"rmse": low}, **others})) == [True] * 6
    worse = {"rmse": high, "coverage": [0.8] * 3, "nll": [0.7] * 3}
    raw = made_up(tmp_path / "bad", {"tabm": worse, **others})
    assert held(raw) == [False] * 6
    text = report.section(raw).text
    assert "behind by 50.0 %" in text and "| concrete | 3.00 ± 0.06 |" in text and "80.0 % (1.00)" in text
    level = {"rmse": [2.0, 2.3, 1.8]}
    raw = made_up(tmp_path / "level", {"tabm": level, **others})
    assert held(raw) == [True] * 6 and "level (1.7 % behind)" in report.section(raw).text
    assert "| breast cancer | 79.7 ± 1.5 |" in report.section(raw).text
    raw = made_up(tmp_path / "few", {"tabm": {"rmse": low}, "boosting": {"rmse": middle}})
    assert held(raw) == [None, None, None, True, None, None]
    every = ", ".join(report.NAMES.values())
    assert f"Not measured: packed on {every}; deep ensemble on {every};" in report.section(raw).text
    assert held(made_up(tmp_path / "smoke", {"tabm": {"rmse": low}, **others}, "smoke")) == [None] * 6
    assert "smoke scale" in report.section(Raw(tmp_path / "smoke")).text


def test_the_better_tree_is_the_one_with_the_lower_error(tmp_path: Path) -> None:
    given = {"tabm": [1.5] * 3, "boosting": [1.0] * 3, "forest": [2.0] * 3}
    raw = made_up(tmp_path, {method: {"rmse": values} for method, values in given.items()})
    assert report.better_tree(raw, "energy") == report.better_tree(raw, "iris") == "boosting"
    assert report.against_trees(raw, "energy") == (1, 0.5)
    way, share = report.against_trees(raw, "iris") or (0, 0.0)
    assert way == 1 and share == pytest.approx(0.05 / 0.9)


# -- real data ---------------------------------------------------------------------------------------------


@with_data("uci")
def test_the_recipe_runs_on_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [f"{name}-{method}" for name in recipe.TABLES for method in models.METHODS]
    raw = smoke(recipe.main, pieces, tmp_path, capsys)
    for name in recipe.TABLES:
        for method in models.METHODS:
            scores = raw[f"{name}-{method}"]["scores"]
            assert len(scores["seconds"]) == 2 and all(map(math.isfinite, scores["nll"])), (name, method)
    assert "smoke scale" in report.section(raw).text
