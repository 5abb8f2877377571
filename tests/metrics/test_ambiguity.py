import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.metric_cases import classes, logits


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


def test_means_alone_do_not_tell_what_members_gain():
    metric = metrics.AmbiguityMSE()
    for ask in (metrics.ambiguity_mse, metric.update):
        with pytest.raises(ValueError, match="prediction must be a Predictive, since ambiguity_mse looks at each"):
            ask(torch.zeros(3), torch.zeros(3))
    assert (metric.sums == 0).all()


def test_a_true_class_that_members_rule_out():
    inf = math.inf
    one, all_of_them = torch.tensor([[[0.0, -inf]], [[0.0, 0.0]]]), torch.tensor([[[0.0, -inf]], [[1.0, -inf]]])
    member, ensemble, gain = metrics.ambiguity_nll(Predictive(one), torch.tensor([1]))
    assert member == gain == inf and float(ensemble) == pytest.approx(math.log(4))
    member, ensemble, gain = metrics.ambiguity_nll(Predictive(all_of_them), torch.tensor([1]))
    assert member == ensemble == inf and gain.isnan()
