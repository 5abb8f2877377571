"""Files that nobody meant to write: mutations of good ones, from a seeded generator, and what reading them may do.

    python -m tests.campaigns.fuzz 1000 0

Whatever is in a file, reading it gives what it should, or a ValueError with one sentence. Prints what else happened.
"""

from __future__ import annotations

import io
import json
import random
import signal
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from torch import nn

import multitudes as mt
from multitudes.base.archives import read_tensors, write_tensors
from multitudes.lab.data import Data, Part, load, save
from multitudes.lab.data.new_inputs import read_inputs
from multitudes.lab.study.spec.specification import Spec

SECONDS = 20
"""After which reading a small file counts as hanging."""

Dice = random.Random

# -- mutations ---------------------------------------------------------------------------------------------

SCRAPS = [
    b"", b"\0", b"\xff\xfe", b"nan", b"inf", b"-1", b"0", b"1e400", b"9" * 40, b'"', b"'", b"[", b"]", b"{", b"}", b"=",
    b",", b";", b"\n", b"\r\n", b"\t", b" ", b"#", b"../", b"true", b"null", b"\xc3\x28", "ü".encode(), b"<script>",
    b"[" * 3000, b"1979-05-27T07:32:00Z", b"0x", b"%s", b"{}", b"\\", b"\xef\xbb\xbf",
]  # fmt: skip


