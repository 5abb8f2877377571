"""How sure a difference is: against scipy's tests, closed forms, and many simulated studies."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from multitudes.lab.study.results.paired import Comparison, Difference
from multitudes.lab.study.results.result_rows import Row, Value


def row(name: str, rows: np.ndarray, score: str = "nll", seeds: int | None = None) -> Row:
    """A method whose test rows add `rows [seeds, N]` to a score."""
    means = np.sqrt(rows.mean(1)) if score == "rmse" else rows.mean(1)
    value = Value(tuple(means.tolist()), rows.shape[1])
    return Row(name, name, tuple(range(len(rows) if seeds is None else seeds)), {score: value}, lambda: {score: rows})


def test_with_one_seed_it_is_students_paired_test_over_the_rows() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 1, 50))
    found = Comparison([row("a", a), row("b", b)], "nll").difference(row("a", a), row("b", b))
    assert found is not None
    judge = stats.ttest_rel(a[0], b[0])
    assert found.interval() == pytest.approx(tuple(judge.confidence_interval(0.95)))
    assert found.significant() == (judge.pvalue < 0.05)


def test_without_rows_variances_over_seeds_are_moderated_by_the_middle_one() -> None:
    values = {"a": (1.0, 1.2, 0.9), "b": (1.5, 1.7, 1.4), "c": (1.0, 3.0, 2.0)}
    rows = {name: Row(name, name, (0, 1, 2), {"ece": Value(own)}) for name, own in values.items()}
    found = Comparison(list(rows.values()), "ece").difference(rows["a"], rows["c"])
    assert found is not None
    variances = [np.var(own, ddof=1) for own in values.values()]
    middle = np.median(variances) / (stats.chi2.median(2) / 2)
    parts = [(4 * middle + 2 * np.var(values[name], ddof=1)) / 6 / 3 for name in "ac"]
    assert found.error == pytest.approx(np.sqrt(sum(parts)))
    assert found.freedom == pytest.approx(sum(parts) ** 2 / sum(part**2 / 6 for part in parts))


def test_with_neither_nothing_is_said() -> None:
    one, two = (Row(name, name, (0,), {"ece": Value((0.1,))}) for name in "ab")
    assert Comparison([one, two], "ece").difference(one, two) is None


def test_bounds_that_hold_together_are_those_of_bonferroni() -> None:
    found = Difference(0.5, 1.0, 12.0)
    assert found.at_most(among=8) == pytest.approx(0.5 + stats.t.ppf(1 - 0.05 / 8, 12))
    assert found.at_least(among=8) == pytest.approx(0.5 - stats.t.ppf(1 - 0.05 / 8, 12))


def test_a_difference_of_roots_has_the_error_of_many_test_sets() -> None:
    rng = np.random.default_rng(4)
    shared = rng.normal(size=(2000, 300))
    ours, theirs = (shared + 0.5 * rng.normal(size=shared.shape)) ** 2, (1.2 * shared) ** 2
    differences = np.sqrt(ours.mean(1)) - np.sqrt(theirs.mean(1))
    a, b = row("a", ours[:1], "rmse"), row("b", theirs[:1], "rmse")
    found = Comparison([a, b], "rmse").difference(a, b)
    assert found is not None and found.error == pytest.approx(differences.std(), rel=0.15)


def test_what_does_not_depend_on_a_seed_adds_no_variance_of_seeds() -> None:
    rng = np.random.default_rng(1)
    method, constant = row("a", rng.random((3, 40))), row("b", np.ones((1, 40)), seeds=0)
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
def test_intervals_hold_what_they_say_over_seeds_and_rows(
    seeds: int, by_seed: tuple[float, ...], by_row: float
) -> None:
    """Methods that are the same: an interval of 95 % must hold zero in about 95 of 100 studies."""
    rng = np.random.default_rng(2)
    held, studies, rows = 0, 400, 60
    for _ in range(studies):
        common = rng.normal(0, 1, rows)
        methods = [
            row(
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
