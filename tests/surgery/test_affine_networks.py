"""Which layers of a network are converted, and networks of them: against each member's own folded weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import multitudes as mt
from multitudes.methods.batch_ensemble import RankOne
from multitudes.methods.masksembles import masked
from multitudes.surgery.affine import affine_layers, maps_of
from tests.surgery.test_affine import Conv1D, Rectified, Scaled, attention, old_norm
from tests.zoo.of_parts import Of

# -- which layers ------------------------------------------------------------------------------------------


def test_what_overrides_forward_is_not_converted() -> None:
    model = nn.Sequential(Scaled(4, 4), Rectified(4, 4), nn.Linear(4, 4), Conv1D(4, 4), nn.Embedding(4, 4))
    assert list(affine_layers(model)) == ["2", "3"]
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert not maps_of(patched)
    both = parametrizations.weight_norm(parametrizations.weight_norm(nn.Linear(4, 4)), "bias", dim=None)
    assert not maps_of(both)
    hooked = parametrizations.weight_norm(nn.Linear(4, 4))
    hooked.register_forward_hook(lambda *_: None)
    assert not maps_of(hooked)


def test_layers_inside_attention_belong_to_it() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert list(affine_layers(encoder)) == ["self_attn", "linear1", "linear2"]


@pytest.mark.parametrize("method", [mt.batch_ensemble, mt.masksembles])
def test_a_layer_refuses_rows_that_are_not_the_members(method: Callable[..., Any]) -> None:
    model = Of(
        lambda net, x: net.head(F.relu(net.body(x)) + net.query(net.learned)),
        body=nn.Linear(4, 8), query=nn.Linear(8, 8), head=nn.Linear(8, 2), learned=nn.Parameter(torch.randn(1, 8)),
    )  # fmt: skip
    options = {"example": torch.randn(2, 4)} if method is mt.masksembles else {}
    net = method(model, 3, **options).train()
    with pytest.raises(ValueError, match=r"a Linear of 3 members got an input of shape \[1, 8\]"):
        net.network(torch.randn(6, 4))


def test_hooks_of_a_layer_see_what_each_members_layer_sees() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model[0].register_forward_hook(lambda _, args, y: y.square())
    x = torch.randn(5, 4)
    for net in (mt.batch_ensemble(model, 2), mt.masksembles(model, 2, layers=["0", "2"], example=x)):
        net.train()
        tiled = net.network(x.repeat(2, 1)).unflatten(0, (2, 5))
        for i in range(2):
            torch.testing.assert_close(tiled[i], net.member(i)(x))


def test_frozen_weights_stay_frozen_and_equal() -> None:
    layers = [nn.Linear(4, 4), attention(True), parametrizations.weight_norm(nn.Linear(4, 4)), Conv1D(4, 4)]
    for layer in layers:
        layer.requires_grad_(False)
        before = {name: tensor.clone() for name, tensor in layer.named_parameters()}
        for converted in (RankOne(layer, 2), masked(layer, 2, 2.0)):
            for name, parameter in converted.layer.named_parameters():
                assert not parameter.requires_grad
                assert torch.equal(parameter, before[name])
            assert not any(parameter.requires_grad for parameter in converted.fold(1).parameters())


# -- networks ----------------------------------------------------------------------------------------------


def small_gpt() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, num_labels=5, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config).eval()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(40, 4))


def vocoder() -> nn.Module:
    return nn.Sequential(
        old_norm(nn.Conv1d(2, 8, 3, padding=1)), nn.ReLU(), parametrizations.weight_norm(nn.ConvTranspose1d(8, 4, 4)),
        nn.Flatten(), parametrizations.spectral_norm(nn.Linear(4 * 13, 5)),
    )  # fmt: skip


def reader() -> nn.Module:
    parts = {"embed": nn.Embedding(30, 6), "lstm": nn.LSTM(6, 8, batch_first=True), "head": nn.Linear(8, 4)}
    return Of(lambda net, x: net.head(net.lstm(net.embed(x))[0][:, -1]), **parts)


def ids() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 40, (4, 9))}


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "gpt": (small_gpt, ids),
    "encoder": (encoder, lambda: torch.randn(4, 5, 6)),
    "vocoder": (vocoder, lambda: torch.randn(4, 2, 10)),
    "reader": (reader, lambda: torch.randint(30, (4, 7))),
}


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("method", [mt.batch_ensemble, mt.masksembles])
@pytest.mark.parametrize("init", ["fresh", "pretrained"])
def test_members_of_whole_networks_are_themselves_alone(name: str, method: Callable[..., Any], init: str) -> None:
    torch.manual_seed(0)
    build, batch = NETWORKS[name]
    model, x = build().eval(), batch()
    options = {"example": x} if method is mt.masksembles else {}
    net = method(model, 3, init=init, seed=0, **options).eval()
    mt.check(net, x)
    assert "(reach)" in net.notes
    alone = torch.stack([call(net.member(i).eval(), x) for i in range(3)])
    torch.testing.assert_close(net(x), alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(alone[0], alone[1])
    if init == "pretrained" and method is mt.batch_ensemble:
        torch.testing.assert_close(alone[0], call(model, x), rtol=1e-4, atol=1e-5)


def call(model: nn.Module, x: Any) -> Tensor:
    output = model(**x) if isinstance(x, dict) else model(x)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("method", [mt.batch_ensemble, mt.masksembles, mt.drop_connect])
def test_converted_networks_are_saved_and_loaded(name: str, method: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, batch = NETWORKS[name]
    x = batch()
    if method is mt.drop_connect:
        net = method(build(), 0.2).eval()
    else:
        net = method(build(), 2, **({"example": x} if method is mt.masksembles else {})).eval()
    mt.save(net, tmp_path / "net.safetensors")
    again = mt.load(tmp_path / "net.safetensors", build()).eval()
    torch.testing.assert_close(again(x, draws=0), net(x, draws=0))


def test_a_head_that_shares_the_embedding_is_left_and_the_rest_converted() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    for net in (mt.batch_ensemble(model, 2), mt.drop_connect(model, 0.1)):
        assert net.lm_head.weight is net.transformer.wte.weight
        assert {name.rpartition(".")[2] for name in net.notes if "." in name} >= {"c_attn", "c_proj", "c_fc"}
    with pytest.raises(ValueError, match="share a weight, so 'lm_head' cannot be replaced"):
        mt.batch_ensemble(model, 2, layers=["lm_head"])


@pytest.mark.parametrize("method", [lambda model: mt.drop_connect(model, 0.2), mt.variance])
def test_a_network_that_reads_the_weight_of_a_layer_that_draws_is_refused_by_name(method: Callable[..., Any]) -> None:
    """Its noise would be left out in silence."""
    parts = {"body": nn.Linear(4, 6), "read": nn.Linear(6, 6), "head": nn.Linear(6, 2)}
    asks = Of(lambda net, x: net.head(net.read(net.body(x).to(net.read.weight.data.dtype))), **parts)
    reads = Of(lambda net, x: net.head(F.linear(net.body(x), net.read.weight, net.read.bias)), **parts)
    by_data = Of(lambda net, x: net.head(net.body(x) @ net.read.weight.data.T), **parts)
    x = torch.randn(3, 4)
    assert method(asks)(x, draws=2).shape == (2, 3, 2)
    for network, mode in itertools.product((reads, by_data), (True, False)):
        with pytest.raises(
            ValueError, match="computes with the weight of layer 'read' .* instead of calling the layer"
        ):
            method(network).train(mode)(x)
