import math

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.forecast_cases import SCORES, heads, members, points, randn
from tests.metrics.metric_cases import changed, orders

POINTS = {name: score for name, score in SCORES.items() if name != "log density"}  # defined for points too

CASES = {
    "heads": heads(),
    "one head": heads(s=1),
    "one value": heads(s=3, n=1),
    "several outputs": heads(d=3, n=7),
    "dense": (Predictive(randn(3, 2, 4, 2, 2), "gaussian"), randn(2, 2, 2, 2, seed=1)),
    "members that agree": (Predictive(randn(1, 9, 2).expand(3, 9, 2), "gaussian"), randn(9, 1, seed=1)),
    "float64": (Predictive(randn(4, 9, 2).double(), "gaussian"), randn(9, 1, seed=1).double()),
}


@pytest.fixture(params=SCORES.values(), ids=SCORES)
def score(request):
    return request.param


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scores_of_gaussian_heads_are_the_textbooks(score, case):
    function, _, textbook = score
    p, y = case
    result = function(p, y)
    assert result.dtype == torch.float64 and result.shape == ()
    expected = textbook(*members(p), y.double().flatten().numpy())
    assert float(result) == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("noise_precision", [0.3, 1, 25.0])
@pytest.mark.parametrize("shape", [(1, 9), (5, 9), (4, 3, 2)], ids=str)
def test_the_noise_precision_gives_every_member_its_noise(score, shape, noise_precision):
    function, _, textbook = score
    p, y = Predictive(randn(*shape), "regression"), randn(*shape[1:], seed=1)
    result = function(p, y) if function is metrics.rmse else function(p, y, noise_precision=noise_precision)
    expected = textbook(*members(p, noise_precision), y.double().flatten().numpy())
    assert float(result) == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("s", [1, 2, 7])
@pytest.mark.parametrize("function, _, textbook", POINTS.values(), ids=POINTS)
def test_members_without_noise_are_points(function, _, textbook, s):
    p, y = points(s=s)
    expected = textbook(*members(p), y.double().numpy())
    assert float(function(p, y)) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_a_tensor_of_means_is_a_single_member(score):
    means, y = randn(9, 2), randn(9, 2, seed=1)
    single = Predictive(means[None], "regression")
    noise = {} if score[0] is metrics.rmse else {"noise_precision": 2.0}
    assert score[0](means, y, **noise) == score[0](single, y, **noise)


# Each score's own facts ------------------------------------------------------------------------------------


def test_rmse_is_torchmetrics_of_the_mean():
    p, y = heads(d=3)
    theirs = torchmetrics.functional.mean_squared_error(p.mean, y, squared=False)
    assert float(metrics.rmse(p, y)) == pytest.approx(float(theirs), rel=1e-6)


def test_log_density_with_a_noise_precision_is_gal_and_ghahramanis_formula():
    p, y = points()
    noise_precision, s = 2.5, p.members
    off = (y - p.predictions).double()
    mixture = (
        torch.logsumexp(-0.5 * noise_precision * off**2, 0)
        - math.log(s)
        - 0.5 * math.log(2 * math.pi)
        + 0.5 * math.log(noise_precision)
    )
    assert float(metrics.log_density(p, y, noise_precision=noise_precision)) == pytest.approx(float(mixture.mean()))


def test_log_density_is_exact_where_densities_underflow():
    p = Predictive(torch.tensor([[0.0], [1.0]]), "regression")
    expected = -0.5 * 99**2 - math.log(2) - 0.5 * math.log(2 * math.pi)
    assert float(metrics.log_density(p, torch.tensor([100.0]), noise_precision=1)) == pytest.approx(expected)


def test_points_have_no_density():
    with pytest.raises(ValueError, match="noise_precision must be given where members predict no variance"):
        metrics.log_density(*points())
    with pytest.raises(ValueError, match="noise_precision must be given where members predict no variance"):
        metrics.LogDensity().update(*points())


def test_crps_of_one_gaussian_is_gneitings_closed_form():
    p, y = heads(s=1)
    mu, var = members(p)
    sigma, norm = np.sqrt(var[0]), scipy.stats.norm
    z = (y.double().numpy()[:, 0] - mu[0]) / sigma
    expected = sigma * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert float(metrics.crps(p, y)) == pytest.approx(expected.mean(), rel=1e-9)


def test_crps_of_points_is_the_energy_form():
    p, y = points()
    x, t = p.predictions.double().numpy(), y.double().numpy()
    pairs = np.abs(x[:, None] - x[None]).mean((0, 1))
    assert float(metrics.crps(p, y)) == pytest.approx((np.abs(x - t).mean(0) - pairs / 2).mean(), rel=1e-9)


