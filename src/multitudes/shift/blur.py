"""Blur: defocus, glass, motion, zoom, Gaussian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from multitudes.shift.filters import correlate, gaussian_filter, gaussian_taps, motion, zoom
from multitudes.shift.noise import uniform


def disk(radius: float, rim: float) -> Tensor:
    """Return a disk `[K, K]` with a blurred rim that sums to 1.

    The published kernel truncates the blur at radius 8 and sums to slightly more than 1. This grid includes the rim.
    """
    spread = 1 if radius <= 8 else 2
    reach = math.ceil(radius) + spread
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (offsets[:, None] ** 2 + offsets**2 <= radius**2).double()
    taps = gaussian_taps(rim, spread)
    return correlate(inside / inside.sum(), taps[:, None] * taps, border="nearest")  # the border is 0


def defocus_blur(x: Tensor, generator: torch.Generator, radius: float, rim: float) -> Tensor:
    """Correlate with a disk, like a lens out of focus."""
    return correlate(x, disk(radius, rim))


def glass_blur(x: Tensor, generator: torch.Generator, sigma: float, reach: int, rounds: int) -> Tensor:
    """Blur, exchange neighbouring pixels, and blur again, like frosted glass.

    As in the published code, each pixel, from the last to the first, is exchanged with a random one at most `reach`
    away. (For colour images that code copies one pixel over the other, since NumPy slices are views.)
    """
    blurred = gaussian_filter(x, sigma)
    batch, channels, height, width = x.shape
    rows, columns = max(height - 2 * reach, 0), max(width - 2 * reach, 0)
    shape = (rounds, 2, batch, rows, columns)
    moves = torch.randint(-reach, reach, shape, generator=generator, device=x.device)
    source = exchange_pixels(height, width, reach, moves)
    shuffled = blurred.flatten(2).gather(2, source[:, None].expand(-1, channels, -1)).view_as(x)
    return gaussian_filter(shuffled, sigma)


def exchange_pixels(height: int, width: int, reach: int, moves: Tensor) -> Tensor:
    """Return the source of each shuffled pixel, `[B, H * W]`, for moves `[rounds, 2, B, rows, columns]`.

    `moves[round, :, image, i, j]` is the offset, in rows and columns, from the pixel that is i rows and j columns
    before the last movable one to its partner. The published loop runs over i, then j. An exchange touches less than
    `2 reach` rows and columns around its pixel. So pixels with equal `n = 2 reach i + j` touch no common pixel, and of
    two pixels that do, the one with the smaller n comes first. One batch per n, in ascending order, equals the loop.
    """
    batch, rows, columns = moves.shape[2:]
    source = torch.arange(height * width, device=moves.device).repeat(batch, 1)
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    number = (2 * reach * i + j).flatten()
    order = number.argsort()
    place = ((height - reach - i) * width + width - reach - j).flatten()[order].to(moves.device)
    at_once = number.unique(return_counts=True)[1].tolist()
    for down, right in moves.flatten(3)[..., order.to(moves.device)]:
        partners = place + down * width + right
        for here, there in zip(place.split(at_once), partners.split(at_once, 1), strict=True):
            moved = source[:, here]
            source[:, here] = source.gather(1, there)
            source.scatter_(1, there, moved)
    return source


def motion_blur(x: Tensor, generator: torch.Generator, radius: int, sigma: float) -> Tensor:
    """Blur along a line at a random angle for each image, -45 to 45 degrees, like a moving camera."""
    return motion(x, radius, sigma, uniform((len(x),), -45, 45, x, generator))


def zoom_blur(x: Tensor, generator: torch.Generator, count: int, step: float) -> Tensor:
    """Average the image and its enlargements, like a camera moving towards its object."""
    total = x.clone()
    for number in range(count):
        total += zoom(x, 1 + number * step)
    return total / (count + 1)


def gaussian_blur(x: Tensor, generator: torch.Generator, sigma: float) -> Tensor:
    """Blur by a Gaussian."""
    return gaussian_filter(x, sigma)
