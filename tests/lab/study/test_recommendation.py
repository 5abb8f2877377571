"""What to take: one answer by budget, and what is said where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from multitudes.lab.study.results.recommendation import BUDGETS, recommend
from multitudes.lab.study.results.result_rows import Row, Value

ONE, FOUR, ANY = BUDGETS
ROWS = 2000
COMMON = np.random.default_rng(0).gamma(1.0, 1.0, ROWS)
"""How hard each test row is, for every method alike."""


def method(
    name: str, level: float, cost: float = 1.0, *, seeds: int = 3, noise: float = 0.05, raw: float | None = None,
    rows: int = ROWS, score: str = "nll", spread: float = 0.002, **scores: float,
) -> Row:  # fmt: skip
    """A method whose rows are `level` times as hard to it, its price `cost` times the single network's."""
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


def taken(*rows: Row, **options: object) -> dict[str, str | None]:
    return {each.budget: each.method for each in recommend(rows, **options).advice}  # type: ignore[arg-type]


def test_each_budget_has_the_best_method_that_is_surely_better() -> None:
    assert taken(SINGLE, PACKED, DEEP, DRAWS) == {ONE: "packed", FOUR: "deep", ANY: "draws"}


def test_the_headline_and_the_advice_tell_gain_cost_and_how_sure_that_is() -> None:
    found = recommend([SINGLE, PACKED, DEEP])
    assert found.headline.startswith("packed is worth its price: NLL 0.25")
    assert "at 1.0 × the time of a prediction" in found.headline
    advice = next(each for each in found.advice if each.method == "packed")
    gain = SINGLE["nll"] - PACKED["nll"]
    assert f"better by {gain:.2g} (at least " in advice.sentence
    assert 0 < float(advice.sentence.split("at least ")[1].split(" with")[0]) < gain


def test_what_is_dearer_and_not_surely_better_is_not_taken() -> None:
    level = method("deep", 0.2502, 4.0)
    found = recommend([SINGLE, PACKED, level])
    assert taken(SINGLE, PACKED, level) == {ONE: "packed", FOUR: "packed"}
    assert (
        next(each for each in found.advice if each.budget == FOUR).sentence
        == "still packed; no dearer method is significantly better."
    )


def test_of_methods_that_are_level_the_cheapest_is_taken() -> None:
    twice = method("twice", 0.2001, 2.0)
    assert taken(SINGLE, DEEP, twice)[FOUR] == "twice"


def test_nothing_is_worth_its_price_where_all_are_the_same_and_that_is_sure() -> None:
    found = recommend([SINGLE, method("packed", 0.3001), method("deep", 0.2999, 4.0)])
    assert found.headline.startswith(
        "No method is worth its price: none is better than the single network (NLL 0."
    )
    assert not found.methods


def test_a_gain_that_is_sure_but_does_not_matter_is_not_worth_it() -> None:
    slight = method("slight", 0.298, noise=0.001, spread=0.0)
    found = recommend([method("single", 0.3, noise=0.001, spread=0.0), slight])
    assert found.headline.startswith("No method is worth its price") and not found.methods


def test_too_few_rows_are_told_as_such() -> None:
    few = [method(name, level, rows=12, noise=0.5) for name, level in (("single", 0.3), ("packed", 0.25))]
    assert recommend(few).headline.startswith("Too few test rows (2,000) or seeds (3) to tell")
    assert not recommend(few).methods


def test_the_best_of_many_that_is_sure_by_itself_alone_is_told_as_likely() -> None:
    rivals = [method(f"m{index}", 0.31, spread=0.01) for index in range(12)]
    single, better = method("single", 0.3, spread=0.01), method("better", 0.284, spread=0.01)
    assert taken(single, better) == {ONE: "better"}
    found = recommend([single, better, *rivals])
    assert found.headline.startswith("better is probably worth its price: NLL 0.29")
    assert "the best of 13 methods may be ahead by chance" in found.headline and not found.methods


def test_a_worse_method_is_never_taken() -> None:
    assert taken(SINGLE, method("worse", 0.5), method("bad", 0.6, 4.0)) == {}


def test_calibrating_the_single_network_needs_no_training() -> None:
    found = taken(method("single", 0.3, raw=1.2), PACKED)
    assert found["Without retraining"] == "single"
    useless = recommend([method("single", 0.3, raw=0.99), PACKED])
    (again,) = (each for each in useless.advice if each.budget == "Without retraining")
    assert again.method is None and "no significant gain" in again.sentence


def test_of_a_tiny_network_the_price_is_its_multiply_adds() -> None:
    slow = method("packed", 0.25)
    slow.values["costs/inference_time_ratio"] = Value((3.0,), 0, 2.9, 3.1)  # type: ignore[index]
    assert taken(SINGLE, slow) == {FOUR: "packed"}
    assert taken(SINGLE, slow, tiny=True) == {ONE: "packed"}
    assert recommend([SINGLE, slow], tiny=True).cost == "multiply-adds, × the single network's"


def test_a_time_that_varies_around_that_of_the_single_network_is_told_as_about() -> None:
    packed = method("packed", 0.25)
    packed.values["costs/inference_time_ratio"] = Value((1.1,), 0, 0.9, 1.3)  # type: ignore[index]
    assert "about 1.1 × the time of a prediction" in recommend([SINGLE, packed]).headline


def test_the_frontier_is_what_nothing_cheaper_is_better_than() -> None:
    worse = method("worse", 0.4, 2.0)
    points = {point.method: point.on_frontier for point in recommend([SINGLE, PACKED, DEEP, worse]).points}
    assert points == {"single": False, "packed": True, "worse": False, "deep": True}


