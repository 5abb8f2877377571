"""Noise of one frequency, and attacks limited to a band of frequencies."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.shift.attacks import fgsm
from multitudes.shift.frequency import band_limited, band_mask, frequency_noise

SIZES = [(32, 32), (8, 8), (9, 9), (12, 20), (7, 10), (1, 16)]


def frequency_of(row: int, column: int, height: int, width: int) -> float:
    """The larger of a coefficient's two frequencies in units of pi, a coefficient at a time."""
    down = min(row, height - row) / height * 2
    across = min(column, width - column) / width * 2
    return max(down, across)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_mask_is_a_square_ring(height: int, width: int) -> None:
    for low, high in [(0.0, 0.3), (0.23, 0.61), (0.6, 1.0), (0.0, 1.0)]:
        mask = band_mask(height, width, low, high)
        for row in range(height):
            for column in range(width):
                frequency = frequency_of(row, column, height, width)
                assert mask[row, column] == (low <= frequency < high or frequency == high == 1)


@pytest.mark.parametrize("pixels", [8, 20, 32, 40, 60, 224])
@pytest.mark.parametrize("width", [0.05, 0.1, 0.125, 0.2, 0.25])
def test_rings_at_multiples_of_their_width_partition_the_spectrum(pixels: int, width: float) -> None:
    rings = [
        band_mask(pixels, pixels, i * width - width / 2, i * width + width / 2) for i in range(round(1 / width) + 1)
    ]
    assert torch.equal(torch.stack(rings).sum(0), torch.ones(pixels, pixels, dtype=torch.int64))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_bands_of_an_image_sum_to_it(height: int, width: int) -> None:
    images = torch.randn(3, 2, height, width, dtype=torch.float64)
    edges = [0.0, 0.21, 1.0] if min(height, width) < 7 else [0.0, 0.2, 0.5, 1.0]
    parts = [band_limited(images, low, high) for low, high in pairwise(edges)]
    torch.testing.assert_close(sum(parts), images)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_noise_is_gaussian_noise_inside_the_ring(height: int, width: int) -> None:
    x = torch.rand(4, 3, height, width, dtype=torch.float64)
    delta = 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).numpy()
    frequencies = [[frequency_of(row, column, height, width) for column in range(width)] for row in range(height)]
    inside = (np.array(frequencies) >= 0.35) & (np.array(frequencies) < 0.65)
    inverse = np.fft.ifft2(np.fft.fft2(delta) * inside)
    assert np.abs(inverse.imag).max() < 1e-12  # the mask is symmetric, so that noise is real
    noisy = frequency_noise(x, 0.5, size=0.3, width=0.3, seed=9)
    np.testing.assert_allclose(noisy.numpy(), x.numpy() + inverse.real, atol=1e-12)


def test_a_seed_repeats_the_noise() -> None:
    x = torch.rand(2, 1, 8, 8)
    before, state = x.clone(), torch.get_rng_state()
    first, second, other = (frequency_noise(x, 0.5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(frequency_noise(x, 0.5), frequency_noise(x, 0.5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_noise_keeps_shape_dtype_and_bounds(dtype: torch.dtype) -> None:
    x = torch.rand(2, 1, 8, 8).to(dtype)
    noisy = frequency_noise(x, 0.5, size=3.0, seed=1, bounds=(0, 1))
    assert noisy.dtype == dtype
    assert noisy.shape == x.shape
    assert noisy.min() == 0
    assert noisy.max() == 1


class EnergyDetector(nn.Module):
    """Class 1 for images with energy in a band."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        energy = band_limited(x, self.low, self.high).flatten(1).square().mean(1)
        return torch.stack([torch.full_like(energy, 1e-4), energy], 1)


def test_accuracy_falls_only_at_the_frequencies_that_the_network_uses() -> None:
    net, x, y = EnergyDetector(0.5, 0.7), torch.full((30, 1, 16, 16), 0.5), torch.zeros(30, dtype=torch.int64)
    for number in range(9):
        noisy = frequency_noise(x, number / 8, size=0.5, width=0.125, seed=0)
        assert mt.metrics.accuracy(mt.predict(net, noisy), y) == float(number not in (4, 5))


def test_a_band_limited_perturbation_has_energy_only_in_its_band() -> None:
    torch.manual_seed(0)
    net = mt.deep_ensemble(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), members=3).double()
    x, y = torch.full((10, 1, 8, 8), 0.5, dtype=torch.float64), torch.arange(10)
    full = fgsm(net, x, y, 0.1).images - x
    limited = fgsm(net, x, y, 0.1, frequencies=(0.25, 0.6)).images - x
    energy = torch.fft.fft2(limited).abs()
    assert energy[..., ~band_mask(8, 8, 0.25, 0.6)].max() < 1e-12
    torch.testing.assert_close(limited.abs().flatten(1).amax(1), torch.full((10,), 0.1, dtype=torch.float64))
    part = band_limited(full, 0.25, 0.6)
    torch.testing.assert_close(F.cosine_similarity(part.flatten(1), limited.flatten(1)), torch.ones(10).double())


def test_a_band_without_energy_changes_nothing() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(49, 2))
    net[1].weight.data.copy_(torch.tensor([1.0, -1.0])[:, None].expand(2, 49))  # the sign is the same everywhere
    x = torch.full((2, 1, 7, 7), 0.5)
    assert torch.equal(fgsm(net, x, torch.tensor([0, 1]), 0.1, frequencies=(0.5, 1.0)).images, x)


IMAGES, CLASSES = torch.rand(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frequency": 1.2}, "frequency must be 0 or more and at most 1, got 1.2"),
        ({"frequency": float("nan")}, "frequency must be 0 or more and at most 1, got nan"),
        ({"frequency": 0.1}, "no frequency of 8 x 8 images is from 0.05 to 0.15"),
        ({"width": 0}, "width must be above 0 and at most 1, got 0"),
        ({"size": -1.0}, "size must be 0 or more, got -1.0"),
        ({"seed": 1.5}, "seed must be None or a whole number, .* got 1.5"),
        ({"bounds": (1, 0)}, r"bounds must be \(minimum, maximum\) in this order, got \(1, 0\)"),
        ({"bounds": 3}, "bounds must be None or"),
        ({"images": torch.zeros(8, 8, dtype=torch.uint8)}, "images must be a floating-point tensor, got torch.uint8"),
        ({"images": torch.zeros(8)}, r"images must be images \[..., H, W\], got shape \[8\]"),
    ],
)
def test_invalid_arguments_raise_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frequency_noise(**{"images": IMAGES, "frequency": 0.5} | arguments)
