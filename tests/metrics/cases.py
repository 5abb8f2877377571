"""Predictions, forecasts, ways to stream them, and textbook loops that the tests of metrics share."""

import itertools
import math
from itertools import pairwise

import numpy as np
import scipy.integrate
import scipy.special
import scipy.stats
import torch

from multitudes import metrics
from multitudes.tasks.predictive import Predictive

# Predictions and targets ----------------------------------------------------------------------------------


def logits(*shape, seed=0, scale=2.0, dtype=torch.float32):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def classes(count, *shape, seed=1):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def random_case(n=57, c=4, seed=0, dtype=torch.float32):
    """Probabilities `[n, c]` and classes."""
    return logits(n, c, seed=seed, dtype=dtype).softmax(1), classes(c, n, seed=seed + 1)


def binary(confidences, correct):
    """Predictions of two classes with the given confidences, right where `correct`."""
    p = torch.tensor(confidences)
    return torch.stack([p, 1 - p], 1), 1 - torch.tensor(correct).long()


def with_twins(p):
    """Return the probabilities with several equal rows."""
    return torch.where(p.amax(1, keepdim=True) > 0.7, p, p[:1])


def changed(values, value, *index):
    """A copy with another value at an index."""
    values = values.clone()
    values[index] = value
    return values


def pixels(p, y, ignore=None):
    """The pixels of dense probabilities `[B, C, H, W]` and classes `[B, H, W]`, one after the other."""
    found = [at for at in np.ndindex(*y.shape) if y[at] != ignore]
    return torch.stack([p[b, :, i, j] for b, i, j in found]), torch.stack([y[at] for at in found])


MEMBERS = {
    "random": logits(4, 40, 5),
    "two members": logits(2, 40, 5),
    "two classes": logits(3, 40, 2),
    "one sample": logits(3, 1, 4),
    "equal": logits(1, 20, 4).expand(3, -1, -1),
    "nearly sure": 20 * logits(3, 20, 4),
    "float64": logits(3, 20, 4).double(),
    "many classes": logits(2, 3, 700),
}
"""Logits `[S, B, C]` of members to be compared."""


# Streaming ------------------------------------------------------------------------------------------------


def streamed(metric, batch, *data):
    """Return the result of a metric that gets the data in batches."""
    for start in range(0, len(data[0]), batch):
        metric.update(*(part[start : start + batch] for part in data))
    return metric.compute()


def orders(members, samples, seed):
    """A random order of each."""
    mixed = torch.Generator().manual_seed(seed)
    return torch.randperm(members, generator=mixed), torch.randperm(samples, generator=mixed)


# Textbook computations ------------------------------------------------------------------------------------


def text_matrix(of_pair, z):
    """Apply a function to each pair of members of `[S, ...]`; 0 on the diagonal."""
    return np.array([[of_pair(z, i, j) if i != j else 0.0 for j in range(len(z))] for i in range(len(z))])


def text_mean(of_pair, z):
    """Average over both orders of all pairs of members."""
    return np.mean([of_pair(z, i, j) for i, j in itertools.permutations(range(len(z)), 2)])


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
