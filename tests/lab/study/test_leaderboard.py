"""The leaderboard: means and spreads over seeds, and what is level with the best."""

from __future__ import annotations

import math

import numpy as np
import pytest

from multitudes.base.archives import write_arrays
from multitudes.base.sealed_files import write_atomically, write_json
from multitudes.lab.study.results.leaderboard import best, better, leaderboard, level_with_best
from multitudes.lab.study.results.result_rows import Row, Value
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import find_job
from multitudes.metrics.declare import Better


def row(name, *, seeds=3, cost=1e6, examples=None, count=1000, **scores):
    """Scores are tuples, one value a seed."""
    values = {key: Value(tuple(np.atleast_1d(value).tolist()), count) for key, value in scores.items()}
    values["costs/multiply_adds"] = Value((cost,))
    return Row(name, name, tuple(range(seeds)), values, lambda: examples or {})


def write_job(run, label, seed, scores, costs=None, method=None, probs=None, target=None):
    directory = run.job(label, seed).directory
    write_json(directory / "config.json", {"method": method or label})
    if probs is not None:
        write_arrays(directory / "predictions.safetensors", {"probs": probs, "target": target})
    scores = {name: {"value": value, "count": 400} for name, value in scores.items()}
    run.job(label, seed).write_metrics({"scores": scores, "costs": costs or {}})


@pytest.fixture
def run(tmp_path):
    text = "seeds = [0, 1, 2]\n[methods.single]\n[methods.packed_8]\n[methods.deep]\n[methods.mimo]\n"
    write_atomically(tmp_path / "study.toml", text)
    return Run(tmp_path)


# -- rows --------------------------------------------------------------------------------------------------


def test_a_row_has_the_mean_and_the_deviation_over_seeds_of_every_score_and_cost(run):
    rng = np.random.default_rng(0)
    nll, parameters = rng.random(3), rng.random(3)
    for seed in range(3):
        write_job(run, "packed_8", seed, {"nll": nll[seed]}, {"parameters": parameters[seed]}, method="packed")
    (found,) = leaderboard(run)
    assert (found.name, found.method, found.seeds) == ("packed_8", "packed", (0, 1, 2))
    assert found["nll"] == pytest.approx(nll.mean())
    assert found.values["nll"].spread == pytest.approx(nll.std(ddof=1))
    assert found.values["nll"].count == 400
    assert found["costs/parameters"] == pytest.approx(parameters.mean())


def test_the_best_by_nll_comes_first_and_jobs_that_are_not_done_do_not_count(run):
    for label, nll in (("single", 0.3), ("deep", 0.1), ("packed_8", 0.2)):
        write_job(run, label, 0, {"nll": nll})
    write_job(run, "single", 1, {"nll": 0.5})
    assert [(r.name, r.seeds) for r in leaderboard(run)] == [("deep", (0,)), ("packed_8", (0,)), ("single", (0, 1))]
    assert leaderboard(run)[2]["nll"] == 0.4


def test_regression_is_ranked_by_log_density(run):
    for label, density in (("single", -0.3), ("deep", 0.1)):
        write_job(run, label, 0, {"rmse": 1.0, "log_density": density})
    assert [r.name for r in leaderboard(run)] == ["deep", "single"]


def test_a_score_that_is_nan_is_none_and_infinity_is_a_number(run):
    write_job(run, "single", 0, {"nll": "inf", "aurc": None})
    (found,) = leaderboard(run)
    assert found["nll"] == math.inf and "aurc" not in found.values and math.isnan(found["aurc"])


def test_one_seed_has_no_spread():
    assert Value((0.5,)).spread is None


DIRECTIONS = {
    Better.HIGHER: ["accuracy", "ood/svhn/entropy/auroc", "ood/svhn/energy/aupr", "log_density", "accuracy_at_90",
                    "mean_iou"],
    Better.LOWER: ["nll", "brier", "shift/mean/ece", "mce", "adaptive_ece", "classwise_ece", "aurc", "member_error",
                   "ood/svhn/entropy/fpr95", "rmse", "crps", "gaussian_ece", "shift/mean_corruption_error",
                   "shift/mcnll", "shift/mcece", "shift/relative_mean_corruption_error", "costs/parameters",
                   "costs/training_time_ratio", "costs/inference_time_ratio", "costs/peak_memory_bytes",
                   "costs/multiply_adds"],
    Better.ZERO: ["overconfidence"],
    Better.NEITHER: ["disagreement", "coverage_95", "width_95", "ensemble_js", "of nobody"],
}  # fmt: skip


