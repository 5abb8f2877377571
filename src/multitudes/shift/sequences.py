"""Sequences of images: one image that shifts pixel by pixel, and a synthetic video with labels.

- `translated`: shift-translated sequences, on which consistency is measured (Zhang, *Making Convolutional Networks
  Shift-Invariant Again*, 2019; Park & Kim, *Blurs Behave Like Ensembles*, 2022, appendix E.1). Neighbouring frames show
  the same thing, so a network that is sure of what it sees does not change its mind between them.
- `video`: a stream for temporal smoothing (ibid., Table 2): a shape that wanders, turns and breathes before a textured
  background, seen through a noisy sensor. Every frame has a label, and every pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from multitudes.core.checks import check_count, check_number, check_seed
from multitudes.shift.filters import fold, gaussian_filter

__all__ = ["DIRECTIONS", "SHAPES", "Video", "translated", "video"]

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
"""Where an image may move, as pixels down and pixels to the right."""

PADDING = ("reflect", "zeros", "circular")


def translated(
    images: Tensor,
    steps: int,
    step: int = 1,
    direction: str = "right",
    padding: str = "reflect",
    seed: int | None = None,
) -> Tensor:
    """Images that move by `step` pixels from frame to frame: `[B, C, H, W] -> [T, B, C, H, W]`, T = steps + 1.

    Args:
        images: of any dtype, with 2 pixels a side or more; they are the first frame.
        steps: M of eq. 37, how often they move.
        step: how many pixels they move at a time.
        direction: one of `DIRECTIONS`, or "random" for one of them for each image.
        padding: what comes in at the border: "reflect", the image's mirror image, which has the border pixels once;
            "zeros"; or "circular", what has left on the other side.
        seed: makes random directions repeatable, and leaves torch's random state alone.

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
        chosen = torch.randint(len(ways), (len(images),), generator=_generator(seed))
    else:
        chosen = torch.tensor([[*DIRECTIONS].index(direction)]).expand(len(images))
    moved = torch.arange(0, steps + 1)[:, None, None] * step * ways[chosen]  # [T, B, 2]
    rows, columns = (
        torch.arange(size) - moved[..., axis, None] for axis, size in enumerate(images.shape[2:])
    )  # where the pixels of each frame come from, [T, B, H] and [T, B, W]
    outside = _outside(rows, images.shape[2])[..., None] | _outside(columns, images.shape[3])[..., None, :]
    rows, columns = _inside(rows, images.shape[2], padding), _inside(columns, images.shape[3], padding)
    image, channel = torch.arange(len(images))[:, None, None, None], torch.arange(images.shape[1])[:, None, None]
    frames = images[image, channel, rows[:, :, None, :, None], columns[:, :, None, None, :]]
    return frames.masked_fill(outside[:, :, None].to(images.device), 0) if padding == "zeros" else frames


def _outside(index: Tensor, size: int) -> Tensor:
    return (index < 0) | (index >= size)


def _inside(index: Tensor, size: int, padding: str) -> Tensor:
    return fold(index, size, "mirror") if padding == "reflect" else index % size


def _check_translation(images: Tensor, steps: int, step: int, direction: str, padding: str, seed: int | None) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or min(images.shape[2:]) < 2:
        got = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be a tensor [B, C, H, W] with 2 or more pixels a side, got {got}")
    check_count("steps", steps)
    check_count("step", step)
    if direction != "random" and direction not in DIRECTIONS:
        raise ValueError(f"direction must be random or one of {', '.join(DIRECTIONS)}, got {direction!r}")
    if padding not in PADDING:
        raise ValueError(f"padding must be one of {', '.join(PADDING)}, got {padding!r}")
    check_seed(seed)


