import math
from functools import partial

import numpy as np
import pytest
import torch

from multitudes import metrics
from multitudes.metrics import calibration_error as calibration
from tests.metrics import cases
from tests.metrics.cases import binary, streamed

random_case = partial(cases.random_case, n=200)


# Textbook computations -------------------------------------------------------------------------------------


def text_bin(value, bins):
    """The bin (k/bins, (k+1)/bins] of a value, edges rounded to its precision; 0 belongs to the first."""
    for k in range(bins):
        low, high = value.dtype.type(k / bins), value.dtype.type((k + 1) / bins)
        if low < value <= high or (k == 0 and value == 0):
            return k
    raise AssertionError(value)


def text_table(values, hits, bins):
    """For each bin the list of its (value, hit)."""
    table = [[] for _ in range(bins)]
    for value, hit in zip(values, hits, strict=True):
        table[text_bin(value, bins)].append((float(value), float(hit)))
    return table


def gap(members):
    value, hit = np.mean(members, 0)
    return abs(hit - value)


def top(p, y):
    p, y = p.numpy(), y.numpy()
    return p.max(1), p.argmax(1) == y


def text_ece(p, y, bins=15, min_count=1):
    table = text_table(*top(p, y), bins)
    return sum(len(m) / len(y) * gap(m) for m in table if len(m) >= min_count)


def text_mce(p, y, bins=15, min_count=1):
    return max(gap(m) for m in text_table(*top(p, y), bins) if len(m) >= min_count)


def text_classwise(p, y, bins=15):
    each = []
    for c in range(p.shape[1]):
        table = text_table(p[:, c].numpy(), (y == c).numpy(), bins)
        each.append(sum(len(m) / len(y) * gap(m) for m in table if m))
    return np.mean(each)


def text_adaptive(p, y, bins=15):
    confidence, correct = top(p, y)
    confidence, n = confidence.astype(np.float32), len(y)
    ordered = sorted(confidence)
    edges = [ordered[math.ceil(k * n / bins) - 1] for k in range(1, bins)]
    table = [[] for _ in range(bins)]
    for value, hit in zip(confidence, correct, strict=True):
        table[sum(value > edge for edge in edges)].append((float(value), float(hit)))
    return sum(len(m) / n * gap(m) for m in table if m)


def text_overconfidence(p, y):
    confidence, correct = top(p, y)
    return np.mean(confidence.astype(float)) - np.mean(correct)


CASES = {
    "random": random_case(),
    "two classes": random_case(c=2),
    "many classes": random_case(n=30, c=100),
    "one sample": random_case(n=1),
    "fewer samples than bins": random_case(n=7),
    "all of one class": (random_case()[0], torch.full((200,), 2)),
    "perfect": (torch.eye(4), torch.arange(4)),
    "surely wrong": (torch.eye(4).roll(1, 0), torch.arange(4)),
    "one class": (torch.ones(3, 1), torch.zeros(3, dtype=torch.long)),
    "ties": binary([0.8] * 9 + [0.6] * 5 + [0.5] * 3, [1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]),
    "edges": binary([0.6, 0.7, 0.8, 0.9, 0.5, 1.0], [1, 0, 1, 0, 1, 1]),
    "empty bins": binary([0.99, 0.98, 0.51], [1, 0, 1]),
    "float64": (random_case()[0].double(), random_case()[1]),
}


BINS = (1, 2, 10, 15, 20)
ERRORS = {
    "ece": (metrics.ece, text_ece),
    "mce": (metrics.mce, text_mce),
    "classwise": (metrics.classwise_ece, text_classwise),
    "adaptive": (metrics.adaptive_ece, text_adaptive),
    "over": (lambda p, y, bins: metrics.overconfidence(p, y), lambda p, y, bins: text_overconfidence(p, y)),
}


