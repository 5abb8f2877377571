"""Batches on the device, in a resumable order: `Loader`; batched random crops and flips."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from multitudes.base.checks import check_count, check_seed
from multitudes.lab.data.parts import Data, Part
from multitudes.networks.devices import free_bytes
from multitudes.networks.seeds import mixed

AUGMENTATIONS = ("standard", "crop")
"""Random crops of padded images, with horizontal flips (standard) or without (crop, for digits and letters)."""


class Loader:
    """Iterate over batches `(x, y)` of a part: `x` preprocessed, `y` classes or standardised numbers.

    The order depends only on the seed and the epoch, the augmentation also on the batch, on every device. Each
    iteration is one epoch; `start(epoch, batch)` sets where the next one begins, to resume training. The part is moved
    to the device as a whole if it needs at most half of the free memory.

    Args:
        part: Rows to iterate over.
        data: Data of the part, with its preprocessing.
        batch_size: Rows per batch.
        device: Device of the batches.
        augment: None, "standard" (random crops and flips) or "crop".
        shuffle: Shuffle the rows in each epoch.
        seed: Seed of order and augmentation.
        drop_last: Drop the last batch if it is smaller.
        streams: With M, a batch concatenates M batches, each in its own order, for members that train on different
            rows (`mt.batch_ensemble(rows="own")`).

    >>> part = Part(torch.tensor([[1.0], [3.0], [1.0], [3.0]]), torch.tensor([0, 1, 0, 1]))
    >>> data = Data("four", part, part, part, ("a", "b"), ("x",), numbers="standard")
    >>> loader = Loader(part, data, batch_size=3, shuffle=False)
    >>> [(x.flatten().tolist(), y.tolist()) for x, y in loader]
    [([-1.0, 1.0, -1.0], [0, 1, 0]), ([1.0], [1])]
    """

    def __init__(
        self,
        part: Part,
        data: Data,
        batch_size: int,
        device: torch.device | str = "cpu",
        augment: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        streams: int = 1,
    ) -> None:
        check_count("batch_size", batch_size)
        check_count("streams", streams)
        check_seed(seed)
        if augment is not None and augment not in AUGMENTATIONS:
            raise ValueError(f"augment must be None or one of {', '.join(AUGMENTATIONS)}, got {augment!r}")
        if augment is not None and not data.kind.feature_maps:
            raise ValueError(f"augment={augment!r} is for images, but {data.name} has {data.kind.describe(data.shape)}")
        if drop_last and batch_size > len(part):
            raise ValueError(f"batch_size={batch_size} exceeds the {len(part)} rows: set drop_last=False or lower it")
        self.part, self.data, self.batch_size, self.device = part, data, batch_size, torch.device(device)
        self.augment, self.shuffle, self.seed, self.drop_last = augment, shuffle, seed, drop_last
        self.streams = streams
        self.epoch, self._first = 0, 0
        fits = part.x.nbytes <= free_bytes(self.device) / 2
        self._x = part.x.to(self.device) if fits else part.x
        self._y = data.standardised(part.y).to(self._x.device)

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        whole, rest = divmod(len(self.part), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def start(self, epoch: int, batch: int = 0) -> None:
        """Start the next iteration at this batch of this epoch."""
        check_count("epoch", epoch, 0)
        if type(batch) is not int or not 0 <= batch <= len(self):
            limit = f"0 or more and at most {len(self)} (batches per epoch)"
            raise ValueError(f"batch must be a whole number, {limit}, got {batch!r}")
        self.epoch, self._first = epoch, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, first = self.epoch, self._first
        self._first = 0
        order = self._order(epoch)
        moves = None if self.augment is None else self._moves(epoch).to(self.device)
        for batch in range(first, len(self)):
            rows = slice(batch * self.batch_size, (batch + 1) * self.batch_size)
            yield self._batch(order[:, rows].flatten(), None if moves is None else moves[:, :, rows].flatten(1))
        self.epoch = epoch + 1

    def _order(self, epoch: int) -> Tensor:
        """Return the row order of an epoch, `[streams, N]`."""
        if not self.shuffle:
            return torch.arange(len(self.part), device=self._x.device).expand(self.streams, -1)
        # drawn on the CPU: equal on every device
        generator = self._generator(epoch)
        drawn = [torch.randperm(len(self.part), generator=generator) for _ in range(self.streams)]
        return torch.stack(drawn).to(self._x.device)

    def _moves(self, epoch: int) -> Tensor:
        """Return the random shifts and flips of an epoch, batch by batch, `[3, streams, N]`."""
        sizes = [len(rows) for rows in torch.arange(len(self.part)).split(self.batch_size)]
        shape, flip = self.part.x.shape[2:], self.augment == "standard"
        drawn = [
            random_moves(self.streams * size, shape, self._generator(epoch, batch), flip).unflatten(1, (-1, size))
            for batch, size in enumerate(sizes)
        ]
        return torch.cat(drawn, 2)

    def _batch(self, rows: Tensor, moves: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self._x[rows].to(self.device)
        if moves is not None:
            x = shift_and_flip(x, moves)
        return self.data.normalised(x), self._y[rows].to(self.device)

    def _generator(self, *numbers: int) -> torch.Generator:
        seed = self.seed
        for number in numbers:
            seed = mixed(seed, number)
        return torch.Generator().manual_seed(seed)


def random_moves(count: int, size: tuple[int, ...], generator: torch.Generator, flip: bool = True) -> Tensor:
    """Draw the vertical and horizontal shift and the flip of each image, `[3, count]`, on the CPU.

    Shifts are up to 4 pixels either way; below 32 pixels, up to an eighth of the shorter side.
    """
    reach = _reach(size)
    down, right = torch.randint(0, 2 * reach + 1, (2, count), generator=generator)
    mirrored = torch.rand(count, generator=generator) < 0.5 if flip else torch.zeros(count, dtype=torch.bool)
    return torch.stack([down, right, mirrored.long()])


def shift_and_flip(x: Tensor, moves: Tensor) -> Tensor:
    """Shift and flip images `[B, C, H, W]` by `random_moves`, with zero padding."""
    count, _, height, width = x.shape
    reach = _reach((height, width))
    down, right, mirrored = moves
    columns = torch.arange(width, device=x.device).expand(count, -1)
    columns = torch.where(mirrored[:, None] > 0, columns.flip(1), columns) + right[:, None]
    rows = torch.arange(height, device=x.device) + down[:, None]
    padded = F.pad(x, (reach, reach, reach, reach)).permute(0, 2, 3, 1)
    each = torch.arange(count, device=x.device)[:, None, None]
    return padded[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _reach(size: tuple[int, ...]) -> int:
    """Return the maximum shift in pixels for images of this height and width."""
    return max(1, min(4, min(size) // 8))
