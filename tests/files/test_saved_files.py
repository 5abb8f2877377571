"""What a saved file holds, what is refused when it is read, and that it is whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import multitudes as mt
from multitudes.base.archives import write_tensors
from multitudes.files.save import load, save
from tests.files.test_save import X, mlp, same


def test_a_file_of_another_kind_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which does not exist"):
        load(tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="path must be a file that mt.save wrote"):
        load(tmp_path / "text.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "tensors.safetensors")
    with pytest.raises(ValueError, match="it has no checksum, or was written by an earlier version"):
        load(tmp_path / "tensors.safetensors")


@pytest.mark.parametrize(
    "header", ["{", "null", "3", "{}", '{"format": 6}', '{"format": 6, "nodes": []}', '{"format": 6, "nodes": [{}]}']
)
def test_a_damaged_header_is_one_error(header: str, tmp_path: Path) -> None:
    path = save(mt.deep_ensemble(mlp(), 2), tmp_path / "net.safetensors")
    save_file(load_file(path), path, {"multitudes": header})
    with pytest.raises(ValueError, match=r"path must be a file that mt.save wrote, got .*, which is damaged"):
        load(path)
    if not header.startswith('{"'):
        return
    write_tensors(path, load_file(path), "multitudes", json.loads(header), "a test")
    with pytest.raises(ValueError, match=r"path must be a file that mt.save wrote, got .*, which is damaged"):
        load(path)


ALIEN = ("os.system", "torch.hub.load", "multitudes.files.save.save", "multitudes.__main__.main")


@pytest.mark.parametrize(
    "entry, names, message",
    [
        ("class", (*ALIEN, "torch.nn.modules.no.Layer"), "which is no layer of torch or of this library"),
        ("function", (*ALIEN, "multitudes.methods.variance.kl.approximate_kl"), "which is no divergence of this"),
    ],
)
def test_a_file_that_names_anything_but_layers_and_divergences_is_refused(
    entry: str, names: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = save(mt.variance(mlp()), tmp_path / "net.safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["multitudes"])
    for name in names:
        changed = header["nodes"][2] if entry == "class" else header["nodes"][0]["divergences"][0]
        changed[entry] = name
        write_tensors(path, load_file(path), "multitudes", header, "a test")
        with pytest.raises(ValueError, match=message):
            load(path)


def test_loaded_tensors_have_aligned_memory_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))  # sizes that are no multiples of an alignment
    tensors = list(load(save(mt.Multitude(model), tmp_path / "net.safetensors")).state_dict().values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(net := mt.deep_ensemble(mlp(), 2), tmp_path / "net.safetensors")

    def failing(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    with pytest.raises(OSError, match="no space left"):
        save(mt.Multitude(mlp()), path)
    monkeypatch.undo()
    same(net, load(path), X)
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_a_file_reads_like_the_network_and_holds_no_pickle(tmp_path: Path) -> None:
    net = mt.deep_ensemble(mlp(), 2)
    tensors = load_file(save(net, tmp_path / "net.safetensors"))
    assert net.state_dict().keys() == tensors.keys() and tensors["1.0.weight"].shape == (24, 6)
    with safetensors.safe_open(tmp_path / "net.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["multitudes"])
    assert (
        header["nodes"][0]["class"] == "multitudes.ensemble.members.Members"
        and header["nodes"][0]["settings"]["members"] == 2
    )


class Graph(nn.Module):
    """A network with a fixed sparse matrix, or with complex weights."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        if dtype is None:
            self.register_buffer("edges", torch.eye(3).to_sparse())
        else:
            self.turn = nn.Parameter(torch.ones(3, dtype=dtype))
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.edges @ x.T).T if hasattr(self, "edges") else (x * self.turn).real.to(x.dtype))


@pytest.mark.parametrize("dtype", [None, torch.complex64, torch.complex128])
def test_sparse_and_complex_tensors_are_saved(dtype: torch.dtype | None, tmp_path: Path) -> None:
    net, x = mt.fuse([Graph(dtype), Graph(dtype)]), torch.randn(4, 3)
    loaded = mt.load(mt.save(net, tmp_path / "net.safetensors"), Graph(dtype))
    assert torch.equal(loaded(x), net(x))


def test_sparse_tensors_stay_as_they_are_along_the_way() -> None:
    model = Graph(None)
    states = [{k: v + i if k.startswith("out") else v for k, v in model.state_dict().items()} for i in range(3)]
    torch.testing.assert_close(mt.swa(model, states).member(0).out.weight, model.out.weight + 1)
    torch.testing.assert_close(mt.swa(model, states).member(0).edges.to_dense(), torch.eye(3))
