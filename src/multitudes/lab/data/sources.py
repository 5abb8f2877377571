"""Read sources into columns: CSV, Parquet, NumPy and image files, folders of them, and Hugging Face datasets."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes.base.archives import read_archive
from multitudes.base.checks import needed
from multitudes.base.sealed_files import DamagedError
from multitudes.lab.data.splits import PARTS, part_named
from multitudes.lab.data.tables.columns import Column, from_arrow, from_cells, strip_cells
from multitudes.lab.data.tables.numbers_and_dates import decimal_marks
from multitudes.lab.data.tables.quick_csv import quick_columns
from multitudes.networks.devices import free_bytes

IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
SOURCES = (
    "'digits', a CSV, Parquet, .npz or .mtdata file, a folder of CSV, Parquet or image files, "
    "or a Hugging Face id such as 'owner/name'"
)


@dataclass(frozen=True)
class Source:
    """All rows of a source by column, with the rows of each part and where each row came from.

    `origins` are the files in order, each with its number of rows; `broken` maps unusable rows to the reason; `target`
    is the column to predict, if unambiguous; `files` is True if each row is a file; `lines` are the start lines of the
    rows in text files, from 1; `arrays` is True if every column is a feature.
    """

    name: str
    columns: Mapping[str, Column]
    parts: Mapping[str, Tensor]
    origins: Sequence[tuple[str, int]]
    broken: Mapping[int, str] = field(default_factory=dict)
    target: str | None = None
    files: bool = False
    lines: Sequence[int] = ()
    arrays: bool = False

    def __len__(self) -> int:
        return sum(count for _, count in self.origins)

    def column(self, argument: str, name: str) -> Column:
        """Return the column that an argument names."""
        if name not in self.columns:
            raise ValueError(f"{argument}={name!r} is not a column of {self.name}, which has {', '.join(self.columns)}")
        return self.columns[name]

    def trained_column(self, name: str) -> Column:
        """Return a column of the training data."""
        if name not in self.columns:
            has = ", ".join(self.columns)
            raise ValueError(f"{self.name} must have the column {name!r}, as in training; it has {has}")
        return self.columns[name]

    def one_of_kind(
        self, kind: str, given: str | None, names: Sequence[str], without: Collection[str] = ()
    ) -> list[str]:
        """Return the column of images or texts: the given one, the only one, or the first of these names, if any.

        The kind is also the name of the argument that selects it. Columns in `without` are ignored.
        """
        if given is not None:
            column = self.column(kind, given)
            if column.kind != kind:
                raise ValueError(f"{kind}={given!r} must be a column of {kind}s, got one of kind {column.kind}")
            return [given]
        found = [name for name, column in self.columns.items() if column.kind == kind and name not in without]
        named = [name for name in names if name in found][:1]
        if len(found) > 1 and not named:
            raise ValueError(
                f"{kind}= must name the column of {self.name} that holds the {kind}s, one of {', '.join(found)}"
            )
        return named or found

    def where(self, row: int) -> str:
        """Return the file and the position in it."""
        name, _ = self._origin(row)
        return name if self.files else f"{name} {self.place(row)}"

    def place(self, row: int) -> str:
        """Return the line of a text file, from 1, or else the row, from 0."""
        return f"line {self.lines[row]}" if self.lines else f"row {self._origin(row)[1]}"

    def _origin(self, row: int) -> tuple[str, int]:
        """Return the file of a row, and its index there."""
        for name, count in self.origins:
            if row < count:
                return name, row
            row -= count
        raise IndexError(row)


def open_source(source: str | Path, split: str | None = None, fold: int = 0) -> Source:
    """Read a source; `split` names the column with each row's part, `fold` selects a split of a .npz file."""
    path = Path(source)
    suffix = path.suffix.lower()
    if path.is_dir():
        found = _folder(path)
    elif suffix in _READERS or suffix == ".npz":
        if not path.is_file():
            raise ValueError(f"source {str(source)!r} does not exist")
        found = _npz(path, fold) if suffix == ".npz" else _READERS[suffix](path.name, path.parent, [path])
    elif path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", str(source)):
        raise ValueError(f"a source must be {SOURCES}, got {str(source)!r}")
    else:
        found = from_hub(str(source))
    if fold and suffix != ".npz":
        raise ValueError(f"fold={fold} needs folds= or a .npz file with its own splits, got {str(source)!r}")
    return found if split is None else _split_by(found, split)


