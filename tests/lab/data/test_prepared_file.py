"""The digits, prepared files, and the checks of `Data`."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from multitudes.base.archives import write_tensors
from multitudes.lab import data as md
from multitudes.lab.data import Data, Part
from multitudes.lab.data.splits import spread
from multitudes.lab.data.tables.features import Category, Number
from tests.lab.data.test_images import encoded, parquet, pixels
from tests.zoo.predictions import raises

# -- digits ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> Data:
    return md.load("digits")


def test_the_digits_are_those_of_scikit_learn_each_in_one_part(digits: Data) -> None:
    theirs = load_digits()
    known = sorted(
        (image.astype(int).tobytes(), int(label)) for image, label in zip(theirs.images, theirs.target, strict=True)
    )
    ours = []
    for part in digits.parts.values():
        back = (part.x[:, 0].double() * 16 / 255).round().long().numpy()
        ours += [(image.tobytes(), int(label)) for image, label in zip(back, part.y, strict=True)]
    assert sorted(ours) == known
    assert int(digits.train.x.min()) == 0 and int(digits.train.x.max()) == 255
    assert [len(part) for part in digits.parts.values()] == [400, 400, 997]
    assert md.load("digits", seed=7).fingerprint == digits.fingerprint
    share = np.bincount(theirs.target) / 1797
    for part in digits.parts.values():
        assert np.abs(part.y.bincount().numpy() - share * len(part)).max() <= 2


def test_photographs_have_the_pixel_values_of_test_digits(digits: Data) -> None:
    photographs = digits.ood["photographs"]
    theirs = digits.test.x[:400]
    assert photographs.shape == theirs.shape
    assert torch.equal(photographs.flatten(1).sort().values, theirs.flatten(1).sort().values)
    assert not (photographs == theirs).flatten(1).all(1).any()
    assert len(photographs.flatten(1).unique(dim=0)) == 400
    with raises("target= has no effect on 'digits', which is prepared: leave it out"):
        md.load("digits", target="label")


def test_spread_is_stratified_by_group() -> None:
    sizes = torch.tensor([60, 30, 9, 1])
    groups = torch.arange(4).repeat_interleave(sizes)[torch.randperm(100)]
    for count in (1, 50, 99):
        rows = spread(groups, count, seed=0)
        assert len(rows.unique()) == count
        assert ((groups[rows].bincount(minlength=4) - sizes * count / 100).abs() < 1).all()


# -- prepared files ----------------------------------------------------------------------------------------


def table() -> Data:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    part = Part(x, x.sum(1))
    more = {
        "ood": {"far away": x + 9},
        "dropped": {"'a' is missing": 3},
        "features": (Number("a", 0.5), Category("b", ("ü",))),
    }
    return Data("sums", part, part, part, columns=("a", "b=ü"), **more)  # type: ignore[arg-type]


def equal(a: Data, b: Data) -> bool:
    about = [(data.name, data.classes, data.columns, data.dropped, list(data.ood), data.features) for data in (a, b)]
    return a.fingerprint == b.fingerprint and about[0] == about[1]


def test_a_prepared_file_restores_the_data(tmp_path: Path, digits: Data) -> None:
    for number, data in enumerate((digits, table())):
        path = md.save(data, tmp_path / f"{number}.mtdata")
        assert equal(md.read(path), data) and equal(md.load(path), data)
        again = md.save(md.read(path), tmp_path / "again.mtdata")
        assert again.read_bytes() == path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.mtdata", "1.mtdata", "again.mtdata"]


def smooth(count: int) -> list[np.ndarray]:
    """Return colour images that a JPEG compresses well."""
    slope = np.linspace(0, 1, 64)
    return [
        np.stack([(255 * slope[None] * slope[:, None] ** (1 + row / 9)).astype("uint8")] * 3, 2) for row in range(count)
    ]


@pytest.fixture
def photographs(tmp_path: Path) -> Data:
    """Load 20 JPEGs that are smaller than their pixels."""
    files = [encoded(array, "JPEG") for array in smooth(20)]
    data = md.load(parquet(tmp_path / "x.parquet", files, [0, 1] * 10, ["a", "b"]))
    assert sorted(file for part in data.parts.values() for file in part.files) == sorted(files)
    return data


def test_encoded_images_stay_encoded_if_they_are_smaller(tmp_path: Path, photographs: Data) -> None:
    data = photographs
    for file, image in zip(data.train.files, data.train.x, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))), image.permute(1, 2, 0).numpy())
    path = md.save(data, tmp_path / "x.mtdata")
    assert load_file(path)["train.files"].tobytes() == b"".join(data.train.files) and "train.x" not in load_file(path)
    read = md.read(path)
    assert equal(read, data) and read.train.files == data.train.files
    assert md.save(read, tmp_path / "again.mtdata").read_bytes() == path.read_bytes()
    data = md.load(parquet(tmp_path / "x.parquet", list(pixels(20, 4, 4)), [0, 1] * 10))
    assert data.train.files and sum(map(len, data.train.files)) > data.train.x.nbytes
    path = md.save(data, tmp_path / "x.mtdata")
    assert "train.x" in load_file(path) and equal(md.read(path), data)


def test_a_prepared_file_supports_limits_and_ood_images(tmp_path: Path, digits: Data) -> None:
    path = md.save(digits, tmp_path / "x.mtdata")
    (tmp_path / "noise.png.d").mkdir()
    (tmp_path / "noise.png.d" / "0.png").write_bytes(encoded(pixels(1, 8, 8)[0]))
    data = md.load(path, limit=20, ood=tmp_path / "noise.png.d")
    assert data.train.y.bincount().tolist() == [2] * 10
    assert {name: len(x) for name, x in data.ood.items()} == {"photographs": 20, "noise.png.d": 1}


def test_a_prepared_file_is_read_with_safetensors_and_pillow_only(tmp_path: Path, photographs: Data) -> None:
    md.save(photographs, tmp_path / "x.mtdata")
    script = (
        "import sys\n"
        "for name in ('datasets', 'pyarrow', 'pandas', 'sklearn', 'pydantic'): sys.modules[name] = None\n"
        "from multitudes import data\n"
        "print(data.load(sys.argv[1]).fingerprint)"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.mtdata")], capture_output=True, text=True)
    assert ran.stdout.strip() == photographs.fingerprint, ran.stderr


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = md.save(table(), tmp_path / "x.mtdata")
    whole = path.read_bytes()
    with raises(f"path must be a prepared file, got {str(tmp_path / 'y.mtdata')!r}, which does not exist"):
        md.read(tmp_path / "y.mtdata")
    with raises(f"path must lie in a folder that exists, got {str(tmp_path / 'no' / 'x.mtdata')!r}"):
        md.save(table(), tmp_path / "no" / "x.mtdata")
    spoilt = bytearray(whole)
    spoilt[-80] ^= 255
    for content in (b"", b"text", whole[: len(whole) // 2], bytes(spoilt)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="x.mtdata' is not an intact prepared file: "):
            md.read(path)
    write_tensors(path, {}, "data", {"version": 99}, "a test")
    with pytest.raises(
        ValueError,
        match="prepared file: its version is 99, but this version of multitudes reads 5; remove it",
    ):
        md.read(path)


# -- Data --------------------------------------------------------------------------------------------------


def test_every_change_changes_the_fingerprint(digits: Data) -> None:
    def with_train(x: torch.Tensor, y: torch.Tensor) -> Data:
        return replace(digits, train=Part(x, y))

    x, y = digits.train.x.clone(), digits.train.y.clone()
    assert with_train(x, y).fingerprint == digits.fingerprint
    x[5, 0, 3, 3] += 1
    y[5] = (y[5] + 1) % 10
    changed = [
        with_train(x, digits.train.y),
        with_train(digits.train.x, y),
        replace(digits, ood={}),
        replace(digits, classes=tuple("abcdefghij")),
        replace(digits, train=digits.test, test=digits.train),
    ]
    assert len({data.fingerprint for data in [digits, *changed]}) == 6


def test_images_are_scaled_to_0_and_1_and_standardised(digits: Data) -> None:
    scaled = digits.scaled(digits.train.x)
    assert (scaled.min().item(), scaled.max().item()) == (0, 1)
    z = digits.preprocess(scaled)
    assert z.mean().item() == pytest.approx(0, abs=1e-5) and z.std(correction=0).item() == pytest.approx(1, rel=1e-5)
    assert digits.preprocess(scaled.double()).dtype == torch.float64
    with raises("x must be scaled before it is preprocessed, got torch.uint8: call `scaled` first"):
        digits.preprocess(digits.train.x)


def test_a_constant_channel_is_only_centred() -> None:
    part = Part(torch.full((3, 2, 4, 4), 51, dtype=torch.uint8), torch.tensor([0, 1, 0]))
    data = Data("even", part, part, part, ("a", "b"))
    assert data.preprocessing.std.flatten().tolist() == [1, 1]
    torch.testing.assert_close(data.preprocess(data.scaled(part.x)), torch.zeros(3, 2, 4, 4))


IMAGES, FEATURES = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, 3)
IMAGE, ROWS = Part(IMAGES, torch.tensor([0, 1])), Part(FEATURES, torch.tensor([0.0, 1.0]))
ENDLESS = Part(FEATURES, torch.tensor([0.0, torch.inf]))
COLUMNS = {"columns": ("a", "b", "c")}
WRONG: dict[str, Callable[[], object]] = {
    "y must be int64 or float32, one for each of 2 inputs, got torch.float32 [3]": lambda: Part(FEATURES, FEATURES[0]),
    "x must hold at least one input, got shape [0, 3]": lambda: Part(FEATURES[:0], torch.zeros(0)),
    "x must be finite, got nan at [0, 0]": lambda: Part(FEATURES / 0, torch.zeros(2)),
    "test must hold inputs like those of train, torch.uint8 [1, 4, 4], got torch.float32 [3]": lambda: Data(
        "x", IMAGE, IMAGE, ROWS, ("a", "b")
    ),
    "y of train must be classes 0 to 0, got 1 at 1": lambda: Data("x", IMAGE, IMAGE, IMAGE, ("a",)),
    "y of train must be numbers, since there are no classes, got torch.int64": lambda: Data("x", IMAGE, IMAGE, IMAGE),
    "columns must name the 3 features, got 1": lambda: Data("x", ROWS, ROWS, ROWS, columns=("a",)),
    "y of test must be finite, got inf at 1": lambda: Data("x", ROWS, ROWS, ENDLESS, **COLUMNS),
    "features must be those of the columns ('a', 'b', 'c'), got ('a=b',)": lambda: Data(
        "x", ROWS, ROWS, ROWS, **COLUMNS, features=[Category("a", ("b",))]
    ),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_inconsistent_parts_are_refused(sentence: str) -> None:
    with raises(sentence):
        WRONG[sentence]()


def test_processes_share_the_memory_of_a_large_table(tmp_path: Path) -> None:
    x = torch.randn(40_000, 60)
    part, small = Part(x, x[:, 0].clone()), Part(x[:7], x[:7, 0].clone())
    data = Data("large", part, small, small, columns=tuple(f"x{at}" for at in range(60)))
    path = md.save(data, tmp_path / "large.mtdata")
    read = md.read(path)
    assert read.fingerprint == data.fingerprint
    assert torch.equal(read.train.x, x)
    assert str(path) in Path("/proc/self/maps").read_text()
    read.train.x[0, 0] = 7.0  # copy on write
    assert md.read(path).train.x[0, 0] == x[0, 0]
