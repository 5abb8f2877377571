"""Weather: snow, frost, fog, brightness; and spatter, of water or mud."""

from __future__ import annotations

import torch
from torch import Tensor

from multitudes.shift.filters import (
    colour,
    correlate,
    fold,
    gaussian_filter,
    level,
    luma,
    motion,
    normal,
    uniform,
    zoom,
)

SNOW = (  # mean and deviation of the flakes, their size, threshold, radius and sigma of their fall, what stays of x
    (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
)
FROST = (  # what stays of the image, how much ice is added
    ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
)
FOG = (  # thickness, how fast its detail fades
    ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
)
BRIGHTNESS = (0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)  # added to the value
SPATTER = (  # mean, deviation and blur of the liquid, threshold, strength (water) or blur (mud), whether it is mud
    (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
    (
        (0.65, 0.3, 4, 0.69, 0.6, False),
        (0.65, 0.3, 3, 0.68, 0.6, False),
        (0.65, 0.3, 2, 0.68, 0.5, False),
        (0.65, 0.3, 1, 0.65, 1.5, True),
        (0.67, 0.4, 1, 0.65, 1.5, True),
    ),
)


def snow(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Whiten the image and add motion-blurred flakes, falling at an angle of each image's own, and once more turned."""
    mean, deviation, size, threshold, radius, sigma, kept = level(x, severity, *SNOW)
    flakes = zoom(mean + deviation * normal((len(x), 1, *x.shape[2:]), x, generator), size)
    flakes = torch.where(flakes < threshold, 0, flakes).clamp(0, 1)
    flakes = motion(flakes, radius, sigma, uniform((len(x),), -135, -45, x, generator))
    whitened = kept * x + (1 - kept) * torch.maximum(x, luma(x) * 1.5 + 0.5)
    return whitened + flakes + flakes.flip(-2, -1)


def frost(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Dim the image and add ice: `a x + b ice`.

    The published benchmark adds crops of photographs, which cannot be shipped. Here the ice is generated, see `ice`;
    a and b are the published ones.
    """
    kept, added = level(x, severity, *FROST)
    return kept * x + added * ice(x, generator) * colour(x, 0.85, 0.94, 1.0)


def ice(x: Tensor, generator: torch.Generator) -> Tensor:
    """A procedural ice texture `[B, 1, H, W]` in [0, 1], another for each image.

    Ridges of smooth noise at three scales give the veins; short streaks in three directions, 60 degrees apart as in
    ice crystals, turned by an angle of each image's own, give the needles. Sizes scale with the image.
    """
    shape, side = (len(x), 1, *x.shape[2:]), max(x.shape[2:])
    veins = torch.zeros(shape, dtype=x.dtype, device=x.device)
    for share, scale in ((0.5, 8), (0.3, 16), (0.2, 32)):
        smooth = gaussian_filter(normal(shape, x, generator), side / scale, "reflect")
        veins += share * (-2 * smooth.abs() / smooth.square().mean((1, 2, 3), keepdim=True).sqrt()).exp()
    turn = uniform((len(x),), 0, 60, x, generator)
    length = max(side // 12, 2)
    needles = torch.zeros_like(veins)
    for direction in (0, 60, 120):
        seeds = (normal(shape, x, generator) > 1.5).to(x.dtype)
        needles = torch.maximum(needles, motion(seeds, length, length, turn + direction))
    return _stretched(_stretched(veins) + _stretched(needles))


def _stretched(x: Tensor) -> Tensor:
    """Each image `[B, 1, H, W]` stretched to [0, 1]; a constant one becomes 0."""
    x = x - x.amin((1, 2, 3), keepdim=True)
    top = x.amax((1, 2, 3), keepdim=True)
    return x / torch.where(top > 0, top, 1)


def fog(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """`(x + c p) m / (m + c)`, p a plasma cloud in [0, 1] and m the image's maximum."""
    thickness, decay = level(x, severity, *FOG)
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * plasma(x, decay, generator)) * brightest / (brightest + thickness)


def plasma(x: Tensor, decay: float, generator: torch.Generator) -> Tensor:
    """Clouds `[B, 1, H, W]` in [0, 1] by the diamond-square algorithm, another for each image.

    On a periodic map whose side is a power of two, each point between known ones is their mean and a random number,
    whose size falls by `decay` squared from one octave to the next (as in the published code).
    """
    side = 1 << (max(x.shape[2:]) - 1).bit_length()
    cloud = x.new_zeros(len(x), side, side)
    wibble, step = 100.0, side

    def wibbled(total: Tensor) -> Tensor:
        return total / 4 + wibble * uniform(total.shape, -wibble, wibble, x, generator)

    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        cloud[:, half::step, half::step] = wibbled(pairs + pairs.roll(-1, 2))
        centres = cloud[:, half::step, half::step]
        cloud[:, ::step, half::step] = wibbled(centres + centres.roll(1, 1) + corners + corners.roll(-1, 2))
        cloud[:, half::step, ::step] = wibbled(centres + centres.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wibble = half, wibble / decay
    return _stretched(cloud[:, None])[..., : x.shape[2], : x.shape[3]]


def brightness(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Add c to the value of hue, saturation and value, which scales a pixel's channels alike; black becomes grey."""
    value = x.amax(1, keepdim=True)
    brighter = (value + level(x, severity, *BRIGHTNESS)).clamp(max=1)
    return torch.where(value > 0, x * (brighter / torch.where(value > 0, value, 1)), brighter)


def spatter(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Drops of water (severities 1 to 3) or mud (4 and 5) on the lens.

    Water shines at the rims of its drops. The published code finds them by OpenCV's edge detector and an approximate
    distance; here a rim is the outline of a drop and distances are exact, the rest is the same.
    """
    mean, deviation, blur, threshold, strength, mud = level(x, severity, *SPATTER)
    liquid = gaussian_filter(mean + deviation * normal((len(x), 1, *x.shape[2:]), x, generator), blur)
    wet = liquid >= threshold
    if mud:
        opacity = gaussian_filter(wet.to(x.dtype), strength)
        opacity = torch.where(opacity < 0.8, 0, opacity)
        return x * (1 - opacity) + opacity * colour(x, 63 / 255, 42 / 255, 20 / 255)
    shine = torch.where(wet, liquid.clamp(max=1), 0) * _relief(wet, x.dtype)
    top = shine.amax((1, 2, 3), keepdim=True)
    return x + strength * shine / torch.where(top > 0, top, 1) * colour(x, 175 / 255, 238 / 255, 238 / 255)


def _relief(wet: Tensor, dtype: torch.dtype) -> Tensor:
    """The embossed, equalised distance to the rims of the drops, `[B, 1, H, W]` in 0 .. 255."""
    mean = torch.full((3, 3), 1 / 9, dtype=torch.float64)
    emboss = torch.tensor([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=torch.float64)
    distance = correlate(_distance(_rims(wet), 20, dtype), mean) + 1e-3  # rounding must not cut whole numbers
    return correlate(correlate(_equalised(distance.floor().long(), 21).to(dtype), emboss).clamp(0, 255), mean)


def _rims(wet: Tensor) -> Tensor:
    """The pixels of the drops `[B, 1, H, W]` that have a dry neighbour above, below, left or right."""
    dry = torch.zeros_like(wet)
    for dim in (-2, -1):
        size = wet.shape[dim]
        for offset in (-1, 1):
            neighbour = fold(torch.arange(size, device=wet.device) + offset, size, "nearest")
            dry |= ~wet.index_select(dim, neighbour)
    return wet & dry


def _distance(rims: Tensor, limit: int, dtype: torch.dtype) -> Tensor:
    """The Euclidean distance of each pixel to the nearest rim, at most `limit`: along the rows, then the columns."""
    squared = torch.where(rims, 0, float(limit**2)).to(dtype)
    for dim in (-1, -2):
        size, nearest = squared.shape[dim], squared
        for offset in range(-min(limit, size - 1), min(limit, size - 1) + 1):
            neighbour = torch.arange(size, device=rims.device) + offset
            # Past the border the border's own pixel would seem further away than it is, never nearer.
            shifted = squared.index_select(dim, fold(neighbour, size, "nearest")) + offset**2
            nearest = torch.minimum(nearest, shifted)
        squared = nearest
    return squared.sqrt()


def _equalised(values: Tensor, bins: int) -> Tensor:
    """Whole numbers below `bins` spread over 0 .. 255 so that their histogram is flat, image by image."""
    flat = values.flatten(1)
    counts = torch.zeros(len(flat), bins, dtype=torch.long, device=flat.device).scatter_add_(
        1, flat, torch.ones_like(flat)
    )
    lowest = counts.gather(1, flat.amin(1, keepdim=True))
    rest = flat.shape[1] - lowest
    table = ((counts.cumsum(1) - lowest).clamp(min=0) * 255 / rest.clamp(min=1)).round().long()
    spread = torch.where(rest > 0, table.gather(1, flat), flat)
    return spread.view_as(values)
