import copy
import dataclasses
import io
import itertools
import math
import pickle
import re

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.functional import kl_divergence

from multitudes import inference
from multitudes.inference import predict
from multitudes.predictive import VARIANCE_FLOOR, Predictive, gaussian_nll, split_gaussian

PER_CLASS = ("probs", "log_probs")
PER_MEMBER = ("member_probs", "member_log_probs")
PER_INPUT = (
    "label",
    "confidence",
    "entropy",
    "expected_entropy",
    "mutual_information",
    "variance",
    "disagreement",
    "max_logit",
)
CLASSIFICATION = PER_CLASS + PER_MEMBER + PER_INPUT
MOMENTS = ("mean", "epistemic_variance", "aleatoric_variance", "variance", "std")


def randn(*shape, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def close(actual, expected, atol=1e-6, rtol=1e-5):
    """Equal in shape and, to rounding, in value; the dtypes may differ."""
    expected = torch.as_tensor(expected)
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=atol, rtol=rtol)


def raises(sentence):
    """A ValueError that is this very sentence."""
    return pytest.raises(ValueError, match=f"^{re.escape(sentence)}$")


# Classification: against textbook computations in float64 ---------------------------------------------------


@pytest.fixture(params=[(1, 1, 2), (1, 6, 4), (5, 1, 3), (5, 7, 4), (4, 3, 5, 2, 3)], ids=str)
def logits(request):
    return randn(*request.param)


def member_probs(logits):
    return scipy.special.softmax(logits.double().numpy(), axis=2)


def test_probs_are_the_mean_of_the_members_softmax(logits):
    p = Predictive(logits)
    close(p.member_probs, member_probs(logits))
    close(p.member_log_probs, np.log(member_probs(logits)))
    close(p.probs, member_probs(logits).mean(0))
    close(p.log_probs, np.log(member_probs(logits).mean(0)))


def test_probs_are_not_the_softmax_of_the_mean_logits():
    logits = torch.tensor([[[10.0, 0.0]], [[0.0, 1.0]]])
    p = Predictive(logits)
    expected = (torch.sigmoid(torch.tensor(10.0)) + torch.sigmoid(torch.tensor(-1.0))) / 2
    close(p.probs[0, 0], expected)
    assert abs(p.probs - logits.mean(0).softmax(1)).max() > 0.3


def test_label_and_confidence_are_the_argmax_and_maximum_of_the_mean(logits):
    p = Predictive(logits)
    probs = member_probs(logits).mean(0)
    assert p.label.dtype == torch.int64
    assert p.label.tolist() == probs.argmax(1).tolist()
    close(p.confidence, probs.max(1))


def test_entropies_agree_with_scipy(logits):
    p = Predictive(logits)
    members = member_probs(logits)
    total = scipy.stats.entropy(members.mean(0), axis=1)
    expected = scipy.stats.entropy(members, axis=2).mean(0)
    close(p.entropy, total)
    close(p.expected_entropy, expected)
    close(p.mutual_information, total - expected)


def test_mutual_information_is_the_mean_divergence_of_the_members_from_their_mean(logits):
    members = member_probs(logits)
    divergence = scipy.stats.entropy(members, members.mean(0, keepdims=True), axis=2).mean(0)
    close(Predictive(logits).mutual_information, divergence)


def test_mutual_information_agrees_with_torchmetrics_divergence():
    p = Predictive(randn(5, 7, 4))
    rows = p.member_log_probs.flatten(0, 1), p.log_probs.repeat(p.members, 1)
    close(p.mutual_information.mean(), kl_divergence(*rows, log_prob=True))


def test_variance_is_that_of_the_members_probabilities(logits):
    close(Predictive(logits).variance, member_probs(logits).var(0).mean(1))


def test_max_logit_is_the_largest_mean_logit(logits):
    close(Predictive(logits).max_logit, logits.double().numpy().mean(0).max(1))


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


def test_nll_of_log_probs_is_that_of_the_mixture():
    logits, y = randn(4, 9, 5), torch.arange(9) % 5
    mixture = -np.log(member_probs(logits).mean(0)[np.arange(9), y]).mean()
    close(F.nll_loss(Predictive(logits).log_probs, y), mixture)


