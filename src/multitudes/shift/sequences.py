"""Sequences of images: one image that shifts pixel by pixel, and a synthetic video with labels.

- `translated`: shift-translated sequences, to measure consistency (Zhang, *Making Convolutional Networks
  Shift-Invariant Again*, 2019; Park & Kim, *Blurs Behave Like Ensembles*, 2022, appendix E.1).
- `video`: a stream for temporal smoothing (ibid., Table 2): a shape that moves, turns and changes size on a
  textured background, with sensor noise. Every frame and every pixel has a label.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from multitudes.base.checks import check_choice, check_count, check_number, check_seed
from multitudes.shift.filters import border_index, gaussian_filter
from multitudes.shift.noise import generator_of

# Shift-translated sequences -----------------------------------------------------------------------------

DIRECTIONS = {
    "right": (0, 1),
    "left": (0, -1),
    "down": (1, 0),
    "up": (-1, 0),
    "down-right": (1, 1),
    "down-left": (1, -1),
    "up-right": (-1, 1),
    "up-left": (-1, -1),
}
"""Directions of motion, as pixels down and pixels to the right."""

PADDING = {"reflect": "mirror", "zeros": "nearest", "circular": "wrap"}
"""Paddings, and the border rule of each."""


def translated(
    images: Tensor,
    steps: int,
    step: int = 1,
    direction: str = "right",
    padding: str = "reflect",
    seed: int | None = None,
) -> Tensor:
    """Shift images by `step` pixels from frame to frame: `[B, C, H, W] -> [T, B, C, H, W]`, T = steps + 1.

    Args:
        images: Images of any dtype with at least 2 pixels a side, the first frame.
        steps: Number of shifts, M in eq. 37.
        step: Pixels per shift.
        direction: One of `DIRECTIONS`, or "random" for a random one for each image.
        padding: Content at the border: "reflect" (without repeating the border pixels), "zeros" or "circular".
        seed: Seed of random directions, without using torch's global generator.

    Example:
        >>> image = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])[None, None]
        >>> for padding in ("reflect", "zeros", "circular"):
        ...     print(translated(image, 2, padding=padding)[:, 0, 0, 0].tolist())
        [[1, 2, 3, 4], [2, 1, 2, 3], [3, 2, 1, 2]]
        [[1, 2, 3, 4], [0, 1, 2, 3], [0, 0, 1, 2]]
        [[1, 2, 3, 4], [4, 1, 2, 3], [3, 4, 1, 2]]
    """
    _check_translation(images, steps, step, direction, padding, seed)
    ways = torch.tensor([*DIRECTIONS.values()])
    if direction == "random":
        numbers = torch.randint(len(ways), (len(images),), generator=generator_of(seed))
    else:
        numbers = torch.tensor([[*DIRECTIONS].index(direction)]).expand(len(images))
    offsets = torch.arange(0, steps + 1)[:, None, None] * step * ways[numbers]  # [T, B, 2]
    height, width = images.shape[2:]
    # Source of each frame's pixels: [T, B, 1, H, 1] and [T, B, 1, 1, W].
    row = (torch.arange(height) - offsets[..., :1])[:, :, None, :, None]
    column = (torch.arange(width) - offsets[..., 1:])[:, :, None, None, :]
    image, channel = torch.arange(len(images))[:, None, None, None], torch.arange(images.shape[1])[:, None, None]
    frames = images[
        image, channel, border_index(row, height, PADDING[padding]), border_index(column, width, PADDING[padding])
    ]
    if padding != "zeros":
        return frames
    outside = (row < 0) | (row >= height) | (column < 0) | (column >= width)
    return frames.masked_fill(outside.to(images.device), 0)


def _check_translation(images: Tensor, steps: int, step: int, direction: str, padding: str, seed: int | None) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or min(images.shape[2:]) < 2:
        got = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be a tensor [B, C, H, W] with 2 or more pixels a side, got {got}")
    check_count("steps", steps)
    check_count("step", step)
    if direction != "random" and direction not in DIRECTIONS:
        raise ValueError(f"direction must be random or one of {', '.join(DIRECTIONS)}, got {direction!r}")
    check_choice("padding", padding, PADDING)
    check_seed(seed)


# A synthetic video --------------------------------------------------------------------------------------

_SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (u, v) -> distance from the shape, negative inside
    "disc": lambda u, v: torch.hypot(u, v) - 0.85,
    "cross": lambda u, v: torch.minimum(_box(u, v, 0.95, 0.3), _box(u, v, 0.3, 0.95)),
    "square": lambda u, v: _box(u, v, 0.7, 0.7),
    "ring": lambda u, v: (torch.hypot(u, v) - 0.7).abs() - 0.25,
    "triangle": lambda u, v: torch.maximum(v, math.sqrt(0.75) * u.abs() - 0.5 * v) - 0.48,
    "bars": lambda u, v: _box(u, v.abs() - 0.5, 0.69, 0.22),
}
SHAPES = tuple(_SHAPES)
"""Classes of `video`, in order."""


def _box(u: Tensor, v: Tensor, width: float, height: float) -> Tensor:
    return torch.maximum(u.abs() - width, v.abs() - height)


class Video(NamedTuple):
    """Frames with labels.

    Args:
        frames: Images `[T, 3, H, W]` in [0, 1].
        labels: Index in `SHAPES` of each frame's shape, `[T]`.
        masks: Class of each pixel, `[T, H, W]`: 0 for the background, 1 + label for the shape.
    """

    frames: Tensor
    labels: Tensor
    masks: Tensor


def video(
    frames: int,
    size: int | tuple[int, int] = 32,
    classes: int = 4,
    noise: float = 0.1,
    hold: int = 25,
    seed: int | None = None,
) -> Video:
    """Generate a video of a shape that moves smoothly on a textured background.

    Args:
        frames: Number of frames, T.
        size: Pixels a side, or (height, width); at least 8.
        classes: Number of `SHAPES` to use, at least 2; no shape follows itself.
        noise: Standard deviation of the sensor noise, independent between frames.
        hold: Number of frames before the shape changes.
        seed: Seed of the video, without using torch's global generator.

    Example:
        >>> frames, labels, masks = video(50, size=16, seed=0)
        >>> frames.shape, labels.unique_consecutive().shape, masks.shape
        (torch.Size([50, 3, 16, 16]), torch.Size([2]), torch.Size([50, 16, 16]))
    """
    height, width = _check_video(frames, size, classes, noise, hold)
    generator = generator_of(seed)
    labels = _labels(frames, classes, hold, generator)
    outside = _distances(labels, height, width, generator)
    cover = (0.5 - outside).clamp(0, 1)[:, None]  # antialias the shape's edge
    background = _texture(height, width, generator)
    paint = 0.65 + 0.35 * torch.rand(math.ceil(frames / hold), 3, generator=generator)
    paint = paint.repeat_interleave(hold, 0)[:frames, :, None, None]
    scene = cover * paint + (1 - cover) * background
    noisy = scene + noise * torch.randn(scene.shape, generator=generator)
    return Video(noisy.clamp(0, 1), labels, torch.where(outside < 0, 1 + labels[:, None, None], 0))


def _labels(frames: int, classes: int, hold: int, generator: torch.Generator) -> Tensor:
    """Draw a shape for every frame `[T]`, a new one every `hold` frames."""
    shapes = math.ceil(frames / hold)
    steps = torch.randint(1, classes, (shapes,), generator=generator)  # never 0, or a shape would follow itself
    steps[0] = torch.randint(classes, (), generator=generator)
    return (steps.cumsum(0) % classes).repeat_interleave(hold)[:frames]


def _wave(frames: int, slowest: float, generator: torch.Generator) -> Tensor:
    """Return a sine of random phase with a period of `slowest / 2` to `slowest` frames, `[T, 1, 1]`."""
    period, phase = torch.rand(2, generator=generator)
    turns = torch.arange(frames) / (slowest * (0.5 + 0.5 * period)) + phase
    return torch.sin(2 * math.pi * turns)[:, None, None]


def _distances(labels: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return each pixel's distance from the shape of its frame in pixels, negative inside, `[T, H, W]`."""
    frames, side = len(labels), min(height, width)
    radius = side * (0.32 + 0.04 * _wave(frames, 60, generator))
    down = (height - 1) / 2 + (height / 2 - radius) * _wave(frames, 120, generator)
    right = (width - 1) / 2 + (width / 2 - radius) * _wave(frames, 90, generator)
    angle = math.pi / 4 * _wave(frames, 150, generator)
    y, x = torch.arange(height)[:, None] - down, torch.arange(width) - right
    u, v = (angle.cos() * x + angle.sin() * y) / radius, (angle.cos() * y - angle.sin() * x) / radius
    each = torch.stack([shape(u, v) for shape in _SHAPES.values()][: int(labels.max()) + 1])
    return each[labels, torch.arange(frames)] * radius


def _texture(height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return smooth colour stains at two scales, dark enough to contrast with shapes, `[3, H, W]` in [0, 0.6]."""
    total = torch.zeros(3, height, width)
    for scale in (6, 20):
        stains = torch.randn(3, height, width, generator=generator)
        stains = gaussian_filter(stains, max(height, width) / scale, "reflect")
        total += stains / stains.std((1, 2), keepdim=True)
    return 0.3 + 0.3 * (total / 2).tanh()


def _check_video(frames: int, size: int | tuple[int, int], classes: int, noise: float, hold: int) -> tuple[int, int]:
    check_count("frames", frames)
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, tuple) or len(sides) != 2 or not all(type(n) is int and n >= 8 for n in sides):
        raise ValueError(f"size must be a whole number of pixels, 8 or more, or two of them, got {size!r}")
    if not isinstance(classes, int) or not 2 <= classes <= len(SHAPES):
        raise ValueError(f"classes must be a whole number from 2 to {len(SHAPES)}, got {classes!r}")
    check_number("noise", noise, 0)
    check_count("hold", hold)
    return sides
