"""Frozen noise in networks whose batch axis is not the first, or whose own code draws, such as recurrent ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.stochastic import stochastic_layers
from tests.zoo.of_parts import Of

X = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """Dropout after one recurrent layer, or between and after two, on sequences `[B, T, C]`."""

    def __init__(self, kind: Any, layers: int, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.rnn: Any = kind(4, 8, layers, batch_first=batch_first, dropout=0.5 if layers > 1 else 0.0, **options)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear((self.rnn.proj_size or 8) * (2 if self.rnn.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.rnn.batch_first:
            return self.head(self.dropout(self.rnn(x)[0])[:, -1])
        return self.head(self.dropout(self.rnn(x.transpose(0, 1))[0])[-1])


KINDS = {"lstm": (nn.LSTM, {}), "projected": (nn.LSTM, {"proj_size": 2}), "gru": (nn.GRU, {}), "rnn": (nn.RNN, {})}


def recurrent(kind: str, layers: int = 2, batch_first: bool = True, both_ways: bool = False) -> Recurrent:
    torch.manual_seed(0)
    own, options = KINDS[kind]
    return Recurrent(own, layers, batch_first, bidirectional=both_ways, **options)


def check_frozen(net: mt.Multitude, x: Tensor) -> None:
    """Check that predictions repeat, and equal those of each row and of each member alone."""
    with torch.no_grad():
        once = net(x)
        assert once.shape[:2] == (net.members, len(x)) and not stochastic_layers(net.network)
        assert torch.equal(net(x), once) and float(once.std(0).max()) > 1e-3
        torch.testing.assert_close(torch.cat([net(row) for row in x.split(1)], 1), once)
        torch.testing.assert_close(torch.stack([net.member(i)(x) for i in range(net.members)]), once)


CASES = [
    ("lstm", 1, False, True), ("lstm", 2, True, True), ("gru", 2, False, True),
    ("projected", 2, False, False), ("rnn", 2, True, False), ("projected", 1, True, True), ("rnn", 1, False, False),
    ("gru", 1, True, False),
]  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize(("kind", "layers", "batch_first", "both_ways"), CASES)
@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:.*vmap cannot run")
def test_recurrent_networks_are_frozen_before_and_after_their_first_input(
    kind: str, layers: int, batch_first: bool, both_ways: bool
) -> None:
    net = mt.mc_dropout(recurrent(kind, layers, batch_first, both_ways)).eval()
    frozen = mt.freeze(net, 4, seed=0)
    check_frozen(frozen, X)
    assert torch.equal(mt.freeze(net, 4, seed=0)(X[:2]), frozen(X[:2]))
    net(X)  # finds what draws, so that freezing is immediate
    check_frozen(mt.freeze(net, 4, seed=0), X)


def test_as_many_rows_as_steps_are_no_problem() -> None:
    frozen = mt.freeze(mt.mc_dropout(recurrent("lstm", batch_first=False)).eval(), 3)
    check_frozen(frozen, X.repeat(2, 1, 1)[:6])
    check_frozen(frozen, X)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformers_are_frozen_for_any_batch_axis(batch_first: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.body(x).mean(1) if batch_first else net.body(x.transpose(0, 1)).mean(0)

    torch.manual_seed(0)
    body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=batch_first)
    check_frozen(mt.freeze(mt.mc_dropout(Of(forward, body=body), example=X).eval(), 3, seed=0), X)


def ones_dropped(forward: Callable[..., Tensor]) -> Tensor:
    """Return dropout masks of 200 frozen networks, found by an input of ones `[B, T, C]`."""
    net = mt.mc_dropout(Of(forward, layer=nn.Dropout(0.5)), example=torch.ones(2, 3, 4)).eval()
    masks = mt.freeze(net, 200, seed=0)(torch.ones(5, 7, 4))
    assert set(masks.unique().tolist()) == {0.0, 2.0}
    assert abs(float(masks.mean()) - 1) < 5 / (200 * 28) ** 0.5  # 0 or 2: deviation 1
    torch.testing.assert_close(masks, masks[:, :1].expand_as(masks))  # equal for all rows
    return masks[:, 0]


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_rows_share_numbers_for_any_batch_axis_and_nothing_else_does(batch: int) -> None:
    masks = ones_dropped(lambda net, x: net.layer(x.movedim(0, batch)).movedim(batch, 0))
    flat = masks.flatten(1) - 1
    together = flat.T @ flat / len(flat)  # correlations of steps and channels
    assert float((together - torch.eye(28)).abs().max()) < 5 / 200**0.5


def test_values_without_a_batch_axis_have_independent_numbers() -> None:
    def positions(net: Any, x: Tensor) -> Tensor:
        return x * net.layer(torch.ones(x.shape[1], 4))

    flat = ones_dropped(positions).flatten(1) - 1
    assert float((flat.T @ flat / len(flat) - torch.eye(28)).abs().max()) < 5 / 200**0.5


class Late(nn.Module):
    """Functional dropout that `mc_dropout` finds in the first run only, because it cannot guess two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.1)
        self.steps = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return F.dropout(x, 0.5, self.training) + 0 * self.layer(y)


