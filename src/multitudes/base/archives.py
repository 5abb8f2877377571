"""Tensors and arrays in sealed safetensors files, and foreign NumPy archives. Nothing is unpickled."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitudes.base.checks import needed
from multitudes.base.sealed_files import BLANK, DamagedError, check_seal, sealing

if TYPE_CHECKING:
    from torch import Tensor

ARRAYS = "arrays"
"""The header entry of files that `write_arrays` writes."""


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], entry: str, about: Mapping[str, Any], what: str
) -> Path:
    """Write copies of tensors, and a table of plain values, to a sealed safetensors file; return its path.

    The header stores the table as JSON, under `entry`. If safetensors is not installed, the error names `what`.
    """
    needed("safetensors.torch", "safetensors", what)
    files = needed("safetensors", "safetensors", what)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with sealing(path) as unfinished:
        files.torch.save_file(copies, unfinished, {entry: json.dumps({"sha256": BLANK, **about})})
    return Path(path)


def write_arrays(path: str | Path, arrays: Mapping[str, Any], what: str = "a file of arrays") -> Path:
    """Write NumPy arrays to a sealed safetensors file; return its path."""
    import torch

    return write_tensors(path, {name: torch.as_tensor(array) for name, array in arrays.items()}, ARRAYS, {}, what)


@contextmanager
def reading_tensors(path: str | Path, entry: str, what: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a file of `write_tensors` and yield it and its table; raise a `DamagedError` if it is damaged.

    The file's `get_tensor` maps a tensor into memory: processes share it, and writes stay in the process.
    """
    needed("safetensors.torch", "safetensors", what)
    files = needed("safetensors", "safetensors", what)
    check_seal(path)
    try:
        with files.safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(entry, "null"))
            if not isinstance(about, dict):
                raise DamagedError(path, f"its header has no table {entry!r}")
            about.pop("sha256", None)
            yield file, about
    except (files.SafetensorError, OSError, json.JSONDecodeError, RecursionError) as error:
        raise DamagedError(path, str(error).splitlines()[0]) from error


def read_tensors(path: str | Path, entry: str, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the table of a file of `write_tensors`; raise a `DamagedError` if it is damaged."""
    with reading_tensors(path, entry, what) as (file, about):
        # Copy into aligned memory: other alignments change products in the last bit.
        return {name: file.get_tensor(name).clone() for name in file.keys()}, about  # noqa: SIM118


# -- files of several parts --------------------------------------------------------------------------------


def join_parts(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join the tensors of several parts in one dict, as `part/name`.

    >>> import torch
    >>> join_parts({"net": {"weight": torch.ones(())}})
    {'net/weight': tensor(1.)}
    """
    return {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}


def tensors_of_part(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of one part, and remove the part from their names."""
    start = f"{part}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


# -- foreign archives --------------------------------------------------------------------------------------

_READING = (
    OSError, EOFError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError, MemoryError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors of NumPy for archives that are truncated or malformed."""


def read_archive(path: str | Path, most: float) -> dict[str, Any]:
    """Read the arrays of a `.npz` file; raise a `DamagedError` if they cannot be read or take over `most` bytes."""
    np = needed("numpy", "data", "a .npz file")
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > most:
            raise DamagedError(path, f"it unpacks to {size / 2**30:.0f} GiB, which does not fit in memory")
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except DamagedError:
        raise
    except _READING as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedError(path, reason) from error
