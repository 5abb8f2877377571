"""Noise of one frequency.

Park & Kim, "Blurs Behave Like Ensembles: Spatial Smoothings to Improve Accuracy, Uncertainty, and Robustness" (2022),
section 2.2 and Fig. 6: `x_noise = x + F^-1(F(delta) * M_f)`, where delta is Gaussian noise, F the two-dimensional
Fourier transform and M_f a mask that passes a ring of frequencies of width w.

Frequencies are in units of pi radians per pixel, so the paper's 0.3 pi is 0.3, and 1 is the highest possible. The
frequency of a wave is the larger of its vertical and horizontal frequency, as in the authors' code, where M_f is the
difference of two squares around frequency 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multitudes.base.checks import check_number
from multitudes.shift.arguments import Bounds, check_bounds, check_floats
from multitudes.shift.noise import generator_of, normal

_DIGITS = 9  # frequencies are rounded before comparison, so that neighbouring bands have no overlap or gap


def band_mask(height: int, width: int, low: float, high: float) -> Tensor:
    """Return a mask of the coefficients of `torch.fft.fft2` in the band `low <= frequency < high`, `[H, W]` booleans.

    A band that ends at 1 includes the frequency 1. A 4 x 4 image has the frequencies 0, 0.5 and 1:

    >>> band_mask(4, 4, 0.5, 0.9).int()
    tensor([[0, 1, 0, 1],
            [1, 1, 0, 1],
            [0, 0, 0, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    frequency = _frequencies(height, width)
    mask = (frequency >= round(low, _DIGITS)) & (frequency < round(high, _DIGITS))
    return mask | (frequency == 1) if round(high, _DIGITS) == 1 else mask


def band_limited(images: Tensor, low: float, high: float) -> Tensor:
    """Return the part of `images`, `[..., H, W]`, in a frequency band: `F^-1(F(images) * M)`.

    >>> stripes = torch.tensor([[1.0, 3.0, 1.0, 3.0]] * 4)  # a mean of 2, and a wave of two pixels' length
    >>> band_limited(stripes, 0.9, 1)[0]
    tensor([-1.,  1., -1.,  1.])
    """
    check_floats("images", images)
    height, width = images.shape[-2:]
    mask = band_mask(height, width, low, high)
    if not mask.any():
        raise ValueError(
            f"no frequency of {height} x {width} images is from {low:g} to {high:g}: "
            f"they are multiples of {2 / height:.3g} down and of {2 / width:.3g} across"
        )
    values = images.to(torch.promote_types(images.dtype, torch.float32))
    half = mask[:, : width // 2 + 1].to(images.device)  # the spectrum of a real image is symmetric
    passed = torch.fft.irfft2(torch.fft.rfft2(values) * half, s=(height, width))
    return passed.to(images.dtype)


def frequency_noise(
    images: Tensor,
    frequency: float,
    size: float = 0.1,
    width: float = 0.1,
    seed: int | None = None,
    *,
    bounds: Bounds = None,
) -> Tensor:
    """Add Gaussian noise of one frequency to images: `x + F^-1(F(delta) * M_f)`.

    A network's accuracy against it (Fig. 6c) is `metrics.accuracy(predict(net, frequency_noise(x, f)), y)`.

    Args:
        images: Floating-point images `[..., H, W]`.
        frequency: f, the middle of the ring, from 0 to 1 in units of pi.
        size: Standard deviation of delta. That of the noise is `size` times the square root of the share of
            coefficients in the ring, which increases with f.
        width: w, from the inner to the outer edge of the ring.
        seed: Seed of delta, the same for every frequency and device, without using torch's global generator.
        bounds: Range to clip the noisy images to. Clipping adds a little noise at other frequencies.

    Example:
        >>> x = torch.zeros(1, 1, 32, 32)
        >>> noise = frequency_noise(x, 0.5, size=1.0, seed=0)
        >>> (torch.fft.fft2(noise).abs() > 1e-3).sum(), band_mask(32, 32, 0.45, 0.55).sum()
        (tensor(64), tensor(64))
    """
    check_floats("images", images)
    check_number("frequency", frequency, 0, 1)
    check_number("width", width, 0, 1, above=True)
    check_number("size", size, 0)
    check_bounds(bounds)
    like = torch.empty(0, dtype=torch.promote_types(images.dtype, torch.float32))  # CPU: the same on all devices
    delta = size * normal(images.shape, like, generator_of(seed)).to(images.device)
    noisy = (images + band_limited(delta, frequency - width / 2, frequency + width / 2)).to(images.dtype)
    return noisy if bounds is None else noisy.clamp(*bounds)


# -- for the attacks ---------------------------------------------------------------------------------------


def band_at_full_size(change: Tensor, low: float, high: float) -> Tensor:
    """Limit changes `[B, ..., H, W]` to a band, and scale each to a largest value of 1; 0 if the band is empty."""
    part = band_limited(change, low, high)
    peak = part.flatten(1).abs().amax(1).view(-1, *[1] * (part.dim() - 1))
    return torch.where(peak > 1e-5, part / peak.clamp(min=1e-5), 0.0)  # smaller peaks are rounding errors


def check_band(frequencies: tuple[float, float], x: Tensor) -> None:
    """Raise unless the band is two frequencies in order that contain a frequency of the images."""
    if not isinstance(frequencies, tuple) or len(frequencies) != 2 or not 0 <= frequencies[0] < frequencies[1] <= 1:
        raise ValueError(f"frequencies must be (low, high), from 0 to 1 in units of pi, got {frequencies!r}")
    if not isinstance(x, Tensor) or x.dim() < 3:
        raise ValueError(f"x must be images [B, ..., H, W] with frequencies, got {getattr(x, 'shape', x)}")
    band_limited(torch.zeros(x.shape[-2:]), *frequencies)  # raises for an empty band


# -- details -------------------------------------------------------------------------------------------------


def _frequencies(height: int, width: int) -> Tensor:
    """Return the frequency of each coefficient of `torch.fft.fft2`, in units of pi, `[H, W]`."""
    down = 2 * torch.fft.fftfreq(height, dtype=torch.float64).abs()
    across = 2 * torch.fft.fftfreq(width, dtype=torch.float64).abs()
    return torch.maximum(down[:, None], across).round(decimals=_DIGITS)
