"""Out-of-distribution detection: measures of scores, and the table of all uncertainties."""

import math
from functools import partial

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes.metrics import UNCERTAINTIES, OODDetection, aupr, auroc, detect, fpr_at_recall, read_rows
from multitudes.tasks.predictive import Predictive
from tests.metrics import cases
from tests.metrics.cases import changed, orders
from tests.zoo.predictions import raises

# Measures -------------------------------------------------------------------------------------------------


# Textbook computations -------------------------------------------------------------------------------------


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


def test_measures_equal_scikit_learn(case):
    s, p = case[0].numpy(), case[1].numpy()
    assert float(auroc(*case)) == pytest.approx(sklearn.metrics.roc_auc_score(p, s), rel=1e-12)
    assert float(aupr(*case)) == pytest.approx(sklearn.metrics.average_precision_score(p, s), rel=1e-12)
    fpr, tpr, _ = sklearn.metrics.roc_curve(p, s, drop_intermediate=False)
    for recall in (0.05, 0.5, 0.8, 0.95, 1.0):
        assert float(fpr_at_recall(*case, recall=recall)) == pytest.approx(fpr[tpr >= recall].min(), rel=1e-12)


def test_the_recall_threshold_is_inclusive():
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
    assert float(auroc(scores, positive)) == 0.625
    assert float(aupr(scores, positive)) == pytest.approx(0.5 * 1 / 2 + 0.5 * 2 / 3)
    assert float(fpr_at_recall(scores, positive)) == 0.5


@pytest.mark.parametrize("positive", [torch.zeros(5).bool(), torch.ones(5).bool(), torch.zeros(0).bool()])
def test_measures_of_one_class_are_nan(positive):
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
def test_auroc_is_symmetric(pairs):
    s, p = labelled(*map(list, zip(*pairs, strict=True)))
    value = auroc(s.double(), p)
    if not value.isnan():
        assert auroc(-s.double(), ~p) == value
        assert float(auroc(-s.double(), p)) == pytest.approx(1 - float(value), abs=1e-15)


# Bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [auroc, aupr, fpr_at_recall])
def test_invalid_scores_raise_an_error(measure):
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
    with raises("recall must be above 0 and at most 1, got 0"):
        fpr_at_recall(scores, positive, recall=0)


logits = partial(cases.logits, dtype=torch.float64)

OF_MEMBERS = ["mutual_information", "variance", "disagreement"]


def both(s=4, inside=60, outside=40, c=5):
    """Predictions of a confident and of an uncertain network."""
    return Predictive(logits(s, inside, c, scale=3.0)), Predictive(logits(s, outside, c, seed=1, scale=1.5))


# The table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positive", ["out", "in"])
@pytest.mark.parametrize("recall", [0.8, 0.95])
def test_detect_equals_scikit_learn_for_all_uncertainties(positive, recall):
    inside, outside = both()
    table = detect(inside, outside, positive=positive, recall=recall)
    assert list(table) == list(table.keys()) == list(UNCERTAINTIES) and len(table) == 8
    assert (table.inside, table.outside, table.positive, table.recall) == (60, 40, positive, recall)
    sign, found = (1, np.arange(100) >= 60) if positive == "out" else (-1, np.arange(100) < 60)
    for name, detection in table.items():
        scores = sign * torch.cat([UNCERTAINTIES[name](inside), UNCERTAINTIES[name](outside)]).numpy()
        assert detection.auroc == pytest.approx(sklearn.metrics.roc_auc_score(found, scores))
        assert detection.aupr == pytest.approx(sklearn.metrics.average_precision_score(found, scores))
        fpr, tpr, _ = sklearn.metrics.roc_curve(found, scores, drop_intermediate=False)
        assert detection.fpr == pytest.approx(fpr[tpr >= recall].min())
        assert table[name] == detection


def test_plain_probabilities_have_two_uncertainties():
    inside, outside = both()
    plain, full = detect(inside.probs, outside.probs), detect(inside, outside)
    assert list(plain) == ["max_probability", "entropy"]
    for name in plain:
        assert plain[name] == pytest.approx(full[name])
    assert list(detect(inside, outside.probs)) == list(detect(inside.probs, outside)) == ["max_probability", "entropy"]
    assert list(detect(inside, outside, uncertainties=["energy", "entropy"])) == ["energy", "entropy"]


def test_detection_without_data_is_nan():
    inside, outside = both()
    for table in (detect(inside, outside[:0]), detect(inside[:0], outside), detect(inside[:0], outside[:0])):
        assert list(table) == list(UNCERTAINTIES)
        assert all(math.isnan(value) for _, detection in table.items() for value in detection)
    assert (table.inside, table.outside) == (0, 0)


# Streaming -------------------------------------------------------------------------------------------------


