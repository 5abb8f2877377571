import math

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.stats
import torch

from multitudes import metrics
from multitudes.metrics import divergences
from multitudes.tasks.predictive import Predictive
from tests.metrics.metric_cases import MEMBERS, logits, text_matrix, text_mean

# Textbook computations, one pair and one row at a time -----------------------------------------------------


def softmax(z):
    return z.double().softmax(-1).numpy()


def text_kl(z, i, j):
    p, q = softmax(z[i]), softmax(z[j])
    return np.mean([sum(a * math.log(a / b) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)])


def text_js(z, i, j):
    p, q = softmax(z[i]), softmax(z[j])
    return np.mean([scipy.spatial.distance.jensenshannon(*rows) ** 2 for rows in zip(p, q, strict=True)])


def text_ensemble_js(z):
    p = softmax(z)
    gaps = [
        scipy.stats.entropy(p[:, n].mean(0)) - scipy.stats.entropy(p[:, n], axis=1).mean() for n in range(p.shape[1])
    ]
    return np.mean(gaps)


DIVERGENCES = {
    "kl": (metrics.pairwise_kl, metrics.kl_divergence, text_kl),
    "js": (metrics.pairwise_js, metrics.js_divergence, text_js),
}


@pytest.mark.parametrize("z", MEMBERS.values(), ids=MEMBERS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_pairs_of_members_are_compared_as_in_the_textbook(name, z):
    pairwise, mean, of_pair = DIVERGENCES[name]
    matrix = pairwise(Predictive(z))
    assert matrix.dtype == torch.float64
    np.testing.assert_allclose(matrix, text_matrix(of_pair, z), rtol=1e-6, atol=1e-12)
    assert mean(Predictive(z)).shape == ()
    assert float(mean(Predictive(z))) == pytest.approx(text_mean(of_pair, z), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("z", MEMBERS.values(), ids=MEMBERS)
def test_the_js_divergence_of_an_ensemble_is_the_entropy_of_the_mean_minus_the_mean_entropy(z):
    assert float(metrics.ensemble_js(Predictive(z))) == pytest.approx(text_ensemble_js(z), rel=1e-6, abs=1e-12)


def test_the_js_divergence_of_two_members_is_that_of_their_ensemble():
    p = Predictive(logits(2, 40, 5))
    assert float(metrics.ensemble_js(p)) == pytest.approx(float(metrics.js_divergence(p)), rel=1e-9)


def test_the_js_divergence_of_an_ensemble_is_the_mean_kl_to_its_mean():
    z = logits(4, 40, 5)
    p = softmax(z)
    to_mean = np.mean([scipy.stats.entropy(p[s, n], p[:, n].mean(0)) for s in range(4) for n in range(40)])
    assert float(metrics.ensemble_js(Predictive(z))) == pytest.approx(to_mean, rel=1e-9)
    assert float(metrics.ensemble_js(Predictive(z))) == pytest.approx(
        float(Predictive(z).mutual_information.mean()), rel=1e-5
    )


# Probabilities of 0, and underflow ------------------------------------------------------------------------


def test_kl_is_exact_where_probabilities_underflow():
    p = Predictive(torch.tensor([[[0.0, -300.0]], [[-300.0, 0.0]]]))
    assert p.member_probs.min() == 0
    torch.testing.assert_close(metrics.pairwise_kl(p), torch.tensor([[0.0, 300.0], [300.0, 0.0]]).double())


def test_kl_is_infinite_where_a_class_is_ruled_out_by_the_second_but_not_by_the_first():
    inf = math.inf
    p = Predictive(torch.tensor([[[0.0, -inf]], [[0.0, 0.0]], [[0.0, -inf]], [[0.0, -800.0]]]))
    expected = torch.tensor([[0, math.log(2), 0, 0], [inf, 0, inf, 400 - math.log(2)], [0, math.log(2), 0, 0]]).double()
    found = metrics.pairwise_kl(p)
    torch.testing.assert_close(found[:3], expected)
    assert found[3].tolist() == [inf, pytest.approx(math.log(2)), inf, 0]  # 0 in float64, but not ruled out
    assert metrics.kl_divergence(p) == inf
    assert metrics.pairwise_js(p).isfinite().all() and metrics.ensemble_js(p).isfinite()


def test_certain_members_that_differ_have_a_js_divergence_of_log_2():
    p = Predictive(torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]]))
    assert float(metrics.js_divergence(p)) == pytest.approx(math.log(2))
    assert float(metrics.ensemble_js(p)) == pytest.approx(math.log(2))


def test_pairs_are_compared_in_chunks_that_change_nothing(monkeypatch):
    p = Predictive(logits(3, 40, 5))
    whole = [pairwise(p) for pairwise, _, _ in DIVERGENCES.values()]
    monkeypatch.setattr(divergences, "_CHUNK", 31)
    for one, (pairwise, _, _) in zip(whole, DIVERGENCES.values(), strict=True):
        torch.testing.assert_close(one, pairwise(p), rtol=1e-12, atol=1e-12)
