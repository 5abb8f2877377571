"""Recommendations by budget, and what is reported without one."""

from __future__ import annotations

import numpy as np
import pytest

from multitudes.lab.study.results.recommendation import BUDGETS, recommend
from multitudes.lab.study.results.result_rows import Row, Value

ONE, FOUR, ANY = BUDGETS
ROWS = 2000
COMMON = np.random.default_rng(0).gamma(1.0, 1.0, ROWS)
"""Difficulty of each test row, the same for every method."""


def method(
    name: str, level: float, cost: float = 1.0, *, seeds: int = 3, noise: float = 0.05, raw: float | None = None,
    rows: int = ROWS, score: str = "nll", spread: float = 0.002, **scores: float,
) -> Row:  # fmt: skip
    """Build a method whose loss is `level` times the difficulty, at `cost` times the single network's price."""
    rng = np.random.default_rng(list(name.encode()))
    every = level * COMMON[:rows] + noise * rng.normal(size=(seeds, rows)) + spread * rng.normal(size=(seeds, 1))
    examples = {score: every} | ({} if raw is None else {f"raw/{score}": every * raw})
    values = {name: Value(tuple(rows.mean(1).tolist()), ROWS) for name, rows in examples.items()}
    values |= {name: Value((value,) * seeds, ROWS) for name, value in scores.items()}
    values |= {"costs/multiply_adds_ratio": Value((cost,)), "costs/inference_time_ratio": Value((cost,), 0, cost, cost)}
    return Row(name, name, tuple(range(seeds)), values, lambda: examples)


SINGLE = method("single", 0.3)
PACKED = method("packed", 0.25)
DEEP = method("deep", 0.2, 4.0)
DRAWS = method("draws", 0.15, 20.0)


def picked(*rows: Row, **options: object) -> dict[str, str | None]:
    return {each.budget: each.method for each in recommend(rows, **options).advice}  # type: ignore[arg-type]


WORSE = method("worse", 0.5)
DENSITIES = (("single", -0.5), ("packed", -0.3))


@pytest.mark.parametrize(
    ("rows", "picks"),
    [
        ([SINGLE, PACKED, DEEP, DRAWS], {ONE: "packed", FOUR: "deep", ANY: "draws"}),
        ([SINGLE, PACKED, method("deep", 0.2502, 4.0)], {ONE: "packed", FOUR: "packed"}),  # level, and dearer
        ([SINGLE, DEEP, method("twice", 0.2001, 2.0)], {FOUR: "twice"}),  # level, and cheaper
        ([SINGLE, WORSE, method("bad", 0.6, 4.0)], {}),
        (
            [method(n, v, score="log_density", rmse=1.0) for n, v in (("single", -0.5), ("packed", -0.3))],
            {ONE: "packed"},
        ),
    ],
    ids=["best", "dearer", "cheaper", "worse", "higher is better"],
)
def test_each_budget_has_its_best_significant_method(rows: list[Row], picks: dict[str, str]) -> None:
    assert picked(*rows) == picks


def test_headline_and_advice_have_gain_cost_and_confidence() -> None:
    found = recommend([SINGLE, PACKED, DEEP])
    assert found.headline.startswith("packed is worth its price: NLL 0.25")
    assert "at 1.0 × the time of a prediction" in found.headline
    advice = next(each for each in found.advice if each.method == "packed")
    gain = SINGLE["nll"] - PACKED["nll"]
    assert f"better by {gain:.2g} (at least " in advice.sentence
    assert 0 < float(advice.sentence.split("at least ")[1].split(" with")[0]) < gain


@pytest.mark.parametrize(
    "rows",
    [
        [SINGLE, method("packed", 0.3001), method("deep", 0.2999, 4.0)],
        [method(name, level, noise=0.001, spread=0.0) for name, level in (("single", 0.3), ("slight", 0.298))],
    ],
    ids=["equal", "negligible"],
)
def test_no_method_is_worth_its_price_without_a_gain_that_matters(rows: list[Row]) -> None:
    found = recommend(rows)
    assert found.headline.startswith("No method is worth its price: none is better than the single network (NLL 0.")
    assert not found.methods


def test_too_few_rows_are_reported() -> None:
    few = [method(name, level, rows=12, noise=0.5) for name, level in (("single", 0.3), ("packed", 0.25))]
    assert recommend(few).headline.startswith("Too few test rows (2,000) or seeds (3) to tell")
    assert not recommend(few).methods


def test_the_best_of_many_methods_is_only_probably_worth_its_price() -> None:
    rivals = [method(f"m{index}", 0.31, spread=0.01) for index in range(12)]
    single, better = method("single", 0.3, spread=0.01), method("better", 0.284, spread=0.01)
    assert picked(single, better) == {ONE: "better"}
    found = recommend([single, better, *rivals])
    assert found.headline.startswith("better is probably worth its price: NLL 0.29")
    assert "the best of 13 methods may be ahead by chance" in found.headline and not found.methods


def test_calibrating_the_single_network_needs_no_training() -> None:
    found = picked(method("single", 0.3, raw=1.2), PACKED)
    assert found["Without retraining"] == "single"
    useless = recommend([method("single", 0.3, raw=0.99), PACKED])
    (again,) = (each for each in useless.advice if each.budget == "Without retraining")
    assert again.method is None and "no significant gain" in again.sentence


def test_the_price_of_a_tiny_network_is_its_multiply_adds() -> None:
    slow = method("packed", 0.25)
    slow.values["costs/inference_time_ratio"] = Value((3.0,), 0, 2.9, 3.1)  # type: ignore[index]
    assert picked(SINGLE, slow) == {FOUR: "packed"}
    assert picked(SINGLE, slow, tiny=True) == {ONE: "packed"}
    assert recommend([SINGLE, slow], tiny=True).cost == "multiply-adds, × the single network's"


