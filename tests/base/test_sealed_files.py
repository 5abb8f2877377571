"""Sealed files: any changed byte is detected, and unchanged files are hashed once."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multitudes as mt
from multitudes.base import sealed_files as files
from multitudes.base.archives import ARRAYS, read_archive, read_tensors, write_arrays, write_tensors
from multitudes.base.sealed_files import DamagedError, check_seal, read_json, write_json
from multitudes.training.checkpoint import Checkpoint, TrainingState
from multitudes.training.recorder import Recorder

KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "json": (lambda path: write_json(path, {"nll": 0.5, "name": "ü", "none": None}), read_json),
    "arrays": (
        lambda path: write_arrays(path, {"probs": np.arange(6.0), "target": np.array([1])}),
        lambda path: read_tensors(path, ARRAYS, "a test"),
    ),
    "tensors": (
        lambda path: write_tensors(path, {"a": torch.arange(5.0)}, "entry", {"one": 1}, "a test"),
        lambda path: read_tensors(path, "entry", "a test"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_or_length_is_detected(kind: str, tmp_path: Path) -> None:
    write, read = KINDS[kind]
    path = tmp_path / "file"
    write(path)
    read(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 + place % 255)]) + whole[place + 1 :])
        with pytest.raises(DamagedError, match="'.*file' is damaged: "):
            read(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            read(path)
    path.write_bytes(whole + b" ")
    with pytest.raises(DamagedError):
        read(path)
    path.write_bytes(whole)
    read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_content_gives_equal_files(kind: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        KINDS[kind][0](tmp_path / name / "file")
    assert (tmp_path / "one" / "file").read_bytes() == (tmp_path / "two" / "file").read_bytes()
    assert check_seal(tmp_path / "one" / "file") == check_seal(tmp_path / "two" / "file")


def test_a_table_under_another_name_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "data.json", {"a": 1}).rename(tmp_path / "metrics.json")
    with pytest.raises(DamagedError, match=r"metrics\.json' is damaged: it is a different file"):
        read_json(tmp_path / "metrics.json")


def test_a_file_is_hashed_once_unless_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = write_json(tmp_path / "a.json", {"a": 1}), []
    digest = files._digest
    monkeypatch.setattr(files, "_digest", lambda *given: reads.append(1) or digest(*given))
    check_seal(path)
    check_seal(path)
    assert len(reads) == 2  # so new a file could have been changed since without a trace
    later = time.time() + 10
    monkeypatch.setattr(files.time, "time", lambda: later)
    check_seal(path)
    check_seal(path)
    assert len(reads) == 3
    path.write_bytes(path.read_bytes().replace(b"1\n", b"2\n"))
    with pytest.raises(DamagedError):
        check_seal(path)


def test_an_archive_that_claims_or_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    for shape in ((10**15,), (10**9,), (10**30,)):  # a header of a few bytes, for which NumPy would reserve memory
        with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
        with pytest.raises(DamagedError, match="a.npz' is damaged: "):
            read_archive(path, 1e9)
    np.savez_compressed(path, x=np.zeros(100_000))
    with pytest.raises(DamagedError, match="it unpacks to 0 GiB"):
        read_archive(path, 1e5)
    assert len(read_archive(path, 1e6)["x"]) == 100_000


# -- what users write --------------------------------------------------------------------------------------


def test_a_changed_network_file_is_not_loaded(tmp_path: Path) -> None:
    path = mt.save(mt.deep_ensemble(torch.nn.Linear(3, 2), 2), tmp_path / "net.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"\0\0\0\0")
    with pytest.raises(ValueError, match=r"net\.safetensors', which is damaged .*checksum.* save the network again"):
        mt.load(path)


def test_a_damaged_or_unrelated_checkpoint_is_refused(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    path = tmp_path / "checkpoint.safetensors"
    Checkpoint(path, 1.0, "this").save(TrainingState(), net, optimizer, {})
    with pytest.raises(ValueError, match="belongs to another training: delete the file to start over"):
        Checkpoint(path, 1.0, "that").load(TrainingState(), net, optimizer, {})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="checkpoint '.*' is damaged: .*; delete the file to start over"):
        Checkpoint(path, 1.0, "this").load(TrainingState(), net, optimizer, {})


def recording(folder: Path, of: str = "", weights: tuple[float, ...] = (1.0, 2.0, 3.0)) -> torch.nn.Module:
    net = torch.nn.Linear(1, 1)
    recorder = Recorder(net, keep=2, folder=folder, of=of)
    for weight in weights:
        torch.nn.init.constant_(net.weight, weight)
        recorder.record()
    return net


def test_a_recording_with_a_missing_or_unrelated_file_is_refused(tmp_path: Path) -> None:
    net = recording(tmp_path / "a")
    assert Recorder(net, keep=2, folder=tmp_path / "a", resume=True).count == 3
    with pytest.raises(DamagedError, match="it belongs to another recording"):
        Recorder(net, keep=2, folder=tmp_path / "a", resume=True, of="job")
    (tmp_path / "a" / "checkpoint-00000002.safetensors").rename(tmp_path / "a" / "checkpoint-00000004.safetensors")
    with pytest.raises(DamagedError, match=r"checkpoint-00000002\.safetensors' is damaged: it is missing"):
        Recorder(net, keep=2, folder=tmp_path / "a", resume=True)
    recording(tmp_path / "b")
    first, second = (tmp_path / "b" / f"checkpoint-0000000{number}.safetensors" for number in (2, 3))
    second.write_bytes(first.read_bytes())
    with pytest.raises(DamagedError, match="it belongs to another recording"):
        Recorder(net, keep=2, folder=tmp_path / "b", resume=True)
    recording(tmp_path / "c")
    (tmp_path / "c" / "moments.safetensors").unlink()
    with pytest.raises(DamagedError, match="it is missing"):
        Recorder(net, keep=2, folder=tmp_path / "c", resume=True)
