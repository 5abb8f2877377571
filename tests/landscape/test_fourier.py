"""Feature maps in frequencies, against NumPy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.fourier import feature_spectrum
from multitudes.methods.smoothing import Smooth


def noise(count: int = 32, height: int = 16, width: int = 16) -> Tensor:
    return torch.randn(count, 2, height, width, generator=torch.Generator().manual_seed(0))


def test_smoothing_takes_high_frequencies_away() -> None:
    """Fig. 6b."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 3))
    found = feature_spectrum(mt.smooth(network, example=noise()), noise(), layers=["1", "smooth"]).layers
    before, after = found["1"], found["smooth"]
    high = before.diagonal_frequencies > 0.3
    assert (after.diagonal[high] < before.diagonal[high] - 0.2).all()
    assert after.diagonal[-1] < before.diagonal[-1] - 2


def test_dropout_adds_high_frequencies_to_smooth_maps() -> None:
    """Fig. 6b: little at low frequencies, much at high ones."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), Smooth((1, 4, 6, 4, 1)), nn.Dropout(0.3), nn.Flatten())
    found = feature_spectrum(mt.mc_dropout(network), noise(), layers=["1", "2"], draws=5).layers
    change = found["2"].diagonal - found["1"].diagonal
    assert change[0] == 0 and change[1] < 0.5
    assert change[-1] > 2


def test_amplitudes_are_the_mean_logarithms_that_numpy_finds() -> None:
    x = noise()
    own = feature_spectrum(nn.Identity(), [x[:10], x[10:]]).layers[""]
    logs = np.log(np.abs(np.fft.fft2(x.numpy().astype(np.float64)))).mean((0, 1))
    np.testing.assert_allclose(own.diagonal.numpy(), np.diagonal(logs)[:9] - logs[0, 0], atol=1e-4)
    np.testing.assert_allclose(own.diagonal_frequencies.numpy(), np.arange(9) / 8, atol=1e-6)


def test_white_noise_has_the_same_amplitude_at_all_frequencies() -> None:
    own = feature_spectrum(nn.Identity(), noise(400)).layers[""]
    # Real at the ends, complex between, the mean logarithms of whose sizes are (-gamma - log 2) / 2 and -gamma / 2.
    assert own.diagonal[1:-1].numpy() == pytest.approx(math.log(2) / 2, abs=0.1)
    assert own.diagonal[-1].item() == pytest.approx(0, abs=0.15)


def test_a_blur_has_the_frequency_response_of_its_kernel() -> None:
    """|1 + e^{i pi f}| / 2 = cos(pi f / 2) down and across, on maps without a border."""
    ring = nn.Sequential(nn.Identity(), nn.Conv2d(1, 1, 2, padding="same", padding_mode="circular", bias=False))
    nn.init.constant_(ring[1].weight, 0.25)
    found = feature_spectrum(ring, noise()[:, :1]).layers
    response = (found["1"].diagonal - found["0"].diagonal)[:-1]
    torch.testing.assert_close(response, 2 * torch.cos(math.pi / 2 * torch.arange(8) / 8).log(), rtol=1e-3, atol=1e-3)


def test_maps_that_are_not_square_have_a_diagonal_too() -> None:
    x = noise(4, 8, 24)
    own = feature_spectrum(nn.Identity(), x).layers[""]
    logs = np.log(np.abs(np.fft.fft2(x.numpy()))).mean((0, 1))
    want = [logs[k, 3 * k] - logs[0, 0] for k in range(5)]
    np.testing.assert_allclose(own.diagonal.numpy(), want, atol=1e-4)


def test_layers_without_maps_are_passed_over_unless_maps_turns_them_into_some() -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())
    assert list(feature_spectrum(network, noise()).layers) == ["0"]
    maps = feature_spectrum(network, noise(), layers=["1"], maps=lambda t: t.unflatten(1, (3, 14, 14))).layers["1"]
    torch.testing.assert_close(maps.diagonal, feature_spectrum(network, noise()).layers["0"].diagonal)