def same(one, other):
    assert (one.inside, one.outside, list(one)) == (other.inside, other.outside, list(other))
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=1e-12, nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 20), st.integers(1, 40), st.integers(1, 4))
def test_streaming_detection_equals_detect(seed, n, m, batch, s):
    z = logits(s, n + m, 4, seed=seed)
    expected = detect(Predictive(z[:, :n]), Predictive(z[:, n:]))
    members, samples = orders(s, n + m, seed)
    metric = OODDetection()
    for part in samples.split(batch):
        metric.update(Predictive(z[:, part]), outside=part >= n)
    same(metric.compute(), expected)
    metric.reset()
    metric.update(Predictive(z[members][:, :n]), outside=False)
    metric.update(Predictive(z[members][:, n:]), outside=True)
    same(metric.compute(), expected)


def test_a_metric_streams_with_its_options():
    inside, outside = both()
    options = {"uncertainties": ["energy", "variance"], "positive": "in", "recall": 0.7}
    metric = OODDetection(**options)
    metric.update(inside, outside=False)
    metric.update(outside, outside=True)
    same(metric.compute(), detect(inside, outside, **options))
    assert metric.compute().positive == "in" and metric.compute().recall == 0.7


def test_streaming_detection_keeps_the_common_uncertainties():
    inside, outside = both()
    metric = OODDetection()
    metric.update(inside.probs, outside=False)
    metric.update(outside.probs, outside=True)
    same(metric.compute(), detect(inside.probs, outside.probs))
    metric.update(outside, outside=True)
    assert list(metric.compute()) == ["max_probability", "entropy"]
    metric.reset()
    metric.update(inside, outside=False)
    assert list(metric.compute()) == list(UNCERTAINTIES)


def test_single_pixels_can_be_outside():
    z = logits(3, 2, 4, 3, 5)
    outside = logits(2, 3, 5, seed=3) > 0
    flat = z.movedim(2, -1)
    metric = OODDetection()
    metric.update(Predictive(z), outside)
    same(metric.compute(), detect(Predictive(flat[:, ~outside]), Predictive(flat[:, outside])))
    metric = OODDetection()
    target = torch.where(outside, 1, 255)
    metric.update(read_rows(Predictive(z), target, ignore=255), outside=True)  # unlabelled pixels left out
    assert (metric.compute().inside, metric.compute().outside) == (0, int(outside.sum()))


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_an_empty_detection_is_nan():
    for uncertainties in (None, ["energy"]):
        table = OODDetection(uncertainties).compute()
        assert list(table) == (uncertainties or list(UNCERTAINTIES)) and (table.inside, table.outside) == (0, 0)
        assert all(math.isnan(value) for _, detection in table.items() for value in detection)


# Bad input -------------------------------------------------------------------------------------------------


def test_bad_predictions_are_named_with_their_first_index():
    good = both()[0]
    bad = changed(good.probs, math.nan, 3, 1)
    sentence = "prediction must hold probabilities within 0 and 1, got nan at index [3, 1]"
    with raises(f"inside: {sentence}"):
        detect(bad, good)
    with raises(f"outside: {sentence}"):
        detect(good, bad)
    metric = OODDetection()
    with raises(sentence):
        metric.update(bad, outside=True)
    assert metric.values == []
    with raises("outside must have 5 classes like inside, got 3"):
        detect(good, good.probs[:, :3].softmax(1))


@pytest.mark.parametrize(
    "outside, kind",
    [
        (torch.zeros(59).bool(), "torch.bool [59]"),
        (torch.zeros(60), "torch.float32 [60]"),
        (1, "int"),
    ],
)
def test_invalid_masks_raise_an_error(outside, kind):
    metric = OODDetection()
    with raises(f"outside must be a boolean tensor [60], got {kind}"):
        metric.update(both()[0], outside)
    assert metric.values == []


def test_invalid_options_raise_an_error():
    names = ", ".join(UNCERTAINTIES)
    for uncertainties in (["entropy", "entropie"], [], "entropy", [["entropy"]], 3):
        for ask in (lambda c: detect(*both(), uncertainties=c), OODDetection):
            with raises(f"uncertainties must be None or a list of names from {names}, got {uncertainties!r}"):
                ask(uncertainties)
    for positive in ("outside", None, 1):
        for ask in (lambda p: detect(*both(), positive=p), lambda p: OODDetection(positive=p)):
            with raises(f"positive must be 'out' or 'in', got {positive!r}"):
                ask(positive)
    for recall in (0, 1.5, -0.1, "0.95", math.nan):
        for ask in (lambda r: detect(*both(), recall=r), lambda r: OODDetection(recall=r)):
            with raises(f"recall must be above 0 and at most 1, got {recall!r}"):
                ask(recall)