def test_every_score_of_an_evaluation_and_every_cost_has_a_direction_unless_it_has_none():
    for direction, names in DIRECTIONS.items():
        assert {name: better(name) for name in names} == dict.fromkeys(names, direction)
    assert best([row("a", disagreement=(0.1,)), row("b", disagreement=(0.2,))], "disagreement") is None


def test_the_best_overconfidence_is_the_nearest_to_zero():
    """The most underconfident method has the lowest one, and is the worst."""
    under, near, over = (
        row(name, overconfidence=[value] * 2) for name, value in {"u": -0.3, "n": -0.02, "o": 0.1}.items()
    )
    for rows in ([under, near, over], [over, near, under]):
        assert best(rows, "overconfidence") is near
        assert level_with_best(rows, "overconfidence") == [near]


def test_what_is_as_far_from_zero_on_the_other_side_is_within_noise():
    below, above = row("below", overconfidence=(-0.03, -0.05)), row("above", overconfidence=(0.04, 0.06))
    assert level_with_best([below, above], "overconfidence") == [below, above]
    assert level_with_best([below, row("far", overconfidence=(0.5, 0.52))], "overconfidence") == [below]


# -- the best -----------------------------------------------------------------------------------------------


def test_the_best_comes_first_and_then_what_is_level_with_it():
    rows = [row("a", nll=(0.1, 0.3)), row("b", nll=(0.1, 0.2)), row("c", nll=(5.0, 5.1)), row("d", nll=(math.inf,))]
    assert [row.name for row in level_with_best(rows, "nll")] == ["b", "a"]
    assert level_with_best(rows, "disagreement") == []


def test_what_each_row_adds_is_read_from_the_predictions_of_all_seeds(run):
    rng = np.random.default_rng(5)
    every = rng.random((2, 30))
    for seed, own in enumerate(every):
        write_job(run, "single", seed, {"nll": own.mean()})
        path = run.job("single", seed).directory / "predictions.safetensors"
        write_arrays(path, {"rows/nll": own, "raw/rows/nll": 2 * own})
    (found,) = leaderboard(run)
    assert np.array_equal(found.examples()["nll"], every) and np.array_equal(found.examples()["raw/nll"], 2 * every)


def test_baselines_and_times_are_read_with_the_methods(run):
    write_job(run, "single", 0, {"nll": 0.5, "accuracy": 0.9})
    table = {"baselines": {"chance": {"count": 4, "scores": {"nll": 0.1}, "rows": {"nll": [0.0, 0.2]}}}}
    run.write_table("baselines.json", table, "")
    time = {"ratio": 2.0, "low": 1.5, "high": 2.5, "seconds": 1.0}
    run.write_table("costs.json", {"methods": {"single": {"inference": time, "training": time}}}, run.timed)
    first, second = leaderboard(run)
    assert (first.name, first.baseline, first["nll"], first.seeds) == ("chance", True, 0.1, ())
    assert first.examples()["nll"].tolist() == [[0.0, 0.2]]
    value = second.values["costs/inference_time_ratio"]
    assert (second.name, second.baseline, value.mean, value.low, value.high) == ("single", False, 2.0, 1.5, 2.5)


def test_of_several_jobs_the_best_is_named_and_no_baseline(run):
    for label, nll in (("single", 0.5), ("deep", 0.4)):
        write_job(run, label, 0, {"nll": nll, "accuracy": 0.9})
    table = {"baselines": {"gradient_boosting": {"count": 4, "scores": {"nll": 0.1}, "rows": {}}}}
    run.write_table("baselines.json", table, "")
    assert leaderboard(run)[0].baseline
    with pytest.raises(ValueError, match=r"choose one, such as '.*deep-0', the best"):
        find_job(run.directory)


def test_the_score_to_rank_by_is_a_proper_one_unless_another_is_chosen(run):
    for label, nll, accuracy in (("single", 0.3, 0.9), ("deep", 0.1, 0.8)):
        write_job(run, label, 0, {"nll": nll, "accuracy": accuracy})
    assert [each.name for each in leaderboard(run)] == ["deep", "single"]
    assert [each.name for each in leaderboard(run, "accuracy")] == ["single", "deep"]
    with pytest.raises(ValueError, match="--by must be one of nll, brier, accuracy for classification, got 'rmse'"):
        leaderboard(run, "rmse")


def test_of_numbers_nll_is_the_log_density(run):
    for label, density, rmse in (("single", -0.3, 1.0), ("deep", 0.1, 2.0)):
        write_job(run, label, 0, {"rmse": rmse, "log_density": density})
    assert [each.name for each in leaderboard(run, "nll")] == ["deep", "single"]
    assert [each.name for each in leaderboard(run, "rmse")] == ["single", "deep"]
