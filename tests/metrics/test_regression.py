import math

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.cases import SCORES, changed, heads, members, points, randn, text_observed

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
def test_scores_of_gaussian_heads_equal_definitions(score, case):
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


def test_log_density_is_exact_where_densities_underflow():
    p = Predictive(torch.tensor([[0.0], [1.0]]), "regression")
    expected = -0.5 * 99**2 - math.log(2) - 0.5 * math.log(2 * math.pi)
    assert float(metrics.log_density(p, torch.tensor([100.0]), noise_precision=1)) == pytest.approx(expected)


def test_points_have_no_density():
    with pytest.raises(ValueError, match="noise_precision is needed if members predict no variance"):
        metrics.log_density(*points())
    with pytest.raises(ValueError, match="noise_precision is needed if members predict no variance"):
        metrics.LogDensity().update(*points())


def test_perfect_points():
    p = Predictive(randn(1, 9).expand(4, 9), "regression")
    y = p.mean
    assert metrics.rmse(p, y) == metrics.crps(p, y) == metrics.interval_width(p, y) == 0
    assert metrics.interval_coverage(p, y) == 1


@pytest.mark.parametrize("of", [points, heads], ids=["points", "heads"])
@pytest.mark.parametrize("level", [0.05, 0.5, 0.95, 0.999])
def test_intervals_equal_those_of_the_predictive(of, level):
    p, y = of()
    own = p.interval(level)
    assert metrics.interval_coverage(p, y, level) == metrics.interval_coverage(own, y)
    given = float(metrics.interval_width(own, y))
    assert float(metrics.interval_width(p, y, level)) == pytest.approx(given, rel=1e-6)


def test_given_intervals_are_closed_and_may_be_infinite():
    low, high = torch.tensor([0.0, 0.0, 0.0, -math.inf]), torch.tensor([1.0, 1.0, 1.0, math.inf])
    y = torch.tensor([0.0, 1.0, 1.5, 7.0])
    assert metrics.interval_coverage((low, high), y) == 0.75
    assert metrics.interval_width((low, high), y) == math.inf
    assert metrics.interval_width((low[:3], high[:3]), y[:3]) == 1


def test_scale_restores_the_unit_of_the_targets():
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
def test_the_fitted_precision_equals_scipys(s, n, spread):
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


def test_the_fitted_precision_of_one_member_is_one_over_mse():
    means, y = randn(30, 2), randn(30, 2, seed=1)
    expected = 1 / (means.double() - y.double()).square().mean()
    assert metrics.fit_noise_precision(means, y) == pytest.approx(float(expected), rel=1e-9)
    assert metrics.fit_noise_precision(1e3 * means, 1e3 * y) == pytest.approx(float(expected) / 1e6, rel=1e-6)


def test_fitting_needs_targets_that_differ_from_the_means():
    p = Predictive(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), "regression")
    with pytest.raises(ValueError, match=r"target must differ from all members.*values=2"):
        metrics.fit_noise_precision(p, torch.tensor([0.0, 3.0]))
    with pytest.raises(ValueError, match=r"target must differ.*values=0"):
        metrics.fit_noise_precision(p[:0], torch.zeros(0))
    assert metrics.fit_noise_precision(p, torch.tensor([0.0, 3.1])) > 0
    with pytest.raises(ValueError, match="prediction must be means: "):
        metrics.fit_noise_precision(*heads())


# Streaming -------------------------------------------------------------------------------------------------


def test_several_metrics_share_forecasts(score):
    p, y = points()
    forecasts = metrics.read_forecasts(p, y, noise_precision=3.0)
    metric = score[1]()
    metric.update(forecasts)
    expected = score[0](p, y) if score[0] is metrics.rmse else score[0](p, y, noise_precision=3.0)
    assert metric.compute() == score[0](forecasts) == expected
    with pytest.raises(ValueError, match=r"must be left out if prediction is Forecasts\(members=5, values=23\)"):
        metric.update(forecasts, y)


def test_shared_forecasts_refuse_reader_settings():
    forecasts = metrics.read_forecasts(*points())
    for options in ({"noise_precision": 2.0}, {"scale": 2.0}):
        with pytest.raises(ValueError, match="target, noise_precision and scale must be left out"):
            metrics.crps(forecasts, **options)
        with pytest.raises(ValueError, match="target, noise_precision and scale must be left out"):
            metrics.CRPS(**options).update(forecasts)


def test_whole_numbers_may_be_targets():
    assert float(metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([1, 4]))) == pytest.approx(math.sqrt(2))