def _generator(seed: int | None) -> torch.Generator:
    """A generator of its own; without a seed, one is drawn from torch's random state."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)


# A synthetic video --------------------------------------------------------------------------------------

Shape = Callable[[Tensor, Tensor], Tensor]
"""`(u, v) -> ` how far a point lies outside, below 0 inside, for a shape within the unit circle."""


def _disc(u: Tensor, v: Tensor) -> Tensor:
    return torch.hypot(u, v) - 0.85


def _square(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(u.abs(), v.abs()) - 0.7


def _cross(u: Tensor, v: Tensor) -> Tensor:
    u, v = u.abs(), v.abs()
    return torch.minimum(torch.maximum(u - 0.95, v - 0.3), torch.maximum(u - 0.3, v - 0.95))


def _ring(u: Tensor, v: Tensor) -> Tensor:
    return (torch.hypot(u, v) - 0.7).abs() - 0.25


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(v, math.sqrt(0.75) * u.abs() - 0.5 * v) - 0.48


def _bars(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(u.abs() - 0.69, (v.abs() - 0.5).abs() - 0.22)


_SHAPES: dict[str, Shape] = {
    "disc": _disc,
    "cross": _cross,
    "square": _square,
    "ring": _ring,
    "triangle": _triangle,
    "bars": _bars,
}
SHAPES = tuple(_SHAPES)
"""The classes of `video`, in their order."""


class Video(NamedTuple):
    """A stream of frames with labels."""

    frames: Tensor
    """Images `[T, 3, H, W]` in [0, 1]."""
    labels: Tensor
    """Which of `SHAPES` each frame shows, `[T]`."""
    masks: Tensor
    """What each pixel shows, `[T, H, W]`: 0 the background, 1 + label the shape."""


def video(
    frames: int,
    size: int | tuple[int, int] = 32,
    classes: int = 4,
    noise: float = 0.1,
    hold: int = 25,
    seed: int | None = None,
) -> Video:
    """A shape that moves smoothly before a textured background, and becomes another every `hold` frames.

    Args:
        frames: T, how many there are.
        size: pixels a side, or (height, width); 8 or more.
        classes: how many of `SHAPES` take part, 2 or more; no shape follows itself.
        noise: the standard deviation of the sensor noise, which is independent from frame to frame.
        hold: how long a shape stays.
        seed: makes the video repeatable, and leaves torch's random state alone.

    >>> frames, labels, masks = video(50, size=16, seed=0)
    >>> frames.shape, labels.unique_consecutive().shape, masks.shape
    (torch.Size([50, 3, 16, 16]), torch.Size([2]), torch.Size([50, 16, 16]))
    """
    height, width = _check_video(frames, size, classes, noise, hold, seed)
    generator = _generator(seed)
    labels = _labels(frames, classes, hold, generator)
    outside = _distances(labels, height, width, generator)
    cover = (0.5 - outside).clamp(0, 1)[:, None]  # the edge of a shape covers part of a pixel
    background = _texture(height, width, generator)
    paint = 0.65 + 0.35 * torch.rand(math.ceil(frames / hold), 3, generator=generator)
    paint = paint.repeat_interleave(hold, 0)[:frames, :, None, None]
    scene = cover * paint + (1 - cover) * background
    seen = scene + noise * torch.randn(scene.shape, generator=generator)
    return Video(seen.clamp(0, 1), labels, torch.where(outside < 0, 1 + labels[:, None, None], 0))


def _labels(frames: int, classes: int, hold: int, generator: torch.Generator) -> Tensor:
    """A shape for every frame `[T]`, another every `hold` frames."""
    shapes = math.ceil(frames / hold)
    steps = torch.randint(1, classes, (shapes,), generator=generator)  # never 0, or a shape would follow itself
    steps[0] = torch.randint(classes, (), generator=generator)
    return (steps.cumsum(0) % classes).repeat_interleave(hold)[:frames]


def _wave(frames: int, slowest: float, generator: torch.Generator) -> Tensor:
    """A sine of a random phase and of a period of `slowest / 2` to `slowest` frames, `[T, 1, 1]`."""
    period, phase = torch.rand(2, generator=generator)
    turns = torch.arange(frames) / (slowest * (0.5 + 0.5 * period)) + phase
    return torch.sin(2 * math.pi * turns)[:, None, None]


def _distances(labels: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    """How many pixels each pixel lies outside the shape of its frame, below 0 inside, `[T, H, W]`."""
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
    """Smooth stains of colour at two scales, dark enough for every shape to stand out, `[3, H, W]` in [0, 0.6]."""
    total = torch.zeros(3, height, width)
    for scale in (6, 20):
        stains = gaussian_filter(
            torch.randn(3, height, width, generator=generator), max(height, width) / scale, "reflect"
        )
        total += stains / stains.std((1, 2), keepdim=True)
    return 0.3 + 0.3 * (total / 2).tanh()


def _check_video(
    frames: int, size: int | tuple[int, int], classes: int, noise: float, hold: int, seed: int | None
) -> tuple[int, int]:
    check_count("frames", frames)
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, tuple) or len(sides) != 2 or not all(type(n) is int and n >= 8 for n in sides):
        raise ValueError(f"size must be a whole number of pixels, 8 or more, or two of them, got {size!r}")
    if not isinstance(classes, int) or not 2 <= classes <= len(SHAPES):
        raise ValueError(f"classes must be a whole number from 2 to {len(SHAPES)}, got {classes!r}")
    check_number("noise", noise, 0)
    check_count("hold", hold)
    check_seed(seed)
    return sides
