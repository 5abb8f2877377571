"""Encoded images into tensors, by Pillow."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multitudes.core.checks import needed
from multitudes.core.draws.memory import free_bytes
from multitudes.data.columns import Column, Encoded
from multitudes.data.features import Feature
from multitudes.data.reading import ColumnReading
from multitudes.data.sources import Source

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class ImageEncoder:
    """Images of a column, decoded to one size and number of channels; None stands for that of the images."""

    size: Size | None = None
    channels: int | None = None
    names: tuple[str, ...] = ()
    features: Sequence[Feature] = ()
    reading: Sequence[ColumnReading] = ()

    def columns(self, source: Source, image: str | None = None) -> dict[str, Column]:
        """The column of images of a source, which may have its own name there."""
        found = find_images(source, image if image in source.columns else None)
        if found is None:
            raise ValueError(f"{source.name} must hold images, got the columns {', '.join(source.columns)}")
        return {name: source.columns[name] for name in found}

    def __call__(self, columns: Mapping[str, Column], rows: Tensor, where: Callable[[int], str]) -> Encoded:
        """The images of these rows, uint8 `[n, C, H, W]`; `where` tells where a row was read."""
        (column,) = columns.values()
        return decode(column.take(rows), lambda index: where(int(rows[index])), self.size, self.channels)


def decode(
    files: Sequence[bytes],
    where: Callable[[int], str],
    size: Size | None = None,
    channels: int | None = None,
) -> Encoded:
    """The pixels of encoded images, uint8 `[n, C, H, W]`, all in memory at once, and the files where none was resized.

    C is 1 where all images are grey and 3 otherwise, or `channels`: palettes become colours, transparency is left
    out, 16 bits become 8. Images of other sizes than `size` are resized so that they cover it, and cut at the middle;
    without `size` they must all be of one size.
    """
    # Before the loop, in which an error is taken for a fault of the image.
    pillow = needed("PIL.Image", "data", "reading images")
    x = torch.empty(0, channels or 1, *(size or (0, 0)), dtype=torch.uint8)
    kept: list[int] = []
    bad: dict[int, str] = {}
    resized = False
    for row, file in enumerate(files):
        try:
            image = _plain(pillow.open(io.BytesIO(file)))
        except Exception as error:  # Pillow raises what its decoders raise, which is nearly anything
            bad[row] = f"the image is unreadable ({_reason(error)})"
            continue
        if channels is not None:
            image = image.convert("L" if channels == 1 else "RGB")
        height, width = size or (image.height, image.width)
        if not kept:
            x = _room(len(files), len(image.getbands()), height, width)
        if (height, width) != x.shape[2:]:
            raise ValueError(
                f"images must all be of one size, or size= be given, to which they are resized: {where(row)} is "
                f"{height} x {width} (height x width), those before it are {x.shape[2]} x {x.shape[3]}"
            )
        if x.shape[1] < len(image.getbands()):  # the first image in colour
            wider = _room(len(files), 3, height, width)
            wider[: len(kept)] = x[: len(kept)]
            x = wider
        resized |= image.size != (width, height)
        x[len(kept)] = _pixels(_fitted(image, height, width))
        kept.append(row)
    return Encoded(x[: len(kept)], kept, bad, () if resized else tuple(files[row] for row in kept))


def refit(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images `[N, C, H, W]` of one shape as images of another, in the way of `decode`."""
    if tuple(x.shape[1:]) == shape:
        return x
    channels, height, width = shape
    pillow = needed("PIL.Image", "data", "resizing images")
    out = _room(len(x), *shape)
    for row, image in enumerate(x):
        pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
        drawn = pillow.fromarray(pixels.contiguous().numpy()).convert("L" if channels == 1 else "RGB")
        out[row] = _pixels(_fitted(drawn, height, width))
    return out


def _room(count: int, channels: int, height: int, width: int) -> Tensor:
    """An empty tensor for images, or an error where memory is too small for them."""
    size = count * channels * height * width
    if size > (free := free_bytes(torch.device("cpu"))):
        raise ValueError(
            f"{count} images of {[channels, height, width]} take {size / 1e9:.3g} GB when decoded, and "
            f"{free / 1e9:.3g} GB are free: give a smaller size= or a limit="
        )
    return torch.empty(count, channels, height, width, dtype=torch.uint8)


def _plain(image: Any) -> Any:
    """An image of mode L or RGB, turned the right way up."""
    image.load()
    if image.getexif().get(0x0112, 1) != 1:  # a photograph that was taken with a turned camera
        image = needed("PIL.ImageOps", "data", "reading images").exif_transpose(image)
    if image.mode.startswith("I;16"):
        # Pillow would cut all above 255, instead of scaling.
        values = needed("numpy", "data", "reading images").asarray(image)
        return needed("PIL.Image", "data", "reading images").fromarray((values >> 8).astype("uint8"))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are 32-bit numbers, mode {image.mode}")
    return image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")


def _fitted(image: Any, height: int, width: int) -> Any:
    if image.size == (width, height):
        return image
    method = needed("PIL.Image", "data", "resizing images").Resampling.BILINEAR
    return needed("PIL.ImageOps", "data", "resizing images").fit(image, (width, height), method)


def _pixels(image: Any) -> Tensor:
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, -1).permute(2, 0, 1)


def _reason(error: Exception) -> str:
    """What an error says, without the address of the buffer that Pillow mentions."""
    return "no known format" if "cannot identify" in str(error) else str(error) or type(error).__name__


def find_images(source: Source, image: str | None) -> list[str] | None:
    """The column of images: the given one, the only one, or one that is called so; None where there is none."""
    return source.one_of_kind("image", image, ("image", "img")) or None
