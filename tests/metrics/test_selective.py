import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes.metrics import (
    AURC,
    UNCERTAINTIES,
    AccuracyAtCoverage,
    RiskCoverageCurve,
    accuracy_at_coverage,
    aurc,
    risk_coverage,
)
from multitudes.metrics.selective import curve_of
from multitudes.tasks.predictive import Predictive
from tests.metrics import cases
from tests.metrics.cases import binary, classes, streamed, with_twins
from tests.zoo.predictions import raises

logits = partial(cases.logits, dtype=torch.float64)
random_case = partial(cases.random_case, dtype=torch.float64)


# Textbook computations -------------------------------------------------------------------------------------


def text_risks(uncertainty, wrong):
    """The risk at each coverage k/n, in fractions: ties are worth their mean error."""
    value = [
        Fraction(sum(w for v, w in zip(uncertainty, wrong, strict=True) if v == u), uncertainty.count(u))
        for u in uncertainty
    ]
    order = sorted(range(len(wrong)), key=lambda i: uncertainty[i])
    return [sum(value[i] for i in order[:k]) / k for k in range(1, len(wrong) + 1)]


def random_order_risks(uncertainty, wrong):
    """The mean of the curves of all orders in which no row comes before a less uncertain one."""
    curves = []
    for order in itertools.permutations(range(len(wrong))):
        if all(uncertainty[i] <= uncertainty[j] for i, j in itertools.pairwise(order)):
            curves.append([sum(wrong[i] for i in order[:k]) / k for k in range(1, len(wrong) + 1)])
    return np.mean(curves, 0)


def read(p, y):
    """Uncertainty and error of each row."""
    return (-p.amax(1)).tolist(), (p.argmax(1) != y).int().tolist()


CASES = {
    "random": random_case(),
    "two classes": random_case(c=2),
    "one class": (torch.ones(3, 1), torch.zeros(3, dtype=torch.long)),
    "one sample, right": binary([0.75], [1]),
    "one sample, wrong": binary([0.75], [0]),
    "perfect": (torch.eye(4), torch.arange(4)),
    "surely wrong": (torch.eye(4).roll(1, 0), torch.arange(4)),
    "all the same": binary([0.75] * 8, [1, 0, 1, 1, 0, 1, 1, 1]),
    "ties": binary([0.75] * 4 + [0.625] * 3 + [1.0] * 2 + [0.875], [1, 0, 1, 1, 0, 1, 1, 1, 0, 1]),
    "float32": (random_case()[0].float(), random_case()[1]),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


# The curve -------------------------------------------------------------------------------------------------


def test_curve_and_area_equal_loops_over_rows(case):
    n, expected = len(case[1]), text_risks(*read(*case))
    curve = risk_coverage(*case)
    assert curve.coverage.tolist() == [k / n for k in range(1, n + 1)]
    assert curve.risk.dtype == torch.float64
    np.testing.assert_allclose(curve.risk, [float(risk) for risk in expected], rtol=1e-12, atol=1e-15)
    assert float(aurc(*case)) == pytest.approx(float(sum(expected) / n), rel=1e-12)
    for k in range(1, n + 1):
        value = float(accuracy_at_coverage(*case, coverage=k / n))
        assert value == pytest.approx(1 - float(expected[k - 1]), abs=1e-12)
        if k < n:  # a little more has to be rounded up
            value = float(accuracy_at_coverage(*case, coverage=math.nextafter(k / n, 1)))
            assert value == pytest.approx(1 - float(expected[k]), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=6))
def test_the_risk_of_ties_is_the_mean_over_random_orders(rows):
    uncertainty, wrong = zip(*rows, strict=True)
    curve = curve_of(torch.tensor(rows, dtype=torch.float32))
    np.testing.assert_allclose(curve.risk, random_order_risks(uncertainty, wrong), rtol=1e-12, atol=1e-15)


