"""Forecasts, and textbook loops for them, that the tests of regression metrics share."""

import math
from itertools import pairwise

import numpy as np
import scipy.integrate
import scipy.special
import scipy.stats

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.metric_cases import logits


def randn(*shape, seed=0, scale=1.0):
    return logits(*shape, seed=seed, scale=scale)


def points(s=5, n=23, seed=0):
    return Predictive(randn(s, n, seed=seed), "regression"), randn(n, seed=seed + 1, scale=1.5)


def heads(s=5, n=23, d=1, seed=0):
    return Predictive(randn(s, n, 2 * d, seed=seed), "gaussian"), randn(n, d, seed=seed + 1, scale=1.5)


def members(p, noise_precision=None):
    """Means and variances `[S, N]` in NumPy, from the definition of each task."""
    values = p.predictions.double().numpy()
    if p.task == "regression":
        flat = values.reshape(len(values), -1)
        return flat, np.full_like(flat, 0 if noise_precision is None else 1 / noise_precision)
    mean, raw = np.split(values, 2, axis=2)
    return mean.reshape(len(values), -1), np.log1p(np.exp(raw)).reshape(len(values), -1) + 1e-6


# Textbook computations, one value at a time ----------------------------------------------------------------


def text_rmse(mu, var, y):
    return math.sqrt(np.mean([(np.mean(mu[:, n]) - y[n]) ** 2 for n in range(len(y))]))


def text_log_density(mu, var, y):
    logs = [scipy.stats.norm.logpdf(y[n], mu[:, n], np.sqrt(var[:, n])) for n in range(len(y))]
    return np.mean([scipy.special.logsumexp(log) - math.log(len(mu)) for log in logs])


def text_cdf(mu, var, x):
    return np.mean(scipy.stats.norm.cdf(x, mu, np.sqrt(var))) if var.min() > 0 else np.mean(mu <= x)


def text_crps(mu, var, y):
    """The integral itself, piece by piece between the places where the integrand jumps or bends."""
    total = 0.0
    for n in range(len(y)):
        m, v = mu[:, n], var[:, n]
        reach = 12 * np.sqrt(v.max())
        edges = sorted({m.min() - reach, *m, y[n], m.max() + reach})

        def integrand(x, m=m, v=v, truth=y[n]):
            return (text_cdf(m, v, x) - (truth <= x)) ** 2

        for low, high in pairwise(edges):
            total += scipy.integrate.quad(integrand, low, high, epsabs=1e-10)[0]
    return total / len(y)


def moments(mu, var, n):
    mean = np.mean(mu[:, n])
    return mean, math.sqrt(np.mean(var[:, n] + mu[:, n] ** 2) - mean**2)


def text_coverage(mu, var, y, level=0.95):
    inside = []
    for n in range(len(y)):
        mean, std = moments(mu, var, n)
        low, high = scipy.stats.norm.interval(level, mean, std) if std > 0 else (mean, mean)
        inside.append(low <= y[n] <= high)
    return np.mean(inside)


def text_width(mu, var, y, level=0.95):
    return np.mean([2 * scipy.stats.norm.ppf((1 + level) / 2) * moments(mu, var, n)[1] for n in range(len(y))])


def text_observed(mu, var, y, levels=19):
    return [
        np.mean([text_cdf(mu[:, n], var[:, n], y[n]) <= j / (levels + 1) for n in range(len(y))])
        for j in range(1, levels + 1)
    ]


def text_gaussian_ece(mu, var, y, levels=19):
    grid = [j / (levels + 1) for j in range(1, levels + 1)]
    return np.mean([abs(text_coverage(mu, var, y, p) - p) for p in grid])


SCORES = {
    "rmse": (metrics.rmse, metrics.RMSE, text_rmse),
    "log density": (metrics.log_density, metrics.LogDensity, text_log_density),
    "crps": (metrics.crps, metrics.CRPS, text_crps),
    "coverage": (metrics.interval_coverage, metrics.IntervalCoverage, text_coverage),
    "width": (metrics.interval_width, metrics.IntervalWidth, text_width),
    "gaussian ece": (metrics.gaussian_ece, metrics.GaussianECE, text_gaussian_ece),
}