def test_many_methods_that_are_level_are_one_sentence() -> None:
    same = [method(f"m{index}", 0.2 + 0.0001 * index, spread=0.01) for index in range(8)]
    first = recommend([SINGLE, *same]).notes[0]
    assert "of the other 8 methods are not significantly worse" in first


# -- warnings ----------------------------------------------------------------------------------------------


def baseline(name: str, value: float, score: str = "nll") -> Row:
    return Row(name, name, (), {score: Value((value,), ROWS)}, dict, baseline=True)


def test_what_is_worse_than_a_baseline_is_called_so() -> None:
    found = recommend([SINGLE, PACKED, method("bad", 2.5), baseline("constant", 2.3)])
    assert found.warnings == ("bad has a worse NLL than a constant prediction (2.300).",)
    found = recommend([SINGLE, PACKED, baseline("chance", 0.01)])
    assert found.warnings == ("Every method has a worse NLL than chance (0.010).",)


def boosting(level: float, name: str = "gradient_boosting") -> Row:
    rows = level * COMMON
    values = {"nll": Value((float(rows.mean()),), ROWS)}
    return Row(name, name, (), values, lambda: {"nll": rows[None]}, baseline=True)


def test_that_a_model_without_a_network_is_better_is_said_first() -> None:
    found = recommend([SINGLE, PACKED, DEEP, boosting(0.1), boosting(0.15, "random_forest")])
    told = f"{0.1 * COMMON.mean():.3f}"
    assert found.headline.startswith(f"Gradient boosting is better than every network: NLL {told}, against ")
    assert found.advice[0].budget == "Among the networks" and "is worth its price" in found.advice[0].sentence
    assert not any("gradient boosting" in warning for warning in found.warnings)
    assert "Every method has a worse NLL than a random forest" in " ".join(found.warnings)


def test_a_model_that_is_better_by_chance_alone_is_called_as_good() -> None:
    noisy = method("gradient_boosting", 0.1999, seeds=1, noise=2.0)
    rival = Row("gradient_boosting", "gradient_boosting", (), noisy.values, noisy.examples, baseline=True)
    top = method("deep", noisy["nll"] / COMMON.mean() + 0.002, 4.0)
    found = recommend([method("single", 0.9), top, rival])
    assert found.headline.startswith("Gradient boosting is as good as the best network") and "due to chance" in found.headline


def test_a_model_that_is_better_by_the_error_alone_is_named() -> None:
    rows = [method(name, level, accuracy=0.9) for name, level in (("single", 0.3), ("packed", 0.25))]
    rival = boosting(0.5)
    rival = Row(rival.name, rival.method, (), {**rival.values, "accuracy": Value((0.95,), ROWS)}, baseline=True)
    found = recommend([*rows, rival])
    assert found.headline.startswith("packed is worth its price")
    assert any(
        warning.startswith("By accuracy alone, gradient boosting is better than every network: 95.0 %")
        for warning in found.warnings
    )


def test_intervals_that_cover_less_than_they_say_are_named() -> None:
    rows = [
        method(name, level, score="log_density", rmse=1.0, coverage_90=share)
        for name, level, share in (("single", -0.3, 0.8), ("deep", -0.2, 0.83), ("packed", -0.25, 0.895))
    ]
    assert "The 90 % intervals of single and deep contain only 80 to 83 % of the true values." in recommend(rows).warnings


def test_of_log_densities_the_higher_is_the_better_one() -> None:
    rows = [method(name, level, score="log_density", rmse=1.0) for name, level in (("single", -0.5), ("packed", -0.3))]
    assert taken(*rows) == {ONE: "packed"}


# -- what may be missing -----------------------------------------------------------------------------------


def test_without_results_or_with_one_method_or_without_the_single_network_it_says_so() -> None:
    assert recommend([]).headline == "No job is done yet, so there is nothing to compare."
    assert recommend([SINGLE]).headline.endswith("is done, so there is nothing to compare it with.")
    found = recommend([PACKED, DEEP])
    assert found.headline.startswith("deep is the best by NLL") and "add the method single" in found.headline
    assert found.advice == ()


def test_one_run_of_each_without_rows_cannot_tell() -> None:
    rows = [
        Row(name, name, (0,), {"nll": Value((value,), 100), "costs/multiply_adds_ratio": Value((1.0,))})
        for name, value in (("single", 0.3), ("packed", 0.2))
    ]
    assert recommend(rows).headline.startswith("One run per method cannot show")
    assert recommend(rows).notes[0] == "packed is the best by NLL (0.200)."  # and nobody knows by how much


@pytest.mark.parametrize("by, best", [("nll", "packed"), ("accuracy", "deep")])
def test_it_is_by_the_score_that_was_chosen(by: str, best: str) -> None:
    def both(name: str, nll: float, accuracy: float) -> Row:
        rng = np.random.default_rng(list(name.encode()))
        examples = {"nll": nll * COMMON[None], "accuracy": (rng.random((1, ROWS)) < accuracy).astype(float)}
        values = {score: Value((float(rows.mean()),), ROWS) for score, rows in examples.items()}
        return Row(name, name, (0,), {**values, "costs/multiply_adds_ratio": Value((1.0,))}, lambda: examples)

    rows = [both("single", 0.3, 0.7), both("packed", 0.2, 0.7), both("deep", 0.3, 0.9)]
    assert taken(*rows, by=by) == {ONE: best}
