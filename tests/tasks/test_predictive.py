import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes.tasks.predictive import Predictive
from tests.zoo.predictions import CLASSIFICATION, MOMENTS, PER_CLASS, PER_INPUT, REFERENCES, close, randn

# Classification: against textbook computations in float64 ---------------------------------------------------


@pytest.fixture(params=[(1, 1, 2), (1, 6, 4), (5, 1, 3), (5, 7, 4), (4, 3, 5, 2, 3)], ids=str)
def logits(request):
    return randn(*request.param)


def member_probs(logits):
    return scipy.special.softmax(logits.double().numpy(), axis=2)


@pytest.mark.parametrize("quantity", REFERENCES)
def test_quantities_agree_with_numpy_and_scipy(logits, quantity):
    close(getattr(Predictive(logits), quantity), REFERENCES[quantity](member_probs(logits)))


def test_max_logit_is_that_of_the_mean_logits(logits):
    close(Predictive(logits).max_logit, logits.double().mean(0).amax(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_disagreement_of_many_members_is_exact_in_any_precision(dtype):
    votes = F.one_hot(torch.arange(300) % 2, 3)[:, None].to(dtype)  # 150 against 150: 22,500 of 44,850 pairs
    share = Predictive(votes).disagreement
    assert torch.equal(share, torch.tensor([22500 / 44850], dtype=share.dtype))


def test_one_member_has_no_epistemic_uncertainty():
    logits = randn(1, 50, 10)
    p = Predictive(logits)
    close(p.probs, logits[0].softmax(1))
    assert torch.equal(p.log_probs, logits[0].log_softmax(1))
    close(p.mutual_information, torch.zeros(50))
    assert not p.variance.any() and not p.disagreement.any()
    assert p.entropy.min() > 0


# Numbers at the edge ----------------------------------------------------------------------------------------


QUANTITIES = [(task, q) for task in ("regression", "gaussian") for q in MOMENTS]
QUANTITIES += [("classification", q) for q in CLASSIFICATION]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("task", "quantity"), QUANTITIES)
def test_half_precision_is_promoted_before_anything_is_computed_and_double_stays(task, quantity, dtype):
    given = randn(6, 5, 4, dtype=dtype)
    wide = given if dtype == torch.float64 else given.float()
    p = Predictive(given, task)
    assert p.predictions is given
    value = getattr(p, quantity)
    assert value.dtype == (torch.int64 if quantity == "label" else wide.dtype)
    assert torch.equal(value, getattr(Predictive(wide, task), quantity))


def test_double_precision_is_used_to_the_last_digit():
    logits = randn(6, 5, 4, dtype=torch.float64)
    close(Predictive(logits).entropy, scipy.stats.entropy(member_probs(logits).mean(0), axis=1), 0, 1e-14)


def test_log_probs_are_exact_where_probs_underflow():
    logits = torch.tensor([[[0.0, -200.0]], [[0.0, -201.0]]], dtype=torch.float32)
    p = Predictive(logits)
    assert p.probs[0, 1] == 0
    close(p.log_probs[0, 1], -200 + math.log((1 + math.exp(-1)) / 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "row",
    [
        [1e4, -1e4, 0.0],
        [-1e4, -1e4, -1e4],
        [1e4, 1e4, 1e4],
        [0.0, -math.inf, -math.inf],
        [0.0, 1.0, -math.inf],
        [-math.inf, -1e4, 1e4],
    ],
    ids=str,
)
def test_extreme_logits_give_finite_quantities(row, dtype):
    logits = torch.tensor([[row], [row[::-1]]], dtype=dtype)
    p = Predictive(logits)
    for quantity in CLASSIFICATION:
        value = getattr(p, quantity)
        assert not value.isnan().any(), quantity
        # Logits of -inf, their logarithms and their means are themselves -inf; nothing else is.
        assert value.isfinite().all() or quantity in ("log_probs", "member_log_probs", "max_logit"), quantity
    expected = member_probs(logits).mean(0)
    close(p.probs, expected)
    close(p.entropy, scipy.stats.entropy(expected, axis=1))


def test_a_class_that_every_member_excludes_has_probability_zero_and_no_entropy():
    p = Predictive(torch.tensor([[[0.0, -math.inf]], [[3.0, -math.inf]]]))
    assert p.probs.tolist() == [[1.0, 0.0]]
    assert p.log_probs.tolist() == [[0.0, -math.inf]]
    assert p.entropy.tolist() == p.expected_entropy.tolist() == p.mutual_information.tolist() == [0.0]


@pytest.mark.parametrize("members", range(1, 40))
def test_certainty_is_never_above_one(members):
    p = Predictive(torch.tensor([90.0, 0.0]).expand(members, 1, 2))
    assert 1 - 1e-6 < p.confidence.item() <= 1
    assert p.log_probs.max() <= 0
    assert 0 <= p.entropy.item() < 1e-6


def test_mutual_information_of_equal_members_is_not_negative():
    p = Predictive(randn(1, 1000, 10).expand(3, 1000, 10))
    assert (p.entropy - p.expected_entropy).min() < 0  # rounding alone would put it there
    assert p.mutual_information.min() == 0 and p.mutual_information.max() < 1e-5


def test_gradients_flow_and_are_finite_for_extreme_logits():
    logits = torch.tensor([[[1e4, -1e4, 0.0]], [[0.0, 1.0, 2.0]]], requires_grad=True)
    p = Predictive(logits)
    (p.entropy + p.expected_entropy + p.variance).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[1].abs().max() > 0.01


# What holds for all logits ----------------------------------------------------------------------------------


@st.composite
def any_logits(draw):
    members, batch, classes = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(2, 5))
    size = members * batch * classes
    values = draw(st.lists(st.floats(-1e4, 1e4, width=32), min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float32).view(members, batch, classes)


@settings(max_examples=100, deadline=None)
@given(logits=any_logits())
def test_invariants(logits):
    p = Predictive(logits)
    tolerance = 1e-5
    close(p.probs.sum(1), torch.ones(len(p)), tolerance)
    close(p.member_probs.sum(2), torch.ones(p.members, len(p)), tolerance)
    assert (p.mutual_information >= 0).all() and (p.expected_entropy >= 0).all()
    assert (p.mutual_information <= math.log(p.members) + tolerance).all()
    assert (p.entropy <= math.log(logits.shape[2]) + tolerance).all()
    close(p.entropy, p.expected_entropy + p.mutual_information, tolerance)
    assert (p.variance >= 0).all() and (p.variance <= 0.25 + tolerance).all()
    assert (p.disagreement >= 0).all() and (p.disagreement <= 1).all()
    assert (p.confidence >= 1 / logits.shape[2] - tolerance).all() and (p.confidence <= 1).all()


@settings(max_examples=50, deadline=None)
@given(logits=any_logits(), seed=st.integers(0, 1000))
def test_the_order_of_members_does_not_matter(logits, seed):
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    p, shuffled = Predictive(logits), Predictive(logits[order])
    # Not the label: which of two equally probable classes is ahead may be a matter of rounding.
    for quantity in (*PER_CLASS, *PER_INPUT[1:]):
        atol = 1e-2 if quantity == "max_logit" else 1e-5  # a sum of logits up to 1e4, which may cancel
        close(getattr(shuffled, quantity), getattr(p, quantity), atol)


@settings(max_examples=50, deadline=None)
@given(logits=any_logits(), cuts=st.lists(st.integers(0, 4), max_size=3))
def test_joined_parts_are_the_whole(logits, cuts):
    whole = Predictive(logits)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    parts = [whole[start:stop] for start, stop in itertools.pairwise(edges)]
    joined = Predictive.concat(parts)
    assert torch.equal(joined.predictions, logits) and joined.task == whole.task
    assert torch.equal(joined.probs, whole.probs)


# Regression -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (1, 7, 3), (5, 1, 2), (4, 3, 2, 5, 6)], ids=str)
def test_regression_has_the_moments_of_its_means(shape):
    means = randn(*shape)
    p = Predictive(means, task="regression")
    reference = means.double().numpy()
    close(p.mean, reference.mean(0))
    close(p.epistemic_variance, reference.var(0))
    close(p.variance, reference.var(0))
    close(p.std, reference.std(0))
    assert torch.equal(p.aleatoric_variance, torch.zeros(shape[1:]))


@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 7, 2), (5, 7, 6), (3, 2, 4, 5, 6)], ids=str)
def test_gaussian_has_the_moments_of_the_mixture(shape):
    raw = randn(*shape)
    p = Predictive(raw, task="gaussian")
    means, scores = np.split(raw.double().numpy(), 2, axis=2)
    variances = np.logaddexp(0, scores) + 1e-6
    close(p.mean, means.mean(0))
    close(p.epistemic_variance, means.var(0))
    close(p.aleatoric_variance, variances.mean(0))
    second_moment = (variances + means**2).mean(0)  # Lakshminarayanan et al., section 2.4
    close(p.variance, second_moment - means.mean(0) ** 2, atol=1e-4)
    close(p.std, np.sqrt(variances.mean(0) + means.var(0)))


@pytest.mark.parametrize("level", [1e-6, 0.5, 0.68, 0.95, 0.999, 1 - 1e-12])
def test_interval_is_that_of_the_moment_matched_gaussian(level):
    p = Predictive(randn(5, 7, 4, dtype=torch.float64), task="gaussian")
    reference = scipy.stats.norm(p.mean.numpy(), p.std.numpy()).interval(level)
    for bound, expected in zip(p.interval(level), reference, strict=True):
        close(bound, expected, atol=1e-9, rtol=1e-4 if level > 0.9999 else 1e-9)


def test_interval_is_of_95_percent_by_default_and_finite_next_to_one():
    p = Predictive(torch.tensor([[-1.0], [1.0]]), task="regression")  # mean 0, variance 1
    for (low, high), want in ((p.interval(), scipy.stats.norm.ppf(0.975)), (p.interval(math.nextafter(1, 0)), 8.3)):
        assert high.item() == pytest.approx(want, rel=0.01) and low == -high
