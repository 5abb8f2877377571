"""Filters of the corruptions: separable filters as matrices, motion along a line.

A separable filter of an image is `rows @ image @ columns.T`. This form is exact for every border rule and for
kernels wider than the image, works on batches, and keeps full precision on a GPU, unlike convolutions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def border_index(index: Tensor, size: int, border: str) -> Tensor:
    """Map out-of-range indices into 0 .. size - 1 by SciPy's border rules `nearest`, `reflect`, `mirror` and `wrap`.

    >>> [border_index(torch.arange(-3, 7), 4, border).tolist() for border in ("reflect", "mirror", "wrap")]
    [[2, 1, 0, 0, 1, 2, 3, 3, 2, 1], [3, 2, 1, 0, 1, 2, 3, 2, 1, 0], [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]]
    """
    if border == "nearest":
        return index.clamp(0, size - 1)
    if border == "wrap":
        return index % size
    period = 2 * size if border == "reflect" else 2 * size - 2
    index = index % period
    return torch.minimum(index, (2 * size - 1 if border == "reflect" else period) - index)


def banded_matrix(taps: Tensor, size: int, border: str) -> Tensor:
    """Return the matrix `[size, size]` that correlates a line with `taps` (an odd number, centred)."""
    radius = len(taps) // 2
    index = torch.arange(size)[:, None] + torch.arange(-radius, radius + 1)
    matrix = torch.zeros(size, size, dtype=taps.dtype)
    return matrix.scatter_add_(1, border_index(index, size, border), taps.expand(size, -1))


def gaussian_taps(sigma: float, radius: int) -> Tensor:
    """Return a sampled Gaussian `[2 * radius + 1]` that sums to 1; a single 1 if sigma is 0."""
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    taps = (-0.5 * (offsets / sigma) ** 2).exp() if sigma > 0 else (offsets == 0).double()
    return taps / taps.sum()


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return `rows [H', H] @ x [..., H, W] @ columns.T [W, W']`."""
    return rows.to(x) @ x @ columns.to(x).T


def gaussian_filter(x: Tensor, sigma: float, border: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Blur the last two dimensions by a Gaussian, as `scipy.ndimage.gaussian_filter` does."""
    taps = gaussian_taps(sigma, int(truncate * sigma + 0.5))
    height, width = x.shape[-2:]
    return separable(x, banded_matrix(taps, height, border), banded_matrix(taps, width, border))


def correlate(x: Tensor, kernel: Tensor, border: str = "mirror") -> Tensor:
    """Correlate the last two dimensions with a kernel `[K, K]`, K odd, by one banded matrix per row."""
    height, width = x.shape[-2:]
    radius = len(kernel) // 2
    out = torch.zeros_like(x)
    for offset, taps in enumerate(kernel, start=-radius):
        if bool((taps != 0).any()):
            shifted = border_index(torch.arange(height) + offset, height, border).to(x.device)
            out += x.index_select(-2, shifted) @ banded_matrix(taps, width, border).to(x).T
    return out


def zoom_matrix(size: int, factor: float) -> Tensor:
    """Return the matrix `[size, size]` that enlarges the middle of a line linearly by `factor` of at least 1."""
    crop = math.ceil(size / factor)
    enlarged = round(crop * factor)
    start, trim = (size - crop) // 2, (enlarged - size) // 2
    at = start + (torch.arange(size, dtype=torch.float64) + trim) * ((crop - 1) / (enlarged - 1))
    return (1 - (at[:, None] - torch.arange(size)).abs()).clamp(min=0)


def zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the middle of images `[..., H, W]` to their full size."""
    height, width = x.shape[-2:]
    return separable(x, zoom_matrix(height, factor), zoom_matrix(width, factor))


def motion(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Blur images `[B, C, H, W]` along a line, each at its angle `[B]`, with half a Gaussian.

    As in ImageMagick, used by the published benchmark, the `2 radius + 1` points of the line are rounded to whole
    pixels, and points outside the image use the nearest pixel.
    """
    height, width = x.shape[-2:]
    steps = torch.arange(2 * radius + 1, dtype=torch.float64, device=x.device)
    weights = (-0.5 * (steps / sigma) ** 2).exp()
    weights = (weights / weights.sum()).to(x.dtype)
    angle = torch.deg2rad(degrees.double())[:, None]
    right = (steps * angle.cos() - 0.5).ceil().long()  # [B, steps]
    down = (steps * angle.sin() - 0.5).ceil().long()
    image = torch.arange(len(x), device=x.device)[:, None, None]
    pixels = x.movedim(1, -1)
    out = torch.zeros_like(pixels)
    for step, weight in enumerate(weights):
        row = border_index(torch.arange(height, device=x.device) + down[:, step, None], height, "nearest")
        column = border_index(torch.arange(width, device=x.device) + right[:, step, None], width, "nearest")
        out += weight * pixels[image, row[:, :, None], column[:, None, :]]
    return out.movedim(-1, 1)


def luma(x: Tensor) -> Tensor:
    """Return grey values `[B, 1, H, W]` of images `[B, C, H, W]` (ITU-R BT.601); grey images are unchanged."""
    if x.shape[1] == 1:
        return x
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def colour(x: Tensor, red: float, green: float, blue: float) -> Tensor:
    """Return a colour `[1, C, 1, 1]` for images `[B, C, H, W]`, or its grey value for grey images."""
    rgb = x.new_tensor([red, green, blue]).reshape(1, 3, 1, 1)
    return rgb if x.shape[1] == 3 else luma(rgb)
