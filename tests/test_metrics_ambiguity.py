import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes import metrics
from multitudes.core.predictive import Predictive
from tests.metric_cases import classes, joined, logits, streamed


def close(one, other):
    torch.testing.assert_close(torch.stack(list(one)), torch.stack(list(other)), rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 30), st.integers(2, 6), st.integers(1, 5), st.sampled_from([0.1, 2.0, 30.0])
)
def test_the_members_nll_is_the_ensembles_plus_their_diversity(seed, n, c, s, scale):
    z, y = scale * logits(s, n, c, seed=seed), classes(c, n, seed=seed)
    member, ensemble, gain = metrics.ambiguity_nll(Predictive(z), y)
    assert float(member) == pytest.approx(float(ensemble + gain), rel=1e-12, abs=1e-12)
    alone = np.mean([float(metrics.nll(Predictive(z[i : i + 1]), y)) for i in range(s)])
    assert float(member) == pytest.approx(alone, rel=1e-6, abs=1e-6)
    assert float(ensemble) == pytest.approx(float(metrics.nll(Predictive(z), y)), rel=1e-6, abs=1e-6)
    p = z.double().softmax(2).numpy()[:, range(n), y]
    assert float(gain) == pytest.approx(np.mean(np.log(p.mean(0) / p)), rel=1e-4, abs=1e-6)
    assert gain >= -1e-12


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.sampled_from([(), (1,), (3,), (2, 3)]), st.integers(1, 5))
def test_the_members_squared_error_is_the_ensembles_plus_their_diversity(seed, n, outputs, s):
    f, y = 5 + logits(s, n, *outputs, seed=seed), logits(n, *outputs, seed=seed + 1)
    member, ensemble, gain = metrics.ambiguity_mse(Predictive(f, "regression"), y)
    f, y = f.double().numpy(), y.double().numpy()
    assert float(member) == pytest.approx(np.mean((f - y) ** 2))
    assert float(ensemble) == pytest.approx(np.mean((f.mean(0) - y) ** 2))
    assert float(gain) == pytest.approx(f.var(0).mean(), abs=1e-12)
    assert float(member) == pytest.approx(float(ensemble + gain), rel=1e-12)


def test_mean_and_variance_heads_are_read_for_their_means():
    z, y = logits(4, 11, 6), logits(11, 3, seed=1)
    heads, means = Predictive(z, "gaussian"), Predictive(z[:, :, :3], "regression")
    close(metrics.ambiguity_mse(heads, y), metrics.ambiguity_mse(means, y))


def test_a_true_class_that_members_rule_out():
    inf = math.inf
    one, all_of_them = torch.tensor([[[0.0, -inf]], [[0.0, 0.0]]]), torch.tensor([[[0.0, -inf]], [[1.0, -inf]]])
    member, ensemble, gain = metrics.ambiguity_nll(Predictive(one), torch.tensor([1]))
    assert member == gain == inf and float(ensemble) == pytest.approx(math.log(4))
    member, ensemble, gain = metrics.ambiguity_nll(Predictive(all_of_them), torch.tensor([1]))
    assert member == ensemble == inf and gain.isnan()


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("batch", [1, 4, 31])
def test_squared_errors_stream(batch):
    f, y = logits(3, 31, 2), logits(31, 2, seed=1)
    metric = metrics.AmbiguityMSE()
    assert all(part.isnan() for part in metric.compute())
    metric.reset()
    p = Predictive(f, "regression")
    close(streamed(metric, batch, p, y), metrics.ambiguity_mse(p, y))
    one, other = metrics.AmbiguityMSE(), metrics.AmbiguityMSE()
    one.update(p[:9], y[:9])
    other.update(p[9:], y[9:])
    close(joined(one, other).compute(), metrics.ambiguity_mse(p, y))


BAD_VALUES = {
    "classes": (
        Predictive(logits(2, 3, 4)),
        torch.zeros(3),
        "task regression or gaussian, got one of task classification",
    ),
    "tensor": (torch.zeros(3), torch.zeros(3), "prediction must be a Predictive, since ambiguity_mse looks at each"),
    "column": (Predictive(logits(2, 3, 1), "regression"), torch.zeros(3), r"member's means, \[3, 1\], got \[3\]"),
    "nan": (
        Predictive(logits(2, 3).index_fill(1, torch.tensor([2]), math.nan), "regression"),
        torch.zeros(3),
        r"prediction must hold finite values, got nan at index \[0, 2\]",
    ),
    "inf": (
        Predictive(logits(2, 3), "regression"),
        torch.tensor([0.0, math.inf, 0.0]),
        r"target must hold finite values, got inf at index \[1\]",
    ),
    "list": (Predictive(logits(2, 3), "regression"), [0.0] * 3, "target must be a tensor of real values .* got list"),
}


@pytest.mark.parametrize("p, y, message", BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_are_named(p, y, message):
    metric = metrics.AmbiguityMSE()
    with pytest.raises(ValueError, match=message):
        metrics.ambiguity_mse(p, y)
    with pytest.raises(ValueError, match=message):
        metric.update(p, y)
    assert (metric.sums == 0).all()
