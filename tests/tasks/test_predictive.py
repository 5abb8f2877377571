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
from torchmetrics.functional import kl_divergence

from multitudes.tasks.gaussian import VARIANCE_FLOOR, gaussian_nll, split_gaussian
from multitudes.tasks.predictive import Predictive
from tests.zoo.predictions import CLASSIFICATION, MOMENTS, PER_CLASS, PER_INPUT, close, randn

# Classification: against textbook computations in float64 ---------------------------------------------------


@pytest.fixture(params=[(1, 1, 2), (1, 6, 4), (5, 1, 3), (5, 7, 4), (4, 3, 5, 2, 3)], ids=str)
def logits(request):
    return randn(*request.param)


def member_probs(logits):
    return scipy.special.softmax(logits.double().numpy(), axis=2)


REFERENCES = {  # of the members' probabilities [S, B, C, ...], and of the logits
    "member_probs": lambda members, logits: members,
    "member_log_probs": lambda members, logits: np.log(members),
    "probs": lambda members, logits: members.mean(0),
    "log_probs": lambda members, logits: np.log(members.mean(0)),
    "label": lambda members, logits: members.mean(0).argmax(1),
    "confidence": lambda members, logits: members.mean(0).max(1),
    "entropy": lambda members, logits: scipy.stats.entropy(members.mean(0), axis=1),
    "expected_entropy": lambda members, logits: scipy.stats.entropy(members, axis=2).mean(0),
    # The mean divergence of the members from their mean.
    "mutual_information": lambda members, logits: scipy.stats.entropy(
        members, members.mean(0, keepdims=True), axis=2
    ).mean(0),
    "variance": lambda members, logits: members.var(0).mean(1),
    "max_logit": lambda members, logits: logits.mean(0).max(1),
}


@pytest.mark.parametrize("quantity", REFERENCES)
def test_quantities_agree_with_numpy_and_scipy(logits, quantity):
    reference = REFERENCES[quantity](member_probs(logits), logits.double().numpy())
    close(getattr(Predictive(logits), quantity), reference)


def test_mutual_information_agrees_with_torchmetrics_divergence():
    p = Predictive(randn(5, 7, 4))
    rows = p.member_log_probs.flatten(0, 1), p.log_probs.repeat(p.members, 1)
    close(p.mutual_information.mean(), kl_divergence(*rows, log_prob=True))


def test_disagreement_counts_every_pair(logits):
    labels = logits.argmax(2)
    pairs = list(itertools.combinations(labels, 2))
    expected = sum((one != other).double() for one, other in pairs) / max(1, len(pairs))
    close(Predictive(logits).disagreement, torch.as_tensor(expected).expand(labels.shape[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_disagreement_of_many_members_is_exact_in_any_precision(dtype):
    votes = F.one_hot(torch.arange(300) % 2, 3)[:, None].to(dtype)  # 150 against 150: 22,500 of 44,850 pairs
    share = Predictive(votes).disagreement
    assert torch.equal(share, torch.tensor([22500 / 44850], dtype=share.dtype))


def test_two_certain_members_that_differ_are_all_epistemic():
    p = Predictive(torch.tensor([[[50.0, 0.0, 0.0]], [[0.0, 50.0, 0.0]]]))
    close(p.probs, [[0.5, 0.5, 0.0]])
    close(p.entropy, [math.log(2)])
    close(p.expected_entropy, [0.0])
    close(p.mutual_information, [math.log(2)])
    close(p.variance, [(0.25 + 0.25 + 0.0) / 3])
    close(p.disagreement, [1.0])


def test_one_member_has_no_epistemic_uncertainty():
    logits = randn(1, 50, 10)
    p = Predictive(logits)
    close(p.probs, logits[0].softmax(1))
    assert torch.equal(p.log_probs, logits[0].log_softmax(1))
    close(p.mutual_information, torch.zeros(50))
    assert not p.variance.any() and not p.disagreement.any()
    assert p.entropy.min() > 0


def test_dense_prediction_is_classification_of_each_pixel():
    logits = randn(3, 2, 4, 5, 6)
    whole = Predictive(logits)
    for quantity in CLASSIFICATION:
        answer = getattr(whole, quantity)
        for row, column in itertools.product(range(5), range(6)):
            pixel = getattr(Predictive(logits[..., row, column]), quantity)
            close(answer[..., row, column], pixel)


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
def test_extreme_logits_give_numbers(row, dtype):
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


def test_mutual_information_of_members_that_agree_is_not_below_zero():
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


def test_variance_has_a_floor():
    p = Predictive(torch.tensor([[[0.0, -1e4]]]), task="gaussian")
    assert p.variance.item() == pytest.approx(VARIANCE_FLOOR)


@pytest.mark.parametrize("level", [1e-6, 0.5, 0.68, 0.95, 0.999, 1 - 1e-12])
def test_interval_is_that_of_the_moment_matched_gaussian(level):
    p = Predictive(randn(5, 7, 4, dtype=torch.float64), task="gaussian")
    reference = scipy.stats.norm(p.mean.numpy(), p.std.numpy()).interval(level)
    for bound, expected in zip(p.interval(level), reference, strict=True):
        close(bound, expected, atol=1e-9, rtol=1e-4 if level > 0.9999 else 1e-9)


def test_interval_is_of_95_percent_by_default():
    p = Predictive(torch.tensor([[-1.0], [1.0]]), task="regression")  # mean 0, variance 1
    low, high = p.interval()
    assert high.item() == pytest.approx(scipy.stats.norm.ppf(0.975)) and low == -high


def test_interval_of_a_level_next_to_one_is_finite():
    low, high = Predictive(torch.tensor([[-1.0], [1.0]]), task="regression").interval(math.nextafter(1, 0))
    assert 8 < high.item() < 9 and low == -high


# The criterion that belongs to task="gaussian" --------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 2), (7, 2), (7, 6), (3, 4, 5, 6)], ids=str)
def test_gaussian_nll_agrees_with_torch(shape):
    prediction, target = randn(*shape), randn(shape[0], shape[1] // 2, *shape[2:], seed=1)
    mean, variance = split_gaussian(prediction)
    loss = gaussian_nll(prediction, target)
    assert loss.shape == ()
    close(loss, F.gaussian_nll_loss(mean, target, variance, full=True))
    close(loss, -torch.distributions.Normal(mean, variance.sqrt()).log_prob(target).mean())
    p = Predictive(prediction[None], task="gaussian")  # which reads the same Gaussian
    close(loss, -scipy.stats.norm.logpdf(target, p.mean, p.std).mean())


def test_gaussian_nll_of_half_precision_is_computed_in_float32():
    prediction, target = randn(7, 6, dtype=torch.bfloat16), randn(7, 3, dtype=torch.bfloat16, seed=1)
    loss = gaussian_nll(prediction, target)
    assert loss.dtype == torch.float32 and torch.equal(loss, gaussian_nll(prediction.float(), target.float()))
