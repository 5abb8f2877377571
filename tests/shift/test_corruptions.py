"""Properties of all corruptions of images; `test_corruption_forms.py` has those of each."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multitudes.shift import CORRUPTIONS, EXTRA, corrupt, corruptions

ALL = CORRUPTIONS + EXTRA
SEVERITIES = range(1, 6)
WITHOUT_CHANCE = (
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
)
BLURS = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur")


def natural(batch: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth images with the spectrum of photographs and correlated channels."""
    generator = torch.Generator().manual_seed(seed)
    frequency = (torch.fft.fftfreq(height)[:, None] ** 2 + torch.fft.rfftfreq(width) ** 2).sqrt()
    spectrum = torch.fft.rfft2(torch.randn(batch, channels, height, width, generator=generator))
    images = torch.fft.irfft2(spectrum / frequency.clamp(min=1 / max(height, width)) ** 1.5, s=(height, width))
    images = images + 2 * images.mean(1, keepdim=True)
    images = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), keepdim=True)
    return (0.45 + 0.18 * images).clamp(0, 1)


def published(name: str, side: int, severity: int) -> Any:
    """Parameters of a severity for images of this size."""
    corruption = (corruptions._CORRUPTIONS | corruptions._EXTRA)[name]
    return (corruption.large if side > 64 else corruption.small)[severity - 1]


# -- properties of all of them ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 8, 8), (2, 1, 32, 32), (2, 3, 33, 47), (1, 3, 8, 70)], ids=str)
def test_shape_dtype_range_and_input_are_preserved(name: str, shape: tuple[int, ...]) -> None:
    for severity in SEVERITIES:
        images = natural(*shape)
        before = images.clone()
        out = corrupt(images, name, severity, seed=3)
        assert out.shape == images.shape and out.dtype == images.dtype
        assert bool(((out >= 0) & (out <= 1)).all())
        assert torch.equal(images, before)
        out.zero_()
        assert torch.equal(images, before), "the result shares memory with the input"


@pytest.mark.parametrize("name", ALL)
def test_empty_batches_and_large_images_work(name: str) -> None:
    assert corrupt(torch.zeros(0, 3, 32, 32), name, 1).shape == (0, 3, 32, 32)
    images = natural(1, 3, 224, 224)
    out = corrupt(images, name, 5, seed=0)
    assert out.shape == images.shape
    assert bool(((out >= 0) & (out <= 1)).all())
    assert float((out - images).square().mean()) > 5e-4


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_equals_rounded_single_precision(name: str, dtype: torch.dtype) -> None:
    images = natural(2, 3, 32, 32).to(dtype)
    out = corrupt(images, name, 3, seed=0)
    assert out.dtype == dtype
    assert torch.equal(out, corrupt(images.float(), name, 3, seed=0).to(dtype))


