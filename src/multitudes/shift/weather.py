"""Weather: snow, frost, fog, brightness; and spatter, of water or mud."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.shift.filters import colour, correlate, gaussian_filter, luma, motion, zoom
from multitudes.shift.noise import normal, uniform


def snow(
    x: Tensor,
    generator: torch.Generator,
    mean: float,
    deviation: float,
    size: float,
    threshold: float,
    radius: int,
    sigma: float,
    kept: float,
) -> Tensor:
    """Whiten the image and add motion-blurred flakes, falling at a random angle per image, plus the same rotated."""
    flakes = zoom(mean + deviation * normal((len(x), 1, *x.shape[2:]), x, generator), size)
    flakes = torch.where(flakes < threshold, 0, flakes).clamp(0, 1)
    flakes = motion(flakes, radius, sigma, uniform((len(x),), -135, -45, x, generator))
    whitened = kept * x + (1 - kept) * torch.maximum(x, luma(x) * 1.5 + 0.5)
    return whitened + flakes + flakes.flip(-2, -1)


def frost(x: Tensor, generator: torch.Generator, kept: float, added: float) -> Tensor:
    """Dim the image and add ice: `a x + b ice`.

    The published benchmark adds crops of photographs, which cannot be distributed; here `ice` generates them.
    """
    return kept * x + added * ice(x, generator) * colour(x, 0.85, 0.94, 1.0)


def ice(x: Tensor, generator: torch.Generator) -> Tensor:
    """Generate an ice texture `[B, 1, H, W]` in [0, 1], different for each image.

    Veins are ridges of smooth noise at three scales. Needles are short streaks in three directions, 60 degrees apart
    as in ice crystals and rotated by a random angle per image. Sizes scale with the image.
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
    return _stretch(_stretch(veins) + _stretch(needles))


def _stretch(x: Tensor) -> Tensor:
    """Stretch each image `[B, 1, H, W]` to [0, 1]; a constant one becomes 0."""
    x = x - x.amin((1, 2, 3), keepdim=True)
    top = x.amax((1, 2, 3), keepdim=True)
    return x / torch.where(top > 0, top, 1)


def fog(x: Tensor, generator: torch.Generator, thickness: float, decay: float) -> Tensor:
    """Return `(x + c p) m / (m + c)`, with a plasma cloud p in [0, 1] and the image's maximum m."""
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * plasma(x, decay, generator)) * brightest / (brightest + thickness)


def plasma(x: Tensor, decay: float, generator: torch.Generator) -> Tensor:
    """Generate clouds `[B, 1, H, W]` in [0, 1] by the diamond-square algorithm, different for each image.

    On a periodic map whose side is a power of two, each point between known ones is their mean plus a random number,
    divided by `decay` squared from one octave to the next (as in the published code).
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
    return _stretch(cloud[:, None])[..., : x.shape[2], : x.shape[3]]


def brightness(x: Tensor, generator: torch.Generator, added: float) -> Tensor:
    """Add c to the value in hue, saturation and value, scaling all channels of a pixel; black becomes grey."""
    value = x.amax(1, keepdim=True)
    brighter = (value + added).clamp(max=1)
    return torch.where(value > 0, x * (brighter / torch.where(value > 0, value, 1)), brighter)


def spatter(
    x: Tensor,
    generator: torch.Generator,
    mean: float,
    deviation: float,
    blur: float,
    threshold: float,
    strength: float,
    mud: bool,
) -> Tensor:
    """Add drops of water (severities 1 to 3) or mud (4 and 5) on the lens.

    Water shines at the rims of its drops. The published code uses OpenCV's edge detector and an approximate distance;
    here a rim is the outline of a drop, and distances are exact.
    """
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
    """Return the embossed, equalised distance to the rims of the drops, `[B, 1, H, W]` in 0 .. 255."""
    mean = torch.full((3, 3), 1 / 9, dtype=torch.float64)
    emboss = torch.tensor([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=torch.float64)
    distance = correlate(_distance(_rims(wet), 20, dtype), mean) + 1e-3  # keeps rounding from lowering integers
    return correlate(correlate(_equalise(distance.floor().long(), 21).to(dtype), emboss).clamp(0, 255), mean)


def _rims(wet: Tensor) -> Tensor:
    """Return the pixels of the drops `[B, 1, H, W]` with a dry neighbour above, below, left or right."""
    dry = (~wet).float()  # pooling pads by -inf, so the border is not dry
    beside = torch.maximum(F.max_pool2d(dry, (3, 1), 1, (1, 0)), F.max_pool2d(dry, (1, 3), 1, (0, 1)))
    return wet & beside.bool()


def _distance(rims: Tensor, limit: int, dtype: torch.dtype) -> Tensor:
    """Return each pixel's Euclidean distance to the nearest rim, at most `limit`: by rows, then by columns."""
    squared = torch.where(rims, 0, float(limit**2)).to(dtype)
    for dim, margin in ((-1, (limit, limit)), (-2, (0, 0, limit, limit))):
        padded, size = F.pad(squared, margin, value=limit**2), squared.shape[dim]
        for offset in range(-limit, limit + 1):
            squared = torch.minimum(squared, padded.narrow(dim, limit + offset, size) + offset**2)
    return squared.sqrt()


def _equalise(values: Tensor, bins: int) -> Tensor:
    """Spread integers below `bins` over 0 .. 255 so that their histogram is flat, for each image."""
    flat = values.flatten(1)
    counts = flat.new_zeros(len(flat), bins).scatter_add_(1, flat, torch.ones_like(flat))
    lowest = counts.gather(1, flat.amin(1, keepdim=True))
    rest = flat.shape[1] - lowest
    table = ((counts.cumsum(1) - lowest).clamp(min=0) * 255 / rest.clamp(min=1)).round().long()
    spread = torch.where(rest > 0, table.gather(1, flat), flat)
    return spread.view_as(values)
