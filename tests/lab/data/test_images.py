"""Images from Parquet, folders and Hugging Face: pixels, labels, sizes, colours, and unreadable files."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from multitudes.lab import data as md
from multitudes.lab.data import images, sources
from multitudes.lab.data.digits import digits
from tests.zoo.predictions import raises


def pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype="uint8")


def encoded(array: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    return saved(Image.fromarray(array), kind, **options)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def parquet(path: Path, arrays: Sequence[Any], labels: Sequence[Any], names: Sequence[str] | None = None) -> Path:
    """Write a file with the `datasets` library, like those of the hub."""
    files = [{"bytes": item if isinstance(item, bytes) else encoded(item), "path": None} for item in arrays]
    label = datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64")
    features = datasets.Features({"img": datasets.Image(), "label": label})
    datasets.Dataset.from_dict({"img": files, "label": list(labels)}, features=features).to_parquet(str(path))
    return path


def refused(source: Any, cases: Mapping[str, dict[str, Any]]) -> None:
    """Check the error of `load` for each of these options."""
    for sentence, options in cases.items():
        with raises(sentence):
            md.load(source, **options)


def check_images(data: md.Data, arrays: np.ndarray, labels: Sequence[int]) -> None:
    """Check that every image is in the data once, with its own label."""
    x = torch.cat([part.x for part in data.parts.values()])
    y = torch.cat([part.y for part in data.parts.values()])
    known = {array.tobytes(): label for array, label in zip(arrays, labels, strict=True)}
    channels_last = x.permute(0, 2, 3, 1).contiguous().numpy()
    seen = {image.tobytes(): int(label) for image, label in zip(channels_last, y, strict=True)}
    assert len(x) == len(arrays) and seen == known


# -- sources -----------------------------------------------------------------------------------------------


def test_parquet_files_of_the_datasets_library_are_read(tmp_path: Path) -> None:
    arrays, labels = pixels(40, 6, 5, 3), [row % 4 for row in range(40)]
    path = parquet(tmp_path / "x.parquet", list(arrays), labels, ["d", "c", "b", "a"])
    data = md.load(path)
    assert (data.kind.name, data.shape, data.classes) == ("image", (3, 6, 5), ("d", "c", "b", "a"))
    check_images(data, arrays, labels)
    assert [len(part) for part in data.parts.values()] == [28, 4, 8]
    assert [part.y.bincount(minlength=4).tolist() for part in data.parts.values()] == [[7] * 4, [1] * 4, [2] * 4]
    assert data.preprocessing.mean.flatten().tolist() == pytest.approx(
        data.train.x.double().mean((0, 2, 3)).div(255).tolist()
    )
    std = data.train.x.numpy().astype("float64").std((0, 2, 3)) / 255
    assert data.preprocessing.std.flatten().tolist() == pytest.approx(std.tolist())
    unnamed = md.load(parquet(path, list(pixels(100, 2, 2)), [5 + row for row in range(50)] * 2))
    assert unnamed.classes == tuple(str(label) for label in range(5, 55)) and int(unnamed.train.y.max()) == 49


def test_shards_are_joined_into_the_parts_in_their_names(tmp_path: Path) -> None:
    arrays = pixels(40, 4, 4)
    for shard in range(3):
        rows = slice(10 * shard, 10 * shard + 10)
        parquet(tmp_path / f"train-0{shard}-of-03.parquet", list(arrays[rows]), [0, 1] * 5, ["a", "b"])
    parquet(tmp_path / "test-00-of-01.parquet", list(arrays[30:]), [0, 1] * 5, ["a", "b"])
    data = md.load(tmp_path)
    np.testing.assert_array_equal(data.test.x[:, 0].numpy(), arrays[30:])
    check_images(data, arrays, [0, 1] * 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write train/{cat,dog} with 10 images each, test/{cat,dog} with 2, a text file, and hidden files."""
    arrays = pixels(24, 4, 4, 3)
    for row, array in enumerate(arrays):
        part, kind = ("train", "test")[row >= 20], ("cat", "dog")[row % 2]
        (tmp_path / "pets" / part / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "pets" / part / kind / f"{row}.png").write_bytes(encoded(array))
    (tmp_path / "pets" / "README.txt").write_text("cats and dogs")
    (tmp_path / "pets" / ".cache").mkdir()
    (tmp_path / "pets" / ".cache" / "small.png").write_bytes(b"")
    (tmp_path / "pets" / "train" / "cat" / "._0.png").write_bytes(b"")
    return tmp_path / "pets"


