"""Files that are written whole or not at all, sealed by a checksum.

A *seal* is the SHA-256 of a file, computed with 64 zeros in its place; it is near the start of the file itself, JSON or
safetensors. Thus a file and its checksum appear in one rename.
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
"""The key of a JSON file for its own name, so that a file in another's place is noticed."""

_MARK = re.compile(rb'sha256[\\": ]{1,6}([0-9a-f]{64})')
_HEAD = 512
"""The seal is within this many bytes of the start."""
_SETTLED = 2.0
"""Age in seconds from which a file's modification time proves that it has not changed since."""


class DamagedError(ValueError):
    """A damaged file: its path, and what is wrong with it."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        self.path, self.what = Path(path), what
        super().__init__(f"{str(self.path)!r} is damaged: {what}")


# -- writing -----------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to; on success it replaces `path` at once, on failure it is removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/a.txt") as unfinished:
    ...         _ = unfinished.write_text("whole")
    ...     print(Path(f"{folder}/a.txt").read_text(), os.listdir(folder))
    whole ['a.txt']
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    if unfinished.is_symlink():  # it would lead elsewhere
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
    """Like `replacing`, and seal the file, which must have `sha256` and `BLANK` near its start."""
    with replacing(path) as unfinished:
        yield unfinished
        with unfinished.open("r+b") as file:
            place = _place(file)
            assert place is not None, "nothing in the file is left blank for its seal"
            digest = _digest(file, place)
            file.seek(place)
            file.write(digest.encode())


def write_atomically(path: str | Path, data: bytes | str) -> Path:
    """Write a file whole or not at all, even if the process or the machine dies; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def write_json(path: str | Path, table: Mapping[str, Any], place: bool = False) -> Path:
    """Write a table of plain values, and the name of its file, as a sealed JSON object; return its path.

    With `place`, write the name of its folder too, for files of the same name in several folders.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read_json(write_json(f"{folder}/a.json", {"nll": 0.5}))
    {'nll': 0.5}
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        json.dumps({"sha256": BLANK, NAME: _place_of(path) if place else path.name, **table}, indent=1, allow_nan=False)
        + "\n"
    )
    with sealing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return path


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file to write to it in place; refuse links, which may lead anywhere."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    if path.is_symlink():
        raise ValueError(f"{str(path)!r} is a link, which is not written to: remove it")
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


# -- checking ----------------------------------------------------------------------------------------------

_CHECKED: dict[str, tuple[tuple[int, ...], str]] = {}
"""Seals of files that were verified, by path, with the files' identity at that time."""


def check_seal(path: str | os.PathLike[str]) -> str:
    """Verify the seal of a file and return it; raise a `DamagedError` if it does not match.

    A process reads each file once, unless it changes.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise DamagedError(path, "it is missing" if not path.exists() else "it is no file")
        stat = path.stat()
        marks = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        known = _CHECKED.get(str(path))
        if known is not None and known[0] == marks:
            return known[1]
        with path.open("rb") as file:
            seal = _checked(file, path)
    except OSError as error:
        raise DamagedError(path, f"it cannot be read ({error.strerror})") from error
    if time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED:
        _CHECKED[str(path)] = marks, seal
    return seal


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table that `write_json` wrote, without its seal; raise a `DamagedError` if it is not whole."""
    path = Path(path)
    check_seal(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedError(path, f"it cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise DamagedError(path, f"it must be a JSON object, got {type(found).__name__}")
    if found.pop(NAME, path.name) not in (path.name, _place_of(path)):
        raise DamagedError(path, "it is another file")
    found.pop("sha256", None)
    return found


def _place_of(path: Path) -> str:
    return f"{path.absolute().parent.name}/{path.name}"


def _checked(file: IO[bytes], path: Path) -> str:
    place = _place(file)
    if place is None:
        empty = not file.seek(0, os.SEEK_END)
        raise DamagedError(path, "it is empty" if empty else "it has no checksum, or was written by an earlier version")
    file.seek(place)
    held = file.read(len(BLANK)).decode("ascii")
    if held != _digest(file, place):
        raise DamagedError(path, "its checksum does not fit its content")
    return held


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
