"""Narrowing real networks: what is padded, masked, halved or shuffled on its way, and true reasons for refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import multitudes as mt
from multitudes.surgery.narrowing.attention_heads import choose
from multitudes.surgery.narrowing.cuts import Cut, cut_layer
from multitudes.surgery.narrowing.proof import prove
from multitudes.surgery.select import replace
from tests.zoo.hard_networks import HARD
from tests.zoo.of_parts import Of


class OwnConv(nn.Conv2d):
    """A subclass that inherits its forward."""


def causal() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = F.relu(net.one(F.pad(x, (2, 0))))
        x = F.relu(net.two(F.pad(x, (4, 0))))
        return net.head(x[..., -1])

    return Of(forward, one=nn.Conv1d(3, 16, 3), two=nn.Conv1d(16, 16, 3, dilation=2), head=nn.Linear(16, 4))


def tokens() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.cat([net.token.expand(len(x), -1, -1), net.embed(x) + net.position], 1)
        return net.head(F.relu(net.mix(x)).mean(1))

    return Of(
        forward, embed=nn.Linear(6, 16), mix=nn.Linear(16, 12), head=nn.Linear(12, 4),
        token=nn.Parameter(torch.randn(1, 1, 16)), position=nn.Parameter(torch.randn(1, 5, 16)),
    )  # fmt: skip


def masked() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(net.two(net.one(x).masked_fill(x.sum(-1, keepdim=True) > 0, 0.0)).mean(1))

    return Of(forward, one=nn.Linear(6, 16), two=nn.Linear(16, 16), head=nn.Linear(16, 4))


def quarters() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        parts = net.one(x).chunk(4, -1)
        return net.head(parts[0] * parts[1] + parts[2].tanh() - parts[3])

    return Of(forward, one=nn.Linear(6, 16), head=nn.Linear(4, 4))


def thirds() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        first, second, third = net.one(x).split(net.size, -1)
        return net.head(first * second.sigmoid() + third)

    return Of(forward, one=nn.Linear(6, 36), head=nn.Linear(12, 4), size=12)


@torch.jit.script
def times(x: Tensor, number: int) -> Tensor:
    return x * number


def scripted() -> nn.Module:
    """Compiled functions take plain numbers only."""
    return Of(
        lambda net, x: net.head(times(net.one(x), net.number).relu()),
        one=nn.Linear(6, 16), head=nn.Linear(16, 4), number=3,
    )  # fmt: skip


def slices() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.one(x)
        third = x.shape[-1] // 3
        return net.head(x[..., :third] * x[..., third : 2 * third].relu() + x[..., 2 * third :])

    return Of(forward, one=nn.Linear(6, 36), head=nn.Linear(12, 4))


def pixels() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.one(x)
        rows, width, high, wide = x.shape
        x = x.view(rows, width // 4, 2, 2, high, wide).permute(0, 1, 4, 2, 5, 3)
        return net.head(x.reshape(rows, width // 4, 2 * high, 2 * wide).mean((2, 3)))

    return Of(forward, one=nn.Conv2d(3, 32, 1), head=nn.Linear(8, 4))


def halves() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.one(x)
        half = x.shape[-1] // 2
        return net.head(x[..., :half] * x[..., half:].relu())

    return Of(forward, one=nn.Linear(6, 16), head=nn.Linear(8, 4))


def shuffled() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.one(x)
        x = x.view(len(x), net.groups, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
        return net.head(net.two(x).mean((2, 3)))

    parts = {"one": nn.Conv2d(3, 16, 1), "two": nn.Conv2d(16, 8, 3, groups=2), "head": nn.Linear(8, 4)}
    return Of(forward, **parts, groups=2)


def held_in_a_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Unflatten(-1, (16, 1)), nn.Flatten(1), nn.ReLU(), nn.Linear(16, 4))


def shifted_by_zeros() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.one(x)
        return net.head(torch.cat([x.new_zeros(len(x), 1, x.shape[-1]), x[:, :-1]], 1).sum(1))

    return Of(forward, one=nn.Linear(6, 16), head=nn.Linear(16, 4))


NARROWED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "causal": (causal, (3, 10)),
    "zero_pad": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 1), nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(16, 12, 3), nn.ReflectionPad2d(1),
            nn.ConstantPad2d(1, 0.5), nn.Conv2d(12, 4, 3),
        ), (3, 8, 8),
    ),
    "tokens": (tokens, (5, 6)),
    "masked": (masked, (5, 6)),
    "shifted": (shifted_by_zeros, (5, 6)),
    "gated": (lambda: nn.Sequential(nn.Linear(6, 16), nn.GLU(-1), nn.Linear(8, 4)), (6,)),
    "quarters": (quarters, (6,)),
    "thirds": (thirds, (6,)),
    "halves": (halves, (6,)),
    "slices": (slices, (6,)),
    "scripted": (scripted, (6,)),
    "pixels": (pixels, (3, 4, 4)),
    "shuffled": (shuffled, (3, 6, 6)),
    "channel_shuffle": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 1), nn.ChannelShuffle(2), nn.Conv2d(16, 4, 1, groups=2)), (3, 4, 4),
    ),
    "held": (held_in_a_layer, (6,)),
    "pixel_shuffle": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 1), nn.PixelShuffle(2), nn.Conv2d(8, 4, 1)), (3, 4, 4),
    ),
    "subclass": (lambda: nn.Sequential(OwnConv(3, 16, 1), nn.ReLU(), OwnConv(16, 4, 1)), (3, 4, 4)),
    "convnext": (HARD["convnext"][0], (3, 8, 8)),
}  # fmt: skip


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", list(NARROWED))
@pytest.mark.parametrize("init", ["fresh", "pretrained"])
def test_members_of_such_networks_are_narrow_and_themselves_alone(name: str, init: str) -> None:
    torch.manual_seed(0)
    build, shape = NARROWED[name]
    model, x = build(), torch.randn(3, *shape)
    net = mt.packed(model, 2, 1, init=init, example=x, seed=0).eval()
    mt.check(net, x)
    assert net(x).shape == (2, *model(x).shape)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (net, model)]
    assert sizes[0] < 1.3 * sizes[1]


def test_the_proof_finds_channels_that_are_confused() -> None:
    """A cut that takes the wrong inputs of a layer has the right shapes, and is refused by name."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    kept = torch.tensor([0, 2, 4, 6])
    cuts = {
        "0": Cut(torch.arange(4), kept), "2": Cut(kept + 1, kept), "4": Cut(kept, torch.arange(2)),
    }  # fmt: skip
    small = replace(model, {name: cut_layer(model.get_submodule(name), cut, name) for name, cut in cuts.items()})
    with pytest.raises(ValueError, match="before layer '2' gives that layer other values"):
        prove(model, small, cuts, torch.randn(3, 4))
    right = cuts | {"2": Cut(kept, kept)}
    small = replace(model, {name: cut_layer(model.get_submodule(name), cut, name) for name, cut in right.items()})
    prove(model, small, right, torch.randn(3, 4))


