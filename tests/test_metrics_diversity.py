import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes import metrics
from multitudes.core.predictive import Predictive
from tests.metric_cases import MEMBERS, classes, joined, logits, orders, streamed, text_matrix, text_mean


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


# Every measure of how members differ, with the metric that streams it for S members
FREE = {
    "pairwise disagreement": (metrics.pairwise_disagreement, metrics.PairwiseDisagreement),
    "pairwise kl": (metrics.pairwise_kl, metrics.PairwiseKL),
    "pairwise js": (metrics.pairwise_js, metrics.PairwiseJS),
    "mean disagreement": (metrics.disagreement, lambda s, **k: metrics.Disagreement(**k)),
    "mean kl": (metrics.kl_divergence, lambda s, **k: metrics.KLDivergence(**k)),
    "mean js": (metrics.js_divergence, lambda s, **k: metrics.JSDivergence(**k)),
    "ensemble_js": (metrics.ensemble_js, lambda s, **k: metrics.EnsembleJS(**k)),
}
OF_ERRORS = {
    "normalised": (metrics.normalised_disagreement, lambda s, **k: metrics.NormalisedDisagreement(**k)),
    "q": (metrics.q_statistic, metrics.QStatistic),
    "correlation": (metrics.error_correlation, metrics.ErrorCorrelation),
    "ambiguity": (metrics.ambiguity_nll, lambda s, **k: metrics.AmbiguityNLL(**k)),
}
ALL = FREE | OF_ERRORS


@pytest.fixture(params=ALL.values(), ids=ALL)
def measure(request):
    return request.param


def numbers(result):
    """A result's numbers, whatever it is: a scalar, a matrix, an ambiguity."""
    return torch.stack(list(result)) if isinstance(result, metrics.Ambiguity) else result


def same(one, other, rel=1e-9):
    torch.testing.assert_close(numbers(one), numbers(other), rtol=rel, atol=rel, equal_nan=True)


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
    for name, (function, _) in FREE.items():
        assert function(p).tolist() == ([[0.0]] if name.startswith("pairwise") else 0)
    assert metrics.normalised_disagreement(p, y) == 0
    assert metrics.q_statistic(p, y).isnan() and metrics.error_correlation(p, y).isnan()
    member, ensemble, gain = metrics.ambiguity_nll(p, y)
    assert member == ensemble == pytest.approx(float(metrics.nll(p, y)), rel=1e-6) and gain == 0


# Streaming ------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 20), st.integers(2, 4))
def test_batches_of_any_size_give_what_one_batch_gives(seed, n, batch, s):
    p, y = Predictive(logits(s, n, 3, seed=seed)), classes(3, n, seed=seed)
    for function, streaming in ALL.values():
        same(streamed(streaming(s), batch, p, y), function(p, y), rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 4))
