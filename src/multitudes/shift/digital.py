"""Digital corruptions: contrast, elastic transformation, pixelation, JPEG; and saturation."""

from __future__ import annotations

from io import BytesIO

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.base.checks import needed
from multitudes.shift.filters import gaussian_filter, separable
from multitudes.shift.noise import uniform


def contrast(x: Tensor, generator: torch.Generator, kept: float) -> Tensor:
    """Scale contrast: `c (x - mean) + mean`, with each channel's mean over the image."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * kept + mean


def saturate(x: Tensor, generator: torch.Generator, factor: float, addition: float) -> Tensor:
    """Change the saturation s to `a s + b`, in hue, saturation and value.

    A grey pixel of a colour image has hue 0, red, so b > 0 makes it reddish, as in the published code. Images of one
    channel do not change.
    """
    if x.shape[1] == 1:
        return x
    value = x.amax(1, keepdim=True)
    below = value - x
    spread = below.amax(1, keepdim=True)  # value times saturation
    coloured = spread > 0
    new_spread = (spread * factor + value * addition).minimum(value)
    red = x.new_tensor([0, 1, 1]).reshape(1, 3, 1, 1)
    return value - new_spread * torch.where(coloured, below / torch.where(coloured, spread, 1), red)


def elastic_transform(
    x: Tensor, generator: torch.Generator, strength: float, smoothness: float, affine: float
) -> Tensor:
    """Move three points randomly and the image with them, then each pixel by a smooth random displacement.

    The parameters are fractions of the image's shorter side. Interpolation is linear, with reflection at the border.
    """
    batch, _, height, width = x.shape
    side = min(height, width)
    row = torch.arange(height, dtype=x.dtype, device=x.device)[:, None].expand(height, width)
    column = torch.arange(width, dtype=x.dtype, device=x.device).expand(height, width)
    right, down, shift = _affine(x, affine * side, generator)[:, :, None, None].unbind(1)
    places = column[..., None] * right + row[..., None] * down + shift  # [B, H, W, 2]; no matrix product: less precise
    x = _sample(x, places, at_centres=True)
    moves = uniform((batch, 2, height, width), -1, 1, x, generator)
    moves = strength * side * gaussian_filter(moves, smoothness * side, "reflect", truncate=3)
    return _sample(x, torch.stack([column, row], -1) + moves.movedim(1, -1), at_centres=False)


def _affine(x: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return matrices `[B, 3, 2]` from places `(column, row, 1)` to their sources, from three moved points."""
    height, width = x.shape[2:]
    arm = min(height, width) // 3
    centre = torch.tensor([width // 2, height // 2], dtype=torch.float64, device=x.device)
    arms = torch.tensor([[arm, arm], [arm, -arm], [-arm, -arm]], dtype=torch.float64, device=x.device)
    moved = arms + uniform((len(x), 3, 2), -size, size, arms, generator)
    moved = torch.cat([centre + moved, torch.ones_like(moved[..., :1])], -1)
    return torch.linalg.solve(moved, (centre + arms).expand(len(x), -1, -1)).to(x.dtype)


def _sample(x: Tensor, places: Tensor, at_centres: bool) -> Tensor:
    """Sample images `[B, C, H, W]` at places `[B, H, W, 2]` (column, row), reflecting at pixel centres or edges."""
    size = places.new_tensor([x.shape[3], x.shape[2]])
    grid = 2 * places / (size - 1) - 1 if at_centres else (2 * places + 1) / size - 1
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=at_centres)


def pixelate(x: Tensor, generator: torch.Generator, kept: float) -> Tensor:
    """Shrink and enlarge the image by box filters, which gives large pixels."""
    height, width = x.shape[2:]
    rows, columns = int(height * kept), int(width * kept)
    small = separable(x, box_matrix(height, rows), box_matrix(width, columns))
    return separable(small, box_matrix(rows, height), box_matrix(columns, width))


def box_matrix(size: int, new_size: int) -> Tensor:
    """Return the matrix `[new_size, size]` of Pillow's box filter: the mean of the pixels with centres in the box.

    The order of operations is Pillow's, so that rounding includes the same centres on a box's edge.
    """
    scale = size / new_size
    width = max(scale, 1.0)
    pixel = torch.arange(size)
    centre = ((torch.arange(new_size, dtype=torch.float64) + 0.5) * scale)[:, None]
    first, end = ((centre + half + 0.5).long() for half in (-0.5 * width, 0.5 * width))
    distance = (pixel - centre + 0.5) * (1 / width)
    inside = (distance > -0.5) & (distance <= 0.5) & (pixel >= first) & (pixel < end)
    return inside.double() / inside.sum(1, keepdim=True)


def jpeg_compression(x: Tensor, generator: torch.Generator, quality: int) -> Tensor:
    """Compress images to JPEG and load them again with Pillow, on the CPU in 8 bits."""
    pillow = needed("PIL.Image", "shift", "jpeg_compression")
    channels, height, width = x.shape[1:]
    pixels = (x * 255).round().to(torch.uint8).movedim(1, -1).contiguous().cpu()
    read = []
    for image in pixels:
        file = BytesIO()
        mode = "RGB" if channels == 3 else "L"
        pillow.frombytes(mode, (width, height), image.numpy().tobytes()).save(file, "JPEG", quality=quality)
        read.append(bytearray(pillow.open(file).tobytes()))
    out = torch.stack([torch.frombuffer(data, dtype=torch.uint8) for data in read])
    return out.reshape(-1, height, width, channels).movedim(-1, 1).to(x) / 255