def test_coverage_counts_rows_without_rounding_errors():
    for n in range(1, 120):
        curve = curve_of(torch.tensor([[float(i), i % 2] for i in range(n)]))
        for percent in range(1, 101):
            rows = -(-percent * n // 100)
            wrong = rows // 2  # every second, the first being right
            assert float(curve.accuracy_at(percent / 100)) == pytest.approx(1 - wrong / rows, abs=1e-12)


# Against the best order ------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=6))
def test_excess_aurc_is_the_difference_from_the_best_order(rows):
    wrong = [error for _, error in rows]
    areas = [np.mean([sum(order[:k]) / k for k in range(1, len(order) + 1)]) for order in itertools.permutations(wrong)]
    curve = curve_of(torch.tensor(rows, dtype=torch.float32))
    assert float(curve.excess_aurc) == pytest.approx(float(curve.aurc) - min(areas), abs=1e-12)
    assert curve.excess_aurc >= 0


def test_coverage_at_a_risk_is_the_largest_possible():
    curve = curve_of(torch.tensor([[0.0, 0], [1, 1], [2, 0], [3, 0], [4, 0], [5, 1]]))
    np.testing.assert_allclose(curve.risk, [0, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 3])
    for risk, rows in ((0, 1), (0.19, 1), (0.2, 5), (0.25, 5), (1 / 3, 6), (1, 6)):
        assert curve.coverage_at(risk) == rows / 6
    assert risk_coverage(*CASES["surely wrong"]).coverage_at(0.99) == 0
    for n in range(1, 80):  # one error in n rows, the last: 1/n is kept by all of them
        curve = curve_of(torch.stack([torch.arange(n), torch.arange(n) == n - 1], 1).double())
        assert curve.coverage_at(1 / n) == 1


# Uncertainties --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uncertainty", UNCERTAINTIES)
def test_every_uncertainty_can_order_the_rows(uncertainty):
    p, y = Predictive(logits(5, 31, 4)), classes(4, 31)
    expected = text_risks(UNCERTAINTIES[uncertainty](p).tolist(), (p.probs.argmax(1) != y).int().tolist())
    np.testing.assert_allclose(risk_coverage(p, y, uncertainty).risk, [float(r) for r in expected], rtol=1e-12)
    assert float(aurc(p, y, uncertainty)) == pytest.approx(float(sum(expected)) / 31)
    at = float(accuracy_at_coverage(p, y, 0.5, uncertainty))
    assert at == pytest.approx(1 - float(expected[15]))  # 16 of 31 are more than half


def test_uncertainties_of_members_need_a_predictive():
    for ask in (lambda *case: aurc(*case, "energy"), AURC("energy").update):
        with raises("energy needs the members' predictions: pass a Predictive, got only probabilities"):
            ask(*random_case())


# Streaming -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 60))
def test_ties_across_batches_are_handled(seed, n, batch):
    p, y = random_case(n, seed=seed)
    p = with_twins(p)
    assert torch.equal(streamed(RiskCoverageCurve(), batch, p, y).risk, risk_coverage(p, y).risk)
    assert torch.equal(streamed(AURC(), batch, p, y), aurc(p, y))
    assert torch.equal(streamed(AccuracyAtCoverage(), batch, p, y), accuracy_at_coverage(p, y))


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_curves_of_one_and_no_row():
    p, y = random_case(n=1)
    assert RiskCoverageCurve()(p, y).risk.shape == (1,)
    for curve in (RiskCoverageCurve().compute(), risk_coverage(p[:0], y[:0]), risk_coverage(p, y, ignore=int(y))):
        assert curve.coverage.shape == curve.risk.shape == (0,)
        assert curve.aurc.isnan() and curve.excess_aurc.isnan()
        assert curve.accuracy_at(0.5).isnan() and curve.coverage_at(0.5).isnan()
        assert repr(curve) == "RiskCoverage(rows=0, aurc=nan)"


# Bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -0.1, 1.01, "0.9", None, math.nan])
def test_invalid_coverages_and_risks_raise_an_error(value):
    curve = risk_coverage(*random_case())
    with raises(f"coverage must be above 0 and at most 1, got {value!r}"):
        curve.accuracy_at(value)
    if value != 0:
        with raises(f"risk must be 0 or more and at most 1, got {value!r}"):
            curve.coverage_at(value)
