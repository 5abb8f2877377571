"""Arrays in sealed files: NumPy archives without pickles, and safetensors."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitudes.core.checks import needed
from multitudes.core.files import BLANK, DamagedError, check_seal, sealing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mapped_array", "read_tensors", "reading_arrays", "write_arrays", "write_tensors"]

_READING = (
    OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, MemoryError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What NumPy raises for archives that are not whole, or not what they should be."""


# -- NumPy archives ----------------------------------------------------------------------------------------


def write_arrays(
    path: str | Path, arrays: Mapping[str, Any], what: str = "a file of arrays", plain: bool = False
) -> Path:
    """Write NumPy arrays to a compressed and sealed `.npz` file; gives its path.

    A `plain` one is not compressed, and its arrays lie in it as in memory, so that `mapped_array` needs no copy.
    """
    np = needed("numpy", "data", what)
    with sealing(path) as unfinished, unfinished.open("wb") as file:
        if plain:
            _write_plain(file, arrays)
        else:
            np.savez_compressed(file, **arrays)
    return Path(path)


ALIGNED = 64
"""Arrays of a plain archive begin at a multiple of so many bytes, as torch's own do."""
_PADDING = 0x544D
"""The id of an extra field of a zip entry that says nothing."""


def _write_plain(file: Any, arrays: Mapping[str, Any]) -> None:
    np, form = (needed(name, "data", "a file of arrays") for name in ("numpy", "numpy.lib.format"))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            array = np.ascontiguousarray(array)
            entry = zipfile.ZipInfo(f"{name}.npy")
            start = file.tell() + 30 + len(entry.filename.encode()) + 4  # the header of an entry, and of the field
            entry.extra = struct.pack("<HH", _PADDING, padding := -start % ALIGNED) + bytes(padding)
            entry.file_size = array.nbytes  # by which zipfile knows a large one
            with archive.open(entry, "w") as target:
                form.write_array(target, array, (1, 0), allow_pickle=False)


def mapped_array(path: str | Path, name: str) -> Any:
    """An array of a plain archive as it lies in the file, which all processes that read it share; None where it cannot.

    What is written into it stays in this process.
    """
    np, form = (needed(each, "data", "a file of arrays") for each in ("numpy", "numpy.lib.format"))
    with zipfile.ZipFile(path) as archive, Path(path).open("rb") as file:
        entry = archive.getinfo(f"{name}.npy")
        if entry.compress_type != zipfile.ZIP_STORED:
            return None
        file.seek(entry.header_offset + 26)
        lengths = struct.unpack("<HH", file.read(4))
        file.seek(sum(lengths), os.SEEK_CUR)
        if form.read_magic(file) != (1, 0):
            return None
        shape, by_columns, dtype = form.read_array_header_1_0(file)
        if by_columns or not math.prod(shape) or file.tell() % ALIGNED:
            return None
        return np.memmap(path, dtype, "c", file.tell(), shape)


@contextmanager
def reading_arrays(path: str | Path, what: str = "a file of arrays", sealed: bool = True) -> Iterator[Any]:
    """The arrays by name of a `.npz` file, read as they are asked for; a `DamagedError` where one cannot be.

    A file that others wrote is not `sealed`.
    """
    np = needed("numpy", "data", what)
    if sealed:
        check_seal(path)
    try:
        _check_sizes(Path(path))
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except DamagedError:
        raise
    except _READING as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedError(path, reason) from error


def _check_sizes(path: Path) -> None:
    """That what the archive unpacks to fits into memory: a small file can claim to hold any amount."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if size > _memory():
            raise DamagedError(path, f"it unpacks to {size / 2**30:.0f} GiB, more than the memory here")
        for entry in archive.infolist():
            with archive.open(entry) as file:
                _check_array(path, entry, file)


def _check_array(path: Path, entry: zipfile.ZipInfo, file: Any) -> None:
    form = needed("numpy.lib.format", "data", "a file of arrays")
    version = form.read_magic(file)
    read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise DamagedError(path, f"{entry.filename} holds Python objects (pickle), which are never read")
    if math.prod(shape) * dtype.itemsize != entry.file_size - file.tell():
        raise DamagedError(path, f"{entry.filename} is not as long as it says")


def _memory() -> int:
    """The memory of this machine, in bytes."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 1 << 40


# -- safetensors -------------------------------------------------------------------------------------------


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], entry: str, about: Mapping[str, Any], what: str
) -> Path:
    """Write tensors to a sealed safetensors file, with a table of plain values in its header; gives its path.

    The table is an `entry` of the header, as JSON. `what` is what needs safetensors, for who lacks it.
    """
    needed("safetensors.torch", "safetensors", what)
    files = needed("safetensors", "safetensors", what)
    with sealing(path) as unfinished:
        files.torch.save_file(dict(tensors), unfinished, {entry: json.dumps({"sha256": BLANK, **about})})
    return Path(path)


def read_tensors(path: str | Path, entry: str, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote; raise a `DamagedError` if the file is not whole."""
    needed("safetensors.torch", "safetensors", what)
    files = needed("safetensors", "safetensors", what)
    try:
        check_seal(path)
        sealed: DamagedError | None = None
    except DamagedError as error:
        sealed = error
    try:
        with files.safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get(entry)
            about = None if metadata is None else json.loads(metadata)
            if not isinstance(about, dict):
                raise DamagedError(path, f"its header has no table {entry!r}")
            if sealed is not None:
                raise sealed
            # Copies, in memory that torch has aligned: how it lies in the file would change products in the last bit.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (files.SafetensorError, OSError, json.JSONDecodeError, RecursionError) as error:
        raise sealed or DamagedError(path, str(error).splitlines()[0]) from error
    about.pop("sha256", None)
    return tensors, about