def test_dense_prediction_is_classification_of_each_pixel():
    logits = randn(3, 2, 4, 5, 6)
    whole = Predictive(logits)
    for quantity in CLASSIFICATION:
        answer = getattr(whole, quantity)
        for row, column in itertools.product(range(5), range(6)):
            pixel = getattr(Predictive(logits[..., row, column]), quantity)
            close(answer[..., row, column], pixel)


@pytest.mark.parametrize(("names", "shape"), [(PER_CLASS, (2, 4, 5, 6)), (PER_INPUT, (2, 5, 6))])
def test_shapes_of_dense_prediction(names, shape):
    p = Predictive(randn(3, 2, 4, 5, 6))
    assert {name: tuple(getattr(p, name).shape) for name in names} == dict.fromkeys(names, shape)


# Numbers at the edge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("task", "quantities"),
    [("classification", CLASSIFICATION), ("regression", MOMENTS), ("gaussian", MOMENTS)],
)
def test_half_precision_is_promoted_before_anything_is_computed(dtype, task, quantities):
    half = randn(6, 5, 4, dtype=dtype)
    p, wide = Predictive(half, task), Predictive(half.float(), task)
    assert p.predictions is half
    for quantity in quantities:
        value = getattr(p, quantity)
        assert value.dtype in (torch.float32, torch.int64), quantity
        assert torch.equal(value, getattr(wide, quantity)), quantity


@pytest.mark.parametrize(
    ("task", "quantities"),
    [("classification", CLASSIFICATION), ("regression", MOMENTS), ("gaussian", MOMENTS)],
)
def test_double_precision_stays(task, quantities):
    p = Predictive(randn(6, 5, 4, dtype=torch.float64), task)
    dtypes = {quantity: getattr(p, quantity).dtype for quantity in quantities if quantity != "label"}
    assert dtypes == dict.fromkeys(dtypes, torch.float64) and len(dtypes) >= 5


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


def test_gaussian_moments_are_those_of_samples_from_the_mixture():
    torch.manual_seed(0)
    raw = torch.tensor([[[-2.0, 1.0]], [[3.0, -1.0]], [[0.0, 2.0]]])
    p = Predictive(raw, task="gaussian")
    mean, variance = split_gaussian(raw, dim=2)
    samples = mean + variance.sqrt() * torch.randn(3, 100_000, 1)
    close(p.mean[0], samples.mean((0, 1)), atol=0.03)
    close(p.variance[0], samples.var((0, 1)), atol=0.1)


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


def test_intervals_cover_gaussian_targets_as_often_as_they_say():
    torch.manual_seed(0)
    p = Predictive(torch.zeros(3, 20_000, 2), task="gaussian")
    y = math.sqrt(math.log(2)) * torch.randn(20_000, 1)
    for level in (0.5, 0.9):
        low, high = p.interval(level)
        assert ((low < y) & (y < high)).float().mean().item() == pytest.approx(level, abs=0.015)


