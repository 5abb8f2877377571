"""CamVid: video frames from a driving car, labelled per pixel (Brostow et al., 2008), from Parquet files.

A row holds an `image` and a `label` map, 480 x 360. Its `path` is the frame's name, such as `0001TP_008550.png`: the
video and the frame number, at 30 frames per second. Classes are 0 to 10; 11 is unlabelled.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

CLASSES = 11
UNLABELLED = 11


@dataclass(frozen=True, eq=False)
class Frames:
    """Frames in the order of their videos."""

    images: Tensor
    """`[N, 3, H, W]`, uint8."""
    labels: Tensor
    """`[N, H, W]`, uint8."""
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def to(self, device: torch.device) -> Frames:
        """Copy the frames to a device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of names, pixels and labels."""
        digest = hashlib.sha256(repr((self.names, list(self.images.shape))).encode())
        for tensor in (self.images, self.labels):
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()


# -- names -------------------------------------------------------------------------------------------------


def place(name: str) -> tuple[str, int]:
    """Return the video of a frame, and its number there.

    >>> place("0006R0_f00930.png"), place("0001TP_008550.png")
    (('0006R0', 930), ('0001TP', 8550))
    """
    found = re.fullmatch(r"(\w+)_f?(\d+)\.png", name)
    if found is None:
        raise ValueError(f"the name of a frame must be like 0001TP_008550.png, got {name!r}")
    return found[1], int(found[2])


def sequences(names: Sequence[str]) -> list[range]:
    """Return ranges of consecutive frames, split where the video changes or a gap exceeds its usual step.

    >>> sequences(["a_0.png", "a_30.png", "a_60.png", "a_330.png", "a_360.png", "b_0.png"])
    [range(0, 3), range(3, 5), range(5, 6)]
    """
    places = [place(name) for name in names]
    steps = [later - number if video == after else None for (video, number), (after, later) in pairwise(places)]
    by_video: dict[str, list[int]] = {}
    for (video, _), step in zip(places, steps, strict=False):
        if step is not None:
            by_video.setdefault(video, []).append(step)
    usual = {video: median_low(found) for video, found in by_video.items()}
    cuts = [
        index
        for index, ((video, _), step) in enumerate(zip(places, steps, strict=False), start=1)
        if step is None or step > usual[video]
    ]
    return [range(start, stop) for start, stop in pairwise([0, *cuts, len(places)])]


# -- reading -----------------------------------------------------------------------------------------------


def read(path: Path, *, every: int = 1, first: int | None = None, shrink: int = 1) -> Frames:
    """Read the frames of a Parquet file: one in `every`, the `first` of each sequence, shrunk by `shrink`."""
    import pyarrow.parquet as pq

    rows = sorted(pq.read_table(path).to_pylist(), key=lambda row: place(row["image"]["path"]))
    for row in rows:
        if row["image"]["path"] != row["label"]["path"]:
            raise ValueError(f"{path}: the labels of {row['image']['path']} are those of {row['label']['path']}")
    rows = rows[::every]
    found = sequences([row["image"]["path"] for row in rows])
    rows = [rows[index] for sequence in found for index in sequence[:first]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = list(pool.map(lambda row: _decoded(row, shrink), rows))
    images, labels = (torch.stack(tensors) for tensors in zip(*decoded, strict=True))
    return Frames(images, labels, tuple(row["image"]["path"] for row in rows))


def _decoded(row: dict[str, Any], shrink: int) -> tuple[Tensor, Tensor]:
    """Decode image `[3, H, W]` and labels `[H, W]`; shrinking averages pixels and subsamples labels."""
    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB").reduce(shrink)
    label = np.array(Image.open(io.BytesIO(row["label"]["bytes"])))[shrink // 2 :: shrink, shrink // 2 :: shrink]
    return torch.from_numpy(np.array(image)).permute(2, 0, 1), torch.from_numpy(label.copy())


# -- training ----------------------------------------------------------------------------------------------


def balanced(labels: Tensor) -> Tensor:
    """Return class weights `[CLASSES]` by median frequency balancing, from label maps `[N, H, W]`.

    A class's frequency is its share of the labelled pixels in frames that contain it (Eigen & Fergus, 2015); its weight
    is the median frequency divided by its own. Classes in no frame get weight 0.
    """
    flat = labels.flatten(1).long()
    offset = torch.arange(len(flat), device=flat.device)[:, None] * (CLASSES + 1)
    counts = torch.bincount((flat + offset).flatten(), minlength=len(flat) * (CLASSES + 1))
    counts = counts.view(-1, CLASSES + 1)[:, :CLASSES].double()  # pixels per frame and class
    labelled = ((counts > 0) * counts.sum(1, keepdim=True)).sum(0)
    frequency = counts.sum(0) / labelled  # NaN for absent classes
    return (frequency.nanmedian() / frequency).nan_to_num(0).float()


def cut(frames: Frames, windows: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Cut windows from frames: images `[B, 3, *size]`, channels-last in memory, and labels `[B, *size]`.

    `windows [4, B]` holds each window's frame, first row, first column, and whether it is flipped.
    """
    which, down, right, mirrored = windows
    columns = torch.arange(size[1], device=which.device).expand(len(which), -1)
    columns = torch.where(mirrored[:, None] > 0, columns.flip(1), columns) + right[:, None]
    rows = torch.arange(size[0], device=which.device) + down[:, None]
    index = which[:, None, None], rows[:, :, None], columns[:, None, :]
    images = frames.images.permute(0, 2, 3, 1)[index].permute(0, 3, 1, 2)
    return images, frames.labels[index]


class Crops:
    """Training batches `(x, y)`: each frame once per epoch, as a random window, half of them flipped.

    `x [B, 3, *size]` is standardised, `y` is `[B, *size]`. An epoch's random numbers are drawn at its start from
    torch's CPU random state, so that they are the same on every device.
    """

    def __init__(self, frames: Frames, mean: Tensor, std: Tensor, size: tuple[int, int], batch_size: int) -> None:
        self.frames, self.mean, self.std, self.size, self.batch_size = frames, mean, std, size, batch_size

    def __len__(self) -> int:
        return -(-len(self.frames) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count, (height, width) = len(self.frames), self.frames.labels.shape[1:]
        down = torch.randint(height - self.size[0] + 1, (count,))
        right = torch.randint(width - self.size[1] + 1, (count,))
        windows = torch.stack([torch.randperm(count), down, right, torch.randint(2, (count,))])
        for some in windows.to(self.frames.images.device).split(self.batch_size, 1):
            images, labels = cut(self.frames, some, self.size)
            yield (images.float() - self.mean) / self.std, labels.long()
