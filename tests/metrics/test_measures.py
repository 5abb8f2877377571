import math

import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes.metrics import aupr, auroc, fpr_at_recall
from tests.zoo.predictions import raises

# Textbook computations -------------------------------------------------------------------------------------


def text_auroc(scores, positive):
    wins = [
        (a > b) + (a == b) / 2
        for a, p in zip(scores, positive, strict=True)
        if p
        for b, q in zip(scores, positive, strict=True)
        if not q
    ]
    return sum(wins) / len(wins)


def text_points(scores, positive):
    """Recall, precision and false-positive rate of every threshold, the highest first."""
    for threshold in sorted(set(scores), reverse=True):
        found = [p for s, p in zip(scores, positive, strict=True) if s >= threshold]
        true, false = sum(found), len(found) - sum(found)
        yield true / sum(positive), true / len(found), false / (len(positive) - sum(positive))


def text_aupr(scores, positive):
    total, before = 0.0, 0.0
    for recall, precision, _ in text_points(scores, positive):
        total, before = total + (recall - before) * precision, recall
    return total


def text_fpr(scores, positive, recall=0.95):
    return min(fpr for found, _, fpr in text_points(scores, positive) if found >= recall)


def ranked(n=200, seed=0, share=0.4):
    g = torch.Generator().manual_seed(seed)
    positive = torch.rand(n, generator=g) < share
    positive[0], positive[1] = True, False
    return torch.randn(n, generator=g) + positive, positive


def labelled(scores, positive):
    return torch.tensor(scores), torch.tensor(positive).bool()


SCORES, POSITIVE = ranked()
CASES = {
    "random": (SCORES, POSITIVE),
    "float64": (SCORES.double() * math.pi, POSITIVE),
    "rare": ranked(share=0.02),
    "frequent": ranked(share=0.97),
    "heavy ties": (SCORES.round(), POSITIVE),
    "two scores": ((SCORES > 0).float(), POSITIVE),
    "all the same": (torch.zeros(200), POSITIVE),
    "large": (1e30 * SCORES, POSITIVE),
    "tiny": (1e-30 * SCORES, POSITIVE),
    "far from 0": (SCORES - 500, POSITIVE),
    "next to each other": (torch.arange(200, dtype=torch.float32) * 2**-23 + 1, POSITIVE),
    "perfect": (POSITIVE.float(), POSITIVE),
    "upside down": (-POSITIVE.float(), POSITIVE),
    "one of each": labelled([1.0, 2.0], [1, 0]),
    "one of each, tied": labelled([1.0, 1.0], [1, 0]),
    "one positive": labelled([3.0, 2.0, 1.0, 4.0], [0, 1, 0, 0]),
    "one negative": labelled([3.0, 2.0, 1.0, 4.0], [1, 0, 1, 1]),
    "20 positives": (torch.arange(40.0), torch.arange(40) % 2 == 0),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


def test_measures_are_the_textbooks(case):
    s, p = case[0].tolist(), case[1].tolist()
    for ours, text in ((auroc, text_auroc), (aupr, text_aupr), (fpr_at_recall, text_fpr)):
        result = ours(*case)
        assert result.dtype == torch.float64 and result.shape == ()
        assert float(result) == pytest.approx(text(s, p), rel=1e-12, abs=1e-15)


def test_scikit_learn_agrees(case):
    s, p = case[0].numpy(), case[1].numpy()
    assert float(auroc(*case)) == pytest.approx(sklearn.metrics.roc_auc_score(p, s), rel=1e-12)
    assert float(aupr(*case)) == pytest.approx(sklearn.metrics.average_precision_score(p, s), rel=1e-12)
    fpr, tpr, _ = sklearn.metrics.roc_curve(p, s, drop_intermediate=False)
    for recall in (0.05, 0.5, 0.8, 0.95, 1.0):
        assert float(fpr_at_recall(*case, recall=recall)) == pytest.approx(fpr[tpr >= recall].min(), rel=1e-12)


def test_exactly_95_percent_are_enough():
    scores = torch.cat([torch.arange(20.0), torch.tensor([0.5])])  # the negative lies above only the last positive
    positive = torch.arange(21) < 20
    assert fpr_at_recall(scores, positive, recall=0.95) == 0 and fpr_at_recall(scores, positive, recall=0.96) == 1
    for n in range(2, 60):
        positive = torch.arange(n + 1) < n
        for k in range(1, n):
            scores = torch.cat([torch.arange(n, 0, -1.0), torch.tensor([n - k + 0.5])])  # below k positives
            assert fpr_at_recall(scores, positive, recall=k / n) == 0
            assert fpr_at_recall(scores, positive, recall=math.nextafter(k / n, 1)) == 1


def test_infinite_scores_are_the_largest_and_the_smallest():
    scores, positive = labelled([math.inf, math.inf, 0.0, -math.inf], [1, 0, 1, 0])
    s, p = scores.tolist(), positive.tolist()
    assert float(auroc(scores, positive)) == text_auroc(s, p) == 0.625
    assert float(aupr(scores, positive)) == pytest.approx(text_aupr(s, p))
    assert float(fpr_at_recall(scores, positive)) == text_fpr(s, p)


@pytest.mark.parametrize("positive", [torch.zeros(5).bool(), torch.ones(5).bool(), torch.zeros(0).bool()])
def test_one_kind_alone_cannot_be_told_from_another(positive):
    for measure in (auroc, aupr, fpr_at_recall):
        assert measure(torch.arange(float(len(positive))), positive).isnan()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-20, 20), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([torch.exp, torch.atan, lambda x: x**3, lambda x: 7 * x - 1e6, lambda x: (x / 20).erf()]),
    st.randoms(use_true_random=False),
)
def test_only_the_order_of_scores_matters(pairs, monotone, random):
    mixed = random.sample(pairs, len(pairs))
    (s, p), (t, q) = (labelled(*map(list, zip(*rows, strict=True))) for rows in (pairs, mixed))
    for measure in (auroc, aupr, fpr_at_recall):
        here, there = measure(s.double(), p), measure(monotone(t.double()), q)
        assert (here == there) | (here.isnan() & there.isnan())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=40))
def test_auroc_is_the_same_from_the_other_side_and_what_is_left_of_1_from_below(pairs):
    s, p = labelled(*map(list, zip(*pairs, strict=True)))
    value = auroc(s.double(), p)
    if not value.isnan():
        assert auroc(-s.double(), ~p) == value
        assert float(auroc(-s.double(), p)) == pytest.approx(1 - float(value), abs=1e-15)


# Bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [auroc, aupr, fpr_at_recall])
def test_bad_scores(measure):
    scores, positive = CASES["random"]
    with raises("scores must not be NaN, got nan at index [5]"):
        measure(scores.index_fill(0, torch.tensor([5, 9]), math.nan), positive)
    with raises("scores must be a floating-point tensor [N], got torch.float32 [200, 1]"):
        measure(scores[:, None], positive)
    with raises("scores must be a floating-point tensor [N], got torch.int64 [200]"):
        measure(scores.long(), positive)
    with raises("scores must be a floating-point tensor [N], got list"):
        measure(scores.tolist(), positive)
    with raises("positive must be a boolean tensor [200], got torch.bool [199]"):
        measure(scores, positive[1:])
    with raises("positive must be a boolean tensor [200], got torch.int64 [200]"):
        measure(scores, positive.long())


@pytest.mark.parametrize("recall", [0, 1.5, -0.1, "0.95", math.nan])
def test_bad_recalls(recall):
    with raises(f"recall must be above 0 and at most 1, got {recall!r}"):
        fpr_at_recall(*CASES["random"], recall=recall)
