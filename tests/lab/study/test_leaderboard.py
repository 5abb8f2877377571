"""The leaderboard, and comparisons of its rows against SciPy's tests, closed forms and simulated studies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from multitudes.base.archives import write_arrays
from multitudes.base.sealed_files import write_atomically, write_json
from multitudes.lab.study.results.leaderboard import best, better, leaderboard, level_with_best
from multitudes.lab.study.results.paired import Comparison, Difference
from multitudes.lab.study.results.result_rows import Row, Value
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import find_job
from multitudes.metrics.declare import Better


def row(name, *, seeds=3, cost=1e6, examples=None, count=1000, **scores):
    """Build a row from scores, tuples of one value per seed."""
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


def test_a_row_has_mean_and_deviation_over_seeds(run):
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


CLASSES = {"single": {"nll": 0.3, "accuracy": 0.9}, "deep": {"nll": 0.1, "accuracy": 0.8}}
NUMBERS = {"single": {"log_density": -0.3, "rmse": 1.0}, "deep": {"log_density": 0.1, "rmse": 2.0}}


@pytest.mark.parametrize(
    ("scores", "by", "order"),
    [
        (CLASSES, None, ["deep", "single"]),
        (CLASSES, "accuracy", ["single", "deep"]),
        (NUMBERS, None, ["deep", "single"]),
        (NUMBERS, "nll", ["deep", "single"]),
        (NUMBERS, "rmse", ["single", "deep"]),
    ],
)
def test_methods_are_ranked_by_a_proper_score_or_the_chosen_one(run, scores, by, order):
    for label, own in scores.items():
        write_job(run, label, 0, own)
    assert [row.name for row in leaderboard(run, by)] == order


def test_a_score_of_another_task_is_refused(run):
    write_job(run, "single", 0, CLASSES["single"])
    with pytest.raises(ValueError, match="--by must be one of nll, brier, accuracy for classification, got 'rmse'"):
        leaderboard(run, "rmse")


def test_only_finished_jobs_count(run):
    for label, seed, nll in (("single", 0, 0.3), ("single", 1, 0.5), ("deep", 0, 0.1)):
        write_job(run, label, seed, {"nll": nll})
    assert [(row.name, row.seeds, row["nll"]) for row in leaderboard(run)] == [
        ("deep", (0,), 0.1),
        ("single", (0, 1), 0.4),
    ]


def test_nan_is_missing_and_infinity_is_a_number(run):
    write_job(run, "single", 0, {"nll": "inf", "aurc": None})
    (found,) = leaderboard(run)
    assert found["nll"] == math.inf and "aurc" not in found.values and math.isnan(found["aurc"])
    assert found.values["nll"].spread is None


DIRECTIONS = {
    Better.HIGHER: ["accuracy", "ood/svhn/entropy/auroc", "ood/svhn/energy/aupr", "log_density", "accuracy_at_90",
                    "mean_iou"],
    Better.LOWER: ["nll", "brier", "shift/mean/ece", "mce", "adaptive_ece", "classwise_ece", "aurc", "member_error",
                   "ood/svhn/entropy/fpr95", "rmse", "crps", "gaussian_ece", "shift/mean_corruption_error",
                   "shift/mcnll", "shift/mcece", "shift/relative_mean_corruption_error", "costs/parameters",
                   "costs/training_time_ratio", "costs/inference_time_ratio", "costs/peak_memory_bytes",
                   "costs/multiply_adds"],
    Better.ZERO: ["overconfidence"],
    Better.NEITHER: ["disagreement", "coverage_95", "width_95", "ensemble_js", "unknown score"],
}  # fmt: skip


def test_every_score_and_cost_has_its_direction():
    for direction, names in DIRECTIONS.items():
        assert {name: better(name) for name in names} == dict.fromkeys(names, direction)
    assert best([row("a", disagreement=(0.1,)), row("b", disagreement=(0.2,))], "disagreement") is None


def test_the_best_overconfidence_is_nearest_to_zero():
    under, near, over = (
        row(name, overconfidence=[value] * 2) for name, value in {"u": -0.3, "n": -0.02, "o": 0.1}.items()
    )
    for rows in ([under, near, over], [over, near, under]):
        assert best(rows, "overconfidence") is near
        assert level_with_best(rows, "overconfidence") == [near]


def test_distances_from_zero_are_compared_on_both_sides():
    below, above = row("below", overconfidence=(-0.03, -0.05)), row("above", overconfidence=(0.04, 0.06))
    assert level_with_best([below, above], "overconfidence") == [below, above]
    assert level_with_best([below, row("far", overconfidence=(0.5, 0.52))], "overconfidence") == [below]


# -- the best -----------------------------------------------------------------------------------------------


def test_methods_level_with_the_best_follow_it():
    rows = [row("a", nll=(0.1, 0.3)), row("b", nll=(0.1, 0.2)), row("c", nll=(5.0, 5.1)), row("d", nll=(math.inf,))]
    assert [row.name for row in level_with_best(rows, "nll")] == ["b", "a"]
    assert level_with_best(rows, "disagreement") == []


def test_rows_read_the_predictions_of_all_seeds(run):
    rng = np.random.default_rng(5)
    every = rng.random((2, 30))
    for seed, own in enumerate(every):
        write_job(run, "single", seed, {"nll": own.mean()})
        path = run.job("single", seed).directory / "predictions.safetensors"
        write_arrays(path, {"rows/nll": own, "raw/rows/nll": 2 * own})
    (found,) = leaderboard(run)
    assert np.array_equal(found.examples()["nll"], every) and np.array_equal(found.examples()["raw/nll"], 2 * every)


def test_baselines_and_times_belong_to_the_leaderboard(run):
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


def test_the_best_of_several_jobs_is_suggested(run):
    for label, nll in (("single", 0.5), ("deep", 0.4)):
        write_job(run, label, 0, {"nll": nll, "accuracy": 0.9})
    table = {"baselines": {"gradient_boosting": {"count": 4, "scores": {"nll": 0.1}, "rows": {}}}}
    run.write_table("baselines.json", table, "")
    assert leaderboard(run)[0].baseline
    with pytest.raises(ValueError, match=r"choose one, such as '.*deep-0', the best"):
        find_job(run.directory)


# -- comparisons -------------------------------------------------------------------------------------------


def paired_row(name: str, rows: np.ndarray, score: str = "nll", seeds: int | None = None) -> Row:
    """Build a row from per-row scores `[seeds, N]`."""
    means = np.sqrt(rows.mean(1)) if score == "rmse" else rows.mean(1)
    value = Value(tuple(means.tolist()), rows.shape[1])
    return Row(name, name, tuple(range(len(rows) if seeds is None else seeds)), {score: value}, lambda: {score: rows})


def test_one_seed_gives_students_paired_test_over_rows() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 1, 50))
    rows = paired_row("a", a), paired_row("b", b)
    found = Comparison(rows, "nll").difference(*rows)
    assert found is not None
    expected = stats.ttest_rel(a[0], b[0])
    assert found.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.significant() == (expected.pvalue < 0.05)


def test_variances_over_seeds_shrink_to_the_median_one() -> None:
    values = {"a": (1.0, 1.2, 0.9), "b": (1.5, 1.7, 1.4), "c": (1.0, 3.0, 2.0)}
    rows = {name: Row(name, name, (0, 1, 2), {"ece": Value(own)}) for name, own in values.items()}
    found = Comparison(list(rows.values()), "ece").difference(rows["a"], rows["c"])
    assert found is not None
    variances = [np.var(own, ddof=1) for own in values.values()]
    middle = np.median(variances) / (stats.chi2.median(2) / 2)
    parts = [(4 * middle + 2 * np.var(values[name], ddof=1)) / 6 / 3 for name in "ac"]
    assert found.error == pytest.approx(np.sqrt(sum(parts)))
    assert found.freedom == pytest.approx(sum(parts) ** 2 / sum(part**2 / 6 for part in parts))


def test_one_seed_without_rows_has_no_difference() -> None:
    one, two = (Row(name, name, (0,), {"ece": Value((0.1,))}) for name in "ab")
    assert Comparison([one, two], "ece").difference(one, two) is None


def test_joint_bounds_are_those_of_bonferroni() -> None:
    found = Difference(0.5, 1.0, 12.0)
    assert found.at_most(among=8) == pytest.approx(0.5 + stats.t.ppf(1 - 0.05 / 8, 12))
    assert found.at_least(among=8) == pytest.approx(0.5 - stats.t.ppf(1 - 0.05 / 8, 12))


def test_a_difference_of_roots_has_the_error_of_many_test_sets() -> None:
    rng = np.random.default_rng(4)
    shared = rng.normal(size=(2000, 300))
    ours, theirs = (shared + 0.5 * rng.normal(size=shared.shape)) ** 2, (1.2 * shared) ** 2
    differences = np.sqrt(ours.mean(1)) - np.sqrt(theirs.mean(1))
    a, b = paired_row("a", ours[:1], "rmse"), paired_row("b", theirs[:1], "rmse")
    found = Comparison([a, b], "rmse").difference(a, b)
    assert found is not None and found.error == pytest.approx(differences.std(), rel=0.15)


def test_a_baseline_adds_no_variance_of_seeds() -> None:
    rng = np.random.default_rng(1)
    method, constant = paired_row("a", rng.random((3, 40))), paired_row("b", np.ones((1, 40)), seeds=0)
    found = Comparison([method], "nll").difference(method, constant)
    assert found is not None
    rows = method.examples()["nll"].mean(0).var(ddof=1) / 40
    own = method.examples()["nll"].mean(1).var(ddof=1)
    seeds = (4 * own / (stats.chi2.median(2) / 2) + 2 * own) / 6 / 3
    assert found.error == pytest.approx(np.sqrt(rows + seeds))


@pytest.mark.parametrize(
    "seeds, by_seed, by_row",
    [(3, (0.05,) * 8, 1.0), (3, (0.3,) * 8, 1.0), (5, (0.1,) * 8, 0.2), (2, (0.2,) * 8, 0.5),
     (3, (0.1, 0.3, 0.2, 0.4, 0.2, 0.1, 0.3, 0.2), 0.5)],
    ids=["rows", "seeds", "five", "two", "unequal"],
)  # fmt: skip
def test_intervals_have_their_coverage_over_seeds_and_rows(
    seeds: int, by_seed: tuple[float, ...], by_row: float
) -> None:
    """For equal methods, a 95 % interval contains zero in about 95 of 100 studies."""
    rng = np.random.default_rng(2)
    held, studies, rows = 0, 400, 60
    for _ in range(studies):
        common = rng.normal(0, 1, rows)
        methods = [
            paired_row(
                str(number),
                common
                + rng.normal(0, by_row, rows)
                + rng.normal(0, own, (seeds, 1))
                + rng.normal(0, 0.3, (seeds, rows)),
            )
            for number, own in enumerate(by_seed)
        ]
        found = Comparison(methods, "nll").difference(methods[0], methods[1])
        assert found is not None
        low, high = found.interval()
        held += low <= 0 <= high
    assert 0.92 <= held / studies <= 0.995