def test_folders_are_classes_and_parts(folder: Path) -> None:
    data = md.load(folder)
    assert (data.name, data.classes) == ("pets", ("cat", "dog"))
    check_images(data, pixels(24, 4, 4, 3), [row % 2 for row in range(24)])
    assert [len(part) for part in data.parts.values()] == [18, 2, 4]
    one_level = md.load(folder / "train")
    assert [len(part) for part in one_level.parts.values()] == [14, 2, 4]


def test_a_hugging_face_dataset_has_splits_and_configurations(tmp_path: Path) -> None:
    arrays = pixels(30, 4, 4)
    for config in ("cropped", "full"):
        (tmp_path / config).mkdir()
        parquet(tmp_path / config / "train.parquet", list(arrays[:20]), [0, 1] * 10, ["a", "b"])
        parquet(tmp_path / config / "extra.parquet", list(arrays[20:]), [0, 1] * 5, ["a", "b"])
    files = "\n".join(
        f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/train.parquet\n"
        f"  - split: extra\n    path: {config}/extra.parquet"
        for config in ("cropped", "full")
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{files}\n---\n")
    with pytest.warns(UserWarning) as warned:
        source = sources.from_hub(str(tmp_path))
    sentences = [str(warning.message) for warning in warned]
    assert f"{tmp_path} has the configurations cropped, full; using cropped" in sentences
    assert f"{tmp_path} also has extra, which is not used" in sentences
    assert source.origins == [("train", 20)] and source.columns["label"].names == ("a", "b")
    opened = Image.open(io.BytesIO(source.columns["img"].values[7]))
    np.testing.assert_array_equal(np.asarray(opened), arrays[7])
    with pytest.warns(UserWarning, match="extra"):
        assert len(sources.from_hub(f"{tmp_path}:full")) == 20


def test_an_invalid_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "get_dataset_default_config_name", offline)
    kinds = f"a source must be {sources.SOURCES}, got"
    (tmp_path / "x.doc").write_text("text")
    for wrong, sentence in {
        "no/where": f"{kinds} 'no/where': no such file or folder, and Hugging Face says: no network",
        **{wrong: f"{kinds} {str(wrong)!r}" for wrong in ("", "digit", "a/b/c", str(tmp_path / "x.doc"))},
        None: f"{kinds} None",
        "nowhere.csv": "source 'nowhere.csv' does not exist",
        tmp_path: f"folder {str(tmp_path)!r} holds no CSV, Parquet or image files",
    }.items():
        refused(wrong, {sentence: {}})
    (tmp_path / "x.parquet").write_text("text")
    with pytest.raises(ValueError, match="x.parquet could not be read as Parquet: "):
        md.load(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="dataset 'no/where' needs datasets: pip install 'multitudes\\[data\\]'"):
        md.load("no/where")


def test_image_and_label_columns_are_found_or_given(tmp_path: Path) -> None:
    image, column = {"bytes": encoded(pixels(1, 2, 2)[0]), "path": None}, datasets.Image()
    labels = {"fine": datasets.ClassLabel(names=["a", "b"]), "n": datasets.Value("int64")}
    features = {"left": column, "right": column, **labels}
    rows = {"left": [image] * 20, "right": [image] * 20, "fine": [0, 1] * 10, "n": [0, 1, 1, 0] * 5}
    path = tmp_path / "x.parquet"
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(str(path))
    assert md.load(path, image="left").classes == ("a", "b")  # the only column of labels
    assert md.load(path, image="left", target="n").classes == ("0", "1")
    cases: dict[str, dict[str, Any]] = {
        "image= must name the column of x.parquet that holds the images, one of left, right": {},
        "image='fine' must be a column of images, got one of kind text": {"image": "fine"},
        "image='middle' is not a column of x.parquet, which has left, right, fine, n": {"image": "middle"},
        "target='right' must hold numbers or texts, got image": {"image": "left", "target": "right"},
        "columns= does not apply to x.parquet, which holds images: leave it out": {"image": "left", "columns": ["n"]},
    }
    refused(path, cases)