@pytest.mark.parametrize("bins", BINS)
@pytest.mark.parametrize("function, textbook", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_calibration_errors_equal_loops_over_bins(function, textbook, case, bins):
    result = function(*case, bins=bins)
    assert result.dtype == torch.float64 and result.shape == ()
    assert float(result) == pytest.approx(textbook(*case, bins=bins), rel=1e-6, abs=1e-7)


def test_the_default_is_fifteen_bins_of_any_size():
    p, y = random_case()
    assert metrics.ece(p, y) == metrics.ece(p, y, bins=15, min_count=1)
    assert [metrics.ECE().bins, metrics.MCE().bins, metrics.ClasswiseECE(4).bins, metrics.AdaptiveECE().bins] == [
        15
    ] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [3, 7, 10, 15, 20])
def test_bins_are_closed_on_the_right(bins, dtype):
    edges = torch.tensor([k / bins for k in range(bins + 1)], dtype=dtype)
    assert calibration._bin_of(edges, bins).tolist() == [0, *range(bins)]
    above = torch.nextafter(edges[:-1], torch.ones((), dtype=dtype))
    assert calibration._bin_of(above, bins).tolist() == list(range(bins))


# Bins of few rows ------------------------------------------------------------------------------------------


def test_min_count_6_drops_bins_of_at_most_5():
    sixes, fives = binary([0.6] * 6, [1] * 6), binary([0.9] * 5, [0] * 5)
    p, y = torch.cat([sixes[0], fives[0]]), torch.cat([sixes[1], fives[1]])
    assert float(metrics.mce(p, y, bins=20, min_count=5)) == pytest.approx(0.9)
    assert float(metrics.mce(p, y, bins=20, min_count=6)) == pytest.approx(0.4)
    # n is the number of all rows, as in the equation of the paper.
    assert float(metrics.ece(p, y, bins=20, min_count=6)) == pytest.approx(6 / 11 * 0.4)


@pytest.mark.parametrize("min_count", [1, 2, 6, 12])
@pytest.mark.parametrize("kind, textbook", [(metrics.ECE, text_ece), (metrics.MCE, text_mce)])
def test_min_count_applies_to_all_batches_together(kind, textbook, min_count):
    p, y = random_case()
    found = streamed(kind(20, min_count), 33, p, y)
    assert float(found) == pytest.approx(textbook(p, y, 20, min_count), rel=1e-6)


def test_without_a_bin_the_error_is_nan():
    p, y = random_case(n=3)
    assert metrics.ece(p, y, min_count=4).isnan() and metrics.mce(p, y, min_count=4).isnan()


# Reliability diagrams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", BINS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reliability_equals_loops_over_bins(case, bins):
    metric = metrics.ReliabilityDiagram(bins)
    metric.update(*case)
    table = text_table(*top(*case), bins)
    for diagram in (metrics.reliability(*case, bins=bins), metric.compute()):
        assert diagram.edges.tolist() == [k / bins for k in range(bins + 1)]
        assert diagram.count.tolist() == [len(m) for m in table]
        confidence, correct = zip(*[np.mean(m, 0) if m else (math.nan, math.nan) for m in table], strict=True)
        np.testing.assert_allclose(diagram.accuracy, correct, rtol=1e-12)
        np.testing.assert_allclose(diagram.confidence, confidence, rtol=1e-12)


# Equal mass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, bins", [(30, 15), (31, 15), (44, 15), (7, 3), (5, 5), (4, 9)])
def test_adaptive_bins_of_distinct_confidences_have_equal_mass(n, bins):
    confidence = torch.linspace(0.51, 0.99, n)
    correct = torch.arange(n) % 3 == 0
    parts, start = [], 0
    for k in range(1, bins + 1):
        end = math.ceil(k * n / bins)
        parts.append((confidence[start:end].double(), correct[start:end].double()))
        start = end
    sizes = [len(part) for part, _ in parts]
    assert max(sizes) - min(sizes) <= 1
    expected = sum(len(a) / n * abs(float(a.mean() - b.mean())) for a, b in parts if len(a))
    assert float(metrics.adaptive_ece(*binary(confidence.tolist(), correct.tolist()), bins=bins)) == pytest.approx(
        expected, rel=1e-6
    )


# Properties ------------------------------------------------------------------------------------------------