# The criterion that belongs to task="gaussian" --------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 2), (7, 2), (7, 6), (3, 4, 5, 6)], ids=str)
def test_gaussian_nll_agrees_with_torch(shape):
    prediction, target = randn(*shape), randn(shape[0], shape[1] // 2, *shape[2:], seed=1)
    mean, variance = split_gaussian(prediction)
    loss = gaussian_nll(prediction, target)
    assert loss.shape == ()
    close(loss, F.gaussian_nll_loss(mean, target, variance, full=True))
    close(loss, -torch.distributions.Normal(mean, variance.sqrt()).log_prob(target).mean())


def test_gaussian_nll_and_predictive_read_the_same_gaussian():
    prediction, target = randn(7, 6), randn(7, 3, seed=1)
    p = Predictive(prediction[None], task="gaussian")
    close(gaussian_nll(prediction, target), -scipy.stats.norm.logpdf(target, p.mean, p.std).mean())


def test_gaussian_nll_of_half_precision_is_computed_in_float32():
    prediction, target = randn(7, 6, dtype=torch.bfloat16), randn(7, 3, dtype=torch.bfloat16, seed=1)
    loss = gaussian_nll(prediction, target)
    assert loss.dtype == torch.float32 and torch.equal(loss, gaussian_nll(prediction.float(), target.float()))


def test_training_with_gaussian_nll_finds_mean_and_variance():
    target = 2 + 3 * randn(500, 1, scale=1.0)
    prediction = torch.zeros(1, 2, requires_grad=True)
    optimizer = torch.optim.LBFGS([prediction], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = gaussian_nll(prediction.expand(500, 2), target)
        loss.backward()
        return loss

    optimizer.step(closure)
    p = Predictive(prediction.detach()[None], task="gaussian")
    assert p.mean.item() == pytest.approx(target.mean().item(), abs=0.01)
    assert p.variance.item() == pytest.approx(target.var(correction=0).item(), rel=0.01)


# The container ----------------------------------------------------------------------------------------------


def test_members_and_inputs_are_counted():
    p = Predictive(randn(4, 10, 3))
    assert (p.members, len(p), p.task) == (4, 10, "classification")


@pytest.mark.parametrize(
    ("shape", "task", "text"),
    [
        ((4, 10, 3), "classification", "task='classification', members=4, inputs=10, outputs=[3]"),
        (
            (4, 10, 3, 8, 9),
            "classification",
            "task='classification', members=4, inputs=10, outputs=[3, 8, 9]",
        ),
        ((4, 10), "regression", "task='regression', members=4, inputs=10, outputs=[]"),
        ((4, 10, 6, 2), "gaussian", "task='gaussian', members=4, inputs=10, outputs=[3, 2]"),
    ],
)
def test_repr_tells_the_sizes(shape, task, text):
    assert repr(Predictive(torch.zeros(shape), task)) == f"Predictive({text})"


@pytest.mark.parametrize(
    ("index", "positions"),
    [
        (0, [0]),
        (-1, [9]),
        (np.int64(3), [3]),
        (torch.tensor(3), [3]),
        (torch.tensor([3]), [3]),
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, 4), [0, 4, 8]),
        ([7, 1], [7, 1]),
        ([], []),
        (torch.tensor([7, 1, -1]), [7, 1, 9]),
        (torch.arange(10) > 6, [7, 8, 9]),
        (np.arange(10) > 6, [7, 8, 9]),
        (torch.zeros(10, dtype=torch.bool), []),
    ],
    ids=str,
)
def test_an_index_selects_inputs_and_keeps_the_batch_dimension(index, positions):
    p = Predictive(randn(4, 10, 6), task="gaussian")
    chosen = p[index]
    assert chosen.task == "gaussian"
    assert torch.equal(chosen.predictions, p.predictions.index_select(1, torch.tensor(positions).long()))


def test_a_mask_of_the_only_input_can_leave_it_out():
    assert len(Predictive(randn(4, 1, 3))[torch.tensor([False])]) == 0


@pytest.mark.filterwarnings("ignore:var")  # torch's remark on the variance of nothing
def test_no_inputs_have_no_answers_but_no_error():
    p = Predictive(randn(4, 10, 3))
    none = p[p.entropy > 100]
    assert {name: len(getattr(none, name)) for name in PER_CLASS + PER_INPUT} == dict.fromkeys(
        PER_CLASS + PER_INPUT, 0
    )


def test_iteration_gives_one_input_at_a_time():
    p = Predictive(randn(4, 10, 3))
    assert torch.equal(torch.cat([one.probs for one in p]), p.probs)


@pytest.mark.parametrize("index", [10, -11, torch.tensor(10)])
def test_an_input_that_does_not_exist_is_an_index_error(index):
    sentence = f"^index must lie within the 10 inputs, got {int(index)}$"
    with pytest.raises(IndexError, match=sentence):
        Predictive(randn(4, 10, 3))[index]


