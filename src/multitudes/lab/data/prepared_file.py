"""Prepared data in one safetensors file, sealed by a checksum and described in its header.

For each part it holds the targets and either pixels, features or tokens, or the concatenated encoded images with their
end offsets. For texts, it also holds the tokenizer and the test texts, which pages show. Reading needs only safetensors
and Pillow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from multitudes.base.archives import reading_tensors, write_tensors
from multitudes.base.sealed_files import DamagedError
from multitudes.lab.data.images import decode
from multitudes.lab.data.parts import Data, Part
from multitudes.lab.data.splits import PARTS
from multitudes.lab.data.tables.column_types import ColumnReading
from multitudes.lab.data.tables.features import feature_of

ENTRY, VERSION = "data", 5
LARGE = 8 << 20
"""Tensors from this size in bytes stay memory-mapped, so that processes share them."""


def save(data: Data, path: str | Path) -> Path:
    """Write data to one file atomically.

    Images stay encoded if that is smaller.

    Args:
        data: Data to write.
        path: File to write, usually with the suffix `.mtdata`.

    Returns:
        The path.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path must lie in a folder that exists, got {str(path)!r}")
    about = {name: getattr(data, name) for name in ("name", "classes", "columns", "shape", "numbers")}
    about |= {"version": VERSION, "dropped": dict(data.dropped), "ood": list(data.ood)}
    about |= {name: [each.plain() for each in getattr(data, name)] for name in ("features", "reading")}
    tensors: dict[str, Tensor] = {}
    for name, part in data.parts.items():
        tensors[f"{name}.y"] = part.y
        smaller = data.kind.feature_maps and 0 < sum(map(len, part.files)) < part.x.nbytes
        if smaller or (data.kind.is_text and part.files and name == "test"):
            tensors[f"{name}.files"] = torch.frombuffer(bytearray(b"".join(part.files)), dtype=torch.uint8)
            tensors[f"{name}.ends"] = torch.tensor([len(file) for file in part.files]).cumsum(0)
        if not smaller:
            tensors[f"{name}.x"] = part.x
    tensors |= {f"ood.{number}": x for number, x in enumerate(data.ood.values())}
    return write_tensors(path, tensors, ENTRY, about, "a prepared file")


def read(path: str | Path) -> Data:
    """Read data that `save` wrote.

    Raises:
        ValueError: If the file is missing, damaged, or of another version.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path must be a prepared file, got {str(path)!r}, which does not exist")
    try:
        with reading_tensors(path, ENTRY, "a prepared file") as (file, about):
            if about.get("version") != VERSION:
                raise DamagedError(
                    path, f"its version is {about.get('version')}, but this version of multitudes reads {VERSION}"
                )

            def tensor(name: str) -> Tensor:
                found: Tensor = file.get_tensor(name)
                return found if found.nbytes > LARGE else found.clone()

            names = set(file.keys())
            train, validation, test = (_part(names, tensor, name, about["shape"]) for name in PARTS)
            features = tuple(map(feature_of, about["features"]))
            reading = tuple(ColumnReading(**each) for each in about["reading"])
            ood = {name: tensor(f"ood.{number}") for number, name in enumerate(about["ood"])}
            classes, columns, dropped = tuple(about["classes"]), tuple(about["columns"]), dict(about["dropped"])
            return Data(
                str(about["name"]), train, validation, test, classes, columns, ood, dropped, features, reading,
                about["numbers"],
            )  # fmt: skip
    except (DamagedError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = error.what if isinstance(error, DamagedError) else str(error).splitlines()[0]
        raise ValueError(
            f"{str(path)!r} is not an intact prepared file: {reason}; remove it and prepare it again"
        ) from error


def _part(names: set[str], tensor: Callable[[str], Tensor], name: str, shape: list[int]) -> Part:
    y = tensor(f"{name}.y")
    files: tuple[bytes, ...] = ()
    if f"{name}.files" in names:
        whole, ends = tensor(f"{name}.files").numpy().tobytes(), tensor(f"{name}.ends").tolist()
        files = tuple(whole[start:end] for start, end in zip([0, *ends], ends, strict=False))
    if f"{name}.x" in names:
        return Part(tensor(f"{name}.x"), y, files)
    channels, height, width = shape
    decoded = decode(files, lambda row: f"{name} image {row}", (height, width), channels)
    if decoded.bad:
        row, reason = next(iter(decoded.bad.items()))
        raise ValueError(f"{name} image {row}: {reason}")
    return Part(decoded.x, y, files)
