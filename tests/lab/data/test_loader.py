"""Batches: order, values, resumption; random crops and flips."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from multitudes.lab.data import Data, Loader, Part
from multitudes.lab.data.loader import random_moves, shift_and_flip
from tests.zoo.predictions import raises

Batch = tuple[Tensor, Tensor]


def numbered(count: int = 23) -> Data:
    """Return images whose pixels all equal their number, which is also their class."""
    x = torch.arange(count, dtype=torch.uint8)[:, None, None, None].repeat(1, 2, 8, 8)
    part = Part(x, torch.arange(count))
    return Data("numbered", part, part, part, tuple(str(label) for label in range(count)))


def loader(data: Data, **options: object) -> Loader:
    return Loader(data.train, data, **({"batch_size": 5} | options))  # type: ignore[arg-type]


def order(batches: Loader) -> list[int]:
    return [label for _, y in batches for label in y.tolist()]


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(s, t) for x, y in zip(a, b, strict=True) for s, t in zip(x, y, strict=True)
    )


def test_each_epoch_visits_every_row_once_in_a_new_order() -> None:
    batches = loader(numbered())
    epochs = [order(batches) for _ in range(4)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert order(loader(numbered(), seed=1)) not in epochs
    assert order(loader(numbered(), shuffle=False)) == list(range(23))


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    data = numbered()
    batches, images = loader(data, batch_size=7, augment="standard"), data.train.x.clone()
    before = torch.get_rng_state()
    epochs = [order(batches) for _ in range(3)]
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(images, data.train.x)
    torch.manual_seed(2)
    other = loader(numbered())
    other.start(2)
    assert order(other) == epochs[2]


def test_batches_are_preprocessed_images_and_their_classes() -> None:
    data = numbered()
    for x, y in loader(data):
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        expected = (y / 255 - data.preprocessing.mean.flatten()[0]) / data.preprocessing.std.flatten()[0]
        torch.testing.assert_close(x, expected[:, None, None, None].expand_as(x))


def test_targets_of_a_regression_are_standardised() -> None:
    part = Part(torch.randn(50, 1), torch.arange(50.0))
    data = Data("line", part, part, part, columns=("a",))
    ((_, y),) = loader(data, batch_size=50)
    assert y.mean().item() == pytest.approx(0, abs=1e-5) and y.std(correction=0).item() == pytest.approx(1)


@pytest.mark.parametrize("augment", [None, "standard"])
def test_an_epoch_resumes_in_the_middle(augment: str | None) -> None:
    whole = loader(numbered(), augment=augment)
    first, second = list(whole), list(whole)
    again = loader(numbered(), augment=augment)
    again.start(0, 2)
    assert same(list(again), first[2:])
    assert same(list(again), second)
    again.start(0, len(again))
    assert list(again) == [] and again.epoch == 1


def test_an_abandoned_epoch_restarts_and_the_last_batch_may_be_dropped() -> None:
    batches = loader(numbered())
    peeked = next(iter(batches))
    assert batches.epoch == 0
    whole = list(batches)
    assert same([peeked], whole[:1]) and [len(y) for _, y in whole] == [5, 5, 5, 5, 3] and batches.epoch == 1
    short = loader(numbered(), drop_last=True)
    assert len(short) == 4 and [len(y) for _, y in short] == [5, 5, 5, 5]
    assert len(loader(numbered(20))) == len(loader(numbered(20), drop_last=True)) == 4


def test_large_data_move_to_the_device_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(loader(numbered(), augment="standard"))
    monkeypatch.setattr("multitudes.lab.data.loader.free_bytes", lambda device: 0.0)
    assert same(list(loader(numbered(), augment="standard")), expected)
    assert loader(numbered(), device="meta")._x.device.type == "cpu"


ROWS = Part(torch.zeros(2, 1), torch.zeros(2))
WRONG: dict[str, Callable[[], object]] = {
    "batch_size must be a whole number, 1 or more, got 0": lambda: loader(numbered(), batch_size=0),
    "augment must be None or one of standard, crop, got 'turn'": lambda: loader(numbered(), augment="turn"),
    "seed must be None or a whole number, 0 or more and below 2**63, got -1": lambda: loader(numbered(), seed=-1),
    "batch_size=24 exceeds the 23 rows: set drop_last=False or lower it": lambda: loader(
        numbered(), batch_size=24, drop_last=True
    ),
    "augment='crop' is for images, but x has rows of 1": lambda: loader(
        Data("x", ROWS, ROWS, ROWS, columns=("a",)), augment="crop"
    ),
    "batch must be a whole number, 0 or more and at most 5 (batches per epoch), got 6": lambda: loader(
        numbered()
    ).start(0, 6),
    "epoch must be a whole number, 0 or more, got -1": lambda: loader(numbered()).start(-1),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_arguments_are_checked(sentence: str) -> None:
    with raises(sentence):
        WRONG[sentence]()


# -- augmentation ------------------------------------------------------------------------------------------


def crops(image: Tensor, pad: int) -> dict[bytes, tuple[int, int, bool]]:
    """Return all crops of a padded image and of its mirror image, by brute force."""
    _, height, width = image.shape
    found = {}
    for down, right, mirrored in itertools.product(range(2 * pad + 1), range(2 * pad + 1), (False, True)):
        out = torch.zeros_like(image)
        for row, column in itertools.product(range(height), range(width)):
            r, c = row + down - pad, (width - 1 - column if mirrored else column) + right - pad
            if 0 <= r < height and 0 <= c < width:
                out[:, row, column] = image[:, r, c]
        found[out.numpy().tobytes()] = (down, right, mirrored)
    return found


@pytest.mark.parametrize(("shape", "pad"), [((2, 16, 9), 1), ((3, 17, 20), 2)], ids=str)
@pytest.mark.parametrize("flip", [True, False])
def test_every_crop_is_equally_likely(shape: tuple[int, ...], pad: int, flip: bool) -> None:
    image = torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    known = crops(image, pad)
    out = shift_and_flip(
        image.expand(4000, *shape), random_moves(4000, shape[1:], torch.Generator().manual_seed(1), flip)
    )
    assert out.shape == (4000, *shape) and out.dtype == torch.uint8 and out.is_contiguous()
    seen = [known[one.numpy().tobytes()] for one in out]
    side = 2 * pad + 1
    counts = torch.zeros(side, side, 2)
    for down, right, mirrored in seen:
        counts[down, right, int(mirrored)] += 1
    assert flip or not counts[..., 1].any()
    counts = counts if flip else counts[..., 0]
    expected = 4000 / counts.numel()
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < counts.numel() - 1 + 4 * (2 * counts.numel()) ** 0.5  # four deviations above its mean


def test_large_images_move_by_at_most_four_pixels() -> None:
    moves = random_moves(500, (64, 48), torch.Generator().manual_seed(0))
    assert moves[:2].amin(1).tolist() == [0, 0] and moves[:2].amax(1).tolist() == [8, 8]


# -- devices -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_batches_of_a_cpu() -> None:
    data = numbered(200)
    here = list(loader(data, batch_size=64, augment="standard"))
    there = list(loader(data, batch_size=64, augment="standard", device="cuda"))
    assert all(tensor.is_cuda for batch in there for tensor in batch)
    for (x, y), (x_there, y_there) in zip(here, there, strict=True):
        torch.testing.assert_close(x_there.cpu(), x)
        assert torch.equal(y_there.cpu(), y)