def test_the_order_of_samples_and_members_does_not_matter(seed, n, s):
    z, y = logits(s, n, 3, seed=seed), classes(3, n, seed=seed)
    members, samples = orders(s, n, seed)
    shuffled = Predictive(z[members][:, samples]), y[samples]
    for function, _ in ALL.values():
        before = function(Predictive(z), y)
        if numbers(before).ndim == 2:
            before = before[members][:, members]
        same(function(*shuffled), before, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_without_rows_everything_is_nan(measure):
    function, streaming = measure
    assert numbers(streaming(3).compute()).isnan().all()
    assert numbers(function(Predictive(logits(3, 0, 4)), classes(4, 0))).isnan().all()


def test_sums_add_up_across_processes_and_after_a_reset(measure):
    function, streaming = measure
    p, y = Predictive(logits(3, 30, 4)), classes(4, 30)
    one, other = streaming(3), streaming(3)
    one.update(p[20:], y[20:])
    one.reset()
    one.update(p[:20], y[:20])
    other.update(p[20:], y[20:])
    same(joined(one, other).compute(), function(p, y))


def test_rows_are_read_once_for_several_metrics(measure):
    function, streaming = measure
    p, y = Predictive(logits(3, 30, 4)), classes(4, 30)
    rows = metrics.read_rows(p, y)
    metric = streaming(3)
    metric.update(rows)
    same(metric.compute(), function(rows))
    same(function(rows), function(p, y))


def test_pixels_are_rows_and_ignored_ones_do_not_count(measure):
    function, streaming = measure
    z, y = logits(3, 2, 4, 3, 5), classes(4, 2, 3, 5)
    y[0, 1], y[1, 2, 3] = 255, 255
    flat = Predictive(z.movedim(2, -1).flatten(1, 3))
    kept = y.flatten() != 255
    expected = function(flat[kept], y.flatten()[kept])
    same(function(Predictive(z), y, ignore=255), expected, rel=1e-6)
    metric = streaming(3, ignore=255)
    metric.update(Predictive(z), y)
    same(metric.compute(), expected, rel=1e-6)


def test_gradients_are_left_alone(measure):
    z = logits(3, 30, 4).requires_grad_()
    p, y = Predictive(z), classes(4, 30)
    assert not numbers(measure[0](p, y)).requires_grad
    p.log_probs.sum().backward()
    assert z.grad is not None


def test_half_precision_is_compared_in_full(measure):
    z, y = logits(3, 30, 4).bfloat16(), classes(4, 30)
    same(measure[0](Predictive(z), y), measure[0](Predictive(z.double()), y), rel=1e-5)


# Targets, and bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function, streaming", FREE.values(), ids=FREE)
def test_no_target_is_needed_where_none_is_used(function, streaming):
    p = Predictive(logits(3, 30, 4))
    same(function(p), function(p, classes(4, 30)))
    metric = streaming(3)
    metric.update(p)
    same(metric.compute(), function(p))
    dense = Predictive(logits(3, 2, 4, 3, 5))
    same(function(dense), function(dense, classes(4, 2, 3, 5)))
    with pytest.raises(ValueError, match="target must be given where ignore=255 leaves rows out, got None"):
        function(p, ignore=255)
    with pytest.raises(ValueError, match="target must be given where ignore=0 leaves rows out, got None"):
        streaming(3, ignore=0).update(p)


@pytest.mark.parametrize("function, streaming", OF_ERRORS.values(), ids=OF_ERRORS)
def test_errors_cannot_be_told_without_targets(function, streaming):
    p = Predictive(logits(3, 30, 4))
    with pytest.raises(ValueError, match="target must be an integer tensor"):
        function(p)
    with pytest.raises(ValueError, match="target must be an integer tensor"):
        streaming(3).update(p)


P, Y = Predictive(logits(3, 30, 4)), classes(4, 30)
BAD = {
    "mean": (P.probs, Y, "prediction must be a Predictive, since .* looks at each member, got only probabilities"),
    "regression": (
        Predictive(logits(3, 30), "regression"),
        Y,
        "must be of task classification, got .* task regression",
    ),
    "nan": (Predictive(P.predictions.index_fill(1, torch.tensor([7]), math.nan)), Y, r"got nan at index \[7, 0\]"),
    "class 4": (P, Y.index_fill(0, torch.tensor([9]), 4), r"target must lie within 0 and 3, got 4 at index \[9\]"),
    "short": (P, Y[1:], r"target must have the prediction's shape without classes, \[30\], got \[29\]"),
    "list": (P.predictions.tolist(), Y, "prediction must be a Predictive or a floating-point tensor"),
}


@pytest.mark.parametrize("p, y, message", BAD.values(), ids=BAD)
def test_bad_input_is_named(measure, p, y, message):
    function, streaming = measure
    metric = streaming(3)
    with pytest.raises(ValueError, match=message):
        function(p, y)
    with pytest.raises(ValueError, match=message):
        metric.update(p, y)
    assert (metric.sums == 0).all()


@pytest.mark.parametrize("metric", [metrics.PairwiseKL, metrics.QStatistic, metrics.ErrorCorrelation])
def test_the_number_of_members_must_be_the_one_announced(metric):
    with pytest.raises(ValueError, match="prediction must have members=4, got 3"):
        metric(4).update(P, Y)
    with pytest.raises(ValueError, match="members must be a whole number, 1 or more, got 0"):
        metric(0)
