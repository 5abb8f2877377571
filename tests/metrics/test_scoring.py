import math
from functools import partial

import numpy as np
import pytest
import sklearn.metrics
import torch

from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.cases import classes, logits, random_case

# Textbook computations, one row at a time ------------------------------------------------------------------


def order(row):
    return sorted(range(len(row)), key=lambda c: (-row[c], c))


def text_topk(p, y, k):
    return np.mean([label in order(row)[:k] for row, label in zip(p, y, strict=True)])


def text_nll(p, y):
    return np.mean([-math.log(row[label]) if row[label] else math.inf for row, label in zip(p, y, strict=True)])


def text_brier(p, y):
    squares = [(row[c] - (c == label)) ** 2 for row, label in zip(p, y, strict=True) for c in range(len(row))]
    return sum(squares) / len(y)


SCORES = {
    "accuracy": (metrics.accuracy, lambda p, y: text_topk(p, y, 1)),
    "top-2": (partial(metrics.topk_accuracy, k=2), lambda p, y: text_topk(p, y, 2)),
    "nll": (metrics.nll, text_nll),
    "brier": (metrics.brier, text_brier),
    "error": (metrics.ensemble_error, lambda p, y: 1 - text_topk(p, y, 1)),
}

CASES = {
    "random": random_case(),
    "two classes": random_case(c=2),
    "many classes": random_case(n=20, c=300),
    "one sample": random_case(n=1),
    "all of one class": (random_case()[0], torch.full((57,), 2)),
    "perfect": (torch.eye(4), torch.arange(4)),
    "all wrong": (torch.eye(4).roll(1, 0), torch.arange(4)),
    "zeros and ones": (torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]), torch.tensor([1, 1])),
    "ties": (torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4], [1 / 3] * 3, [1 / 3] * 3]), torch.tensor([1, 2, 1, 2])),
    "float64": (random_case()[0].double(), random_case()[1]),
}


def rows(p, y):
    return p.double().numpy().tolist(), y.tolist()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("function, textbook", SCORES.values(), ids=SCORES)
def test_scores_equal_loops_over_rows(function, textbook, case):
    result = function(*case)
    assert result.dtype == torch.float64 and result.shape == ()
    assert float(result) == pytest.approx(textbook(*rows(*case)), rel=1e-6, abs=1e-12)


def test_a_true_class_of_probability_0_has_infinite_nll_in_a_tensor_of_probabilities():
    assert metrics.nll(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 0])) == math.inf


def test_nll_of_a_predictive_is_exact_where_probabilities_underflow():
    p = Predictive(torch.tensor([[[0.0, -300.0]], [[0.0, -400.0]]]))
    assert p.probs[0, 1] == 0
    assert float(metrics.nll(p, torch.tensor([1]))) == pytest.approx(300 + math.log(2))


def test_brier_is_precise_for_nearly_perfect_predictions():
    p = torch.tensor([[1 - 1e-6, 1e-6]], dtype=torch.float64).float()
    rest = 1 - p[0, 0].double()
    expected = rest**2 + p[0, 1].double() ** 2
    assert float(metrics.brier(p, torch.tensor([0]))) == pytest.approx(float(expected), rel=1e-6)


def test_topk_accuracy_handles_ties():
    p, y = CASES["ties"]
    assert metrics.topk_accuracy(p, y, k=1) == metrics.accuracy(p, y) == 0
    assert metrics.topk_accuracy(p, y, k=3) == 1
    with pytest.raises(ValueError, match="k must be at most the number of classes, 3, got 4"):
        metrics.topk_accuracy(p, y, k=4)


def test_member_error_is_the_mean_of_single_errors():
    z, y = logits(5, 31, 4), classes(4, 31)
    alone = [1 - text_topk(*rows(z[i].softmax(1), y), 1) for i in range(5)]
    assert float(metrics.member_error(Predictive(z), y)) == pytest.approx(np.mean(alone))


# Dense predictions and ignored labels ----------------------------------------------------------------------