def test_a_rotation_of_channels_is_right_or_refused() -> None:
    """Which depends on the chosen channels: the last one kept comes first, or does not."""
    model = Of(lambda net, x: net.head(net.body(x).roll(1, -1)), body=nn.Linear(6, 16), head=nn.Linear(16, 4)).double()
    x, outcomes = torch.randn(5, 6).double(), set()
    for seed in range(8):
        try:
            small = mt.narrow(model, 0.5, init="pretrained", example=x, seed=seed)
        except ValueError as error:
            assert "before layer 'head' gives that layer other values" in str(error)
            outcomes.add("refused")
            continue
        kept = (F.normalize(small.body.weight) @ F.normalize(model.body.weight).T).argmax(1)
        inputs = (F.normalize(small.head.weight) @ F.normalize(model.head.weight[:, (kept.roll(1) + 1) % 16]).T).diag()
        torch.testing.assert_close(inputs, torch.ones_like(inputs))
        outcomes.add("right")
    assert "right" in outcomes


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 4])
def test_patterns_choose_the_same_of_each_part_and_whole_blocks(parts: int, block: int) -> None:
    kept = choose(64, 32, pattern=(parts, block))
    assert len(kept.unique()) == 32
    assert torch.equal(kept, kept.sort().values)
    of_each = kept.view(parts, -1)
    assert torch.equal(of_each - torch.arange(parts).unsqueeze(1) * (64 // parts), of_each[:1].expand_as(of_each))
    assert bool((kept.view(-1, block).diff() == 1).all())
    assert bool((kept.view(-1, block)[:, 0] % block == 0).all())


def test_code_that_cannot_run_with_gradients_is_narrowed() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.one(x)
        return net.head(x.relu()) if net.training else net.head(x.relu()) * float(len(x.numpy()) > 0)

    model, x = Of(forward, one=nn.Linear(6, 16), head=nn.Linear(16, 4)).eval(), torch.randn(3, 6)
    assert mt.narrow(model, 0.5, example=x).one.out_features == 8


# -- reasons -----------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "softmax": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 2)), (6,),
        r"channels are mixed before layer '2' by softmax in layer '1' \(Softmax\)",
    ),
    "mean": (
        lambda: Of(lambda net, x: net.head(net.body(x) - net.body(x).mean(-1, keepdim=True)),
                   body=nn.Linear(6, 8), head=nn.Linear(8, 2)), (6,),
        r"channels are mixed before layer 'head' by mean in the network's own forward \(Of\)",
    ),
    "decides": (
        lambda: Of(lambda net, x: net.head(net.body(x)) * (2.0 if net.body(x).sum().item() > 0 else 1.0),
                   body=nn.Linear(6, 8), head=nn.Linear(8, 2)), (6,),
        r"the network's own forward \(Of\) branches on the values of channels \(item\)",
    ),
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 2)), (6,),
        "layer '0' is a Linear with a computed weight",
    ),
    "parametrised": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 2)), (6,),
        "layer '0' is a ParametrizedLinear with a computed weight",
    ),
    "fixed": (
        lambda: Of(lambda net, x: net.head((net.body(x).view(-1, 4, 4) * net.gate).flatten(1)),
                   body=nn.Linear(6, 16), head=nn.Linear(16, 2), gate=nn.Parameter(torch.randn(4, 4))), (6,),
        "fixes a hidden width: .*parameters of fixed width: gate",
    ),
    "permuted": (
        lambda: Of(lambda net, x: net.head(net.body(x)[:, [3, 1, 0, 2, 7, 6, 5, 4]]),
                   body=nn.Linear(6, 8), head=nn.Linear(8, 2)), (6,),
        r"fixes a hidden width: index \d is out of bounds",
    ),
    "in_training": (
        lambda: Of(lambda net, x: net.head(net.body(x)) + (net.aux(net.body(x)) if net.training else 0.0),
                   body=nn.Linear(6, 16), head=nn.Linear(16, 2), aux=nn.Linear(16, 2)), (6,),
        r"layer 'aux' does not run on the example in evaluation",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_refusal_names_what_stands_in_the_way(name: str) -> None:
    torch.manual_seed(0)
    build, shape, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        mt.packed(build(), 2, 1, example=torch.randn(4, *shape))


def test_a_network_of_parameters_that_stand_alone_is_warned_of() -> None:
    model = Of(
        lambda net, x: net.head(torch.einsum("bi,io->bo", x, net.up).relu() @ net.down),
        head=nn.Linear(6, 4), up=nn.Parameter(torch.randn(6, 64)), down=nn.Parameter(torch.randn(64, 6)),
    )  # fmt: skip
    with pytest.warns(
        UserWarning, match=r"'up', 'down' are in no layer and keep their width, so that 4 members have 4.0"
    ):
        mt.packed(model, 4, 2, example=torch.randn(3, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.packed(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4)), 4, 2)