def short_name(source: str | Path) -> str:
    """Return a short name for a source: the name of the file or folder, or the last part of an id.

    >>> short_name("data/wine.csv"), short_name("ufldl-stanford/svhn:cropped_digits"), short_name("photos/")
    ('wine', 'svhn', 'photos')
    """
    path = Path(source)
    name = path.stem if path.suffix.lower() in {*_READERS, ".npz", ".mtdata"} else path.name
    return (name or path.resolve().name).partition(":")[0]


def _split_by(source: Source, split: str) -> Source:
    """Assign parts by the column `split`."""
    column = source.column("split", split)
    if column.kind != "text":
        raise ValueError(f"split={split!r} must hold train, validation or test, got a column of kind {column.kind}")
    found: dict[str, list[int]] = {part: [] for part in PARTS}
    for row, value in enumerate(column.values):
        part = part_named(value or "")
        if part is not None:
            found[part].append(row)
        elif row not in source.broken:
            where = source.where(row)
            raise ValueError(f"split={split!r} must hold train, validation or test, got {value!r} at {where}")
    rows = {part: torch.tensor(own) for part, own in found.items() if own}
    columns = {name: other for name, other in source.columns.items() if name != split}
    return replace(source, columns=columns, parts=rows)


def _parts(stretches: Iterable[tuple[str | None, int]]) -> dict[str, Tensor]:
    """Return the rows of each part, given the part (default train) and length of each stretch."""
    rows: dict[str, list[Tensor]] = {}
    start = 0
    for part, count in stretches:
        rows.setdefault(part or "train", []).append(torch.arange(start, start + count))
        start += count
    return {part: torch.cat(pieces) for part, pieces in rows.items()}


def _parts_of_files(origins: Iterable[tuple[str, int]]) -> dict[str, Tensor]:
    """Return the rows of each part, by the names of their files or of the folders above."""
    return _parts((part_named(file.rpartition("/")[2]) or part_named(file), count) for file, count in origins)


# -- files -------------------------------------------------------------------------------------------------


def _folder(folder: Path) -> Source:
    files = _visible(folder)
    for suffix, reader in _READERS.items():
        if chosen := [path for path in files if path.suffix.lower() == suffix]:
            return reader(folder.resolve().name, folder, chosen)
    if images := [path for path in files if path.suffix.lower() in IMAGES]:
        return _images(folder, images)
    raise ValueError(f"folder {str(folder)!r} holds no CSV, Parquet or image files")


