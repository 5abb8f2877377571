"""Functional noise: dropout in a network's own code, found by recorded runs and kept on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertForSequenceClassification

import multitudes as mt
from multitudes.networks.random_functions import STILL, RandomFrom
from tests.zoo.of_parts import Of
from tests.zoo.shared_cases import bert, tokens

CLASSES = 3


class Functional(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.first, self.last, self.p = nn.Linear(4, 32), nn.Linear(32, CLASSES), p

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x).relu(), self.p, self.training))


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) < 0.6) / 0.6 if self.training else x


def attention_by_function(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    p = 0.5 if net.training else 0.0
    return net.last(F.scaled_dot_product_attention(h, h, h, dropout_p=p).mean(1))


def attention_by_layer(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(net.attention(h, h, h)[0].mean(1))


def ends() -> dict[str, nn.Module]:
    return {"first": nn.Linear(4, 8), "last": nn.Linear(8, CLASSES)}


def torch_attention() -> nn.Module:
    return nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)


def recurrent() -> nn.Module:
    rnn = nn.GRU(4, 8, 2, dropout=0.5, batch_first=True)
    return Of(lambda net, x: net.last(net.rnn(x)[0].mean(1)), rnn=rnn, last=nn.Linear(8, CLASSES))


def row(width: int = 4) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(0))


def sequence() -> Tensor:
    return torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))


NOISY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "functional": (Functional, row),
    "with_a_layer": (lambda: nn.Sequential(nn.Dropout(0.1), Functional()), row),
    "drop_path": (lambda: nn.Sequential(nn.Linear(4, 8), DropPath(), nn.Linear(8, CLASSES)), row),
    "attention": (lambda: Of(attention_by_function, **ends()), sequence),
    "multihead": (lambda: Of(attention_by_layer, attention=torch_attention(), **ends()), sequence),
    "recurrent": (recurrent, sequence),
    "alpha": (lambda: nn.Sequential(nn.Linear(4, 8), nn.AlphaDropout(0.5), nn.Linear(8, CLASSES)), row),
}
EVERY = pytest.mark.parametrize("name", list(NOISY))


def noisy(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, x = NOISY[name]
    return build().double(), x().double()


@EVERY
@pytest.mark.filterwarnings("ignore:.*vmap cannot run")
def test_draws_have_the_distribution_of_the_network_in_training(name: str) -> None:
    model, x = noisy(name)
    net = mt.mc_dropout(model, example=x)
    drawn = net.predict(x, draws=2000, seed=0).predictions
    with torch.no_grad():
        want = torch.stack([model.train()(x) for _ in range(2000)])
    error = want.std(0) / 2000**0.5
    assert float(drawn.std(0).min()) > 0
    assert float(((drawn.mean(0) - want.mean(0)) / (2**0.5 * error)).abs().max()) < 5
    torch.testing.assert_close(drawn.std(0), want.std(0), rtol=0.15, atol=0)
    torch.testing.assert_close(net.predict(x, draws=0).predictions[0], model.eval()(x))


@EVERY
@pytest.mark.filterwarnings("ignore:.*vmap cannot run")
def test_draws_with_a_seed_do_not_depend_on_memory(name: str, tmp_path: Path) -> None:
    model, x = noisy(name)
    net = mt.mc_dropout(model, example=x).eval()
    state = torch.get_rng_state()
    drawn = net(x, draws=6, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(drawn, net(x, draws=6, seed=1))
    torch.testing.assert_close(drawn, net(x, draws=6, seed=1, memory=1))
    assert not torch.equal(drawn, net(x, draws=6, seed=2))
    mt.save(net, tmp_path / "net.safetensors")
    loaded = mt.load(tmp_path / "net.safetensors", NOISY[name][0]().double())
    assert torch.equal(drawn, loaded(x, draws=6, seed=1))
    frozen = mt.freeze(net, draws=3, seed=0).eval()
    assert torch.equal(frozen(x), frozen(x)) and float(frozen(x).detach().std(0).max()) > 0


def test_noise_is_found_on_the_first_input_without_an_example() -> None:
    class Two(Functional):
        def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + self.extra(more)

    model = Two()
    model.extra = nn.Sequential(nn.Linear(2, CLASSES), nn.Dropout(0.1))
    net = mt.mc_dropout(model)
    members = mt.deep_ensemble(net, members=2, seed=0)
    x = row(), row(2)
    for one in (net, members):
        drawn = one.predict(x, draws=50, seed=0).predictions.unflatten(0, (one.members, 50))
        assert float(drawn.std(1).min()) > 0.03  # of the functional one: the layer's rate is low
        assert "dropout in its own code stays on" in one.summary()


def test_a_given_rate_applies_to_functional_dropout() -> None:
    model = Functional(p=0.0001)
    x = row()
    net = mt.mc_dropout(model, p=0.5)
    assert float(net.predict(x, draws=50, seed=0).predictions.std(0).min()) > 0.01
    torch.manual_seed(0)
    assert float(torch.stack([net.train()(x)[0] for _ in range(50)]).std(0).min()) > 0.01


def test_bert_with_attention_dropout_alone() -> None:
    config = bert().config
    config.attention_probs_dropout_prob, config.initializer_range = 0.4, 0.7
    net = mt.mc_dropout(BertForSequenceClassification(config))
    with pytest.raises(ValueError, match="rate 0"):
        mt.mc_dropout(BertForSequenceClassification(config), layers="dropout")
    p = net.predict(tokens(3), draws=10, seed=0)
    assert float(p.mutual_information.min()) > 1e-3
    assert net.summary().count("scaled_dot_product_attention in its own code stays on") == 2


def test_noise_that_cannot_be_kept_on_is_an_error() -> None:
    class Python(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random() if self.training else x

    class More(Functional):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if self.training else 1)

    with pytest.raises(ValueError, match="layer '1' .Python. draws random numbers in training by an unknown"):
        mt.mc_dropout(nn.Sequential(nn.Dropout(0.5), Python(), nn.Linear(4, CLASSES)))
    with pytest.raises(ValueError, match="More.*self.training for more than dropout"):
        mt.mc_dropout(More())
    net = mt.mc_dropout(nn.Sequential(nn.Dropout(0.5), Python(), nn.Linear(4, CLASSES)), layers=["0"])
    assert list(net.notes) == ["0"]


def test_the_search_for_noise_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), DropPath(), nn.Linear(8, CLASSES)).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    net = mt.mc_dropout(model, example=row())
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    for state in (model.state_dict(), net.state_dict()):
        assert all(torch.equal(state[key], value) for key, value in before.items())
    assert all(module.training for module in net.modules())


def test_compiled_draws_with_a_seed_are_the_same() -> None:
    net, x = mt.mc_dropout(Functional()).eval(), row()
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager")
    assert torch.equal(compiled(x, draws=3, seed=0), net(x, draws=3, seed=0))


def test_a_seed_applies_to_networks_that_draw_in_evaluation() -> None:
    always, x = Of(lambda net, x: net.last(x + torch.randn_like(x)), last=nn.Linear(4, CLASSES)), row()
    for net in (mt.Multitude(always), mt.deep_ensemble(always, members=2, seed=0)):
        state = torch.get_rng_state()
        assert torch.equal(net.predict(x, seed=3).predictions, net.predict(x, seed=3).predictions)
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(net.predict(x, seed=3).predictions, net.predict(x, seed=4).predictions)


def test_attention_without_noise_is_that_of_evaluation() -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True).double()
    x, hidden = torch.randn(3, 5, 8).double(), torch.rand(3, 5) < 0.3
    hidden[:, 0] = False
    for need_weights in (True, False):
        options = {"need_weights": need_weights, "key_padding_mask": hidden}
        state = torch.get_rng_state()
        with RandomFrom(STILL):
            got = layer.train()(x, x, x, **options)[0]
        assert torch.equal(state, torch.get_rng_state())
        torch.testing.assert_close(got, layer.eval()(x, x, x, **options)[0])
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    with RandomFrom(STILL):
        got = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True, scale=0.2)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2)
    torch.testing.assert_close(got, want)


def test_check_lists_comparisons_and_detects_differences() -> None:
    x = row()
    net = mt.mc_dropout(Functional())
    assert "four draws differ" in str(mt.check(net, x))
    members = mt.deep_ensemble(Functional(), members=2, seed=0)
    assert len(mt.check(members, x).compared) >= 4

    class OtherMember(mt.Multitude):
        def _member(self, index: int) -> nn.Module:
            member = super()._member(index)
            member.weight.data.add_(1.0)
            return member

    class OtherGradient(mt.Multitude):
        def _predictions(self, x: Tensor) -> Tensor:
            return super()._predictions(x.detach())

    with pytest.raises(ValueError, match="member 0 differs from net.member.0. alone in evaluation: its predictions"):
        mt.check(OtherMember(nn.Linear(4, CLASSES)), x)
    with pytest.raises(ValueError, match=r"in evaluation: the gradient of x\[0\]"):
        mt.check(OtherGradient(nn.Linear(4, CLASSES)), x)
    silent = mt.mc_dropout(Functional())
    for module in silent.network.modules():
        if hasattr(module, "rate"):
            module.rate = 0.0
    with pytest.raises(ValueError, match="no layer draws"):
        mt.check(silent, x)