def mutated(content: bytes, dice: Dice) -> bytes:
    """Flip, cut, double, move or replace a few bytes."""
    for _ in range(dice.choice((1, 1, 2, 3, 8))):
        at, to = sorted(dice.randrange(len(content) + 1) for _ in range(2))
        to = min(to, at + dice.choice((1, 4, 40)))
        how = dice.randrange(6)
        if how == 0 and content:
            flipped = bytearray(content)
            flipped[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            content = bytes(flipped)
        elif how == 1:
            content = content[:at] + content[to:]
        elif how == 2:
            content = content[:to] + content[at:to] * dice.choice((1, 2, 50)) + content[to:]
        elif how == 3:
            content = content[:at] + dice.choice(SCRAPS) + content[at:]
        elif how == 4:
            content = content[:at] + dice.choice(SCRAPS) + content[to:]
        elif dice.random() < 0.2:
            content = content[:at]
    return content


VALUES: list[Any] = [
    None, True, -1, 0, 3, 10**30, 0.5, -1e300, "", "a", "../..", "ü", [], [1], [[]], {}, {"a": 1}, [None] * 9,
]  # fmt: skip


def changed(value: Any, dice: Dice) -> Any:
    """A tree of plain values with one of them replaced, removed or doubled."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    value = json.loads(json.dumps(value))
    walk(value)
    node, key = dice.choice(places)
    how = dice.randrange(4)
    if how == 0:
        del node[key]
    elif how == 1 and isinstance(node, dict):
        node[dice.choice(("a", "path", "class", "", "#"))] = node.pop(key)
    elif how == 2 and isinstance(node, list):
        node.insert(key, node[key])
    else:
        other, name = dice.choice(places)
        try:
            node[key] = dice.choice([*VALUES, json.loads(json.dumps(other[name]))])
        except (KeyError, IndexError):
            node[key] = None
    return value


# -- kinds of files ----------------------------------------------------------------------------------------


class Studies:
    """Study files."""

    TEXT = """seeds = [0, 1]
device = "cpu"

[methods.single]
[methods.packed_8]
method = "packed"
members = 8
alpha = 2

[data]
source = "digits"
limit = 100

[model]
name = "small_cnn"
settings = {}

[training]
epochs = 30
lr = 0.05
optimizer = "sgd"
augment = "none"

[evaluation]
shift = ["fog", "contrast"]
severities = [1, 3]

[scales.smoke.training]
epochs = 1
"""
    KEYS = ("epochs", "lr", "members", "source", "seeds", "limit", "severities", "optimizer", "name", "shift", "device")
    WORDS = (
        "-1",
        "0",
        "1e9",
        "nan",
        "inf",
        '"x"',
        "[]",
        "{}",
        "[1, 'a']",
        "true",
        "2020-01-01",
        "99999999999999999999",
    )

    def write(self, path: Path, dice: Dice) -> Path:
        text = self.TEXT
        if dice.random() < 0.5:
            lines = text.split("\n")
            for number, line in enumerate(lines):
                key = line.partition(" = ")[0]
                if key in self.KEYS and dice.random() < 0.08:
                    lines[number] = f"{key} = {dice.choice(self.WORDS)}"
            text = "\n".join(lines)
            path.write_text(text)
        else:
            path.write_bytes(mutated(text.encode(), dice))
        return path

    def read(self, path: Path, dice: Dice) -> None:
        spec = Spec.load(path, dice.choice((None, None, "smoke", "none")))
        resolved = spec.resolved(
            *dice.choice((((1, 8, 8), "classification"), ((1, 8, 8), "classification"), ((13,), "regression")))
        )
        again = path.with_name("again.toml")
        again.write_text(resolved.to_toml())
        assert Spec.load(again) == resolved, f"a specification does not read back as it was written: {resolved}"


class Tables:
    """CSV files."""

    HEADS = ("a,b,c,y", "a;b;c;y", "a\tb\tc\ty", "y,a,b,c", "date,b,id,y")

    def write(self, path: Path, dice: Dice) -> Path:
        head = dice.choice(self.HEADS)
        comma = next(mark for mark in ",;\t" if mark in head)

        def cell(column: str, row: int) -> str:
            usual = {"c": dice.choice(("red", "green", "blue")), "id": f"u{row}", "date": f"2024-0{1 + row % 9}-11"}
            odd = ("", "nan", "inf", "?", "1,5" if comma != "," else "1.5", "1e999", '"', "x", " 7 ", "12/31/2024")
            return dice.choice(odd) if dice.random() < 0.03 else usual.get(column, f"{dice.gauss(0, 3):.3f}")

        names = head.split(comma)
        rows = [comma.join(cell(name, row) for name in names) for row in range(dice.choice((1, 4, 40)))]
        text = "\n".join([head, *rows]) + "\n"
        path.write_bytes(text.encode() if dice.random() < 0.4 else mutated(text.encode(), dice))
        return path

    def read(self, path: Path, dice: Dice) -> None:
        load(path, target=dice.choice(("y", "y", "y", "a", None)), skip_bad=dice.random() < 0.3)


class Arrays:
    """NumPy archives of X and y, and of anything else."""

    TYPES = ("f8", "f4", "i8", "u1", "c16", "?", "U3", "M8[D]", "f2")

    def write(self, path: Path, dice: Dice) -> Path:
        rows = dice.choice((0, 1, 40))
        arrays = {"X": np.random.default_rng(dice.randrange(99)).normal(size=(rows, 3)), "y": np.arange(rows) % 3}
        if dice.random() < 0.5:
            name = dice.choice(("X", "y", "train_idx", "test_idx", "other"))
            shape = [dice.choice((0, 1, 3, 40)) for _ in range(dice.randrange(4))]
            arrays[name] = np.ones(shape).astype(dice.choice(self.TYPES[:-1]))
        file = io.BytesIO()
        np.savez(file, **arrays)
        content = file.getvalue()
        if dice.random() < 0.3:
            content = self._claiming(dice)
        path.write_bytes(content if dice.random() < 0.3 else mutated(content, dice))
        return path

    def _claiming(self, dice: Dice) -> bytes:
        """Return an archive whose headers do not match its arrays."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name in ("X.npy", "y.npy"):
                shape = tuple(dice.choice((3, 40, 10**6, 10**15)) for _ in range(dice.randrange(3)))
                held = io.BytesIO()
                header = {"descr": dice.choice(("<f8", "|O", "<i8")), "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(held, header)
                archive.writestr(name, held.getvalue() + bytes(dice.choice((0, 8, 320))))
        return file.getvalue()

    def read(self, path: Path, dice: Dice) -> None:
        load(path, fold=dice.choice((0, 0, 1)))


def _digits() -> Data:
    x = torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
    part = Part(x, torch.arange(6) % 2)
    return Data("images", part, part, part, classes=("a", "b"))


class Images:
    """Image files, read to be predicted."""

    FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")

    def __init__(self) -> None:
        self.data = _digits()

    def write(self, path: Path, dice: Dice) -> Path:
        form, file = dice.choice(self.FORMATS), io.BytesIO()
        mode = dice.choice(("L", "RGB")) if form in ("JPEG", "PPM") else dice.choice(("L", "RGB", "P", "1"))
        pixels = np.random.default_rng(dice.randrange(99)).integers(0, 255, (8, 8, 3), dtype="uint8")
        Image.fromarray(pixels).convert("RGB" if form == "WEBP" else mode).save(file, form)
        path.write_bytes(mutated(file.getvalue(), dice))
        return path

    def read(self, path: Path, dice: Dice) -> None:
        read_inputs([path], self.data, skip_bad=dice.random() < 0.3)


class Networks:
    """Files of `mt.save` with a changed header and a valid checksum, or with changed bytes."""

    def __init__(self) -> None:
        plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2))
        nets = [mt.deep_ensemble(plain, 2), mt.variance(plain), mt.mc_dropout(plain), mt.batch_ensemble(plain, 2)]
        with tempfile.TemporaryDirectory() as folder:
            paths = [mt.save(net, f"{folder}/{number}.safetensors") for number, net in enumerate(nets)]
            self.whole = [(path.read_bytes(), *read_tensors(path, "multitudes", "a test")) for path in paths]

    def write(self, path: Path, dice: Dice) -> Path:
        content, tensors, header = dice.choice(self.whole)
        if dice.random() < 0.3:
            path.write_bytes(mutated(content, dice))
            return path
        for _ in range(dice.choice((1, 1, 3))):
            header = changed(header, dice)
        write_tensors(path, tensors, "multitudes", header if isinstance(header, dict) else {}, "a test")
        return path

    def read(self, path: Path, dice: Dice) -> None:
        mt.load(path)


