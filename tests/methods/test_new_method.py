"""The recipe of CONTRIBUTING for a new method, followed: one file in methods/, and everything else knows it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import multitudes as mt
from multitudes import files as storage
from multitudes import methods
from multitudes.ensemble.multitude import DIVERGENCES
from multitudes.lab.cli.program import app
from multitudes.lab.study.spec import method_rows as of_studies
from multitudes.methods.registry import collect

FILE = '''
"""Shaken networks: every weight of a linear layer is moved by normal noise, `W + size * eps`."""

import torch.nn.functional as F
from torch import nn

from multitudes.ensemble.multitude import divergence
from multitudes.networks.stochastic import Stochastic
from multitudes.ensemble.multitude import Multitude
from multitudes.methods.registry import Method, by
from multitudes.surgery.select import check_model, plain_layer, replace, select


class ShakenLinear(Stochastic):
    """`[B, ..., I] -> [B, ..., O]`."""

    noise = "weights"

    def __init__(self, layer, size):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias, self.size = layer.weight, layer.bias, size

    def drawn(self):
        """The weight of this draw."""
        return self.weight if self.expects else self.weight + self.size * self.normal(self.weight.shape, self.weight)

    def forward(self, x):
        return F.linear(x, self.drawn(), self.bias)

    def fold(self):
        return plain_layer(nn.Linear, self, self.drawn(), self.bias, omit=("size",))


def shaken(model, size=0.1, layers=None):
    """A copy of `model` whose linear layers draw their weights."""
    network = check_model(model)
    new = {name: ShakenLinear(layer, size) for name, layer in select(network, layers, (nn.Linear,)).items()}
    net = Multitude(replace(network, new)).like(model)
    net.divergences += (shaken_kl,)
    return net


@divergence
def shaken_kl(network):
    """The sum of squares."""
    return sum(parameter.square().sum() for parameter in network.parameters())


ROWS = (Method("shaken", by(shaken), {"size": 0.1}, "A forward a draw.", "Pick it to try the recipe.", place=75),)
'''


@pytest.fixture
def shaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The method's file, as if it lay among the others."""
    (tmp_path / "shaken.py").write_text(FILE)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    before = dict(of_studies.METHODS)
    of_studies.METHODS.update(collect())
    module = importlib.import_module("multitudes.methods.shaken")
    yield module
    of_studies.METHODS.clear()
    of_studies.METHODS.update(before)
    del sys.modules["multitudes.methods.shaken"], DIVERGENCES["multitudes.methods.shaken.shaken_kl"]
    delattr(methods, "shaken")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))


def test_its_row_is_collected_in_its_place_and_listed(shaken: ModuleType) -> None:
    names = list(collect())
    assert names[0] == "single" and names.index("shaken") == names.index("drop_connect") + 1
    listed = CliRunner().invoke(app, ["methods"])
    assert listed.exit_code == 0 and "Pick it to try the recipe." in re.sub(r"\s+", " ", listed.output)
    assert "shaken: size=0.1" in listed.output


def test_a_study_builds_trains_and_finishes_it_by_its_settings(shaken: ModuleType) -> None:
    row, x, y = of_studies.method_of("shaken"), torch.randn(20, 6), torch.arange(20) % 5
    settings = row.complete({"size": 0.3})
    net = row.build(model(), x, settings, 0)
    assert {layer.size for layer in net.modules() if isinstance(layer, shaken.ShakenLinear)} == {0.3}
    training = row.train(net, {"epochs": 1, "optimizer": "adam", "lr": 0.01}, settings)
    mt.fit(net, [(x, y)], **training, dataset_size=len(x))
    net = row.finish(net, None, x, settings, 0).eval()
    assert net(x, draws=3, seed=0).std(0).max() > 0
    with pytest.raises(ValueError, match="method 'shaken' has no setting 'scale'; its settings are: size"):
        row.complete({"scale": 1})


def test_it_is_saved_frozen_and_composed(shaken: ModuleType, tmp_path: Path) -> None:
    net, x = shaken.shaken(model(), 0.3).eval(), torch.randn(4, 6)
    loaded = mt.load(mt.save(net, tmp_path / "net.safetensors"))
    assert torch.equal(loaded(x, draws=3, seed=0), net(x, draws=3, seed=0)) and torch.equal(loaded.kl(), net.kl())
    frozen = mt.freeze(net, draws=3, seed=0)
    torch.testing.assert_close(frozen(x), net(x, draws=3, seed=0))
    assert {type(module) for module in frozen.member(0).modules()} == {nn.Sequential, nn.Linear, nn.ReLU}
    assert mt.deep_ensemble(net, 2)(x, draws=3).shape == (6, 4, 5)


def test_storage_names_no_method() -> None:
    for path in Path(storage.__path__[0]).glob("*.py"):
        text = re.sub(r">>> .*", "", path.read_text())
        assert "multitudes.methods" not in text, path.name
