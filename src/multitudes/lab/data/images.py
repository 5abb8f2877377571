"""Decode images into tensors, with Pillow."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multitudes.base.checks import needed
from multitudes.lab.data.sources import Source
from multitudes.lab.data.tables.column_types import ColumnReading
from multitudes.lab.data.tables.columns import Column, Encoded
from multitudes.lab.data.tables.features import Feature
from multitudes.networks.devices import free_bytes

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class ImageEncoder:
    """Decode a column of images to one size and number of channels; None keeps those of the images."""

    size: Size | None = None
    channels: int | None = None
    names: tuple[str, ...] = ()
    features: Sequence[Feature] = ()
    reading: Sequence[ColumnReading] = ()

    def columns(self, source: Source, image: str | None = None) -> dict[str, Column]:
        """Return the image column of a source, which may have another name than in training."""
        found = find_images(source, image if image in source.columns else None)
        if found is None:
            raise ValueError(f"{source.name} must hold images, got the columns {', '.join(source.columns)}")
        return {name: source.columns[name] for name in found}

    def __call__(self, columns: Mapping[str, Column], rows: Tensor, where: Callable[[int], str]) -> Encoded:
        """Decode the images of these rows, uint8 `[n, C, H, W]`; `where` describes a row's origin."""
        (column,) = columns.values()
        return decode(column.take(rows), lambda index: where(int(rows[index])), self.size, self.channels)


def decode(
    files: Sequence[bytes],
    where: Callable[[int], str],
    size: Size | None = None,
    channels: int | None = None,
) -> Encoded:
    """Decode images into uint8 `[n, C, H, W]` in memory, and keep the files if none was resized.

    C is 1 if all images are grey, else 3, or `channels`: palettes become colours, transparency is dropped, 16 bits
    become 8. Images of another size than `size` are resized to cover it and center-cropped; without `size` all images
    must have the same size.
    """
    # outside of the loop, where errors count as faults of the image
    pillow = needed("PIL.Image", "data", "reading images")
    x = torch.empty(0, channels or 1, *(size or (0, 0)), dtype=torch.uint8)
    kept: list[int] = []
    bad: dict[int, str] = {}
    resized = False
    for row, file in enumerate(files):
        try:
            image = _grey_or_rgb(pillow.open(io.BytesIO(file)))
        except Exception as error:  # Pillow's decoders raise nearly anything
            bad[row] = f"the image is unreadable ({_reason(error)})"
            continue
        if channels is not None:
            image = image.convert("L" if channels == 1 else "RGB")
        height, width = size or (image.height, image.width)
        if not kept:
            x = _allocate(len(files), len(image.getbands()), height, width)
        if (height, width) != x.shape[2:]:
            raise ValueError(
                f"images must have the same size, or size= must be given to resize them: {where(row)} is "
                f"{height} x {width} (height x width), the previous ones are {x.shape[2]} x {x.shape[3]}"
            )
        if x.shape[1] < len(image.getbands()):  # first colour image
            wider = _allocate(len(files), 3, height, width)
            wider[: len(kept)] = x[: len(kept)]
            x = wider
        resized |= image.size != (width, height)
        x[len(kept)] = _pixels(_resize(image, height, width))
        kept.append(row)
    return Encoded(x[: len(kept)], kept, bad, () if resized else tuple(files[row] for row in kept))


def refit(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Convert images `[N, C, H, W]` to another shape, the way `decode` does."""
    if tuple(x.shape[1:]) == shape:
        return x
    channels, height, width = shape
    pillow = needed("PIL.Image", "data", "resizing images")
    out = _allocate(len(x), *shape)
    for row, image in enumerate(x):
        pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
        drawn = pillow.fromarray(pixels.contiguous().numpy()).convert("L" if channels == 1 else "RGB")
        out[row] = _pixels(_resize(drawn, height, width))
    return out


def _allocate(count: int, channels: int, height: int, width: int) -> Tensor:
    """Allocate a tensor for images; raise if memory is too small."""
    size = count * channels * height * width
    if size > (free := free_bytes(torch.device("cpu"))):
        raise ValueError(
            f"{count} images of {[channels, height, width]} need {size / 1e9:.3g} GB when decoded, but "
            f"{free / 1e9:.3g} GB are free: pass a smaller size= or limit="
        )
    return torch.empty(count, channels, height, width, dtype=torch.uint8)


def _grey_or_rgb(image: Any) -> Any:
    """Convert an image to mode L or RGB, and apply its EXIF orientation."""
    import numpy as np
    from PIL import Image, ImageOps

    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype("uint8"))  # Pillow would clip values above 255
    if image.mode in ("I", "F"):
        raise ValueError(f"32-bit pixels, mode {image.mode}, are not supported")
    return image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")


def _resize(image: Any, height: int, width: int) -> Any:
    from PIL import Image, ImageOps

    same = image.size == (width, height)
    return image if same else ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)


def _pixels(image: Any) -> Tensor:
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, -1).permute(2, 0, 1)


def _reason(error: Exception) -> str:
    """Return an error message without the buffer address that Pillow includes."""
    return "unknown format" if "cannot identify" in str(error) else str(error) or type(error).__name__


def find_images(source: Source, image: str | None) -> list[str] | None:
    """Return the image column: the given one, the only one, or one with a typical name; None if there is none."""
    return source.one_of_kind("image", image, ("image", "img")) or None