def test_functional_dropout_is_frozen_when_it_is_found() -> None:
    frozen = mt.freeze(mt.mc_dropout(Late()).eval(), 100, seed=0)
    x = torch.ones(5, 8), torch.ones(5, 8)
    once = frozen(x)
    assert once.shape == (100, 5, 8) and torch.equal(frozen(x), once) and set(once.unique().tolist()) == {0.0, 2.0}
    flat = once[:, 0] - 1
    assert float((flat.T @ flat / 100 - torch.eye(8)).abs().max()) < 5 / 100**0.5
    assert abs(float(flat.mean())) < 5 / (100 * 8) ** 0.5


def test_the_search_for_noise_leaves_no_trace_in_members() -> None:
    net = mt.deep_ensemble(mt.mc_dropout(Late()), 2).train()
    net((torch.ones(5, 8), torch.ones(5, 8)))
    assert [net.member(index).network.steps for index in range(2)] == [1, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("ran", [False, True])
def test_frozen_recurrent_networks_are_saved(ran: bool, tmp_path: Path) -> None:
    frozen, again = (mt.freeze(mt.mc_dropout(sequence_first()).eval(), 2, seed=0) for _ in range(2))
    if ran:
        frozen(X[:2])
    mt.save(frozen, tmp_path / "net.safetensors")
    assert torch.equal(mt.load(tmp_path / "net.safetensors", sequence_first())(X), again(X))  # type: ignore[operator]


@pytest.mark.slow
def test_frozen_recurrent_networks_are_exported_and_deployed(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    net = mt.mc_dropout(sequence_first()).eval()
    mt.to_onnx(net, tmp_path / "net.onnx", X[:3], draws=2, seed=0)
    frozen = mt.freeze(net, 2, seed=0)
    torch.testing.assert_close(mt.deploy(frozen, X[:3]).predict(X).probs, frozen.predict(X).probs)


def sequence_first() -> nn.Module:
    return recurrent("lstm", batch_first=False, both_ways=True)


# -- refusals ----------------------------------------------------------------------------------------------


def test_a_member_without_a_batch_does_not_guess_its_batch_axis() -> None:
    frozen = mt.freeze(mt.mc_dropout(recurrent("lstm", 1), example=X).eval(), 2)
    with pytest.raises(ValueError, match="the batch axis of a frozen .* is unknown .*: call the frozen multitude once"):
        frozen.member(0)(X)
    frozen(X)
    assert frozen.member(0)(X).shape == (5, 3)


def test_an_input_that_does_not_fit_is_forgotten() -> None:
    frozen = mt.freeze(mt.mc_dropout(recurrent("lstm", batch_first=False)).eval(), 2)
    with pytest.raises(ValueError, match="does not fit the network"):
        frozen(X[..., :3])
    check_frozen(frozen, X)


def test_a_network_for_batches_of_one_size_is_frozen() -> None:
    net = mt.mc_dropout(Of(lambda net, x: net.layer(x) * torch.ones(5, 1), layer=nn.Dropout(0.5)), example=X[:, 0])
    frozen = mt.freeze(net.eval(), 2)
    assert torch.equal(frozen(X[:, 0]), frozen(X[:, 0]))


def test_one_layer_for_rows_along_two_axes_is_refused() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.layer(net.layer(x).transpose(0, 1)).transpose(0, 1)

    frozen = mt.freeze(mt.mc_dropout(Of(forward, layer=nn.Dropout(0.5)), example=X).eval(), 2)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="layer 'layer' .* batch axis 0 and with batch axis 1: use a separate layer"
        ):
            frozen(X)


def test_noise_that_cannot_be_kept_on_is_refused_each_time() -> None:
    class More(Late):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * (2 if self.training else 1)

    net = mt.mc_dropout(More()).eval()
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be kept on"):
            net((torch.ones(5, 8), torch.ones(5, 8)))
