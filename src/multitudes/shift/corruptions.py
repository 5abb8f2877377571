"""Corruptions of images: how well does a network do when the picture is bad, and does it know?

D. Hendrycks, T. Dietterich: Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR
2019. The fifteen corruptions and the four extra ones at the five published severities, as functions of whole batches.
Their parameters are those of CIFAR-10-C for images of up to 64 pixels a side, and those of ImageNet-C for larger ones.

A severity ranks images by how hard they are to recognise, not by how much they are changed. The mean squared change
rises with it, but for these steps of the published parameters:

- up to 64 pixels a side: glass_blur 2, 3 and 5 (more blur evens out the exchanged pixels), motion_blur 4 (same sigma),
  frost 3 to 5 (a darker image under the ice), elastic_transform 2 to 5 (smaller affine parts), spatter 4 (mud after
  water), saturate 3 (more colour after less);
- larger: frost 2 and 4, fog 4 (as thick, of finer detail), elastic_transform 3, saturate 3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multitudes.core.checks import check_seed
from multitudes.shift import blur, digital, noise, weather

Corruption = Callable[[Tensor, int, torch.Generator], Tensor]

_CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
}
_EXTRA: dict[str, Corruption] = {
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}

CORRUPTIONS = tuple(_CORRUPTIONS)
"""The names of the fifteen standard corruptions, in the paper's order."""

EXTRA = tuple(_EXTRA)
"""The names of the four extra corruptions, which the paper keeps for validation."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, seed: int | None = None) -> Tensor:
    """Corrupt images `[B, C, H, W]` with values in [0, 1]: a new tensor of the same shape, type and device, in [0, 1].

    C is 1 or 3, H and W are 8 or more. The `name` is one of `CORRUPTIONS` or `EXTRA`, the `severity` 1 to 5. Each
    image has its own noise, angle, cloud or ice. The same `seed` gives the same corruption on the same kind of device
    and leaves torch's random state alone; without one, a seed is drawn from it. There is no gradient.

    >>> images = torch.full((2, 3, 32, 32), 0.5)
    >>> foggy = corrupt(images, "fog", 3, seed=0)
    >>> foggy.shape, bool((foggy >= 0).all() and (foggy <= 1).all())
    (torch.Size([2, 3, 32, 32]), True)
    >>> corrupt(images, "brightness", 5)[0, 0, 0, 0]
    tensor(0.8000)
    """
    _check(images, name, severity, seed)
    if len(images) == 0:
        return images.clone()
    generator = torch.Generator(images.device)
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    x = images if images.dtype == torch.float64 else images.float()  # half precision would show in the filters
    corrupted = (_CORRUPTIONS | _EXTRA)[name](x, severity, generator)
    return corrupted.clamp(0, 1).to(images.dtype).contiguous()


def _check(images: Tensor, name: str, severity: int, seed: int | None) -> None:
    if name not in CORRUPTIONS + EXTRA:
        raise ValueError(f"name must be one of {', '.join(CORRUPTIONS + EXTRA)}, got {name!r}")
    if isinstance(severity, bool) or not isinstance(severity, int) or not 1 <= severity <= 5:
        raise ValueError(f"severity must be a whole number from 1 to 5, got {severity!r}")
    check_seed(seed)
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a tensor [B, C, H, W], got {type(images).__name__}")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 8:
        raise ValueError(
            f"images must be [B, C, H, W] with 1 or 3 channels and 8 or more pixels a side, got {list(images.shape)}"
        )
    if images.dtype not in DTYPES:
        raise ValueError(f"images must be of one of the types {', '.join(map(str, DTYPES))}, got {images.dtype}")
    bad = ~((images >= 0) & (images <= 1))  # NaN is neither
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        raise ValueError(f"images must lie in [0, 1], got {images[tuple(first)].item()} at index {first}")