def test_labels_may_be_unsigned_bytes():
    p = torch.eye(3)
    assert metrics.accuracy(p, torch.tensor([0, 255, 2], dtype=torch.uint8), ignore=255) == 1
    with pytest.raises(ValueError, match=r"got 255 at index \[1\]"):
        metrics.accuracy(p, torch.tensor([0, 255, 2], dtype=torch.uint8), ignore=-1)


# Streaming -------------------------------------------------------------------------------------------------


def test_sums_of_a_million_terms_are_precise():
    metric = metrics.NLL()
    p = torch.tensor([[0.9, 0.1]]).expand(100_000, 2)
    for _ in range(10):
        metric.update(p, torch.zeros(100_000, dtype=torch.long))
    assert float(metric.compute()) == pytest.approx(-math.log(float(p[0, 0])), rel=1e-7)


# Properties ------------------------------------------------------------------------------------------------


# Bad input -------------------------------------------------------------------------------------------------


def test_the_index_of_a_bad_pixel_is_that_of_the_given_tensor():
    p, y = logits(2, 4, 3, 5).softmax(1), classes(4, 2, 3, 5)
    bad = p.clone()
    bad[1, :, 2, 4] /= 2
    with pytest.raises(ValueError, match=r"sum of 0.5 at index \[1, 2, 4\] of \[2, 3, 5\]"):
        metrics.nll(bad, y)
    y[1, 2, 4] = 7
    with pytest.raises(ValueError, match=r"got 7 at index \[1, 2, 4\]"):
        metrics.nll(p, y)


def test_nan_under_an_ignored_label_is_still_an_error():
    with pytest.raises(ValueError, match=r"got nan at index \[0, 0\]"):
        metrics.nll(torch.tensor([[math.nan, 0.5]]), torch.tensor([255]), ignore=255)


def test_a_class_of_logit_minus_infinity_has_probability_0():
    p = Predictive(torch.tensor([[[0.0, -math.inf]]]))
    assert metrics.nll(p, torch.tensor([0])) == 0 and metrics.nll(p, torch.tensor([1])) == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_probabilities_are_summed_in_full_precision(dtype):
    p, y = random_case(n=500, c=100)
    half = p.to(dtype)
    assert float(metrics.nll(half, y)) == pytest.approx(text_nll(*rows(half, y)), rel=1e-6)
    assert float(metrics.brier(half, y)) == pytest.approx(text_brier(*rows(half, y)), rel=1e-6)


def test_a_mean_of_softmaxes_that_rounds_to_more_than_1_counts_as_1():
    p = torch.tensor([[1 + 1.2e-7, 0.0]])
    assert p[0, 0] > 1
    assert metrics.nll(p, torch.tensor([0])) == 0


@pytest.mark.parametrize("count", [2, 5])
def test_balanced_accuracy_and_macro_auroc_equal_scikit_learn(count):
    rng = np.random.default_rng(count)
    target = rng.choice(count, size=300, p=np.r_[0.9, np.full(count - 1, 0.1 / (count - 1))])
    raw = rng.normal(size=(300, count)) + 1.5 * np.eye(count)[target]
    probs = torch.tensor(raw).softmax(1)
    y = torch.from_numpy(target)
    judge = sklearn.metrics.balanced_accuracy_score(target, probs.argmax(1).numpy())
    assert float(metrics.balanced_accuracy(probs, y)) == pytest.approx(judge)
    streaming = metrics.BalancedAccuracy(classes=count)
    for rows in torch.arange(300).split(70):
        streaming.update(probs[rows], y[rows])
    assert float(streaming.compute()) == pytest.approx(judge)
    scores = probs[:, 1].numpy() if count == 2 else probs.numpy()
    auroc = sklearn.metrics.roc_auc_score(target, scores, multi_class="ovr")
    assert float(metrics.macro_auroc(probs, y)) == pytest.approx(auroc)


def test_classes_without_inputs_do_not_count():
    probs, y = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.4, 0.3]]), torch.tensor([0, 1, 0])
    assert float(metrics.balanced_accuracy(probs, y)) == 0.75
    assert float(metrics.macro_auroc(probs, y)) == 1.0
    assert math.isnan(float(metrics.macro_auroc(probs[:1], y[:1])))