@pytest.mark.parametrize(
    "index", [None, torch.ones(10, 3, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.long)]
)
def test_an_index_that_reaches_past_the_inputs_is_an_index_error(index):
    with pytest.raises(IndexError, match=r"^index must select along the 10 inputs alone, got "):
        Predictive(randn(4, 10, 3))[index]


def test_concat_takes_any_iterable():
    p = Predictive(randn(4, 10), task="regression")
    assert torch.equal(Predictive.concat(iter(p)).mean, p.mean)


def test_to_changes_dtype_and_keeps_the_task():
    p = Predictive(randn(4, 10, 2), task="gaussian")
    double = p.to(torch.float64)
    assert (double.predictions.dtype, double.task) == (torch.float64, "gaussian")
    assert p.predictions.dtype == torch.float32
    assert p.to("meta").predictions.is_meta
    assert p.cpu() is p and p.to(torch.float32) is p


@pytest.mark.parametrize("quantity", CLASSIFICATION)
def test_a_quantity_is_computed_once(quantity):
    p = Predictive(randn(4, 10, 3))
    assert getattr(p, quantity) is getattr(p, quantity)


def test_all_quantities_share_one_softmax(monkeypatch):
    calls = []
    softmax = F.log_softmax
    monkeypatch.setattr(F, "log_softmax", lambda *args, **kwargs: calls.append(1) or softmax(*args, **kwargs))
    p = Predictive(randn(4, 10, 3))
    assert not calls  # nothing is computed before it is asked for
    for quantity in CLASSIFICATION:
        getattr(p, quantity)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["predictions", "task", "probs", "anything"])
