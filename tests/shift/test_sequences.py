import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multitudes as mt
from multitudes import metrics
from multitudes.metrics import robustness
from multitudes.shift import sequences
from multitudes.shift.sequences import DIRECTIONS, SHAPES, translated, video


def images(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# Shift-translated sequences -------------------------------------------------------------------------------

NUMPY = {"reflect": "reflect", "zeros": "constant", "circular": "wrap"}


def by_hand(image, down, right, padding):
    """Translate one image [C, H, W] by padding and cropping in NumPy."""
    by = max(abs(down), abs(right))
    wide = np.pad(image, [(0, 0), (by, by), (by, by)], mode=NUMPY[padding])
    height, width = image.shape[1:]
    return wide[:, by - down : by - down + height, by - right : by - right + width]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "shape, steps, step, padding",
    [
        ((2, 3, 5, 7), 3, 1, "reflect"),
        ((1, 1, 8, 8), 2, 3, "zeros"),
        ((2, 1, 3, 2), 9, 1, "circular"),
        ((2, 1, 3, 2), 9, 1, "reflect"),
    ],
)
def test_images_move_step_by_step(direction, padding, shape, steps, step):
    x = images(*shape)
    frames = translated(x, steps, step, direction, padding)
    assert frames.shape == (steps + 1, *shape)
    down, right = DIRECTIONS[direction]
    for t, b in itertools.product(range(steps + 1), range(len(x))):
        expected = by_hand(x[b].numpy(), t * step * down, t * step * right, padding)
        np.testing.assert_array_equal(frames[t, b], expected)


def test_random_directions_differ_between_images_and_are_reproducible():
    x = images(200, 1, 6, 6)
    state = torch.get_rng_state()
    frames = translated(x, 2, direction="random", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(frames, translated(x, 2, direction="random", seed=3))
    assert not torch.equal(frames, translated(x, 2, direction="random", seed=4))
    ways = [translated(x, 2, direction=name) for name in DIRECTIONS]
    taken = [[torch.equal(frames[:, b], way[:, b]) for way in ways].index(True) for b in range(200)]
    assert set(taken) == set(range(8))


def test_translation_is_differentiable():
    x = images(1, 1, 4, 4).requires_grad_()
    before = x.detach().clone()
    translated(x, 2, padding="zeros").sum().backward()
    assert torch.equal(x, before)
    assert x.grad[0, 0, 0].tolist() == [3, 3, 2, 1]  # how many frames still show the pixel


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64])
@pytest.mark.parametrize("padding", NUMPY)
def test_translation_keeps_the_dtype(dtype, padding):
    x = (100 * images(2, 1, 4, 4)).to(dtype)
    frames = translated(x, 2, padding=padding)
    assert frames.dtype == dtype and torch.equal(frames[0], x)
    assert torch.equal(frames[1, ..., 1:], x[..., :-1])


BAD_TRANSLATIONS = {
    "images": (dict(images=images(3, 4, 4)), r"images must be a tensor \[B, C, H, W\] .* got \[3, 4, 4\]"),
    "line": (dict(images=images(1, 1, 1, 4)), "2 or more pixels a side"),
    "steps": (dict(steps=0), "steps must be a whole number, 1 or more, got 0"),
    "step": (dict(step=0.5), "step must be a whole number, 1 or more, got 0.5"),
    "direction": (dict(direction="north"), "direction must be random or one of right, left, .* got 'north'"),
    "padding": (dict(padding="wrap"), "padding must be one of reflect, zeros, circular, got 'wrap'"),
    "seed": (dict(seed=-1), "seed must be None or a whole number, 0 or more"),
}


@pytest.mark.parametrize("change, message", BAD_TRANSLATIONS.values(), ids=BAD_TRANSLATIONS)
def test_invalid_translations_raise_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        translated(**{"images": images(1, 1, 4, 4), "steps": 2, **change})


# Video ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, height, width", [(8, 8, 8), (33, 33, 33), ((9, 20), 9, 20), ((40, 12), 40, 12)])
@pytest.mark.parametrize("classes", range(2, len(SHAPES) + 1))
def test_every_frame_has_one_shape(size, height, width, classes):
    frames, labels, masks = video(60, size, classes, hold=7, seed=classes)
    assert frames.shape == (60, 3, height, width) and frames.dtype == torch.float32
    assert labels.shape == (60,) and masks.shape == (60, height, width)
    assert frames.min() >= 0 and frames.max() <= 1
    assert labels.min() >= 0 and labels.max() < classes
    for label, mask in zip(labels, masks, strict=True):
        assert mask.unique().tolist() == [0, 1 + int(label)]
        assert 0.05 < (mask > 0).sum() / min(height, width) ** 2 < 0.5


