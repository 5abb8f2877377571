"""Dropout in a network's own code: found by observation, kept on, drawn like a layer's."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.random_functions import STILL, RandomFrom

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


class Attention(nn.Module):
    """Attention whose weights alone are dropped, in a call or in torch's own layer."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.attention = None if own else nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.attention is not None:
            return self.last(self.attention(h, h, h)[0].mean(1))
        p = 0.5 if self.training else 0.0
        return self.last(F.scaled_dot_product_attention(h, h, h, dropout_p=p).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.GRU(4, 8, 2, dropout=0.5, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x)[0].mean(1))


def row(width: int = 4) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(0))


def sequence() -> Tensor:
    return torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))


NOISY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "functional": (Functional, row),
    "with_a_layer": (lambda: nn.Sequential(nn.Dropout(0.1), Functional()), row),
    "drop_path": (lambda: nn.Sequential(nn.Linear(4, 8), DropPath(), nn.Linear(8, CLASSES)), row),
    "attention": (lambda: Attention(own=True), sequence),
    "multihead": (lambda: Attention(own=False), sequence),
    "recurrent": (Recurrent, sequence),
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
    drawn = net.predict(x, draws=4000, seed=0).predictions
    with torch.no_grad():
        want = torch.stack([model.train()(x) for _ in range(4000)])
    error = want.std(0) / 4000**0.5
    assert float(drawn.std(0).min()) > 0
    assert float(((drawn.mean(0) - want.mean(0)) / (2**0.5 * error)).abs().max()) < 5
    torch.testing.assert_close(drawn.std(0), want.std(0), rtol=0.15, atol=0)
    torch.testing.assert_close(net.predict(x, draws=0).predictions[0], model.eval()(x))


@EVERY
@pytest.mark.filterwarnings("ignore:.*vmap cannot run")
def test_a_seed_repeats_the_draws_whatever_the_memory(name: str, tmp_path: Path) -> None:
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


def test_noise_is_found_on_the_first_input_where_none_was_given() -> None:
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


def test_a_rate_that_is_given_is_that_of_functional_dropout_too() -> None:
    model = Functional(p=0.0001)
    x = row()
    net = mt.mc_dropout(model, p=0.5)
    assert float(net.predict(x, draws=50, seed=0).predictions.std(0).min()) > 0.01
    torch.manual_seed(0)
    assert float(torch.stack([net.train()(x)[0] for _ in range(50)]).std(0).min()) > 0.01


def test_bert_with_attention_dropout_alone() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.4, initializer_range=0.7,
    )  # fmt: skip
    net = mt.mc_dropout(BertForSequenceClassification(config))
    with pytest.raises(ValueError, match="rate 0"):
        mt.mc_dropout(BertForSequenceClassification(config), layers="dropout")
    p = net.predict({"input_ids": torch.randint(20, (3, 6))}, draws=10, seed=0)
    assert float(p.mutual_information.min()) > 1e-3
    assert net.summary().count("scaled_dot_product_attention in its own code stays on") == 2


def test_what_cannot_be_kept_on_is_named() -> None:
    class Python(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random() if self.training else x

    class More(Functional):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if self.training else 1)

    with pytest.raises(ValueError, match="layer '1' .Python. draws random numbers in training in a way"):
        mt.mc_dropout(nn.Sequential(nn.Dropout(0.5), Python(), nn.Linear(4, CLASSES)))
    with pytest.raises(ValueError, match="More.*for more than dropout"):
        mt.mc_dropout(More())
    net = mt.mc_dropout(nn.Sequential(nn.Dropout(0.5), Python(), nn.Linear(4, CLASSES)), layers=["0"])
    assert list(net.notes) == ["0"]


def test_looking_for_noise_moves_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), functional_of(8)).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    net = mt.mc_dropout(model, example=row())
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    for state in (model.state_dict(), net.state_dict()):
        assert all(torch.equal(state[key], value) for key, value in before.items())
    assert all(module.training for module in net.modules())


def functional_of(width: int) -> nn.Module:
    inner = Functional()
    inner.first = nn.Linear(width, 32)
    return inner


def test_draws_with_a_seed_are_the_same_compiled() -> None:
    net, x = mt.mc_dropout(Functional()).eval(), row()
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager")
    assert torch.equal(compiled(x, draws=3, seed=0), net(x, draws=3, seed=0))


def test_a_network_that_draws_in_evaluation_too_honours_a_seed() -> None:
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + torch.randn_like(x))

    x = row()
    for net in (mt.Multitude(Always()), mt.deep_ensemble(Always(), members=2, seed=0)):
        state = torch.get_rng_state()
        assert torch.equal(net.predict(x, seed=3).predictions, net.predict(x, seed=3).predictions)
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(net.predict(x, seed=3).predictions, net.predict(x, seed=4).predictions)


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_without_noise_is_that_of_evaluation(need_weights: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True).double()
    x, hidden = torch.randn(3, 5, 8).double(), torch.rand(3, 5) < 0.3
    hidden[:, 0] = False
    options = {"need_weights": need_weights, "key_padding_mask": hidden}
    state = torch.get_rng_state()
    with RandomFrom(STILL):
        got = layer.train()(x, x, x, **options)[0]
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(got, layer.eval()(x, x, x, **options)[0])


def test_grouped_and_causal_attention_without_noise() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    with RandomFrom(STILL):
        got = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True, scale=0.2)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2)
    torch.testing.assert_close(got, want)


def test_check_says_what_it_compared_and_finds_what_is_wrong() -> None:
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


def test_old_weight_norm_is_taken_by_every_method() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(
            nn.utils.weight_norm(nn.Linear(4, 80)), nn.ReLU(), nn.Dropout(0.2), nn.Linear(80, CLASSES)
        )
        x = row()
        model(x)
        for method in (mt.deep_ensemble, mt.batch_ensemble, mt.mc_dropout, mt.masksembles):
            assert method(model).predict(x).probs.shape == (5, CLASSES)
        assert mt.patched(model, layers="output").predict(x).probs.shape == (5, CLASSES)
