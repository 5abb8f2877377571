import numpy as np
import pytest
import scipy.stats
import torch

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.forecast_cases import heads, members, points, randn, text_observed


@pytest.mark.parametrize("case", [heads(), heads(s=1), heads(n=1), heads(d=2), points(), points(s=1)])
@pytest.mark.parametrize("levels", [1, 9, 19])
def test_the_diagram_of_quantiles_is_the_textbooks(case, levels):
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
    """Targets drawn from their mixtures, whose deviations are then told `factor` times as large."""
    means, raw = randn(s, n, seed=3), randn(s, n, seed=4)
    variances = torch.nn.functional.softplus(raw) + 1e-6
    member = torch.randint(s, (n,), generator=torch.Generator().manual_seed(5))
    at = (member, torch.arange(n))
    y = means[at] + variances[at].sqrt() * randn(n, seed=6)
    told = factor**2 * variances - 1e-6
    return Predictive(torch.stack([means, told + torch.log(-torch.expm1(-told))], 2), "gaussian"), y[:, None]


def test_calibrated_forecasts_are_found_calibrated():
    p, y = sampled()
    found = metrics.quantile_calibration(p, y)
    assert found.error < 0.01 and found.squared_error < 1e-4  # the deviation of a share of 20000 is at most 0.0035
    assert (found.observed - found.levels).abs().max() < 0.015
    one, truth = sampled(s=1)  # whose mixture is the Gaussian of the intervals
    assert metrics.gaussian_ece(one, truth) < 0.01
    for level in (0.5, 0.9, 0.95):
        assert float(metrics.interval_coverage(one, truth, level)) == pytest.approx(level, abs=0.015)


def test_a_calibrated_cdf_is_uniform():
    p, y = sampled()
    assert scipy.stats.kstest(metrics.read_forecasts(p, y).cdf.numpy(), "uniform").pvalue > 0.01


@pytest.mark.parametrize("factor, too_narrow", [(0.5, True), (2.0, False)])
def test_over_and_underconfident_forecasts_are_found_out(factor, too_narrow):
    p, y = sampled(factor, s=1)
    found = metrics.quantile_calibration(p, y)
    assert found.error > 0.05 and metrics.gaussian_ece(p, y) > 0.1
    low, high = found.levels < 0.45, found.levels > 0.55
    above = found.observed > found.levels
    assert bool((above[low] == too_narrow).all()) and bool((above[high] == (not too_narrow)).all())
    assert (metrics.interval_coverage(p, y, 0.9) < 0.85) == too_narrow


def test_the_noise_precision_makes_points_calibrated_whose_noise_it_is():
    truth = randn(20_000)
    y = truth + 0.5 * randn(20_000, seed=1)
    found = metrics.quantile_calibration(truth, y, noise_precision=4.0)
    assert found.error < 0.01 < 0.2 < metrics.quantile_calibration(truth, y).error
    assert metrics.gaussian_ece(truth, y, noise_precision=4.0) < 0.01


def test_a_value_on_a_point_is_not_above_it():
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
