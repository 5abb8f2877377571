import numpy as np
import pytest
import torch

import multitudes as mt
from multitudes import metrics
from multitudes.tasks.predictive import Predictive
from tests.metrics.metric_cases import classes, logits, text_consistency


def video(t=6, s=3, b=2, c=3, h=4, w=5, seed=0):
    """Logits `[T, S, B, C, H, W]`, and which pixels count, `[T, B, H, W]`."""
    kept = torch.rand(t, b, h, w, generator=torch.Generator().manual_seed(seed + 1)) > 0.3
    return logits(t, s, b, c, h, w, seed=seed), kept


@pytest.mark.parametrize("shape", [{}, {"s": 1}, {"b": 1, "h": 1, "w": 1}, {"t": 2}], ids=str)
def test_consistency_is_the_share_of_pixels_that_keep_their_label(shape):
    z, kept = video(**shape)
    frames = [Predictive(frame) for frame in z]
    found = z.softmax(3).mean(1).argmax(2).numpy()
    for masks in (None, kept):
        result = metrics.consistency(frames, masks)
        expected = text_consistency(found, None if masks is None else masks.numpy())
        assert float(result) == pytest.approx(expected)
        metric = metrics.Consistency()
        for t in range(len(frames) - 1):  # as a stream: each frame with the one before
            metric.update([frame.probs for frame in frames[t : t + 2]], None if masks is None else masks[t : t + 2])
        assert float(metric.compute()) == pytest.approx(expected)


def test_a_single_frame_has_none_to_be_compared_with():
    z, kept = video(t=1)
    with pytest.raises(ValueError, match="frames must be 2 or more, to compare each with the next, got 1"):
        metrics.consistency([Predictive(z[0])], kept)


@pytest.mark.parametrize("name", ["consistency", "cross_entropy_consistency"])
def test_masked_pixels_do_not_count_in_whatever_form_a_video_comes(name):
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


def test_a_still_video_is_consistent_and_a_flickering_one_is_not():
    still, flicker = torch.eye(2)[:1, :, None], torch.eye(2)[1:, :, None]
    assert metrics.consistency([still] * 4) == 1
    assert metrics.consistency([still, flicker] * 2) == 0


def test_the_last_frame_of_a_video_is_not_compared_with_the_first_of_the_next():
    one, other = torch.eye(2)[:1, :, None], torch.eye(2)[1:, :, None]
    metric = metrics.Consistency()
    metric.update([one, one, other])
    assert metric.compute() == 0.5
    metric.update([one.expand(3, 2, 1)] * 2)  # of any size
    assert metric.compute() == 0.8 and metric.sums[1] == 5


def test_temporal_smoothing_makes_a_noisy_video_more_consistent():
    scene = 2 * torch.nn.functional.one_hot(classes(3, 1, 8, 8), 3).movedim(-1, 1)
    stream = mt.temporal(torch.nn.Identity(), frames=5)
    frames = [scene + logits(1, 3, 8, 8, seed=t) for t in range(20)]
    plain = metrics.consistency(Predictive(frame[None]) for frame in frames)
    assert metrics.consistency(map(stream, frames)) > plain + 0.1


def test_bad_frames():
    z, kept = video()
    frames = [Predictive(frame) for frame in z]
    with pytest.raises(ValueError, match="masks must be as many as the frames, got 5 of them, and more frames"):
        metrics.consistency(frames, kept[1:])
    with pytest.raises(ValueError, match="masks must be as many as the frames, got 5 frames, and more masks"):
        metrics.consistency(frames[1:], kept)
    with pytest.raises(ValueError, match="masks must be None or boolean tensors, one for each frame, got int"):
        metrics.consistency(frames, 1)
    with pytest.raises(
        ValueError, match=r"frames\[2\]: mask must be a boolean tensor \[2, 4, 5\], got torch.bool \[4\]"
    ):
        metrics.consistency(frames, [kept[0], kept[1], kept[2, 0, :, 0], *kept[3:]])
    with pytest.raises(ValueError, match=r"masks must be a boolean tensor \[6\], got list"):
        metrics.consistency(torch.eye(3)[[0, 1, 2, 0, 1, 2]], [True] * 6)
    rows = metrics.read_rows(frames[1], kept[1].long())
    for bad, got in ((torch.zeros(3), r"shape \[3\]"), (kept.tolist(), "list"), (None, "NoneType")):
        with pytest.raises(ValueError, match=rf"frames\[1\]: prediction must be .*probabilities.* got {got}"):
            metrics.consistency([frames[0], bad])
    with pytest.raises(ValueError, match=r"frames\[1\]: prediction must be a Predictive or .*, got Rows"):
        metrics.consistency([frames[0], rows])  # of which some may have been left out