# Bad input -------------------------------------------------------------------------------------------------


LOW, HIGH = torch.zeros(4), torch.ones(4)


@pytest.mark.parametrize(
    "pair, y, message",
    [
        ((HIGH, LOW), LOW, r"low must be at most high, got 1 and 0 at index \[0\]"),
        ((changed(LOW, math.nan, 2), HIGH), LOW, r"low must be at most high, got nan and 1 at index \[2\]"),
        ((LOW, HIGH[:3]), LOW, r"low and high must have the same shape.* got \[4\] and \[3\]"),
        ((LOW, HIGH, HIGH), LOW, r"prediction must be a pair of tensors \(low, high\), got a tuple of"),
    ],
)
def test_invalid_intervals_raise_an_error(pair, y, message):
    for name in ("coverage", "width"):
        function, metric, _ = SCORES[name]
        with pytest.raises(ValueError, match=message):
            function(pair, y)
        with pytest.raises(ValueError, match=message):
            metric().update(pair, y)


# Calibration of quantiles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [heads(), heads(s=1), heads(n=1), heads(d=2), points(), points(s=1)])
@pytest.mark.parametrize("levels", [1, 9, 19])
def test_quantile_calibration_equals_its_definition(case, levels):
    p, y = case
    found = metrics.quantile_calibration(p, y, levels)
    expected = text_observed(*members(p), y.double().flatten().numpy(), levels)
    grid = [j / (levels + 1) for j in range(1, levels + 1)]
    assert found.levels.tolist() == pytest.approx(grid)
    assert found.observed.tolist() == pytest.approx(expected)
    assert found.count == y.numel()
    assert float(found.error) == pytest.approx(np.abs(np.subtract(expected, grid)).mean())
    assert float(found.squared_error) == pytest.approx((np.subtract(expected, grid) ** 2).mean())


def sampled(factor=1.0, s=3, n=20_000):
    """Targets drawn from mixtures, and predictions with `factor` times their deviations."""
    means, raw = randn(s, n, seed=3), randn(s, n, seed=4)
    variances = torch.nn.functional.softplus(raw) + 1e-6
    member = torch.randint(s, (n,), generator=torch.Generator().manual_seed(5))
    at = (member, torch.arange(n))
    y = means[at] + variances[at].sqrt() * randn(n, seed=6)
    scaled = factor**2 * variances - 1e-6
    return Predictive(torch.stack([means, scaled + torch.log(-torch.expm1(-scaled))], 2), "gaussian"), y[:, None]


def test_calibrated_forecasts_have_small_errors():
    p, y = sampled()
    found = metrics.quantile_calibration(p, y)
    assert found.error < 0.01 and found.squared_error < 1e-4  # the deviation of a share of 20000 is at most 0.0035
    assert (found.observed - found.levels).abs().max() < 0.015
    one, truth = sampled(s=1)  # whose mixture is the Gaussian of the intervals
    assert metrics.gaussian_ece(one, truth) < 0.01
    for level in (0.5, 0.9, 0.95):
        assert float(metrics.interval_coverage(one, truth, level)) == pytest.approx(level, abs=0.015)


@pytest.mark.parametrize("factor, too_narrow", [(0.5, True), (2.0, False)])
def test_miscalibrated_forecasts_have_large_errors(factor, too_narrow):
    p, y = sampled(factor, s=1)
    found = metrics.quantile_calibration(p, y)
    assert found.error > 0.05 and metrics.gaussian_ece(p, y) > 0.1
    low, high = found.levels < 0.45, found.levels > 0.55
    above = found.observed > found.levels
    assert bool((above[low] == too_narrow).all()) and bool((above[high] == (not too_narrow)).all())
    assert (metrics.interval_coverage(p, y, 0.9) < 0.85) == too_narrow


def test_the_cdf_of_points_includes_their_value():
    p = Predictive(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), "regression")
    assert [float(metrics.read_forecasts(p, torch.tensor([y])).cdf) for y in (0.9, 1, 2, 2.5, 4)] == [
        0,
        0.25,
        0.5,
        0.5,
        1,
    ]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_the_diagram_prints_as_a_table_and_is_nan_without_values():
    metric = metrics.QuantileDiagram(levels=1)
    assert metric.compute().observed.isnan().all() and metric.compute().count == 0
    metric.update(torch.zeros(2), torch.tensor([-1.0, 1.0]))
    assert repr(metric.compute()) == " level  observed\n0.5000    0.5000"
    assert metric.compute().observed.shape == (1,)
