"""Sealed files: written completely or not at all, with a checksum inside.

The *seal* of a file is its SHA-256, computed with 64 zeros in place of the seal. It is stored near the start of the
file itself (JSON or safetensors), so one rename publishes a file and its checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

UNFINISHED = ".unfinished"
"""Suffix of files being written, or left by a killed process."""
BLANK = "0" * 64
"""Placeholder of the seal until a file is sealed."""

NAME = "file_name"
"""The key under which a JSON file stores its own name, to detect swapped files."""

_MARK = re.compile(rb'sha256[\\": ]{1,6}([0-9a-f]{64})')
_HEAD = 512
"""The seal is within this many bytes of the start."""
_SETTLED = 2.0
"""Seconds after a change until the modification time can be trusted to show the next one."""


class DamagedError(ValueError):
    """A damaged file: its path, and what is wrong with it."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        self.path, self.what = Path(path), what
        super().__init__(f"{str(self.path)!r} is damaged: {what}")


# -- writing -----------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to. On success it replaces `path` atomically; on failure it is removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/a.txt") as unfinished:
    ...         _ = unfinished.write_text("whole")
    ...     print(Path(f"{folder}/a.txt").read_text(), os.listdir(folder))
    whole ['a.txt']
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    if unfinished.is_symlink():  # do not write to its target
        unfinished.unlink()
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # otherwise the name could reach the disk before the content
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def sealing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Act like `replacing`, and seal the file, which must have `sha256` and `BLANK` near its start."""
    with replacing(path) as unfinished:
        yield unfinished
        with unfinished.open("r+b") as file:
            place = _place(file)
            assert place is not None, "the file has no blank seal"
            digest = _digest(file, place)
            file.seek(place)
            file.write(digest.encode())


def write_atomically(path: str | Path, data: bytes | str) -> Path:
    """Write a file atomically, even if the process or the machine dies; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def write_json(path: str | Path, table: Mapping[str, Any], place: bool = False) -> Path:
    """Write a table of plain values and the file's name as a sealed JSON object; return its path.

    With `place`, also write the name of the folder, for files of the same name in several folders.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read_json(write_json(f"{folder}/a.json", {"nll": 0.5}))
    {'nll': 0.5}
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sealed = {"sha256": BLANK, NAME: _place_of(path) if place else path.name, **table}
    with sealing(path) as unfinished:
        unfinished.write_text(json.dumps(sealed, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file to write in place; refuse symbolic links."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    if path.is_symlink():
        raise ValueError(f"{str(path)!r} is a symbolic link, and files are not written through links: remove it")
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


# -- checking ----------------------------------------------------------------------------------------------

_CHECKED: dict[str, tuple[tuple[int, ...], str]] = {}
"""Verified seals by path, with the identity of the file when it was verified."""


def check_seal(path: str | os.PathLike[str]) -> str:
    """Verify the seal of a file and return it; raise a `DamagedError` if it does not match.

    The result is cached until the file changes.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise DamagedError(path, "it is missing" if not path.exists() else "it is not a regular file")
        stat = path.stat()
        marks = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        known = _CHECKED.get(str(path))
        if known is not None and known[0] == marks:
            return known[1]
        with path.open("rb") as file:
            seal = _verified_seal(file, path)
    except OSError as error:
        raise DamagedError(path, f"it cannot be read ({error.strerror})") from error
    if time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED:
        _CHECKED[str(path)] = marks, seal
    return seal


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table of a file of `write_json`; raise a `DamagedError` if it is damaged."""
    path = Path(path)
    check_seal(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedError(path, f"it cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise DamagedError(path, f"it must be a JSON object, got {type(found).__name__}")
    if found.pop(NAME, path.name) not in (path.name, _place_of(path)):
        raise DamagedError(path, "it is a different file under this name")
    found.pop("sha256", None)
    return found


def _place_of(path: Path) -> str:
    return f"{path.absolute().parent.name}/{path.name}"


def _verified_seal(file: IO[bytes], path: Path) -> str:
    place = _place(file)
    if place is None:
        empty = not file.seek(0, os.SEEK_END)
        raise DamagedError(path, "it is empty" if empty else "it has no checksum, or an earlier version wrote it")
    file.seek(place)
    seal = file.read(len(BLANK)).decode("ascii")
    if seal != _digest(file, place):
        raise DamagedError(path, "its checksum does not match its content")
    return seal


def _place(file: IO[bytes]) -> int | None:
    """Return the position of a file's seal; None if it has none."""
    file.seek(0)
    found = _MARK.search(file.read(_HEAD))
    return None if found is None else found.start(1)


def _digest(file: IO[bytes], place: int) -> str:
    """Return the SHA-256 of a file with zeros as its seal."""
    file.seek(0)
    digest = hashlib.sha256(file.read(place) + BLANK.encode())
    file.seek(place + len(BLANK))
    while part := file.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()