def test_crps_of_a_single_point_is_its_absolute_error():
    p, y = points(s=1)
    theirs = torchmetrics.functional.mean_absolute_error(p.mean, y)
    assert float(metrics.crps(p, y)) == pytest.approx(float(theirs), rel=1e-6)


def test_noise_that_vanishes_leaves_the_crps_of_points():
    p, y = points()
    assert float(metrics.crps(p, y, noise_precision=1e16)) == pytest.approx(float(metrics.crps(p, y)), abs=1e-7)


def test_perfect_points():
    p = Predictive(randn(1, 9).expand(4, 9), "regression")
    y = p.mean
    assert metrics.rmse(p, y) == metrics.crps(p, y) == metrics.interval_width(p, y) == 0
    assert metrics.interval_coverage(p, y) == 1


@pytest.mark.parametrize("of", [points, heads], ids=["points", "heads"])
@pytest.mark.parametrize("level", [0.05, 0.5, 0.95, 0.999])
def test_intervals_are_the_predictives_own(of, level):
    p, y = of()
    own = p.interval(level)
    assert metrics.interval_coverage(p, y, level) == metrics.interval_coverage(own, y)
    given = float(metrics.interval_width(own, y))
    assert float(metrics.interval_width(p, y, level)) == pytest.approx(given, rel=1e-6)


def test_given_intervals_hold_their_ends_and_may_be_infinite():
    low, high = torch.tensor([0.0, 0.0, 0.0, -math.inf]), torch.tensor([1.0, 1.0, 1.0, math.inf])
    y = torch.tensor([0.0, 1.0, 1.5, 7.0])
    assert metrics.interval_coverage((low, high), y) == 0.75
    assert metrics.interval_width((low, high), y) == math.inf
    assert metrics.interval_width((low[:3], high[:3]), y[:3]) == 1


def test_standardised_targets_are_scored_in_their_own_unit():
    p, y = heads(s=1, d=2)
    scale = 7.0
    mu, var = members(p)
    args = (scale * mu, scale**2 * var, scale * y.double().flatten().numpy())
    for name in ("rmse", "log density", "crps", "width"):
        function, metric, textbook = SCORES[name]
        assert float(function(p, y, scale=scale)) == pytest.approx(textbook(*args), rel=1e-6)
        streaming = metric(scale=scale)
        streaming.update(p, y)
        assert streaming.compute() == function(p, y, scale=scale)
    plain = float(metrics.log_density(p, y))
    assert float(metrics.log_density(p, y, scale=scale)) == pytest.approx(plain - math.log(scale))


# The precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s, n, spread", [(2, 40, 1.0), (20, 200, 0.1), (20, 200, 3.0), (50, 3, 1.0)])
def test_the_fitted_precision_is_scipys(s, n, spread):
    p, y = Predictive(spread * randn(s, n), "regression"), randn(n, seed=1, scale=0.7)
    means, truth = members(p)[0], y.double().numpy()

    def loss(log_precision):
        logs = scipy.stats.norm.logpdf(truth, means, math.exp(-log_precision / 2))
        return -np.mean(scipy.special.logsumexp(logs, axis=0) - math.log(s))

    starts = np.linspace(-6, 10, 33)
    start = min(starts, key=loss)
    best = scipy.optimize.minimize_scalar(loss, bracket=(start - 0.5, start, start + 0.5), tol=1e-10)
    noise_precision = metrics.fit_noise_precision(p, y)
    assert loss(math.log(noise_precision)) <= best.fun + 1e-12
    assert math.log(noise_precision) == pytest.approx(best.x, abs=1e-5)


def test_the_fitted_precision_of_one_member_is_that_of_its_errors():
    means, y = randn(30, 2), randn(30, 2, seed=1)
    expected = 1 / (means.double() - y.double()).square().mean()
    assert metrics.fit_noise_precision(means, y) == pytest.approx(float(expected), rel=1e-9)
    assert metrics.fit_noise_precision(1e3 * means, 1e3 * y) == pytest.approx(float(expected) / 1e6, rel=1e-6)


def test_the_precision_of_known_noise_is_found():
    truth = randn(4000)
    p = Predictive(truth + 0.05 * randn(10, 4000, seed=1), "regression")
    noise_precision = metrics.fit_noise_precision(p, truth + 0.5 * randn(4000, seed=2))
    assert noise_precision == pytest.approx(4, rel=0.1)


def test_no_precision_fits_targets_that_are_hit_exactly_or_not_there():
    p = Predictive(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), "regression")
    with pytest.raises(ValueError, match=r"target must hold a value that no member hits exactly.*values=2"):
        metrics.fit_noise_precision(p, torch.tensor([0.0, 3.0]))
    with pytest.raises(ValueError, match=r"target must hold a value.*values=0"):
        metrics.fit_noise_precision(p[:0], torch.zeros(0))
    assert metrics.fit_noise_precision(p, torch.tensor([0.0, 3.1])) > 0
    with pytest.raises(ValueError, match="prediction must be means alone"):
        metrics.fit_noise_precision(*heads())