class Parquets:
    """Parquet files, with and without what Hugging Face writes into them."""

    def write(self, path: Path, dice: Dice) -> Path:
        table = pyarrow.table({"a": [0.5 * row for row in range(30)], "b": list("xyz" * 10), "y": [0, 1, 2] * 10})
        if dice.random() < 0.5:
            features = changed({"y": {"names": ["no", "yes", "so"], "_type": "ClassLabel"}, "a": {"dtype": "x"}}, dice)
            metadata = dice.choice([json.dumps({"info": {"features": features}}), "{", "3", "[]", '{"info": 3}'])
            table = table.replace_schema_metadata({"huggingface": metadata})
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file)
        path.write_bytes(mutated(file.getvalue(), dice) if dice.random() < 0.7 else file.getvalue())
        return path

    def read(self, path: Path, dice: Dice) -> None:
        load(path, target=dice.choice(("y", "y", "b", "a")))


class Prepared:
    """Prepared data with another description and a checksum that fits, or with other bytes."""

    def write(self, path: Path, dice: Dice) -> Path:
        save(_digits(), path)
        if dice.random() < 0.3:
            path.write_bytes(mutated(path.read_bytes(), dice))
            return path
        tensors, about = read_tensors(path, "data", "a test")
        about = changed(about, dice)
        if dice.random() < 0.3:
            name = dice.choice(list(tensors))
            kind = dice.choice((torch.uint8, torch.int64, torch.float32, torch.float64))
            tensors[name] = tensors[name][: dice.randrange(3)].to(kind)
        return write_tensors(path, tensors, "data", about if isinstance(about, dict) else {}, "a test")

    def read(self, path: Path, dice: Dice) -> None:
        load(path)


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "study files": (Studies, "study.toml"),
    "CSV files": (Tables, "table.csv"),
    "NumPy archives": (Arrays, "arrays.npz"),
    "images": (Images, "image.png"),
    "safetensors headers": (Networks, "net.safetensors"),
    "Parquet files": (Parquets, "table.parquet"),
    "prepared files": (Prepared, "data.mtdata"),
}


# -- running -----------------------------------------------------------------------------------------------


class Hangs(BaseException):
    """Reading a file took too long."""


@contextmanager
def limited(seconds: int) -> Any:
    """An error where what is inside takes longer."""

    def stop(number: int, frame: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(read: Callable[[], object]) -> str:
    """ "read", "refused", or what else happened."""
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except ValueError as error:
        clear = str(error).strip() and type(error).__name__ not in ("UnicodeDecodeError", "JSONDecodeError")
        return "refused" if clear else f"unclear: {type(error).__name__}: {error}"
    except Hangs:
        return "hangs"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in where if "multitudes" in frame.filename] or where
        return f"{type(error).__name__}: {str(error)[:1500]} at {Path(own[-1].filename).name}:{own[-1].lineno}"
    return "read"


def fuzz(kind: str, count: int, seed: int, folder: Path) -> Counter[str]:
    """Read mutated files of a kind and count the outcomes."""
    make, name = KINDS[kind]
    files, found = make(), Counter[str]()
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        path = files.write(folder / name, dice)
        found[outcome(lambda path=path, dice=dice: files.read(path, dice))] += 1
    return found


def main() -> None:
    """Print the counts of every kind."""
    count, seed = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (1000, 0)
    with tempfile.TemporaryDirectory() as folder:
        for kind in sys.argv[3:] or KINDS:
            found = fuzz(kind, count, seed, Path(folder))
            print(f"{kind}: {found.pop('read', 0)} read, {found.pop('refused', 0)} refused, {found.total()} faults")
            for what, times in found.most_common(25):
                print(f"    {times} x {what}")


if __name__ == "__main__":
    main()
