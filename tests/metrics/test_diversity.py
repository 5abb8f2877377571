import itertools

import numpy as np
import pytest
import torch

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.metric_cases import MEMBERS, classes, logits, text_matrix, text_mean


def voting(*votes):
    """Members that are nearly sure of these labels, and their predictive."""
    return Predictive(9 * torch.nn.functional.one_hot(torch.tensor(votes)).float())


# Textbook computations, one pair and one row at a time -----------------------------------------------------


def text_disagreement(z, i, j):
    return np.mean([z[i, n].argmax() != z[j, n].argmax() for n in range(z.shape[1])])


def counts(z, y, i, j):
    """N11, N10, N01, N00 of Kuncheva & Whitaker, Table 1."""
    found = {pair: 0 for pair in itertools.product((True, False), repeat=2)}
    for n in range(len(y)):
        found[bool(z[i, n].argmax() == y[n]), bool(z[j, n].argmax() == y[n])] += 1
    return found[True, True], found[True, False], found[False, True], found[False, False]


def text_q(z, y):
    found = []
    for i, j in itertools.combinations(range(len(z)), 2):
        n11, n10, n01, n00 = counts(z, y, i, j)
        found.append((n11 * n00 - n01 * n10) / (n11 * n00 + n01 * n10))
    return np.mean(found)


def text_correlation(z, y):
    wrong = (z.argmax(2) != y).double().numpy()
    return np.mean([np.corrcoef(wrong[i], wrong[j])[0, 1] for i, j in itertools.combinations(range(len(z)), 2)])


def text_normalised(z, y):
    error = np.mean([int(z[s, n].argmax() != y[n]) for s in range(len(z)) for n in range(len(y))])
    return text_mean(text_disagreement, z) / error


# Textbook -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("z", MEMBERS.values(), ids=MEMBERS)
def test_labels_of_pairs_of_members_are_compared_as_in_the_textbook(z):
    matrix = metrics.pairwise_disagreement(Predictive(z))
    assert matrix.dtype == torch.float64
    np.testing.assert_allclose(matrix, text_matrix(text_disagreement, z), rtol=1e-6, atol=1e-12)
    mean = metrics.disagreement(Predictive(z))
    assert mean.shape == ()
    assert float(mean) == pytest.approx(text_mean(text_disagreement, z), rel=1e-6, abs=1e-12)


def test_disagreement_is_the_mean_of_the_predictives_own():
    p = Predictive(logits(5, 40, 3))
    assert float(metrics.disagreement(p)) == pytest.approx(float(p.disagreement.mean()), rel=1e-6)


def test_errors_of_members_are_compared_as_in_the_textbook():
    z, y = logits(4, 200, 3), classes(3, 200)
    z.scatter_add_(2, y.expand(4, -1)[..., None], torch.full((4, 200, 1), 2.0))
    p = Predictive(z)
    assert float(metrics.normalised_disagreement(p, y)) == pytest.approx(text_normalised(z, y))
    assert float(metrics.q_statistic(p, y)) == pytest.approx(text_q(z, y))
    assert float(metrics.error_correlation(p, y)) == pytest.approx(text_correlation(z, y))


def test_members_that_err_together_correlate_and_those_that_err_apart_do_the_opposite():
    y = torch.zeros(4, dtype=torch.long)
    together, apart = voting([0, 0, 1, 1], [0, 0, 1, 1]), voting([0, 0, 1, 1], [1, 1, 0, 0])
    for function in (metrics.q_statistic, metrics.error_correlation):
        assert function(together, y) == 1 and function(apart, y) == -1
        assert function(voting([0, 0, 1, 1], [0, 1, 0, 1]), y) == 0


def test_of_members_that_are_always_right_nothing_can_be_said():
    p, y = voting([0, 1, 1], [0, 1, 1]), torch.tensor([0, 1, 1])
    assert metrics.normalised_disagreement(p, y).isnan()  # 0 / 0
    assert metrics.q_statistic(p, y).isnan() and metrics.error_correlation(p, y).isnan()
    assert metrics.disagreement(p) == 0


def test_one_undefined_pair_makes_the_mean_undefined_and_is_not_dropped():
    p, y = voting([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]), torch.zeros(4, dtype=torch.long)
    assert metrics.q_statistic(p, y).isnan()


def test_a_single_member_differs_from_nobody():
    p, y = Predictive(logits(1, 9, 3)), classes(3, 9)
    for name in ("disagreement", "kl", "js"):
        assert getattr(metrics, f"pairwise_{name}")(p).tolist() == [[0.0]]
    for function in (metrics.disagreement, metrics.kl_divergence, metrics.js_divergence, metrics.ensemble_js):
        assert function(p) == 0
    assert metrics.normalised_disagreement(p, y) == 0
    assert metrics.q_statistic(p, y).isnan() and metrics.error_correlation(p, y).isnan()
    member, ensemble, gain = metrics.ambiguity_nll(p, y)
    assert member == ensemble == pytest.approx(float(metrics.nll(p, y)), rel=1e-6) and gain == 0
