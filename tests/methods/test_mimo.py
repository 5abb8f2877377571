"""MIMO's proof: where inputs lie, that each reaches the first layer as alone, and that nothing else is reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from tests.zoo.of_parts import Of


def layers(**parts: Any) -> dict[str, Any]:
    return {"body": nn.Linear(12, 8), "head": nn.Linear(8, 4)} | parts


def of(forward: Callable[..., Tensor], **parts: Any) -> nn.Module:
    return Of(forward, **layers(**parts))


def zeros() -> nn.Module:
    layer = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)  # sequence-first, without positions
    return of(lambda net, x: net.head(net.encoder(net.body(x))), encoder=nn.TransformerEncoder(layer, 1))


APART = (
    "its input must be read by its first layer 'body' only and its output be that of its last layer 'head', but "
    r"output \d for input \d changes if other inputs are in the same forward"
)
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "normalised over features": (
        lambda: of(lambda net, x: net.head(net.body(x - x.mean(1, keepdim=True)).relu())), (5, 12),
        APART,
    ),
    "a permutation": (
        lambda: of(lambda net, x: net.head(net.body(x.view(len(x), -1, 4).mT.flatten(1)).relu())), (5, 12),
        APART,
    ),
    "another way": (
        lambda: of(lambda net, x: net.head(net.body(x).relu()) * x.sum(1, keepdim=True).sigmoid()), (5, 12),
        APART,
    ),
    "normalised before weights of 0": (
        lambda: of(lambda net, x: net.head(net.gate(net.body(x - x.mean(1, keepdim=True)).relu())), gate=zeros()),
        (5, 12), APART,
    ),
    "another way through weights of 0": (
        lambda: of(lambda net, x: net.head(net.body(x).relu() + net.gate(x.sum(1, keepdim=True).expand(-1, 8))),
                   gate=zeros()), (5, 12), APART,
    ),
    "softmax after": (
        lambda: of(lambda net, x: net.head(net.body(x).relu()).softmax(1)), (5, 12),
        APART,
    ),
    "sequence first": (encoder, (6, 3, 12), "the first axis of x is not the batch, or rows affect each other"),
    "rows that see each other": (
        lambda: of(lambda net, x: net.head(net.body(x).softmax(0))), (5, 12), "rows affect each other",
    ),
    "transposed layer": (
        lambda: nn.Sequential(nn.ConvTranspose1d(3, 4, 2), nn.Flatten(), nn.Linear(20, 2)), (5, 3, 4),
        "MIMO cannot widen layer '0'",
    ),
    "recurrent layer": (
        lambda: Of(lambda net, x: net.head(net.gru(x)[0][:, -1]), gru=nn.GRU(6, 8, batch_first=True),
                   head=nn.Linear(8, 2)), (5, 3, 6), r"MIMO cannot widen layer 'gru' \(GRU",
    ),
}  # fmt: skip


@pytest.mark.parametrize("init", ["fresh", "pretrained"])
@pytest.mark.parametrize("name", list(REFUSED))
def test_networks_that_mix_inputs_are_errors(name: str, init: str) -> None:
    torch.manual_seed(0)
    build, shape, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        mt.mimo(build(), 3, init=init, example=torch.randn(shape))


RIGHT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "flattened": (lambda: of(lambda net, x: net.head(net.body(x.flatten(1)).relu())), (5, 3, 2, 2)),
    "channels last": (
        lambda: Of(lambda net, x: net.head(net.conv(x.permute(0, 3, 1, 2)).relu().mean((2, 3))),
                   conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 4)), (5, 6, 6, 3),
    ),
    "channels last, flattened": (
        lambda: of(lambda net, x: net.head(net.body(x.permute(0, 2, 3, 1).flatten(1)).relu())), (5, 3, 2, 2),
    ),
    "patches": (
        lambda: of(lambda net, x: net.head(net.body(F.pixel_unshuffle(x, 2).flatten(2).mT.flatten(1)).relu()),
                   body=nn.Linear(48, 8)), (5, 3, 4, 4),
    ),
    "scaled": (lambda: of(lambda net, x: net.head(net.body(x / 255 - 0.5).relu())), (5, 12)),
    "sequences": (lambda: of(lambda net, x: net.head(net.body(x).cumsum(1).relu())), (5, 6, 12)),
    "one row": (lambda: of(lambda net, x: net.head(net.body(x).relu())), (1, 12)),
    "zero head": (lambda: zero_head(), (5, 12)),
}  # fmt: skip


def zero_head() -> nn.Module:
    model = of(lambda net, x: net.head(net.body(x).relu()))
    nn.init.zeros_(model.head.weight)
    return model


@pytest.mark.parametrize("name", list(RIGHT))
def test_each_member_predicts_its_own_input_with_its_own_weights(name: str) -> None:
    """Members that change places, inputs and weights alike, give the same answers in the other order."""
    torch.manual_seed(0)
    build, shape = RIGHT[name]
    x = torch.rand(shape)
    pretrained = mt.mimo(build().eval(), 3, init="pretrained", example=x).eval()
    model = build().eval()
    model.load_state_dict({n: t for n, t in pretrained.member(1).state_dict().items()})
    torch.testing.assert_close(pretrained(x), model(x).expand(3, *model(x).shape), rtol=1e-4, atol=1e-5)
    net = mt.mimo(model, 3, init="fresh", example=x).eval()
    inputs = [torch.rand(shape) for _ in range(3)]
    first, last = net.network.get_submodule(net.first), net.network.get_submodule(net.last)
    with torch.no_grad():
        last.weight.normal_()
        before = net._predict_each(inputs)
        first.weight.copy_(first.weight.unflatten(1, (3, -1)).roll(1, 1).flatten(1, 2))
        after = net._predict_each([inputs[2], inputs[0], inputs[1]])
    torch.testing.assert_close(after, before)
    with torch.no_grad():
        moved = net._predict_each([inputs[2] + 1, inputs[0], inputs[1]])
    assert not torch.allclose(moved, after)
