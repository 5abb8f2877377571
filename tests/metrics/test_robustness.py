"""Robustness: consistency of sequences and videos, attacks, corruption errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import multitudes as mt
from multitudes import metrics, shift
from multitudes.tasks.predictive import Predictive
from tests.metrics.cases import changed, classes, logits, orders

# Sequences ------------------------------------------------------------------------------------------------


def text_cec(p):
    """Eq. 38."""
    total = 0.0
    for t in range(len(p) - 1):
        for b in range(p.shape[1]):
            total -= sum(f * math.log(g) for f, g in zip(p[t, b], p[t + 1, b], strict=True))
    return total / ((len(p) - 1) * p.shape[1])


SEQUENCE = {
    "consistency": (metrics.consistency, metrics.Consistency, lambda p: np.mean(p.argmax(2)[1:] == p.argmax(2)[:-1])),
    "cross-entropy": (metrics.cross_entropy_consistency, metrics.CrossEntropyConsistency, text_cec),
}


@pytest.fixture(params=SEQUENCE.values(), ids=SEQUENCE)
def measure(request):
    return request.param


def test_sequences_are_accepted_in_any_form(measure):
    function, streaming, textbook = measure
    z = logits(3, 9, 4, 5)  # three members, nine frames of four inputs
    p = z.double().softmax(3).mean(0)
    expected = pytest.approx(textbook(p.numpy()), rel=1e-5)
    frames = [Predictive(z[:, t]) for t in range(9)]
    assert float(function(frames)) == expected
    assert float(function(frame for frame in frames)) == expected
    assert float(function(p)) == float(function(list(p))) == expected
    one = pytest.approx(textbook(p[:, :1].numpy()), rel=1e-5)
    assert float(function(p[:, 0])) == one  # [T, C]
    assert float(function(Predictive(z[:, :, 0]))) == one  # T inputs
    metric = streaming()
    for b in range(4):
        metric.update(Predictive(z[:, :, b]))
    assert float(metric.compute()) == expected


def test_constant_sequences_have_their_entropy_as_cross_entropy():
    p = torch.tensor([0.5, 0.25, 0.25]).expand(4, 3)
    assert metrics.consistency(p) == 1
    assert float(metrics.cross_entropy_consistency(p)) == pytest.approx(1.5 * math.log(2))


def test_probabilities_of_0_and_1():
    sure = torch.eye(3)[[0, 0, 1]]
    assert metrics.consistency(sure) == 0.5
    assert metrics.cross_entropy_consistency(sure[:2]) == 0
    assert metrics.cross_entropy_consistency(sure) == math.inf
    far = Predictive(torch.tensor([[[0.0, -300.0], [-300.0, 0.0]]]))  # underflows, but is not impossible
    assert float(metrics.cross_entropy_consistency(far)) == pytest.approx(300)


def test_the_first_class_wins_a_tie():
    assert metrics.consistency(torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.5, 0.5], [0.4, 0.6]])) == pytest.approx(2 / 3)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 6), st.integers(1, 3), st.integers(1, 6))
def test_streaming_sequences_equal_one_call_in_any_order(seed, t, b, s, batch):
    z = logits(s, t, b, 3, seed=seed)
    members, sequences = orders(s, b, seed)
    for function, streaming, _ in SEQUENCE.values():
        whole = function([Predictive(z[:, i]) for i in range(t)])
        shuffled = function([Predictive(z[members][:, i, sequences]) for i in range(t)])
        assert float(shuffled) == pytest.approx(float(whole), rel=1e-5)
        metric = streaming()
        for part in z.split(batch, 2):
            metric.update([Predictive(part[:, i]) for i in range(t)])
        assert float(metric.compute()) == pytest.approx(float(whole), rel=1e-6)


P = logits(4, 2, 3).softmax(2)


BAD_FRAMES = {
    "one": (P[:1], "frames must be 2 or more, .* got 1"),
    "none": ([], "frames must be 2 or more, .* got 0"),
    "nan": (
        changed(P, math.nan, 2, 1, 0),
        r"frames\[2\]: prediction must hold probabilities .* got nan at index \[1, 0\]",
    ),
    "logits": (list(logits(4, 2, 3)), r"frames\[0\]: prediction must hold probabilities within 0 and 1"),
    "unlike": (
        [P[0], P[1], P[2, :1]],
        r"frames must have the same shape, got .*rows=2.* in frames\[1\] and .*rows=1",
    ),
    "number": (3, "frames must be a Predictive, probabilities, or several of them, got int"),
    "rows": (metrics.read_rows(P[0], classes(3, 2)), "frames must be .* got Rows"),
    "numbers": ([1, 2], r"frames\[0\]: prediction must be a Predictive or a floating-point tensor"),
    "regression": (Predictive(logits(2, 5), "regression"), "prediction must be of task classification"),
}


@pytest.mark.parametrize("frames, message", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_invalid_frames_raise_an_error(measure, frames, message):
    function, streaming, _ = measure
    with pytest.raises(ValueError, match=message):
        function(frames)
    metric = streaming()
    with pytest.raises(ValueError, match=message):
        metric.update(frames)
    assert (metric.sums == 0).all()


# Relative confidence --------------------------------------------------------------------------------------


def test_relative_confidence_equals_its_equation():
    z, y = logits(3, 40, 4), classes(4, 40)
    p = Predictive(z)
    probs = z.double().softmax(2).mean(0)
    expected = np.mean([float(row[label] / row.max()) for row, label in zip(probs, y, strict=True)])
    assert float(metrics.relative_confidence(p, y)) == pytest.approx(expected, rel=1e-6)
    assert float(metrics.relative_confidence(p.probs, y)) == pytest.approx(expected, rel=1e-6)


# Attacks --------------------------------------------------------------------------------------------------


def test_attack_success_is_the_share_of_correct_predictions_made_wrong():
    clean, attacked, y = logits(50, 3).softmax(1), logits(50, 3, seed=5).softmax(1), classes(3, 50)
    fooled = [int(attacked[n].argmax() != y[n]) for n in range(50) if clean[n].argmax() == y[n]]
    assert 0 < np.mean(fooled) < 1
    assert float(metrics.attack_success_rate(clean, attacked, y)) == pytest.approx(np.mean(fooled))
    kept = y != 2
    without = metrics.attack_success_rate(clean[kept], attacked[kept], y[kept])
    assert metrics.attack_success_rate(clean, attacked, y, ignore=2) == without


def test_attack_success_equals_that_of_the_attack():
    torch.manual_seed(0)
    net = mt.deep_ensemble(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), members=3)
    x, y = torch.rand(60, 1, 4, 4), classes(3, 60)
    attack = shift.fgsm(net, x, y, 0.1)
    rate = metrics.attack_success_rate(net.predict(x), net.predict(attack.images), y)
    assert 0 < rate < 1
    assert float(rate) == pytest.approx(float(attack.success_rate[-1]), rel=1e-6)


def test_attack_success_without_correct_predictions_is_nan():
    p = torch.eye(3)
    assert metrics.attack_success_rate(p, p, torch.tensor([1, 2, 0])).isnan()
    assert metrics.attack_success_rate(p, p, torch.tensor([0, 1, 2])) == 0
    assert metrics.attack_success_rate(p, p.roll(1, 0), torch.tensor([0, 1, 2])) == 1


def test_attack_predictions_need_the_same_inputs():
    p, y = torch.eye(3), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"target must have the prediction's shape without classes, \[2\], got \[3\]"):
        metrics.attack_success_rate(p, p[:2], y)
    with pytest.raises(ValueError, match=r"got nan at index \[1, 1\]"):
        metrics.attack_success_rate(p, p.clone().fill_diagonal_(math.nan).index_fill(0, torch.tensor([0]), 1 / 3), y)
    rows = metrics.read_rows(p, y), metrics.read_rows(p, y.flip(0))
    with pytest.raises(ValueError, match="attacked must have the targets of clean"):
        metrics.attack_success_rate(*rows)


# Videos ---------------------------------------------------------------------------------------------------


def video(t=6, s=3, b=2, c=3, h=4, w=5, seed=0):
    """Logits `[T, S, B, C, H, W]`, and which pixels count, `[T, B, H, W]`."""
    kept = torch.rand(t, b, h, w, generator=torch.Generator().manual_seed(seed + 1)) > 0.3
    return logits(t, s, b, c, h, w, seed=seed), kept


@pytest.mark.parametrize("name", ["consistency", "cross_entropy_consistency"])
def test_masked_pixels_do_not_count_in_any_form_of_video(name):
    z, kept = video(s=1)
    function, frames = getattr(metrics, name), z[:, 0].softmax(2)
    steps = []
    for t in range(5):
        for b, i, j in (kept[t] & kept[t + 1]).nonzero().tolist():
            p, q = frames[t, b, :, i, j].double(), frames[t + 1, b, :, i, j].double()
            steps.append(float(p.argmax() == q.argmax()) if name == "consistency" else -float(p @ q.log()))
    expected = pytest.approx(np.mean(steps), rel=1e-6)
    assert float(function(frames, kept)) == float(function(list(frames), list(kept))) == expected
    assert float(function((Predictive(frame) for frame in z), iter(kept))) == expected
    metric = metrics.Consistency() if name == "consistency" else metrics.CrossEntropyConsistency()
    for b in range(2):  # each video as one predictive, whose inputs are its frames
        metric.update(Predictive(z[:, :, b].movedim(0, 1)), kept[:, b])
    assert float(metric.compute()) == expected


def test_the_last_frame_of_a_video_is_not_compared_with_the_first_of_the_next():
    one, other = torch.eye(2)[:1, :, None], torch.eye(2)[1:, :, None]
    metric = metrics.Consistency()
    metric.update([one, one, other])
    assert metric.compute() == 0.5
    metric.update([one.expand(3, 2, 1)] * 2)  # of any size
    assert metric.compute() == 0.8 and metric.sums[1] == 5


def test_invalid_masks_raise_an_error():
    z, kept = video()
    frames = [Predictive(frame) for frame in z]
    with pytest.raises(ValueError, match="masks must hold one mask per frame, got more frames"):
        metrics.consistency(frames, kept[1:])
    with pytest.raises(ValueError, match="masks must hold one mask per frame, got more masks"):
        metrics.consistency(frames[1:], kept)
    with pytest.raises(ValueError, match="masks must be None or boolean tensors, one for each frame, got int"):
        metrics.consistency(frames, 1)
    with pytest.raises(ValueError, match=r"frames\[2\]: mask must be a boolean tensor \[2, 4, 5\]"):
        metrics.consistency(frames, [kept[0], kept[1], kept[2, 0, :, 0], *kept[3:]])
    with pytest.raises(ValueError, match=r"masks must be a boolean tensor \[6\], got list"):
        metrics.consistency(torch.eye(3)[[0, 1, 2, 0, 1, 2]], [True] * 6)
    rows = metrics.read_rows(frames[1], kept[1].long())
    with pytest.raises(ValueError, match=r"frames\[1\]: prediction must be a Predictive or .*, got Rows"):
        metrics.consistency([frames[0], rows])  # rows may be missing


# Corruption errors ----------------------------------------------------------------------------------------


def tables(seed=0):
    """Errors of a model and of a baseline under each corruption and severity."""
    random = np.random.default_rng(seed)
    names = shift.CORRUPTIONS
    return ({name: random.uniform(0.1, 0.9, 5).tolist() for name in names} for _ in range(2))


def test_corruption_errors_equal_their_definition():
    errors, baseline = tables()
    by_hand = [sum(errors[c][s] for s in range(5)) / sum(baseline[c][s] for s in range(5)) for c in errors]
    np.testing.assert_allclose(metrics.corruption_error(errors, baseline), by_hand)
    assert float(metrics.mean_corruption_error(errors, baseline)) == pytest.approx(np.mean(by_hand))
    means = [np.mean(errors[c]) for c in errors]
    np.testing.assert_allclose(metrics.corruption_error(errors), means)
    assert float(metrics.mean_corruption_error(errors)) == pytest.approx(np.mean(means))


def test_relative_corruption_errors_equal_their_definition():
    errors, baseline = tables()
    by_hand = [
        sum(errors[c][s] - 0.05 for s in range(5)) / sum(baseline[c][s] - 0.08 for s in range(5)) for c in errors
    ]
    found = metrics.relative_corruption_error(errors, 0.05, baseline, 0.08)
    np.testing.assert_allclose(found, by_hand)
    mean = metrics.relative_mean_corruption_error(errors, torch.tensor(0.05), baseline, 0.08)
    assert float(mean) == pytest.approx(np.mean(by_hand))
    growth = [np.mean(errors[c]) - 0.05 for c in errors]
    np.testing.assert_allclose(metrics.relative_corruption_error(errors, 0.05), growth)
    assert float(metrics.relative_mean_corruption_error(errors, 0.05)) == pytest.approx(np.mean(growth))


def test_scores_are_tensors_lists_or_mappings():
    errors, baseline = tables()
    expected = metrics.corruption_error(errors, baseline)
    turned = {name: torch.tensor(baseline[name]) for name in reversed(baseline)}
    torch.testing.assert_close(metrics.corruption_error(errors, turned), expected, rtol=1e-6, atol=0)
    rows = [errors[name] for name in errors], [baseline[name] for name in errors]
    torch.testing.assert_close(metrics.corruption_error(*rows), expected)
    tensors = (torch.tensor(table, dtype=torch.float64) for table in rows)
    torch.testing.assert_close(metrics.corruption_error(*tensors), expected)


FIVE = [0.1, 0.2, 0.3, 0.4, 0.5]
BAD_TABLES = {
    "zero row": (
        (torch.ones(2, 5), torch.eye(2, 5) * torch.tensor([[1], [0]])),
        "baseline must not sum to 0, got 0 for corruption 1",
    ),
    "other": (({"fog": FIVE}, {"snow": FIVE}), "baseline must hold the corruptions of errors, 'fog', got 'snow'"),
    "fewer": (({"fog": FIVE}, {"fog": FIVE[:3]}), "baseline must hold as many severities as errors, 5, got 3"),
    "ragged": (({"fog": FIVE, "snow": FIVE[:3]},), r"must hold 5 scores for 'snow', got shape \[3\]"),
    "nan value": (({"fog": [0.1, 0.2, math.nan]},), "errors must hold finite scores, got nan for 'fog' at index 2"),
    "empty": (({},), "errors must hold at least one corruption"),
    "no severity": ((torch.zeros(3, 0),), "errors must hold at least one corruption"),
    "number": ((0.3,), r"errors must be {corruption: scores} or \[corruptions, severities\], got 0.3"),
}


@pytest.mark.parametrize("given, message", BAD_TABLES.values(), ids=BAD_TABLES)
def test_invalid_scores_raise_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        metrics.mean_corruption_error(*given)


def test_invalid_clean_errors_raise_an_error():
    with pytest.raises(ValueError, match="baseline and baseline_clean must be given together, got baseline_clean=0.1"):
        metrics.relative_corruption_error([FIVE], 0.1, baseline_clean=0.1)
    with pytest.raises(ValueError, match="clean must be a finite number, .* got nan"):
        metrics.relative_corruption_error([FIVE], math.nan)
    with pytest.raises(ValueError, match="baseline_clean must be a finite number, .* got \\[0.1, 0.1\\]"):
        metrics.relative_corruption_error([FIVE], 0.1, [FIVE], [0.1, 0.1])
    with pytest.raises(ValueError, match="baseline minus baseline_clean must not sum to 0, got 0 for corruption 0"):
        metrics.relative_corruption_error([[0.2, 0.2]], 0.1, [[0.25, 0.25]], 0.25)