def _visible(folder: Path) -> list[Path]:
    """List all files of a folder, except hidden ones and those in hidden folders."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part[0] == "." for part in path.relative_to(folder).parts))


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def open_images(path: Path) -> Source | None:
    """Read an image file, or the images of a folder, named by full path; None if there are none."""
    if path.is_dir():
        folder, files = path, [file for file in _visible(path) if file.suffix.lower() in IMAGES]
    else:
        folder, files = path.parent, [] if path.suffix.lower() in {*_READERS, ".npz"} else [path]
    return replace(_images(folder, files), origins=[(str(file), 1) for file in files]) if files else None


def open_table(path: Path) -> Source:
    """Read the rows of a file or of a folder."""
    if not path.is_dir() and path.suffix.lower() not in {*_READERS, ".npz"}:
        raise ValueError(f"rows must be in a CSV, Parquet or .npz file or a folder of them, got {str(path)!r}")
    return open_source(path)


def _images(folder: Path, files: Sequence[Path]) -> Source:
    """Read images labelled by their folder; folders of classes may be inside folders of parts."""
    labels, parts = [], []
    for path in files:
        *folders, _ = path.relative_to(folder).parts
        part = part_named(folders[0]) if len(folders) > 1 else None
        parts.append(part)
        labels.append(next(iter(folders[1:] if part else folders), None))
    columns = {"image": Column("image", [path.read_bytes() for path in files]), "label": Column("text", labels)}
    origins = [(_relative(path, folder), 1) for path in files]
    rows = _parts((part, 1) for part in parts)
    return Source(folder.resolve().name, columns, rows, origins, target="label", files=True)


def _csv(name: str, folder: Path, files: Sequence[Path]) -> Source:
    """Read CSV files with equal headers; the separator is the header's most frequent of comma, semicolon and tab."""
    if len(files) == 1 and (quick := quick_columns(files[0])):
        count = len(next(iter(quick.values())))
        origins = [(_relative(files[0], folder), count)]
        return Source(name, quick, _parts_of_files(origins), origins, lines=range(2, count + 2))
    header: list[str] = []
    rows: list[list[str]] = []
    numbers: list[int] = []
    origins, broken, separator = [], {}, ","
    for path in files:
        separator, lines = _csv_lines(path)
        names = [cell.strip() for cell in lines[0][1]] if lines else []
        _same_columns(header or names, names, path)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path.name} must have distinct column names in its first line, got {twice!r} twice")
        header = names
        for number, line in lines[1:]:
            if len(line) != len(header):
                broken[len(rows)] = f"the number of cells is not {len(header)}"
                line = [""] * len(header)
            rows.append(line)
            numbers.append(number)
        origins.append((_relative(path, folder), len(lines) - 1))
    if not rows:
        raise ValueError(f"{name} holds no rows")
    texts = [strip_cells(cells) for cells in zip(*rows, strict=True)]
    marks = decimal_marks(texts, separator)
    columns = {cell: from_cells(own, mark) for cell, own, mark in zip(header, texts, marks, strict=True)}
    return Source(name, columns, _parts_of_files(origins), origins, broken, lines=numbers)


def _csv_lines(path: Path) -> tuple[str, list[tuple[int, list[str]]]]:
    """Return the separator, and each non-empty row with its start line."""
    limit = csv.field_size_limit(sys.maxsize)  # allow long texts: the default limit is 131,072 characters
    try:
        content = path.read_bytes()
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
        header = re.sub('"[^"]*"', "", text[:65536]).partition("\n")[0]
        most = max(",;\t", key=header.count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=most)
        found, start = [], 1
        for line in reader:
            if line:
                found.append((start, line))
            start = reader.line_num + 1
        return most, found
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} must be UTF-8, but byte {error.start} is invalid: save it as UTF-8") from error
    except csv.Error as error:
        raise ValueError(f"{path.name} could not be read as CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _parquet(name: str, folder: Path, files: Sequence[Path]) -> Source:
    arrow = needed("pyarrow", "data", "a Parquet file")
    parquet = needed("pyarrow.parquet", "data", "a Parquet file")
    tables = []
    for path in files:
        try:
            tables.append(parquet.read_table(path, partitioning=None))
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} could not be read as Parquet: {str(error).splitlines()[0]}") from error
        _same_columns(tables[0].column_names, tables[-1].column_names, path)
    try:
        table = arrow.concat_tables(tables, promote_options="permissive")
    except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
        raise ValueError(f"the Parquet files of {name} differ in types: {str(error).splitlines()[0]}") from error
    try:
        columns = from_arrow(table, _features(tables[0].schema.metadata or {}))
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"the texts or numbers of {name} could not be read: {error}") from error
    origins = [(_relative(path, folder), len(part)) for path, part in zip(files, tables, strict=True)]
    return Source(name, columns, _parts_of_files(origins), origins)