def test_a_predictive_cannot_be_changed(name):
    p = Predictive(randn(4, 10, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(p, name, p.predictions)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
@pytest.mark.parametrize("task", ["classification", "gaussian"])
def test_copies_and_pickles_say_the_same(duplicate, task):
    p = Predictive(randn(4, 10, 6), task)
    before = p.variance
    twin = duplicate(p)
    assert twin is not p and twin.task == task
    assert "variance" in vars(p) and "variance" not in vars(twin)  # what can be computed is not carried along
    assert torch.equal(twin.predictions, p.predictions) and torch.equal(twin.variance, before)


def test_a_deep_copy_shares_no_memory():
    p = Predictive(randn(4, 10, 6))
    assert copy.deepcopy(p).predictions.data_ptr() != p.predictions.data_ptr()


# Wrong use --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predictions", "task", "sentence"),
    [
        (
            torch.zeros(2, 3, 4),
            "segmentation",
            "task must be one of classification, regression, gaussian, got 'segmentation'",
        ),
        (torch.zeros(2, 3, 4), None, "task must be one of classification, regression, gaussian, got None"),
        ([[1.0]], "classification", "predictions must be a floating-point tensor, got list"),
        (np.zeros((2, 3, 4)), "classification", "predictions must be a floating-point tensor, got float64"),
        (
            torch.zeros(2, 3, 4, dtype=torch.int64),
            "classification",
            "predictions must be a floating-point tensor, got torch.int64",
        ),
        (
            torch.zeros(2, 3),
            "classification",
            "predictions of task classification must be [S, B, channels, ...], got shape [2, 3]",
        ),
        (
            torch.zeros(2, 3),
            "gaussian",
            "predictions of task gaussian must be [S, B, channels, ...], got shape [2, 3]",
        ),
        (
            torch.zeros(2),
            "regression",
            "predictions of task regression must be [S, B] or [S, B, D, ...], got shape [2]",
        ),
        (
            torch.zeros(0, 3, 4),
            "classification",
            "predictions of task classification must hold at least one member in dim 0, got shape [0, 3, 4]",
        ),
        (
            torch.zeros(2, 3, 5, 8),
            "gaussian",
            "predictions of task gaussian must hold as many raw variances as means in dim 2, "
            "an even number together, got shape [2, 3, 5, 8]",
        ),
        (
            torch.zeros(2, 3, 1),
            "classification",
            "predictions of task classification must hold 2 or more classes in dim 2 "
            "(use task='regression' for a single output), got shape [2, 3, 1]",
        ),
    ],
)
def test_predictions_that_cannot_be_read_are_refused(predictions, task, sentence):
    with raises(sentence):
        Predictive(predictions, task)


@pytest.mark.parametrize("quantity", sorted({*CLASSIFICATION} - {"variance"}))
@pytest.mark.parametrize("task", ["regression", "gaussian"])
def test_regression_does_not_answer_for_classes(quantity, task):
    with raises(f"{quantity} needs task classification, got predictions of {task}"):
        getattr(Predictive(randn(2, 3, 4), task), quantity)


@pytest.mark.parametrize("quantity", sorted({*MOMENTS} - {"variance"}))
def test_classification_does_not_answer_for_numbers(quantity):
    with raises(f"{quantity} needs task regression or gaussian, got predictions of classification"):
        getattr(Predictive(randn(2, 3, 4)), quantity)


def test_classification_has_no_interval():
    with raises("interval needs task regression or gaussian, got predictions of classification"):
        Predictive(randn(2, 3, 4)).interval(0.9)


@pytest.mark.parametrize("level", [0, 1, -0.1, 95, math.nan])
def test_levels_outside_0_and_1_are_refused(level):
    with raises(f"level must lie between 0 and 1, got {level}"):
        Predictive(randn(2, 3), "regression").interval(level)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([], "parts must hold at least one Predictive, got none"),
        (
            [Predictive(torch.zeros(2, 3, 4)), Predictive(torch.zeros(3, 3, 4))],
            "parts must have the same shape but for dim 1, got [2, 3, 4] and [3, 3, 4]",
        ),
        (
            [
                Predictive(torch.zeros(2, 3, 4)),
                Predictive(torch.zeros(2, 9, 4)),
                Predictive(torch.zeros(2, 3, 5)),
            ],
            "parts must have the same shape but for dim 1, got [2, 3, 4] and [2, 3, 5]",
        ),
        (
            [Predictive(torch.zeros(2, 3, 4)), Predictive(torch.zeros(2, 3, 4), "gaussian")],
            "parts must have the same task, got classification and gaussian",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts, sentence):
    with raises(sentence):
        Predictive.concat(parts)


@pytest.mark.parametrize("shape", [(), (4,), (4, 3)], ids=str)
def test_gaussian_nll_refuses_predictions_without_pairs(shape):
    with raises(
        "gaussian predictions need as many raw variances as means, an even number in dim 1, "
        f"got shape {list(shape)}"
    ):
        gaussian_nll(torch.zeros(shape), torch.zeros(4, 1))


def test_gaussian_nll_refuses_a_target_that_would_broadcast():
    with raises("target must have the means' shape [4, 1], got [4]"):
        gaussian_nll(torch.zeros(4, 2), torch.zeros(4))


# predict: over tensors and loaders --------------------------------------------------------------------------


class Fake(nn.Module):
    """Three linear members, which remember what they were called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(3, 4, 6))
        self.seen = []

    def predict(self, x, task="classification"):
        self.seen.append(x)
        x = x["x"] if isinstance(x, dict) else x[0] + x[1] if isinstance(x, tuple) else x
        if x.isnan().any():
            raise ValueError("x holds NaN")
        return Predictive(x @ self.weight, task)


class Unbatched(IterableDataset):
    """A stream of batches whose length nobody knows."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


X = randn(10, 4, seed=3)
Y = torch.arange(10)


@pytest.fixture
def net():
    return Fake()


@pytest.mark.parametrize(
    "data",
    [
        X,
        [X],
        list(X.split(3)),
        X.split(3),
        iter(X.split(3)),
        [(X[:7], Y[:7]), (X[7:], Y[7:])],
        [[X[:7], Y[:7]], [X[7:], Y[7:]]],
        [{"x": X[:7], "labels": Y[:7]}, {"x": X[7:], "label": Y[7:]}],
        [({"x": X}, Y)],
        [((X, torch.zeros(10, 4)), Y)],
        DataLoader(TensorDataset(X, Y), batch_size=4),
        DataLoader(TensorDataset(X), batch_size=4),
        DataLoader([{"x": x, "label": y} for x, y in zip(X, Y, strict=True)], batch_size=3),
        DataLoader(Unbatched(X.split(3)), batch_size=None),
        Unbatched(X.split(3)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_predict_gives_the_predictions_of_all_batches(net, data):
    p = predict(net, data)
    torch.testing.assert_close(p.predictions, (X @ net.weight).detach())


@pytest.mark.parametrize(("batch_size", "sizes"), [(None, [10]), (4, [4, 4, 2]), (1, [1] * 10), (99, [10])])
def test_a_tensor_is_cut_into_batches(net, batch_size, sizes):
    predict(net, X, batch_size=batch_size)
    assert [len(x) for x in net.seen] == sizes


def test_a_tensor_is_cut_into_batches_of_256_by_default(net):
    predict(net, randn(600, 4))
    assert [len(x) for x in net.seen] == [256, 256, 88]


def test_predict_keeps_no_graph_and_no_targets(net):
    p = predict(net, [{"x": X, "labels": Y, "note": "kept"}])
    assert not p.predictions.requires_grad and torch.is_grad_enabled()
    assert net.seen[0].keys() == {"x", "note"}


def test_predict_passes_the_task_on_only_if_there_is_one(net):
    assert predict(net, X).task == "classification"
    assert predict(net, X, task="gaussian").task == "gaussian"
    net.predict = lambda x: Predictive(x @ net.weight, "regression")
    assert predict(net, X).task == "regression"


@pytest.mark.parametrize(
    "data", [X, [(X, Y)], [{"x": X}], [((X, X), Y)]], ids=["tensor", "pair", "dict", "args"]
)
def test_inputs_go_to_the_device_of_the_parameters(data):
    net, seen = Fake().to("meta"), []
    net.predict = lambda x: seen.append(x) or Predictive(torch.zeros(2, 10, 3))
    predict(net, data)
    values = (
        seen[0].values() if isinstance(seen[0], dict) else seen[0] if isinstance(seen[0], tuple) else seen
    )
    assert len(values) >= 1 and all(value.is_meta for value in values)


def test_inputs_go_to_the_device_asked_for(net):
    seen = []
    net.predict = lambda x: seen.append(x.device.type) or Predictive(torch.zeros(2, 10, 3))
    predict(net, X, device="meta")
    predict(net, X)
    assert seen == ["meta", "cpu"]


def test_each_batch_leaves_the_device_before_the_next(net, monkeypatch):
    moved = []
    monkeypatch.setattr(Predictive, "cpu", lambda self: moved.append(len(net.seen)) or self)
    predict(net, X, batch_size=3)
    assert moved == [1, 2, 3, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_predictions_come_back_to_the_cpu():
    net = Fake().cuda()
    p = predict(net, X.split(3))
    assert p.predictions.device.type == "cpu" and net.seen[0].is_cuda
    close(p.predictions, (X @ net.weight.cpu()).detach(), atol=1e-4)


def test_a_network_without_parameters_gets_the_inputs_as_they_are():
    class Bare(nn.Module):
        def predict(self, x):
            return Predictive(torch.stack([x, -x]))

    assert torch.equal(predict(Bare(), X).predictions, torch.stack([X, -X]))


def test_a_batch_with_nan_is_named(net):
    poisoned = X.clone()
    poisoned[5, 2] = math.nan
    with raises("batch 2 of data: x holds NaN") as caught:
        predict(net, poisoned, batch_size=2)
    assert str(caught.value.__cause__) == "x holds NaN"
    assert len(net.seen) == 3


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "data must hold at least one batch, got none"),
        (iter(()), "data must hold at least one batch, got none"),
        (X[:0], "data must hold at least one input, got shape [0, 4]"),
        (torch.tensor(1.0), "data must hold at least one input, got shape []"),
        (
            TensorDataset(X, Y),
            "data must come in batches, got a TensorDataset: wrap it in a DataLoader",
        ),
        (
            X.numpy(),
            "batch 0 of data: a batch must be, or start with, a tensor, a mapping or a tuple, got ndarray",
        ),
        (
            [X, "rabbit"],
            "batch 1 of data: a batch must be, or start with, a tensor, a mapping or a tuple, got str",
        ),
        ([()], "batch 0 of data: a batch must be, or start with, a tensor, a mapping or a tuple, got tuple"),
    ],
    ids=["list", "iterator", "no inputs", "scalar", "dataset", "array", "text", "empty batch"],
)
def test_data_that_cannot_be_predicted_is_refused(net, data, sentence):
    with raises(sentence):
        predict(net, data)


def test_batch_sizes_are_checked(net):
    with raises("batch_size must be at least 1, got 0"):
        predict(net, X, batch_size=0)
    with raises("batch_size cuts a tensor, and data is a list with its own batches"):
        predict(net, [X], batch_size=4)


# The progress bar -------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(text):
    """What a terminal shows after `text`: a carriage return goes back, and what follows overwrites."""
    line = ""
    for piece in text.split("\r"):
        line = piece + line[len(piece) :]
    return line.rstrip()


@pytest.fixture
def run(monkeypatch, net):
    """Predicts in a world where each batch takes `seconds`; returns what was written to stderr."""

    def run(seconds, data=None, stderr=None, **options):
        clock = [100.0]
        stderr = stderr or Terminal()
        monkeypatch.setattr(inference.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(inference.sys, "stderr", stderr)
        slow = Fake.predict

        def predict_slowly(self, x):
            clock[0] += seconds
            return slow(self, x)

        monkeypatch.setattr(Fake, "predict", predict_slowly)
        try:
            predict(net, X.split(1) if data is None else data, **options)
        finally:
            monkeypatch.undo()
        return stderr.getvalue()

    return run


def test_a_short_run_shows_nothing(run):
    assert run(seconds=0.15) == ""


def test_a_long_run_on_a_terminal_shows_progress_after_two_seconds(run):
    lines = run(seconds=0.5).split("\r")
    assert lines[1] == " 40% [========            ] 4 batches, 2.0 batches/s"
    assert lines[-3] == "100% [====================] 10 batches, 2.0 batches/s"


def test_a_long_run_elsewhere_shows_nothing(run):
    assert run(seconds=0.5, stderr=io.StringIO()) == ""


def test_progress_can_be_asked_for_and_refused(run):
    assert "10 batches" in run(seconds=0.15, stderr=io.StringIO(), progress=True)
    assert run(seconds=0.5, progress=False) == ""


def test_progress_without_a_known_length_has_no_percentage(run):
    text = run(seconds=1.0, data=(x for x in X.split(1)))
    assert "10 batches, 1.0 batches/s" in text and "%" not in text


def test_progress_is_drawn_ten_times_a_second_at_most(run):
    batches = [X[:1]] * 1000
    assert 10 <= run(seconds=0.001, data=batches, progress=True).count("batches,") <= 12


def test_the_terminal_is_left_clean(run):
    text = run(seconds=0.5)
    assert "batches/s" in text and screen(text) == ""


def test_the_terminal_is_left_clean_by_an_error(run):
    stderr = Terminal()
    with raises("batch 1 of data: x holds NaN"):
        run(seconds=5.0, data=[X, X * math.nan], stderr=stderr)
    assert "batches/s" in stderr.getvalue() and screen(stderr.getvalue()) == ""


def test_progress_stops_at_100_percent_when_there_are_more_batches_than_promised(run):
    class Modest(list):
        def __len__(self):
            return 4

    text = run(seconds=1.0, data=Modest(X.split(1)))
    assert "100% [====================] 10 batches" in text and "250%" not in text


def test_a_shorter_line_covers_a_longer_one(monkeypatch):
    clock, stderr = [0.0], Terminal()
    monkeypatch.setattr(inference.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(inference.sys, "stderr", stderr)
    bar = inference._ProgressBar(total=0, shown=True)
    for done, clock[0] in ((1, 0.001), (2, 4.0)):
        bar.update(done)
    assert "1 batches, 1000.0 batches/s" in stderr.getvalue()
    assert screen(stderr.getvalue()) == "2 batches, 0.5 batches/s"
