"""Diversity of members in labels, errors, probabilities, losses and weights."""

import itertools
import math

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import cosine_similarity as sklearn_cosine
from torch import nn

import multitudes as mt
from multitudes import metrics
from multitudes.metrics import cosine_similarity, divergences, diversity
from multitudes.tasks.predictive import Predictive
from tests.metrics.cases import MEMBERS, classes, logits, text_matrix, text_mean


def voting(*votes):
    """Predictions of members that are nearly sure of these labels."""
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
def test_disagreement_equals_loops_over_pairs(z):
    matrix = metrics.pairwise_disagreement(Predictive(z))
    assert matrix.dtype == torch.float64
    np.testing.assert_allclose(matrix, text_matrix(text_disagreement, z), rtol=1e-6, atol=1e-12)
    mean = metrics.disagreement(Predictive(z))
    assert mean.shape == ()
    assert float(mean) == pytest.approx(text_mean(text_disagreement, z), rel=1e-6, abs=1e-12)


def test_error_diversity_equals_loops_over_pairs():
    z, y = logits(4, 200, 3), classes(3, 200)
    z.scatter_add_(2, y.expand(4, -1)[..., None], torch.full((4, 200, 1), 2.0))
    p = Predictive(z)
    assert float(metrics.normalised_disagreement(p, y)) == pytest.approx(text_normalised(z, y))
    assert float(metrics.q_statistic(p, y)) == pytest.approx(text_q(z, y))
    assert float(metrics.error_correlation(p, y)) == pytest.approx(text_correlation(z, y))


def test_equal_errors_correlate_and_opposite_ones_anticorrelate():
    y = torch.zeros(4, dtype=torch.long)
    equal, opposite = voting([0, 0, 1, 1], [0, 0, 1, 1]), voting([0, 0, 1, 1], [1, 1, 0, 0])
    for function in (metrics.q_statistic, metrics.error_correlation):
        assert function(equal, y) == 1 and function(opposite, y) == -1
        assert function(voting([0, 0, 1, 1], [0, 1, 0, 1]), y) == 0


def test_perfect_members_have_undefined_error_diversity():
    p, y = voting([0, 1, 1], [0, 1, 1]), torch.tensor([0, 1, 1])
    assert metrics.normalised_disagreement(p, y).isnan()  # 0 / 0
    assert metrics.q_statistic(p, y).isnan() and metrics.error_correlation(p, y).isnan()
    assert metrics.disagreement(p) == 0


def test_one_undefined_pair_makes_the_mean_undefined():
    p, y = voting([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]), torch.zeros(4, dtype=torch.long)
    assert metrics.q_statistic(p, y).isnan()


def test_a_single_member_has_no_diversity():
    p, y = Predictive(logits(1, 9, 3)), classes(3, 9)
    for name in ("disagreement", "kl", "js"):
        assert getattr(metrics, f"pairwise_{name}")(p).tolist() == [[0.0]]
    for function in (metrics.disagreement, metrics.kl_divergence, metrics.js_divergence, metrics.ensemble_js):
        assert function(p) == 0
    assert metrics.normalised_disagreement(p, y) == 0
    assert metrics.q_statistic(p, y).isnan() and metrics.error_correlation(p, y).isnan()
    member, ensemble, gain = metrics.ambiguity_nll(p, y)
    assert member == ensemble == pytest.approx(float(metrics.nll(p, y)), rel=1e-6) and gain == 0