def _features(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any]:
    """Return Hugging Face's column descriptions in a Parquet file; empty if missing or unreadable."""
    try:
        found = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _same_columns(names: Sequence[str], others: Sequence[str], path: Path) -> None:
    if list(names) != list(others):
        had, has = ", ".join(names), ", ".join(others)
        raise ValueError(f"{path.name} must have the columns of the previous file, {had}, got {has}")


def _npz(path: Path, fold: int) -> Source:
    """Read arrays `X` `[N, F]` and `y` `[N]`; `train_idx` and `test_idx` `[K, n]` are the rows of K splits."""
    np = needed("numpy", "data", "a .npz file")
    try:
        arrays = read_archive(path, free_bytes(torch.device("cpu")))
        x, y = torch.from_numpy(arrays["X"]).double(), torch.from_numpy(arrays["y"])
    except (KeyError, TypeError, ValueError) as error:
        reason = error.what if isinstance(error, DamagedError) else error
        raise ValueError(f"{path.name} must hold two numeric arrays, X and y: {reason}") from error
    if x.dim() != 2 or y.shape != x.shape[:1]:
        raise ValueError(f"{path.name} must hold X [N, F] and y [N], got {list(x.shape)} and {list(y.shape)}")
    columns = {f"x{number}": Column("number", column) for number, column in enumerate(x.unbind(1))}
    columns["y"] = Column("number", y.double(), whole=not y.is_floating_point())
    parts = {"train": torch.arange(len(x))}
    own = {name: np.atleast_2d(arrays[f"{name}_idx"]) for name in ("train", "test") if f"{name}_idx" in arrays}
    folds = min(map(len, own.values())) if len(own) == 2 else 0
    if fold >= max(folds, 1):
        raise ValueError(f"fold={fold} must be one of the {folds} splits of {path.name}, counted from 0")
    if folds:
        parts = {part: torch.from_numpy(rows[fold].astype("int64")) for part, rows in own.items()}
        together = torch.cat(list(parts.values()))
        if len(together.unique()) < len(together) or together.min() < 0 or together.max() >= len(x):
            raise ValueError(
                f"{path.name} must have distinct rows below {len(x)} in train_idx and test_idx of fold {fold}"
            )
    return Source(path.name, columns, parts, [(path.name, len(x))], target="y", arrays=True)


_READERS = {".parquet": _parquet, ".csv": _csv, ".tsv": _csv}


# -- Hugging Face ------------------------------------------------------------------------------------------


def from_hub(name: str) -> Source:
    """Read a Hugging Face dataset, `"owner/name"` or `"owner/name:configuration"`, with the `datasets` library.

    Without a named or default configuration the first one is used, with a warning.
    """
    datasets = needed("datasets", "data", f"the Hugging Face dataset {name!r}")
    path, _, config = name.partition(":")
    try:
        config = config or datasets.get_dataset_default_config_name(path) or _first_config(datasets, path)
        loaded = datasets.load_dataset(path, config)
    except Exception as error:  # any error of the library or the network
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"a source must be {SOURCES}, got {name!r}: no such file or folder, and Hugging Face says: {reason}"
        ) from error
    splits = {split: part_named(split) for split in loaded}
    used = [split for split in splits if splits[split] or len(splits) == 1]
    if unused := [split for split in splits if split not in used]:
        warnings.warn(f"{name} also has {', '.join(unused)}, which is not used", stacklevel=2)
    if not used:
        raise ValueError(f"{name} must have a part for training, validation or test, got {', '.join(splits)}")
    tables = [loaded[split].with_format("arrow")[:] for split in used]
    features: Any = loaded[used[0]].features.to_dict()
    columns = from_arrow(needed("pyarrow", "data", "a dataset").concat_tables(tables), features)
    origins = [(split, len(table)) for split, table in zip(used, tables, strict=True)]
    return Source(path, columns, _parts((splits[split], count) for split, count in origins), origins)


def _first_config(datasets: Any, path: str) -> str:
    names = datasets.get_dataset_config_names(path)
    warnings.warn(f"{path} has the configurations {', '.join(names)}; using {names[0]}", stacklevel=3)
    return str(names[0])
