import math
from functools import partial

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes.metrics import UNCERTAINTIES, OODDetection, detect, read_rows
from multitudes.tasks.predictive import Predictive
from tests.metrics import metric_cases
from tests.metrics.metric_cases import changed, orders
from tests.zoo.predictions import raises

logits = partial(metric_cases.logits, dtype=torch.float64)

OF_MEMBERS = ["mutual_information", "variance", "disagreement"]


def both(s=4, inside=60, outside=40, c=5):
    """Predictions of a sure and of an unsure network."""
    return Predictive(logits(s, inside, c, scale=3.0)), Predictive(logits(s, outside, c, seed=1, scale=1.5))


# The table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positive", ["out", "in"])
@pytest.mark.parametrize("recall", [0.8, 0.95])
def test_one_call_gives_all_uncertainties_as_scikit_learn_does(positive, recall):
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


def test_auroc_does_not_ask_which_side_is_positive_but_aupr_does():
    out, inside = detect(*both()), detect(*both(), positive="in")
    for name in UNCERTAINTIES:
        assert out[name].auroc == inside[name].auroc
        assert out[name].aupr != inside[name].aupr


def test_a_single_class_tells_nothing_apart():
    table = detect(torch.ones(3, 1), torch.ones(2, 1))
    assert table["max_probability"] == table["entropy"] == (0.5, 0.4, 1.0)


def test_a_single_network_cannot_disagree():
    table = detect(*both(s=1))
    for name in OF_MEMBERS:
        assert table[name] == (0.5, 0.4, 1.0)  # AUPR is the share of positives, and one threshold finds all
    assert table["entropy"] == table["expected_entropy"]
    assert table["entropy"].auroc > 0.6


def test_probabilities_have_the_uncertainties_that_exist_for_them():
    inside, outside = both()
    plain, full = detect(inside.probs, outside.probs), detect(inside, outside)
    assert list(plain) == ["max_probability", "entropy"]
    for name in plain:
        assert plain[name] == pytest.approx(full[name])
    assert list(detect(inside, outside.probs)) == list(detect(inside.probs, outside)) == ["max_probability", "entropy"]
    assert list(detect(inside, outside, uncertainties=["energy", "entropy"])) == ["energy", "entropy"]


def test_the_sure_and_the_unsure_are_told_apart_completely():
    inside, outside = Predictive(20 * torch.eye(4)[None]), Predictive(torch.zeros(1, 3, 4))
    for name in set(UNCERTAINTIES) - set(OF_MEMBERS):
        assert detect(inside, outside)[name] == (1, 1, 0)
        assert detect(outside, inside)[name].auroc == 0


def test_without_anything_outside_there_is_no_answer():
    inside, outside = both()
    for table in (detect(inside, outside[:0]), detect(inside[:0], outside), detect(inside[:0], outside[:0])):
        assert list(table) == list(UNCERTAINTIES)
        assert all(math.isnan(value) for _, detection in table.items() for value in detection)
    assert (table.inside, table.outside) == (0, 0)


def test_a_table_prints_in_columns():
    inside, outside = torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([[0.6, 0.4], [0.85, 0.15]])
    assert str(detect(inside, outside, recall=0.5)).splitlines() == [
        "                  auroc    aupr   fpr50",
        "max_probability  0.7500  0.8333  0.0000",
        "entropy          0.7500  0.8333  0.0000",
        "2 inside, 2 outside; positive: out",
    ]


# Streaming -------------------------------------------------------------------------------------------------


def same(one, other):
    assert (one.inside, one.outside, list(one)) == (other.inside, other.outside, list(other))
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=1e-12, nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 20), st.integers(1, 40), st.integers(1, 4))
def test_batches_of_any_size_and_order_give_what_one_call_gives(seed, n, m, batch, s):
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


def test_a_metric_of_probabilities_has_the_uncertainties_that_exist_for_all_it_saw():
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


def test_pixels_may_be_outside_one_by_one():
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
def test_an_empty_metric_has_no_answer():
    for uncertainties in (None, ["energy"]):
        table = OODDetection(uncertainties).compute()
        assert list(table) == (uncertainties or list(UNCERTAINTIES)) and (table.inside, table.outside) == (0, 0)
        assert all(math.isnan(value) for _, detection in table.items() for value in detection)


def test_a_metric_keeps_nine_numbers_for_each_prediction_and_no_gradients():
    metric = OODDetection()
    metric.update(Predictive(torch.randn(3, 7, 100, requires_grad=True)), outside=True)
    assert [(part.shape, part.dtype, part.requires_grad) for part in metric.values] == [((7, 9), torch.float32, False)]


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
    with raises("outside must have the classes of inside, 5, got 3"):
        detect(good, good.probs[:, :3].softmax(1))
    for wrong, kind in ((good.probs.tolist(), "list"), (good.probs.numpy(), "float64"), (None, "NoneType")):
        with raises(f"inside: prediction must be a Predictive or a floating-point tensor of probabilities, got {kind}"):
            detect(wrong, good)
    sentence = "inside: prediction must be of task classification, tokens, binary or multilabel"
    with raises(f"{sentence}, got a Predictive of task regression"):
        detect(Predictive(torch.randn(3, 4), "regression"), good)


@pytest.mark.parametrize(
    "outside, kind",
    [
        (torch.zeros(59).bool(), "torch.bool [59]"),
        (torch.zeros(60), "torch.float32 [60]"),
        (torch.zeros(60, 1).bool(), "torch.bool [60, 1]"),
        (1, "int"),
        ("yes", "str"),
        (None, "NoneType"),
    ],
)
def test_bad_masks(outside, kind):
    metric = OODDetection()
    with raises(f"outside must be a boolean tensor [60], got {kind}"):
        metric.update(both()[0], outside)
    assert metric.values == []


def test_bad_options():
    names = ", ".join(UNCERTAINTIES)
    for uncertainties in (
        ["entropy", "entropie"],
        [],
        "entropy",
        ["variance", None],
        [["entropy"]],
        iter(["entropy"]),
        3,
    ):
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
