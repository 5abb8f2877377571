"""Attributes of a user's network: plain values come from the file, others must be the same in the given network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.base.archives import write_tensors

pytest.importorskip("safetensors")
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Kind(Enum):
    PLAIN = 1
    DOUBLE = 2


@dataclass
class Config:
    gain: float = 1.0
    act: Callable[[Tensor], Tensor] = F.relu
    dtype: torch.dtype = torch.float32


class Net(nn.Module):
    def __init__(self, act: Any = F.relu, config: Any = None, **held: Any) -> None:
        super().__init__()
        self._act, self.config = act, config
        self.fc = nn.Linear(4, 3)
        vars(self).update(held)

    def forward(self, x: Tensor) -> Tensor:
        return self._act(self.fc(x)) * getattr(self.config, "gain", 1.0)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def saved(model: nn.Module, folder: Path) -> tuple[mt.Multitude, Path]:
    net = mt.deep_ensemble(model, 2, seed=0)
    return net, mt.save(net, folder / "net.safetensors")


REFUSED: dict[str, tuple[Callable[[], Net], Callable[[], Net], str]] = {
    "function": (lambda: Net(F.relu), lambda: Net(torch.tanh), "has _act = .*relu.* in the file and .*tanh.* in model"),
    "operator": (lambda: Net(lambda x: x + 2), lambda: Net(lambda x: x - 2), "has _act = "),
    "closure": (lambda: Net(times(2.0)), lambda: Net(times(3.0)), "has _act = "),
    "partial": (
        lambda: Net(partial(F.leaky_relu, negative_slope=0.1)),
        lambda: Net(partial(F.leaky_relu, negative_slope=0.2)), "has _act = ",
    ),
    "function in a configuration": (
        lambda: Net(config=Config(act=F.relu)), lambda: Net(config=Config(act=torch.sigmoid)), "has config = ",
    ),
    "dtype": (
        lambda: Net(config=Config()), lambda: Net(config=Config(dtype=torch.float64)), "has config = .*32.*64",
    ),
    "enum": (lambda: Net(kind=Kind.PLAIN), lambda: Net(kind=Kind.DOUBLE), "has kind = .*PLAIN.* file and .*DOUBLE"),
    "tensors in a list": (
        lambda: Net(anchors=[torch.ones(3)]), lambda: Net(anchors=[torch.zeros(3)]), "has anchors = ",
    ),
    "no configuration": (lambda: Net(config=Config()), lambda: Net(), "has config = Config.* file and None"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_attributes_that_differ_are_named(case: str, tmp_path: Path) -> None:
    one, other, message = REFUSED[case]
    net, path = saved(one(), tmp_path)
    assert torch.equal(mt.load(path, one())(X), net(X))
    with pytest.raises(ValueError, match=rf"model does not fit the file: the network \(Net\) {message}"):
        mt.load(path, other())


@pytest.mark.parametrize("make", [Config, lambda gain: SimpleNamespace(gain=gain)], ids=["dataclass", "namespace"])
def test_plain_values_in_objects_come_from_the_file(make: Callable[[float], Any], tmp_path: Path) -> None:
    net, path = saved(Net(config=make(3.0)), tmp_path)
    given = Net(config=make(1.0))
    loaded = mt.load(path, given)
    assert torch.equal(loaded(X), net(X))
    assert given.config.gain == 1.0
    nested = Net(config=SimpleNamespace(gain=2.0, inner=[SimpleNamespace(deep={"x": 1})]))
    net, path = saved(nested, tmp_path)
    other = Net(config=SimpleNamespace(gain=1.0, inner=[SimpleNamespace(deep={"x": 7})]))
    assert mt.load(path, other).member(1).config.inner[0].deep == {"x": 1}


def test_fused_networks_with_other_private_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in the network itself: _act is"):
        mt.fuse([Net(F.relu), Net(torch.tanh)])


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, num_labels=5, **options))


def test_hugging_face_models_load_with_their_saved_configuration(tmp_path: Path) -> None:
    x = {"input_ids": torch.arange(14).view(2, 7)}
    model, same = bert(), bert()
    for one in (model, same):
        one.config.output_hidden_states = True
        one(**x)  # adds hooks
    net, path = saved(model, tmp_path)
    for given in (bert(), same):
        loaded = mt.load(path, given).eval()
        torch.testing.assert_close(loaded(x), net.eval()(x), rtol=0, atol=0)
        assert loaded.member(1).config.output_hidden_states
        assert len(loaded.member(0)(**x).hidden_states) == 2
    eager = bert()
    eager.config._attn_implementation = "eager"
    _, path = saved(eager, tmp_path)
    assert mt.load(path, bert()).member(1).config._attn_implementation == "eager"


# -- files that need no model -------------------------------------------------------------------------------


def mlp(hidden: int = 8, act: type[nn.Module] = nn.ReLU, p: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), act(), nn.LayerNorm(hidden, eps=p), nn.Linear(hidden, 3))


@pytest.mark.parametrize("method", ["deep_ensemble", "packed", "batch_ensemble", "masksembles", "mimo", "patched"])
def test_a_model_that_is_not_needed_must_fit_too(method: str, tmp_path: Path) -> None:
    net = getattr(mt, method)(mlp(), 2)
    path = mt.save(net, tmp_path / "net.safetensors")
    assert mt.load(path, mlp()).members == net.members
    for wrong in (
        nn.Linear(4, 3),
        nn.Sequential(nn.Conv1d(4, 8, 1), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)),
        mlp()[:3],
    ):
        with pytest.raises(ValueError, match="model does not fit the file"):
            mt.load(path, wrong)


def test_other_settings_and_widths_do_not_fit(tmp_path: Path) -> None:
    _, path = saved(mlp(), tmp_path)
    with pytest.raises(ValueError, match=r"layer '0' \(Linear\) has out_features = 8 in the file and 16 in model"):
        mt.load(path, mlp(16))
    with pytest.raises(ValueError, match=r"layer '2' \(LayerNorm\) has eps = 0.1 in the file and 0.2 in model"):
        mt.load(path, mlp(p=0.2))


def test_tensors_that_do_not_match_the_header_are_named(tmp_path: Path) -> None:
    from safetensors import safe_open

    _, path = saved(mlp(), tmp_path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["multitudes"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del header["sha256"]
    assert header["shapes"]["1.0.weight"] == [8, 4]
    write_tensors(path, tensors | {"1.0.weight": torch.zeros(7, 4)}, "multitudes", header, "a test")
    with pytest.raises(ValueError, match=r"tensor '1.0.weight' has shape \[7, 4\], but its header has \[8, 4\]"):
        mt.load(path)
    del tensors["1.0.weight"]
    write_tensors(path, tensors, "multitudes", header, "a test")
    with pytest.raises(ValueError, match="damaged: tensor '1.0.weight' of its header is missing"):
        mt.load(path)