@pytest.mark.parametrize("name", ALL)
def test_a_seed_repeats_corruptions_which_differ_between_images(name: str) -> None:
    images = natural(1, 3, 32, 32).repeat(2, 1, 1, 1)
    state = torch.get_rng_state()
    first, again, other = (corrupt(images, name, 4, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert torch.equal(first, other) == torch.equal(first[0], first[1]) == (name in WITHOUT_CHANCE)


def test_without_a_seed_torchs_random_state_is_used() -> None:
    images = natural(2, 3, 32, 32)
    torch.manual_seed(0)
    first, second = (corrupt(images, "gaussian_noise", 1) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(corrupt(images, "gaussian_noise", 1), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", [*BLURS, "snow", "fog", "brightness", "contrast", "elastic_transform", "pixelate"])
@pytest.mark.parametrize("side", [32, 80])
def test_grey_images_are_corrupted_like_three_equal_channels(name: str, side: int) -> None:
    grey = natural(2, 1, side, side)
    out = corrupt(grey.repeat(1, 3, 1, 1), name, 5, seed=1)
    torch.testing.assert_close(out, corrupt(grey, name, 5, seed=1).repeat(1, 3, 1, 1))


def test_saturate_keeps_grey_images() -> None:
    images = natural(2, 1, 16, 16)
    assert torch.equal(corrupt(images, "saturate", 5), images)


def test_images_above_64_pixels_use_the_parameters_of_imagenet() -> None:
    for height, width, shift in ((64, 64, 0.05), (8, 64, 0.05), (64, 65, 0.1), (65, 8, 0.1)):
        out = corrupt(torch.full((1, 1, height, width), 0.25), "brightness", 1)
        torch.testing.assert_close(out, torch.full_like(out, 0.25 + shift))


# Sums of the published constants (make_cifar_c.py and make_imagenet_c.py at github.com/hendrycks/robustness), weighted
# by their position, for small and for large images. Constants of elastic_transform are fractions of a side.
CHECKSUMS = {
    "gaussian_noise": (1.26, 3.8),
    "shot_noise": (1850, 181),
    "impulse_noise": (0.69, 2.45),
    "defocus_blur": (33.5, 205.2),
    "glass_blur": (123.55, 251.8),
    "motion_blur": (252, 735),
    "zoom_blur": (504.3, 305.64),
    "snow": (2163.3, 2474.2),
    "frost": (32.9, 37.35),
    "fog": (92.45, 112.7),
    "brightness": (3, 5.5),
    "contrast": (4.9, 2.25),
    "elastic_transform": (7.65, 18.47428571),
    "pixelate": (11.55, 5.25),
    "jpeg_compression": (784, 181),
    "speckle_noise": (2.26, 6.4),
    "gaussian_blur": (11.9, 60),
    "spatter": (261.28, 386.39),
    "saturate": (47.4, 228.4),
}


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_the_published_constants(name: str) -> None:
    for side, checksum in zip((64, 65), CHECKSUMS[name], strict=True):
        constants = np.array([published(name, side, severity) for severity in SEVERITIES], dtype=float).ravel()
        assert constants @ np.arange(1, len(constants) + 1) == pytest.approx(checksum, rel=1e-9)


# Severities whose published parameters change images no more than the severity before, for images of up to 64 pixels
# a side and for larger ones.
NOT_MORE = {
    "small": {
        "glass_blur": {2, 3, 5},  # pixels go as far and as often as before, and more blur evens out their exchange
        "motion_blur": {4},  # a longer line with the same sigma: its end has no weight
        "frost": {4, 5},  # hardly more ice on a much darker image: the one makes up for the other
        "elastic_transform": {2, 3, 4, 5},  # ever smaller affine parts
        "spatter": {4},  # mud instead of water
        "saturate": {3},  # more saturation after less
    },
    "large": {
        "frost": {4},  # as much ice on a darker image
        "elastic_transform": {3},  # finer, and much smaller
        "saturate": {3},
    },
}
# Those for which it is up to the images: frost brightens and darkens, fog 4 is as thick as fog 3 and of finer detail.
UP_TO_THE_IMAGES = {"small": {"frost": {3}}, "large": {"frost": {2}, "fog": {4}}}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", ["small", "large"])
def test_the_mean_squared_change_grows_with_severity_up_to_known_exceptions(name: str, size: str) -> None:
    images = natural(64, 3, 32, 32) if size == "small" else natural(12, 3, 96, 96)
    change = [float((corrupt(images, name, severity, seed=0) - images).square().mean()) for severity in SEVERITIES]
    falls = {number for number, (a, b) in enumerate(itertools.pairwise(change), start=2) if b <= a * (1 + 1e-4)}
    either = UP_TO_THE_IMAGES[size].get(name, set())
    assert falls - either == NOT_MORE[size].get(name, set())


# -- what cannot be corrupted ------------------------------------------------------------------------------

GOOD = torch.full((2, 3, 8, 8), 0.5)


def spoilt(value: float) -> Tensor:
    images = GOOD.clone()
    images[1, 2, 3, 4] = value
    images[1, 2, 3, 5] = value
    return images


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((GOOD, "rain", 1), r"name must be one of gaussian_noise, .*, saturate, got 'rain'"),
        ((GOOD, "fog", 0), "severity must be a whole number from 1 to 5, got 0"),
        ((GOOD, "fog", True), "severity .* got True"),
        ((GOOD, "fog", 1, -1), "seed must be None or a whole number, .* got -1"),
        ((GOOD.numpy(), "fog", 1), r"images must be a tensor .* got ndarray"),
        ((GOOD[0], "fog", 1), r"images must be \[B, C, H, W\] .* got \[3, 8, 8\]"),
        ((torch.zeros(1, 2, 8, 8), "fog", 1), r"images .* 1 or 3 channels .* got \[1, 2, 8, 8\]"),
        ((torch.zeros(1, 3, 8, 7), "fog", 1), r"images .* 8 or more pixels a side, got \[1, 3, 8, 7\]"),
        ((torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "fog", 1), r"images must have a dtype of .* got torch.uint8"),
        ((spoilt(1.5), "fog", 1), r"images must lie in \[0, 1\], got 1.5 at \[1, 2, 3, 4\]"),
        ((spoilt(float("nan")), "fog", 1), r"images must lie in \[0, 1\], got nan at \[1, 2, 3, 4\]"),
    ],
)
def test_invalid_arguments_raise_an_error(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        corrupt(*arguments)