# -- pixels ------------------------------------------------------------------------------------------------


def opened(*files: bytes, **options: Any) -> np.ndarray:
    return images.decode(files, str, **options).x.numpy()


def test_grey_images_become_rgb_only_beside_colour() -> None:
    grey, colour = pixels(2, 3, 4), pixels(1, 3, 4, 3)[0]
    np.testing.assert_array_equal(opened(*map(encoded, grey)), grey[:, None])
    mixed = opened(encoded(grey[0]), encoded(colour), encoded(grey[1]))
    np.testing.assert_array_equal(mixed, [np.stack([grey[0]] * 3), colour.transpose(2, 0, 1), np.stack([grey[1]] * 3)])


def test_formats_may_differ_between_images() -> None:
    arrays = pixels(4, 8, 8, 3)
    kinds = ["png", "bmp", "webp", "tiff"]
    files = [
        encoded(array, kind, **({"lossless": True} if kind == "webp" else {}))
        for array, kind in zip(arrays, kinds, strict=True)
    ]
    np.testing.assert_array_equal(opened(*files), arrays.transpose(0, 3, 1, 2))


def test_palettes_transparency_and_1_and_16_bits_are_converted() -> None:
    colour, alpha = pixels(1, 3, 4, 3)[0], pixels(1, 3, 4, 1, seed=1)[0]
    palette = Image.fromarray(np.array([[0, 1], [2, 1]], dtype="uint8"), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    for file, expected in (
        (encoded(np.concatenate([colour, alpha], 2)), colour.transpose(2, 0, 1)),
        (saved(palette), [[[10, 40], [70, 40]], [[20, 50], [80, 50]], [[30, 60], [90, 60]]]),
        (saved(Image.fromarray(np.array([[True, False]]))), [[[255, 0]]]),
        (encoded(np.array([[0, 256, 65535]], dtype="uint16")), [[[0, 1, 255]]]),
    ):
        np.testing.assert_array_equal(opened(file)[0], expected)


def test_a_rotated_photograph_is_rotated_back() -> None:
    array = pixels(1, 2, 3)[0]
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees, clockwise
    np.testing.assert_array_equal(opened(encoded(array, exif=exif))[0, 0], np.rot90(array, -1))


def test_size_resizes_and_crops_the_centre() -> None:
    halves = np.repeat(np.array([[0, 200]], dtype="uint8"), 4, 0).repeat(4, 1)  # 4 x 8: dark left, bright right
    assert opened(encoded(halves), size=(4, 4)).tolist() == [[[[0, 0, 200, 200]] * 4]]
    even = np.full((6, 10), 77, dtype="uint8")
    assert opened(encoded(even), encoded(halves), size=(5, 3)).shape == (2, 1, 5, 3)
    assert set(opened(encoded(even), size=(5, 3)).flatten()) == {77}


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    arrays = [*pixels(12, 4, 4), pixels(1, 5, 4)[0], *pixels(12, 4, 4, seed=1)]
    path = parquet(tmp_path / "x.parquet", arrays, [row % 2 for row in range(25)])
    with raises(
        "images must have the same size, or size= must be given to resize them: 12 is 5 x 4 (height x width), "
        "the previous ones are 4 x 4"
    ):
        opened(*map(encoded, arrays))
    data = md.load(path, size=4)
    assert data.shape == (1, 4, 4) and not data.train.files
    assert md.load(path, size=(2, 3)).shape == (1, 2, 3)
    for wrong in (0, (4, 4, 3)):
        with pytest.raises(ValueError, match="^size must be "):
            md.load(path, size=wrong)  # type: ignore[arg-type]


def test_too_little_memory_and_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encoded(pixels(1, 100, 100, 3)[0])
    monkeypatch.setattr(images, "free_bytes", lambda device: 1e6)
    with raises(
        "100 images of [3, 100, 100] need 0.003 GB when decoded, but 0.001 GB are free: pass a smaller size= or limit="
    ):
        opened(*[file] * 100)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    digits.cache_clear()
    for what, call in (("reading images", lambda: opened(file)), ("photographs", lambda: md.load("digits"))):
        with pytest.raises(ImportError, match=f"^{what} needs PIL: pip install 'multitudes\\[data\\]'$"):
            call()  # not counted as a bad image


# -- bad rows ----------------------------------------------------------------------------------------------


def test_unreadable_images_and_missing_labels_raise_or_are_skipped(tmp_path: Path) -> None:
    good = pixels(40, 4, 4)
    arrays: list[Any] = list(good)
    arrays[3], arrays[7] = b"no image", encoded(good[7])[:60]
    path = parquet(tmp_path / "x.parquet", arrays, [0, 1] * 20, ["a", "b"])
    with pytest.raises(
        ValueError,
        match=r"^x.parquet has 2 bad rows: x.parquet row 3: the image is unreadable \(unknown format\); "
        r"x.parquet row 7: the image is unreadable \(.*\). skip_bad=True leaves them out$",
    ):
        md.load(path)
    data = md.load(path, skip_bad=True)
    assert data.dropped == {"the image is unreadable": 2}
    kept = [row for row in range(40) if row not in (3, 7)]
    check_images(data, good[kept], [row % 2 for row in kept])
    parquet(path, list(good), [0, 1, -1, None] * 10, ["a", "b"])
    with pytest.raises(ValueError, match="has 20 bad rows: x.parquet row 2: 'label' is missing; x.parquet row 3: "):
        md.load(path)
    assert md.load(path, skip_bad=True).dropped == {"'label' is missing": 20}


def test_a_broken_file_is_named_and_a_part_needs_a_good_one(folder: Path) -> None:
    (folder / "train" / "cat" / "0.png").write_bytes(b"")
    what = "pets has 1 bad row: train/cat/0.png: the image is unreadable (unknown format). skip_bad=True leaves"
    refused(folder, {f"{what} them out": {}})
    for path in (folder / "test").rglob("*.png"):
        path.write_bytes(b"")
    refused(folder, {"pets has no readable row in its test part": {"skip_bad": True}})


# -- out-of-distribution images ----------------------------------------------------------------------------


def test_ood_images_get_the_shape_of_the_data(tmp_path: Path, folder: Path) -> None:
    grey = pixels(6, 4, 4, seed=5)
    (tmp_path / "plain").mkdir()
    for row, array in enumerate(grey):
        (tmp_path / "plain" / f"{row}.png").write_bytes(encoded(array))
    data = md.load(folder, ood=[tmp_path / "plain", "digits"], limit=5)
    assert {name: tuple(x.shape) for name, x in data.ood.items()} == {"plain": (5, 3, 4, 4), "digits": (5, 3, 4, 4)}
    known = {array.tobytes() for array in grey}
    for image in data.ood["plain"]:
        assert torch.equal(image[0], image[1]) and torch.equal(image[0], image[2])
        assert image[0].numpy().tobytes() in known
    small = md.load("digits", ood=folder)
    expected = np.asarray(Image.open(folder / "test" / "cat" / "20.png").convert("L").resize((8, 8), 2))
    np.testing.assert_array_equal(small.ood["pets"][0, 0].numpy(), expected)
    assert len(small.ood["pets"]) == 4  # its test part


def test_unfit_ood_images_are_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    refused(folder, {"x.csv must hold images, got the columns a, b": {"ood": tmp_path / "x.csv"}})
    taken = "digits already has out-of-distribution inputs with the name"
    refused("digits", {f"{taken} 'pets'": {"ood": [folder, folder]}})
    (folder / "test" / "cat" / "20.png").write_bytes(b"")
    with pytest.raises(ValueError, match="^pets has 1 bad row: test/cat/20.png: the image is unreadable"):
        md.load("digits", ood=folder)
    data = md.load("digits", ood=folder, skip_bad=True)
    assert data.dropped == {"pets: the image is unreadable": 1} and len(data.ood["pets"]) == 3
