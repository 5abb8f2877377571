"""The leaderboard: means and spreads over seeds, what is noise, and the answer in words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from multitudes.core.archives import write_arrays
from multitudes.core.files import write_json
from multitudes.metrics.declare import Better
from multitudes.study.leaderboard import (
    Row,
    Value,
    best,
    better,
    difference_error,
    example_scores,
    leaderboard,
    marks,
    verdict,
    within_noise,
)
from multitudes.study.store import Run, write_atomically


def row(name, *, seeds=3, cost=1e6, examples=None, count=1000, **scores):
    """Scores are tuples, one value a seed."""
    values = {key: Value(tuple(np.atleast_1d(value).tolist()), count) for key, value in scores.items()}
    values["costs/multiply_adds"] = Value((cost,))
    return Row(name, name, tuple(range(seeds)), values, lambda: examples or {})


def write_job(run, label, seed, scores, costs=None, method=None, probs=None, target=None):
    directory = run.job(label, seed).directory
    write_json(directory / "config.json", {"method": method or label})
    if probs is not None:
        write_arrays(directory / "predictions.npz", {"probs": probs, "target": target})
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
                    "mean_iou", "costs/inference_per_second", "costs/inference_per_second_ratio"],
    Better.LOWER: ["nll", "brier", "shift/mean/ece", "mce", "adaptive_ece", "classwise_ece", "aurc", "member_error",
                   "ood/svhn/entropy/fpr95", "rmse", "crps", "gaussian_ece", "shift/mean_corruption_error",
                   "shift/mcnll", "shift/mcece", "shift/relative_mean_corruption_error", "costs/parameters",
                   "costs/training_seconds_ratio", "costs/peak_memory_bytes", "costs/multiply_adds"],
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
        assert marks(rows, "overconfidence") == {"u": "", "n": "best", "o": ""}


def test_what_is_as_far_from_zero_on_the_other_side_is_within_noise():
    below, above = row("below", overconfidence=(-0.03, -0.05)), row("above", overconfidence=(0.04, 0.06))
    assert marks([below, above], "overconfidence") == {"below": "best", "above": "noise"}
    assert not within_noise(row("far", overconfidence=(0.5, 0.52)), below, "overconfidence")


# -- noise -------------------------------------------------------------------------------------------------


def test_over_seeds_the_error_of_a_difference_is_that_of_welch():
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, 4), rng.normal(0.5, 3, 6)
    statistic = stats.ttest_ind(a, b, equal_var=False).statistic
    error = difference_error(row("a", nll=a), row("b", nll=b), "nll")
    assert error == pytest.approx((a.mean() - b.mean()) / statistic)


@pytest.mark.parametrize("name", ["accuracy", "nll", "brier"])
def test_with_one_seed_the_error_is_that_of_the_paired_test_inputs(name):
    rng = np.random.default_rng(2)
    target = rng.integers(0, 3, 200)
    ours, theirs = (example_scores({"probs": p, "target": target})[name] for p in rng.dirichlet([1] * 3, (2, 200)))
    a = row("a", examples={name: ours}, **{name: (ours.mean(),)})
    b = row("b", examples={name: theirs}, **{name: (theirs.mean(),)})
    paired = stats.ttest_rel(ours, theirs).statistic
    assert difference_error(a, b, name) == pytest.approx((ours.mean() - theirs.mean()) / paired)


def test_what_each_input_contributes_adds_up_to_the_score():
    rng = np.random.default_rng(3)
    probs, target = rng.dirichlet([1] * 4, 50).astype("float32"), rng.integers(0, 4, 50)
    found = example_scores({"probs": probs, "target": target})
    assert found["accuracy"].mean() == np.mean([p.argmax() == t for p, t in zip(probs, target, strict=True)])
    assert found["nll"].mean() == pytest.approx(-np.mean([np.log(p[t]) for p, t in zip(probs, target, strict=True)]))
    onehot = np.eye(4)[target]
    assert found["brier"].mean() == pytest.approx(((probs - onehot) ** 2).sum(1).mean())
    assert example_scores({}) == {}


def test_a_probability_of_zero_is_not_infinite_noise():
    found = example_scores({"probs": np.array([[0.0, 1.0]]), "target": np.array([0])})
    assert np.isfinite(found["nll"]).all()


def test_the_error_of_a_difference_of_rmse_is_that_of_many_test_sets():
    rng = np.random.default_rng(4)
    shared = rng.normal(size=(2000, 300))
    ours, theirs = (shared + 0.5 * rng.normal(size=shared.shape)) ** 2, (1.2 * shared) ** 2
    differences = np.sqrt(ours.mean(1)) - np.sqrt(theirs.mean(1))
    a = row("a", examples={"rmse": ours[0]}, rmse=(np.sqrt(ours[0].mean()),))
    b = row("b", examples={"rmse": theirs[0]}, rmse=(np.sqrt(theirs[0].mean()),))
    assert difference_error(a, b, "rmse") == pytest.approx(differences.std(), rel=0.15)


def test_without_predictions_an_accuracy_has_its_binomial_error_and_nothing_else_has_one():
    a, b = row("a", accuracy=(0.9,), nll=(0.3,), count=400), row("b", accuracy=(0.8,), nll=(0.2,), count=400)
    assert difference_error(a, b, "accuracy") == pytest.approx(
        math.sqrt(stats.binom.var(400, 0.9) / 400**2 + stats.binom.var(400, 0.8) / 400**2)
    )
    assert difference_error(a, b, "nll") is None
    assert not within_noise(a, b, "nll")


def test_within_noise_is_within_two_standard_errors():
    a = row("a", nll=(0.0, 2.0))  # mean 1, standard error 1
    for mean, noise in ((2.9, True), (3.1, False), (-0.9, True), (-1.1, False)):
        assert within_noise(row("b", nll=(mean, mean)), a, "nll") == noise
    assert within_noise(row("b", nll=(1.0, 1.0)), row("c", nll=(1.0, 1.0)), "nll")
    assert not within_noise(row("b", nll=(math.inf, 1.0)), a, "nll")


def test_marks_tell_the_best_and_what_is_within_noise_of_it():
    rows = [row("a", nll=(0.1, 0.3)), row("b", nll=(0.1, 0.2)), row("c", nll=(5.0, 5.1)), row("d", nll=(math.inf,))]
    assert marks(rows, "nll") == {"a": "noise", "b": "best", "c": "", "d": ""}
    assert marks(rows, "disagreement") == dict.fromkeys("abcd", "")


def test_noise_of_one_seed_is_read_from_the_predictions(run):
    rng = np.random.default_rng(5)
    target = rng.integers(0, 2, 400)
    confident = np.where(target[:, None] == np.arange(2), 0.9, 0.1)
    for label, probs in (("single", confident), ("deep", confident + rng.normal(0, 0.01, (400, 1)) * [1, -1])):
        scores = {name: value.mean() for name, value in example_scores({"probs": probs, "target": target}).items()}
        write_job(run, label, 0, scores, probs=probs, target=target)
    a, b = leaderboard(run)
    assert within_noise(b, a, "nll")
    assert not within_noise(b, row("c", nll=(a["nll"] - 1,)), "nll")


# -- the answer --------------------------------------------------------------------------------------------


def answer(name, accuracy, nll, cost=1e6, **others):
    return row(name, accuracy=accuracy, nll=nll, cost=cost, **others)


DEEP = answer("deep", (0.970, 0.976, 0.973), (0.080, 0.081, 0.079), 4e6)
PACKED = answer("packed", (0.969, 0.975, 0.972), (0.1, 0.101, 0.099))
SINGLE = answer("single", (0.95, 0.951, 0.949), (0.2, 0.21, 0.19), 0.9e6)
VERDICTS = {
    "the cheaper method within noise of the best is the answer": (
        [PACKED, DEEP, SINGLE],
        "packed is 0.1 points below deep, the best by accuracy (97.3 %), at a quarter of its multiply-adds: "
        "a difference within noise (3 seeds). "
        "By NLL deep is the best (0.080), ahead of all others by more than noise.",
    ),
    "where nothing is within noise the next one and its price are told": (
        [DEEP, answer("single", (0.95, 0.951), (0.2, 0.21), seeds=2)],
        "deep is the best by accuracy (97.3 %) by more than noise (2 and 3 seeds); "
        "the next, single, is 2.3 points below it, at a quarter of its multiply-adds. "
        "By NLL deep is the best (0.080), ahead of all others by more than noise.",
    ),
    "where the best is the cheapest the others cost no less": (
        [
            answer("single", (0.970, 0.976), (0.1, 0.12)),
            answer("deep", (0.969, 0.975), (0.11, 0.13), 4e6),
            answer("mimo", (0.968, 0.975), (0.3, 0.31)),
        ],
        "single is the best by accuracy (97.3 %); deep and mimo, within noise of it (3 seeds), cost no less. "
        "By NLL single is the best (0.110), with deep within noise of it.",
    ),
    "where noise is unknown it is not claimed": (
        [row("a", rmse=(1.0,), log_density=(0.1,), seeds=1), row("b", rmse=(2.0,), log_density=(0.0,), seeds=1)],
        "a is the best by RMSE (1.000); the next, b, is 1 above it, at the same number of multiply-adds, and one run "
        "of each cannot tell whether that is noise. By log density a is the best (0.100).",
    ),
    "of two that cost the same the answer names the better one": (
        [
            answer("deep", (0.970, 0.980, 0.975), (0.1, 0.1, 0.1), 4e6),
            answer("worse", (0.968, 0.977, 0.973), (0.1, 0.1, 0.1)),
            answer("single", (0.969, 0.979, 0.974), (0.1, 0.1, 0.1)),
        ],
        "single is 0.1 points below deep, the best by accuracy (97.5 %), at a quarter of its multiply-adds: "
        "a difference within noise (3 seeds). "
        "By NLL deep is the best (0.100), with worse and single within noise of it.",
    ),
    "with one method there is nothing to compare": (
        [answer("a", (0.97,), (0.1,))],
        "Only a is done (accuracy 97.0 %), so there is nothing to compare it with.",
    ),
    "with no job either": ([], "No job is done yet, so there is nothing to compare."),
    "with no score either": ([row("a"), row("b")], "a and b have no score to be compared by."),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_answer_in_words(case):
    rows, text = VERDICTS[case]
    assert verdict(rows) == text


def test_one_seed_is_told_as_such():
    rows = [answer(name, (value,), (0.1,), seeds=1) for name, value in (("a", 0.9), ("b", 0.899))]
    assert "one seed, by the test inputs" in verdict(rows)


@pytest.mark.parametrize(
    "ratio, told",
    [(1 / 3, "a third of its"), (0.5, "half its"), (0.13, "13% of its"), (0.001, "0.001 times its")],
)
def test_prices_are_told_in_words(ratio, told):
    a, b = answer("a", (0.97, 0.98), (0.1, 0.1)), answer("b", (0.96, 0.98), (0.1, 0.1), ratio * 1e6)
    start = "b is 0.5 points below a, the best by accuracy (97.5 %), at"
    assert f"{start} {told} multiply-adds: a difference" in verdict([a, b])


def test_the_price_is_that_of_parameters_where_multiply_adds_are_unknown():
    rows = []
    for name, value, cost in (("a", (0.97, 0.98), 10), ("b", (0.96, 0.98), 5)):
        values = {"accuracy": Value(value), "nll": Value(value), "costs/parameters": Value((cost, cost))}
        rows.append(Row(name, name, (0, 1), values))
    assert "at half its parameters" in verdict(rows)