def test_shapes_last_for_hold_frames_and_never_repeat():
    _, labels, _ = video(103, 8, classes=3, hold=10, seed=0)
    values, lengths = labels.unique_consecutive(return_counts=True)
    assert lengths.tolist() == [10] * 10 + [3]
    assert set(values.tolist()) == {0, 1, 2}


def test_a_seed_repeats_a_video():
    state = torch.get_rng_state()
    one, same, other = video(9, 12, seed=5), video(9, 12, seed=5), video(9, 12, seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.frames, other.frames)
    torch.manual_seed(0)
    free = video(9, 12)
    torch.manual_seed(0)
    assert torch.equal(free.frames, video(9, 12).frames)


def test_scenes_are_smooth_and_noise_is_independent():
    still, noisy = video(40, 32, noise=0.0, hold=40, seed=1), video(40, 32, noise=0.1, hold=40, seed=1)
    assert torch.equal(still.labels, noisy.labels) and torch.equal(still.masks, noisy.masks)
    assert (still.frames[1:] - still.frames[:-1]).abs().mean() < 0.02
    grain = (noisy.frames - still.frames)[:, :, still.frames.mean((0, 1)) > 0.35]  # where clipping is rare
    assert grain.std() == pytest.approx(0.1, rel=0.1)
    correlation = np.corrcoef(grain[1:].flatten(), grain[:-1].flatten())[0, 1]
    assert abs(correlation) < 0.02


def test_a_shape_moves_by_less_than_two_pixels_a_frame():
    for seed in range(3):
        masks = video(50, 32, hold=50, seed=seed).masks > 0
        y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
        centres = torch.stack([(masks * axis).sum((1, 2)) / masks.sum((1, 2)) for axis in (y, x)], 1)
        steps = (centres[1:] - centres[:-1]).norm(dim=1)
        assert steps.max() < 2 and centres.std(0).max() > 1


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_inside_the_unit_circle_and_differ(name):
    axis = torch.linspace(-1.5, 1.5, 301)
    v, u = torch.meshgrid(axis, axis, indexing="ij")
    inside = sequences._SHAPES[name](u, v) < 0
    assert torch.hypot(u, v)[inside].max() < 1.01
    for other in set(SHAPES) - {name}:
        overlap = inside & (sequences._SHAPES[other](u, v) < 0)
        union = inside | (sequences._SHAPES[other](u, v) < 0)
        assert overlap.sum() / union.sum() < 0.85


BAD_VIDEOS = {
    "frames": (dict(frames=0), "frames must be a whole number, 1 or more, got 0"),
    "small": (dict(size=7), "size must be a whole number of pixels, 8 or more, or two of them, got 7"),
    "real": (dict(size=(8, 9.5)), r"size must be .* got \(8, 9.5\)"),
    "seven": (dict(classes=7), "classes must be a whole number from 2 to 6, got 7"),
    "noise": (dict(noise=-0.1), "noise must be 0 or more, got -0.1"),
    "hold": (dict(hold=0), "hold must be a whole number, 1 or more, got 0"),
    "seed": (dict(seed=1.5), "seed must be None or a whole number, 0 or more"),
}


@pytest.mark.parametrize("change, message", BAD_VIDEOS.values(), ids=BAD_VIDEOS)
def test_invalid_videos_raise_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        video(**{"frames": 5, **change})


# Temporal smoothing ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """A small network trained on single noisy frames of three shapes."""
    parts = [video(20, 16, classes=3, noise=0.25, hold=2, seed=seed) for seed in range(100)]
    frames, labels = torch.cat([part.frames for part in parts]), torch.cat([part.labels for part in parts])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv2d(3, 12, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(96, 3)),
        )
        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        for _ in range(500):
            batch = torch.randint(len(frames), (64,))
            optimizer.zero_grad()
            F.cross_entropy(net(frames[batch]), labels[batch]).backward()
            optimizer.step()
    return net.eval()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1004))
def test_temporal_smoothing_increases_consistency_and_accuracy(model, seed):
    frames, labels, _ = video(400, 16, classes=3, noise=0.25, hold=50, seed=seed)
    alone = mt.Multitude(model).predict(frames)
    smoothed = mt.predict(mt.temporal(model, frames=5, decay=0.3), frames, batch_size=1)
    before, after = (float(robustness.consistency(p)) for p in (alone, smoothed))
    assert after > before + 0.05
    right, smoothly_right = (float(metrics.accuracy(p, labels)) for p in (alone, smoothed))
    assert smoothly_right > right > 2 / 3
