"""Prepared data: one compact file, read with NumPy and Pillow alone.

The file is a NumPy archive (`.npz`) without pickles, sealed by a checksum. Of each part it holds the targets and either
the pixels, features or tokens, or the images as they came, encoded, one after the other, and where each of them ends.
Of texts it holds those of the test part as well, for pages, and their tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes.core.archives import mapped_array, reading_arrays, write_arrays
from multitudes.core.files import DamagedError
from multitudes.data.features import feature_of
from multitudes.data.images import decode
from multitudes.data.reading import ColumnReading
from multitudes.data.splits import PARTS
from multitudes.data.types import Data, Part

__all__ = ["read", "save"]

VERSION = 4
LARGE = 8 << 20
"""Bytes of a training part, from which a table is not compressed."""


def save(data: Data, path: str | Path) -> Path:
    """Write data into one file, which appears under its name when it is whole; gives its path.

    Images that came encoded are kept so, where that is smaller; all else is kept as it is, compressed without loss. A
    large table is not compressed, nor are many texts: processes that read it share the memory of the file.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path must lie in a folder that exists, got {str(path)!r}")
    about = {name: getattr(data, name) for name in ("name", "classes", "columns", "shape", "numbers")}
    about |= {"version": VERSION, "dropped": dict(data.dropped), "ood": list(data.ood)}
    about |= {name: [each.plain() for each in getattr(data, name)] for name in ("features", "reading")}
    arrays = {"about": _bytes(json.dumps(about).encode())}
    for name, part in data.parts.items():
        arrays[f"{name}.y"] = part.y
        smaller = data.kind.feature_maps and 0 < sum(map(len, part.files)) < part.x.nbytes
        if smaller or (data.kind.written and part.files and name == "test"):
            arrays[f"{name}.files"] = _bytes(b"".join(part.files))
            arrays[f"{name}.ends"] = torch.tensor([len(file) for file in part.files]).cumsum(0)
        if not smaller:
            arrays[f"{name}.x"] = part.x
    arrays |= {f"ood.{number}": x for number, x in enumerate(data.ood.values())}
    plain = (data.kind.named or data.kind.written) and data.train.x.nbytes > LARGE
    return write_arrays(path, {name: tensor.numpy() for name, tensor in arrays.items()}, "a prepared file", plain)


def read(path: str | Path) -> Data:
    """The data that `save` wrote."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path must be a prepared file, got {str(path)!r}, which does not exist")
    try:
        with reading_arrays(path, "a prepared file") as arrays:
            about = json.loads(arrays["about"].tobytes())
            if about["version"] != VERSION:
                raise ValueError(f"its version is {about['version']}, and this program reads {VERSION}")
            train, validation, test = (_part(path, arrays, name, about["shape"]) for name in PARTS)
            features = tuple(map(feature_of, about["features"]))
            reading = tuple(ColumnReading(**each) for each in about["reading"])
            ood = {name: torch.from_numpy(arrays[f"ood.{number}"]) for number, name in enumerate(about["ood"])}
            classes, columns, dropped = tuple(about["classes"]), tuple(about["columns"]), dict(about["dropped"])
            return Data(
                str(about["name"]), train, validation, test, classes, columns, ood, dropped, features, reading,
                about["numbers"],
            )  # fmt: skip
    except DamagedError as error:
        reason = f"{error.what}; remove it and prepare it again"
        raise ValueError(f"{str(path)!r} is no whole file of prepared data: {reason}") from error


def _part(path: Path, arrays: Any, name: str, shape: list[int]) -> Part:
    y = torch.from_numpy(arrays[f"{name}.y"])
    files: tuple[bytes, ...] = ()
    if f"{name}.files" in arrays:
        whole, ends = arrays[f"{name}.files"].tobytes(), arrays[f"{name}.ends"].tolist()
        files = tuple(whole[start:end] for start, end in zip([0, *ends], ends, strict=False))
    if f"{name}.x" in arrays:
        mapped = mapped_array(path, f"{name}.x")
        return Part(torch.from_numpy(arrays[f"{name}.x"] if mapped is None else mapped), y, files)
    channels, height, width = shape
    decoded = decode(files, lambda row: f"{name} image {row}", (height, width), channels)
    if decoded.bad:
        row, reason = next(iter(decoded.bad.items()))
        raise ValueError(f"{name} image {row}: {reason}")
    return Part(decoded.x, y, files)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
