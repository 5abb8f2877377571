import math
from functools import partial

import numpy as np
import pytest
import torch

from multitudes import metrics
from multitudes.metrics import UNCERTAINTIES, uncertainties
from multitudes.metrics.uncertainties import OF_PROBABILITIES
from multitudes.tasks.predictive import Predictive
from tests.metrics import cases
from tests.zoo.predictions import raises

logits = partial(cases.logits, dtype=torch.float64)

# Textbook computations -------------------------------------------------------------------------------------


def text_entropy(p):
    return -sum(q * math.log(q) for q in p if q > 0)


def text_uncertainties(z):
    """All scores of one input, from its logits `[S, C]`."""
    s, c = z.shape
    p = [[math.exp(v) / sum(math.exp(w) for w in row) for v in row] for row in z]
    mean = [sum(row[k] for row in p) / s for k in range(c)]
    expected = sum(text_entropy(row) for row in p) / s
    labels = [int(np.argmax(row)) for row in z]
    pairs = [labels[i] != labels[j] for i in range(s) for j in range(i)]
    return {
        "max_probability": -max(mean),
        "entropy": text_entropy(mean),
        "expected_entropy": expected,
        "mutual_information": text_entropy(mean) - expected,
        "variance": sum(sum((row[k] - mean[k]) ** 2 for row in p) / s for k in range(c)) / c,
        "disagreement": sum(pairs) / len(pairs) if pairs else 0.0,
        "max_logit": -max(sum(row[k] for row in z) / s for k in range(c)),
        "energy": -sum(math.log(sum(math.exp(v) for v in row)) for row in z) / s,
    }


@pytest.mark.parametrize("s", [1, 2, 5])
@pytest.mark.parametrize("c", [2, 7])
def test_uncertainties_equal_loops_over_members(s, c):
    z = logits(s, 23, c)
    expected = [text_uncertainties(z[:, i].numpy()) for i in range(23)]
    assert list(UNCERTAINTIES) == list(expected[0])
    for name, uncertainty in UNCERTAINTIES.items():
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            scores = uncertainty(Predictive(z.to(dtype)))
            assert scores.dtype == dtype and scores.shape == (23,)
            np.testing.assert_allclose(scores, [row[name] for row in expected], atol=tolerance)


def test_each_pixel_of_a_dense_prediction_has_a_score():
    z = logits(3, 2, 4, 3, 5)
    expected = [text_uncertainties(z[:, b, :, i, j].numpy()) for b in range(2) for i in range(3) for j in range(5)]
    for name, uncertainty in UNCERTAINTIES.items():
        np.testing.assert_allclose(uncertainty(Predictive(z)), [row[name] for row in expected], atol=1e-12)
    p = z[0].softmax(1)
    for name in OF_PROBABILITIES:
        torch.testing.assert_close(UNCERTAINTIES[name](p), UNCERTAINTIES[name](Predictive(z[:1])))


def test_probabilities_have_the_uncertainties_of_their_predictive():
    p = Predictive(logits(4, 60, 5))
    for name in OF_PROBABILITIES:
        torch.testing.assert_close(UNCERTAINTIES[name](p.probs), UNCERTAINTIES[name](p))
    sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert uncertainties.entropy(sure).tolist() == [0, 0] and uncertainties.max_probability(sure).tolist() == [-1, -1]


@pytest.mark.parametrize("name", sorted(set(UNCERTAINTIES) - set(OF_PROBABILITIES)))
def test_other_uncertainties_need_a_predictive(name):
    p = Predictive(logits(4, 60, 5)).probs
    sentence = f"{name} needs the members' predictions: pass a Predictive, got only probabilities"
    with raises(sentence):
        UNCERTAINTIES[name](p)
    with raises(sentence):
        metrics.detect(p, p, uncertainties=["entropy", name])
    with raises(sentence):
        metrics.OODDetection(uncertainties=[name]).update(p, outside=True)


def test_half_precision_logits_are_summed_in_float32():
    z = torch.full((1, 1, 70_000), 5.0, dtype=torch.float16)  # the sum of exponentials is beyond half precision
    assert float(uncertainties.energy(Predictive(z))) == pytest.approx(-5 - math.log(70_000), rel=1e-6)
