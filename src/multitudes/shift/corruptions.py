"""Corruptions of images: the fifteen common ones and four extra ones at five severities, for whole batches.

D. Hendrycks, T. Dietterich: Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR
2019. Images of up to 64 pixels a side use the parameters of CIFAR-10-C, larger ones those of ImageNet-C.

Severity ranks images by how hard they are to recognise. The mean squared change increases with it, except at these
published parameters:

- up to 64 pixels a side: glass_blur 2, 3 and 5 (more blur evens out the exchanged pixels), motion_blur 4 (same sigma),
  frost 3 to 5 (a darker image under the ice), elastic_transform 2 to 5 (smaller affine parts), spatter 4 (mud after
  water), saturate 3 (more colour after less);
- larger: frost 2 and 4, fog 4 (same thickness, finer detail), elastic_transform 3, saturate 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multitudes.base.checks import check_choice
from multitudes.shift import blur, digital, noise, weather
from multitudes.shift.arguments import check_values
from multitudes.shift.noise import generator_of

SMALL = 64
"""Images of at most this many pixels a side use CIFAR-10-C's parameters, larger ones ImageNet-C's."""


class Corruption(NamedTuple):
    """`function(images, generator, *parameters)`, with parameters of the five severities at both sizes."""

    function: Callable[..., Tensor]
    small: tuple[Any, ...]
    large: tuple[Any, ...]

    def parameters(self, images: Tensor, severity: int) -> tuple[Any, ...]:
        """Return the published parameters of a severity, 1 to 5, for images of this size."""
        found = (self.small if max(images.shape[2:]) <= SMALL else self.large)[severity - 1]
        return found if isinstance(found, tuple) else (found,)


_CORRUPTIONS = {
    "gaussian_noise": Corruption(
        noise.gaussian_noise,  # standard deviation
        (0.04, 0.06, 0.08, 0.09, 0.10),
        (0.08, 0.12, 0.18, 0.26, 0.38),
    ),
    "shot_noise": Corruption(
        noise.shot_noise,  # photons at full brightness
        (500, 250, 100, 75, 50),
        (60, 25, 12, 5, 3),
    ),
    "impulse_noise": Corruption(
        noise.impulse_noise,  # fraction of values replaced
        (0.01, 0.02, 0.03, 0.05, 0.07),
        (0.03, 0.06, 0.09, 0.17, 0.27),
    ),
    "defocus_blur": Corruption(
        blur.defocus_blur,  # radius of the disk, blur of its rim
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    ),
    "glass_blur": Corruption(
        blur.glass_blur,  # blur, reach, rounds
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    ),
    "motion_blur": Corruption(
        blur.motion_blur,  # radius, sigma
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    ),
    "zoom_blur": Corruption(
        blur.zoom_blur,  # number of enlargements, step between them
        ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
        ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
    ),
    "snow": Corruption(
        weather.snow,  # mean and deviation of the flakes, size, threshold, radius and sigma of the fall, image kept
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
    ),
    "frost": Corruption(
        weather.frost,  # fraction of the image kept, fraction of ice added
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    ),
    "fog": Corruption(
        weather.fog,  # thickness, decay of detail
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    ),
    "brightness": Corruption(
        weather.brightness,  # added to the value
        (0.05, 0.1, 0.15, 0.2, 0.3),
        (0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    "contrast": Corruption(
        digital.contrast,  # fraction of the contrast kept
        (0.75, 0.5, 0.4, 0.3, 0.15),
        (0.4, 0.3, 0.2, 0.1, 0.05),
    ),
    "elastic_transform": Corruption(
        digital.elastic_transform,  # strength and smoothness of the displacement, size of the affine one: fractions
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        tuple(
            tuple(fraction * 244 / 224 for fraction in fractions)  # published as fractions of 244, for images of 224
            for fractions in (
                (2, 0.7, 0.1),
                (2, 0.08, 0.2),
                (0.05, 0.01, 0.02),
                (0.07, 0.01, 0.02),
                (0.12, 0.01, 0.02),
            )
        ),
    ),
    "pixelate": Corruption(
        digital.pixelate,  # fraction of the pixels a side kept
        (0.95, 0.9, 0.85, 0.75, 0.65),
        (0.6, 0.5, 0.4, 0.3, 0.25),
    ),
    "jpeg_compression": Corruption(digital.jpeg_compression, (80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),  # quality
}
_EXTRA = {
    "speckle_noise": Corruption(
        noise.speckle_noise,  # relative standard deviation
        (0.06, 0.1, 0.12, 0.16, 0.2),
        (0.15, 0.2, 0.35, 0.45, 0.6),
    ),
    "gaussian_blur": Corruption(blur.gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1), (1, 2, 3, 4, 6)),  # sigma
    "spatter": Corruption(
        weather.spatter,  # mean, deviation and blur of the liquid, threshold, strength (water) or blur (mud), mud
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
    ),
    "saturate": Corruption(
        digital.saturate,  # factor, addition
        ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    ),
}

CORRUPTIONS = tuple(_CORRUPTIONS)
"""Names of the fifteen standard corruptions, in the paper's order."""

EXTRA = tuple(_EXTRA)
"""Names of the four extra corruptions, which the paper reserves for validation."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, seed: int | None = None) -> Tensor:
    """Corrupt images; each has its own noise, angle, cloud or ice. There is no gradient.

    Args:
        images: Images `[B, C, H, W]` in [0, 1], with C = 1 or 3, and H and W at least 8.
        name: Name in `CORRUPTIONS` or `EXTRA`.
        severity: 1 to 5.
        seed: Seed of the corruption, reproducible on the same kind of device without using torch's global generator;
            by default drawn from it.

    Returns:
        New images of the same shape, dtype and device in [0, 1].

    Example:
        >>> images = torch.full((2, 3, 32, 32), 0.5)
        >>> foggy = corrupt(images, "fog", 3, seed=0)
        >>> foggy.shape, bool((foggy >= 0).all() and (foggy <= 1).all())
        (torch.Size([2, 3, 32, 32]), True)
        >>> corrupt(images, "brightness", 5)[0, 0, 0, 0]
        tensor(0.8000)
    """
    _check(images, name, severity)
    generator = generator_of(seed, images.device)
    if len(images) == 0:
        return images.clone()
    x = images if images.dtype == torch.float64 else images.float()  # filters need more than half precision
    corruption = (_CORRUPTIONS | _EXTRA)[name]
    corrupted = corruption.function(x, generator, *corruption.parameters(x, severity))
    return corrupted.clamp(0, 1).to(images.dtype).contiguous()


def _check(images: Tensor, name: str, severity: int) -> None:
    check_choice("name", name, CORRUPTIONS + EXTRA)
    if isinstance(severity, bool) or not isinstance(severity, int) or not 1 <= severity <= 5:
        raise ValueError(f"severity must be a whole number from 1 to 5, got {severity!r}")
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a tensor [B, C, H, W], got {type(images).__name__}")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 8:
        raise ValueError(
            f"images must be [B, C, H, W] with 1 or 3 channels and 8 or more pixels a side, got {list(images.shape)}"
        )
    if images.dtype not in DTYPES:
        raise ValueError(f"images must have a dtype of {', '.join(map(str, DTYPES))}, got {images.dtype}")
    check_values("images", images, (0, 1))