# Streaming -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 5))
def test_the_order_of_samples_and_of_members_that_are_points_does_not_matter(seed, n, s):
    order, samples = orders(s, n, seed)
    p, y = points(s, n, seed)
    shuffled = Predictive(p.predictions[order][:, samples], "regression")
    assert float(metrics.crps(shuffled, y[samples])) == pytest.approx(float(metrics.crps(p, y)), rel=1e-9)
    assert metrics.fit_noise_precision(shuffled, y[samples]) == pytest.approx(
        metrics.fit_noise_precision(p, y), rel=1e-5
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(2, 5))
def test_the_mixtures_proper_scores_are_never_worse_than_its_members_mean(seed, n, s):
    p, y = heads(s, n, 1, seed)
    alone = [Predictive(p.predictions[i : i + 1], "gaussian") for i in range(s)]
    assert metrics.crps(p, y) >= 0
    assert float(metrics.crps(p, y)) <= np.mean([float(metrics.crps(q, y)) for q in alone]) + 1e-9
    assert float(metrics.log_density(p, y)) >= np.mean([float(metrics.log_density(q, y)) for q in alone]) - 1e-9


def test_forecasts_are_read_once_for_several_metrics(score):
    p, y = points()
    forecasts = metrics.read_forecasts(p, y, noise_precision=3.0)
    metric = score[1]()
    metric.update(forecasts)
    expected = score[0](p, y) if score[0] is metrics.rmse else score[0](p, y, noise_precision=3.0)
    assert metric.compute() == score[0](forecasts) == expected
    with pytest.raises(ValueError, match=r"must be left out where prediction is Forecasts\(members=5, values=23\)"):
        metric.update(forecasts, y)


def test_forecasts_that_were_read_have_their_noise():
    forecasts = metrics.read_forecasts(*points())
    for options in ({"noise_precision": 2.0}, {"scale": 2.0}):
        with pytest.raises(ValueError, match="target, noise_precision and scale must be left out"):
            metrics.crps(forecasts, **options)
        with pytest.raises(ValueError, match="target, noise_precision and scale must be left out"):
            metrics.CRPS(**options).update(forecasts)


def test_whole_numbers_may_be_targets():
    assert float(metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([1, 4]))) == pytest.approx(math.sqrt(2))


# Bad input -------------------------------------------------------------------------------------------------


Y = randn(9, 2)
BAD_MEANS = {
    "nan": (changed(Y, math.nan, 4, 1), Y, r"prediction must hold finite values, got nan at index \[4, 1\]"),
    "no target": (Y, None, r"target must be a tensor of real values \[9, 2\], got NoneType"),
    "array": (Y.numpy(), Y, r"prediction must be a Predictive or a floating-point tensor of means, got float32"),
    "whole": (Y.long(), Y, r"prediction must be a Predictive or a floating-point tensor .* got torch.int64"),
    "number": (torch.tensor(1.0), torch.tensor(1.0), r"prediction must be means \[B\] or \[B, D, ...\], got a single"),
}


@pytest.mark.parametrize("p, y, message", BAD_MEANS.values(), ids=BAD_MEANS)
def test_bad_means_are_named_with_their_first_index(score, p, y, message):
    with pytest.raises(ValueError, match=message):
        score[0](p, y)
    metric = score[1]()
    with pytest.raises(ValueError, match=message):
        metric.update(p, y)
    assert (metric.sums == 0).all()


LOW, HIGH = torch.zeros(4), torch.ones(4)


@pytest.mark.parametrize(
    "pair, y, message",
    [
        ((HIGH, LOW), LOW, r"low must be at most high, got 1 and 0 at index \[0\]"),
        ((changed(LOW, math.nan, 2), HIGH), LOW, r"low must be at most high, got nan and 1 at index \[2\]"),
        ((LOW, HIGH[:3]), LOW, r"low and high must be .* alike, got \[4\] and \[3\]"),
        ((LOW, HIGH), LOW[:3], r"target must have .* \[4\], got \[3\]"),
        ((LOW, HIGH, HIGH), LOW, r"prediction must be a pair of tensors \(low, high\), got a tuple of"),
        ((0.0, 1.0), LOW, r"prediction must be a pair of tensors .* \['float', 'float'\]"),
    ],
)
def test_bad_intervals(pair, y, message):
    for name in ("coverage", "width"):
        function, metric, _ = SCORES[name]
        with pytest.raises(ValueError, match=message):
            function(pair, y)
        with pytest.raises(ValueError, match=message):
            metric().update(pair, y)