# Divergences ----------------------------------------------------------------------------------------------


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
def test_divergences_equal_loops_over_pairs(name, z):
    pairwise, mean, of_pair = DIVERGENCES[name]
    matrix = pairwise(Predictive(z))
    assert matrix.dtype == torch.float64
    np.testing.assert_allclose(matrix, text_matrix(of_pair, z), rtol=1e-6, atol=1e-12)
    assert mean(Predictive(z)).shape == ()
    assert float(mean(Predictive(z))) == pytest.approx(text_mean(of_pair, z), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("z", MEMBERS.values(), ids=MEMBERS)
def test_the_js_divergence_of_an_ensemble_is_the_entropy_of_the_mean_minus_the_mean_entropy(z):
    assert float(metrics.ensemble_js(Predictive(z))) == pytest.approx(text_ensemble_js(z), rel=1e-6, abs=1e-12)


# Probabilities of 0, and underflow ------------------------------------------------------------------------


def test_kl_is_exact_where_probabilities_underflow():
    p = Predictive(torch.tensor([[[0.0, -300.0]], [[-300.0, 0.0]]]))
    assert p.member_probs.min() == 0
    torch.testing.assert_close(metrics.pairwise_kl(p), torch.tensor([[0.0, 300.0], [300.0, 0.0]]).double())


def test_kl_is_infinite_if_only_the_second_member_excludes_a_class():
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


def test_chunks_do_not_change_divergences(monkeypatch):
    p = Predictive(logits(3, 40, 5))
    whole = [pairwise(p) for pairwise, _, _ in DIVERGENCES.values()]
    monkeypatch.setattr(divergences, "_CHUNK", 31)
    for one, (pairwise, _, _) in zip(whole, DIVERGENCES.values(), strict=True):
        torch.testing.assert_close(one, pairwise(p), rtol=1e-12, atol=1e-12)


# Losses ---------------------------------------------------------------------------------------------------


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


def test_ambiguity_ignores_predicted_variances():
    z, y = logits(4, 11, 6), logits(11, 3, seed=1)
    heads, means = Predictive(z, "gaussian"), Predictive(z[:, :, :3], "regression")
    close(metrics.ambiguity_mse(heads, y), metrics.ambiguity_mse(means, y))


def test_ambiguity_refuses_plain_means():
    metric = metrics.AmbiguityMSE()
    for ask in (metrics.ambiguity_mse, metric.update):
        with pytest.raises(ValueError, match="ambiguity_mse needs the members' predictions"):
            ask(torch.zeros(3), torch.zeros(3))
    assert (metric.sums == 0).all()


def test_ambiguity_of_an_excluded_true_class():
    inf = math.inf
    one, all_of_them = torch.tensor([[[0.0, -inf]], [[0.0, 0.0]]]), torch.tensor([[[0.0, -inf]], [[1.0, -inf]]])
    member, ensemble, gain = metrics.ambiguity_nll(Predictive(one), torch.tensor([1]))
    assert member == gain == inf and float(ensemble) == pytest.approx(math.log(4))
    member, ensemble, gain = metrics.ambiguity_nll(Predictive(all_of_them), torch.tensor([1]))
    assert member == ensemble == inf and gain.isnan()


# Weights --------------------------------------------------------------------------------------------------


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4))


def vector(network):
    return np.concatenate([p.detach().double().numpy().ravel() for p in network.parameters()])


def test_cosine_similarity_uses_all_weights_and_no_buffers():
    nets = [net(seed) for seed in range(4)]
    nets[1][1].running_mean += 100
    expected = sklearn_cosine(np.stack([vector(n) for n in nets]))
    similarity = cosine_similarity(nets)
    np.testing.assert_allclose(similarity, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(similarity.diagonal(), 1)
    close(cosine_similarity(mt.fuse(nets)), similarity)
    close(cosine_similarity([n.state_dict() for n in nets], nets[0]), similarity)
    close(cosine_similarity(iter(nets)), similarity)


def test_cosine_similarity_along_a_recording():
    network = net(0)
    recorder = mt.Recorder(network, keep=3)
    for scale in (1.0, 2.0, -1.0):
        for p in network.parameters():
            p.data.mul_(scale)
        recorder.record()
    expected = torch.tensor([[1.0, 1, -1], [1, 1, -1], [-1, -1, 1]]).double()
    close(cosine_similarity(recorder), expected)


def test_cosine_similarity_of_members_with_shared_weights():
    ensemble = mt.batch_ensemble(net(0), members=3)
    expected = sklearn_cosine(np.stack([vector(ensemble.member(i)) for i in range(3)]))
    np.testing.assert_allclose(cosine_similarity(ensemble), expected, rtol=1e-6)


def test_cosine_similarity_in_chunks_and_of_a_single_network(monkeypatch):
    nets = [net(seed) for seed in range(3)]
    similarity = cosine_similarity(nets)
    assert cosine_similarity(nets[:1]).tolist() == [[pytest.approx(1)]]
    monkeypatch.setattr(diversity, "_CHUNK", 100)
    close(cosine_similarity(nets), similarity)


def test_cosine_similarity_of_zero_weights_is_nan():
    zeros = net(0)
    for p in zeros.parameters():
        p.data.zero_()
    assert cosine_similarity([zeros, net(1)]).isnan().tolist() == [[True, True], [True, False]]


def broken():
    network = net(1)
    network[3].bias.data[2] = math.nan
    return network


BAD_NETWORKS = {
    "one": (net(0), None, "networks must be a multitude, or several networks, got Sequential"),
    "number": (3, None, "networks must be a multitude, or several networks, got int"),
    "none": ([], None, "networks must hold at least one network, got none"),
    "inside": ([net(0), 3], None, r"networks\[1\] must be a network or a state dict, got int"),
    "unlike": ([net(0), nn.Linear(3, 2)], None, r"networks\[1\] does not fit the model"),
    "no model": ([net(0).state_dict()], None, "model is needed to distinguish"),
    "nan": ([net(0), broken()], None, r"networks\[1\] holds NaN or infinite weights in '3.bias'"),
}


@pytest.mark.parametrize("networks, model, message", BAD_NETWORKS.values(), ids=BAD_NETWORKS)
def test_invalid_networks_raise_an_error(networks, model, message):
    with pytest.raises(ValueError, match=message):
        cosine_similarity(networks, model)