def test_a_time_close_to_the_single_networks_is_approximate() -> None:
    packed = method("packed", 0.25)
    packed.values["costs/inference_time_ratio"] = Value((1.1,), 0, 0.9, 1.3)  # type: ignore[index]
    assert "about 1.1 × the time of a prediction" in recommend([SINGLE, packed]).headline


def test_on_the_frontier_nothing_cheaper_is_better() -> None:
    worse = method("worse", 0.4, 2.0)
    points = {point.method: point.on_frontier for point in recommend([SINGLE, PACKED, DEEP, worse]).points}
    assert points == {"single": False, "packed": True, "worse": False, "deep": True}


def test_many_level_methods_are_counted_in_one_sentence() -> None:
    same = [method(f"m{index}", 0.2 + 0.0001 * index, spread=0.01) for index in range(8)]
    first = recommend([SINGLE, *same]).notes[0]
    assert "of the other 8 methods are not significantly worse" in first


# -- warnings ----------------------------------------------------------------------------------------------


def baseline(name: str, value: float, score: str = "nll") -> Row:
    return Row(name, name, (), {score: Value((value,), ROWS)}, dict, baseline=True)


def test_methods_worse_than_a_baseline_are_named() -> None:
    found = recommend([SINGLE, PACKED, method("bad", 2.5), baseline("constant", 2.3)])
    assert found.warnings == ("bad has a worse NLL than a constant prediction (2.300).",)
    found = recommend([SINGLE, PACKED, baseline("chance", 0.01)])
    assert found.warnings == ("Every method has a worse NLL than chance (0.010).",)


def boosting(level: float, name: str = "gradient_boosting") -> Row:
    rows = level * COMMON
    values = {"nll": Value((float(rows.mean()),), ROWS)}
    return Row(name, name, (), values, lambda: {"nll": rows[None]}, baseline=True)


def test_a_better_model_without_a_network_comes_first() -> None:
    found = recommend([SINGLE, PACKED, DEEP, boosting(0.1), boosting(0.15, "random_forest")])
    score = f"{0.1 * COMMON.mean():.3f}"
    assert found.headline.startswith(f"Gradient boosting is better than every network: NLL {score}, against ")
    assert found.advice[0].budget == "Among the networks" and "is worth its price" in found.advice[0].sentence
    assert not any("gradient boosting" in warning for warning in found.warnings)
    assert "Every method has a worse NLL than a random forest" in " ".join(found.warnings)


def test_a_model_that_is_better_by_chance_is_as_good() -> None:
    noisy = method("gradient_boosting", 0.1999, seeds=1, noise=2.0)
    rival = Row("gradient_boosting", "gradient_boosting", (), noisy.values, noisy.examples, baseline=True)
    top = method("deep", noisy["nll"] / COMMON.mean() + 0.002, 4.0)
    found = recommend([method("single", 0.9), top, rival])
    assert (
        found.headline.startswith("Gradient boosting is as good as the best network")
        and "due to chance" in found.headline
    )


def test_a_model_with_a_better_error_is_named() -> None:
    rows = [method(name, level, accuracy=0.9) for name, level in (("single", 0.3), ("packed", 0.25))]
    rival = boosting(0.5)
    rival = Row(rival.name, rival.method, (), {**rival.values, "accuracy": Value((0.95,), ROWS)}, baseline=True)
    found = recommend([*rows, rival])
    assert found.headline.startswith("packed is worth its price")
    assert any(
        warning.startswith("By accuracy alone, gradient boosting is better than every network: 95.0 %")
        for warning in found.warnings
    )


def test_intervals_that_cover_too_little_are_named() -> None:
    rows = [
        method(name, level, score="log_density", rmse=1.0, coverage_90=share)
        for name, level, share in (("single", -0.3, 0.8), ("deep", -0.2, 0.83), ("packed", -0.25, 0.895))
    ]
    assert (
        "The 90 % intervals of single and deep contain only 80 to 83 % of the true values." in recommend(rows).warnings
    )


# -- what may be missing -----------------------------------------------------------------------------------


def test_missing_methods_are_reported() -> None:
    assert recommend([]).headline == "No job is done yet, so there is nothing to compare."
    assert recommend([SINGLE]).headline.endswith("is done, so there is nothing to compare it with.")
    found = recommend([PACKED, DEEP])
    assert found.headline.startswith("deep is the best by NLL") and "add the method single" in found.headline
    assert found.advice == ()


def test_one_run_per_method_without_rows_shows_nothing() -> None:
    rows = [
        Row(name, name, (0,), {"nll": Value((value,), 100), "costs/multiply_adds_ratio": Value((1.0,))})
        for name, value in (("single", 0.3), ("packed", 0.2))
    ]
    assert recommend(rows).headline.startswith("One run per method cannot show")
    assert recommend(rows).notes[0] == "packed is the best by NLL (0.200)."  # without a difference to the others


@pytest.mark.parametrize("by, best", [("nll", "packed"), ("accuracy", "deep")])
def test_the_chosen_score_decides(by: str, best: str) -> None:
    def both(name: str, nll: float, accuracy: float) -> Row:
        rng = np.random.default_rng(list(name.encode()))
        examples = {"nll": nll * COMMON[None], "accuracy": (rng.random((1, ROWS)) < accuracy).astype(float)}
        values = {score: Value((float(rows.mean()),), ROWS) for score, rows in examples.items()}
        return Row(name, name, (0,), {**values, "costs/multiply_adds_ratio": Value((1.0,))}, lambda: examples)

    rows = [both("single", 0.3, 0.7), both("packed", 0.2, 0.7), both("deep", 0.3, 0.9)]
    assert picked(*rows, by=by) == {ONE: best}
