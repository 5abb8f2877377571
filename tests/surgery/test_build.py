"""Packed ensembles of networks that a function of the width constructs: `mt.packed(build, members=4, alpha=2)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt


class Patches(nn.Module):
    """A small vision transformer with custom code: the class token reads the mean over all channels of each patch."""

    def __init__(self, width: int = 32, heads: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.dropout, self.head = nn.LayerNorm(width), nn.Dropout(0.1), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        x = torch.cat([self.token + x.mean((1, 2), keepdim=True), x], 1)
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.dropout(x + self.out(y))[:, 0])


class Gated(nn.Module):
    """A CNN whose code reads the mean over its channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.two, self.head = nn.Conv2d(width, width, 3), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(x)).relu()
        x = x * x.mean(1, keepdim=True).sigmoid()
        return self.head(self.two(x).mean((2, 3)))


def patches(width: float) -> nn.Module:
    return Patches(round(32 * width), round(4 * width))


def gated(width: float) -> nn.Module:
    return Gated(round(24 * width))


WIDTHS = count(2)
CACHED = [gated(1.0), gated(0.5)]
IMAGES = torch.linspace(-1, 1, 3 * 3 * 8 * 8).sin().view(3, 3, 8, 8)


@pytest.mark.parametrize("build", [patches, gated])
def test_networks_that_cannot_be_narrowed_say_that_a_function_can_build_them(build: Callable[[float], Any]) -> None:
    for convert in (lambda model: mt.packed(model, 4, 2, example=IMAGES), lambda m: mt.narrow(m, 0.5, example=IMAGES)):
        with pytest.raises(ValueError, match=r"channels are mixed before layer '.*' by mean .*packed\(build, \.\.\.\)"):
            convert(build(1.0))


@pytest.mark.parametrize("build", [patches, gated])
def test_members_are_those_built_by_hand(build: Callable[[float], nn.Module]) -> None:
    torch.manual_seed(3)
    by_hand = [build(0.5) for _ in range(4)]
    state = torch.get_rng_state()
    net = mt.packed(build, members=4, alpha=2, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    for index, member in enumerate(by_hand):
        got = net.member(index)
        assert repr(got) == repr(member) and type(got) is type(member)
        for (name, one), other in zip(got.state_dict().items(), member.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
    net.eval()
    torch.testing.assert_close(net(IMAGES), torch.stack([member.eval()(IMAGES) for member in by_hand]))
    mt.check(net, IMAGES)


def test_the_torch_seed_counts_where_none_is_given() -> None:
    torch.manual_seed(5)
    want = [gated(1.0), gated(1.0)]
    torch.manual_seed(5)
    net = mt.packed(gated, members=2, alpha=2)
    for index, member in enumerate(want):
        assert torch.equal(net.member(index).one.weight, member.one.weight)


def test_full_width_members_are_a_deep_ensemble() -> None:
    net, deep = mt.packed(gated, 3, 3, seed=1).eval(), mt.deep_ensemble(lambda: gated(1.0), 3, seed=1).eval()
    torch.testing.assert_close(net(IMAGES), deep(IMAGES))


def test_the_summary_compares_with_the_network_at_full_width() -> None:
    net = mt.packed(gated, members=4, alpha=2)
    size, whole = (sum(p.numel() for p in network.parameters()) for network in (net, gated(1.0)))
    assert f"alpha 2, build(0.5), {size / whole:.2f} times the parameters of model" in net.summary()


def test_a_multitude_that_is_built_draws_and_has_its_task() -> None:
    def build(width: float) -> nn.Module:
        net = mt.mc_dropout(patches(width))
        net.draws = 3
        return net

    net = mt.packed(build, members=2, alpha=1).eval()
    draws = net(IMAGES)
    assert draws.shape == (6, 3, 5) and not torch.equal(draws[0], draws[1])
    assert mt.packed(gated, 2, task="multilabel").task == "multilabel"


def test_functions_without_arguments_and_classes_are_factories_as_before() -> None:
    model = partial(nn.Sequential, nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    assert mt.packed(lambda: model(), 1, 1).member(0)[0].out_features == 16

    class Net(nn.Sequential):
        def __init__(self, hidden: int = 16) -> None:
            super().__init__(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    assert mt.packed(Net, 2, 1).member(0)[0].out_features == 8
    assert mt.packed(lambda width=1.0: Net(round(100 * width)), 2, 1).member(0)[0].out_features == 50
    assert mt.packed(lambda hidden=16: Net(hidden), 2, 1).member(0)[0].out_features == 8


def test_narrow_gives_one_network_of_the_function() -> None:
    torch.manual_seed(2)
    want = gated(0.25)
    small = mt.narrow(gated, 0.25, seed=2)
    assert type(small) is Gated and torch.equal(small.two.weight, want.two.weight)


@pytest.mark.parametrize("example", [None, IMAGES])
@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda width: None, r"model\(1\) must build an nn.Module, got a NoneType"),
        (
            lambda width: Gated(24 * width),
            r"model\(1\) raised TypeError: .*must be a function of a fraction of the width",
        ),
        (lambda width: Gated(24), r"model\(0.5\) has \d+ parameters and model\(1\) has \d+: .*narrower network"),
        (lambda width: Gated(round(24 / width)), r"model\(0.5\) has \d+ parameters and model\(1\)"),
        (
            lambda width: Patches(round(32 * width), 4, round(6 * width)),
            r"shape \[\d, 3\], and model\(1\) of shape \[\d, 6\]",
        ),
        (
            lambda width: nn.Sequential(nn.Conv2d(round(4 * width) - 1, round(8 * width), 3), nn.Flatten()),
            r"model\(0.5\) cannot run an input that model\(1\) runs",
        ),
        (lambda width: CACHED[width < 1], "a new network in every call"),
        (
            lambda width: Gated(100 if width == 1 else next(WIDTHS)),
            r"the same architecture in every call: .* differ at 'one.weight': \[\d+, 3, 3, 3\] .* and \[\d+, 3",
        ),
    ],
)
def test_wrong_functions_are_told(build: Callable[[float], Any], sentence: str, example: Tensor | None) -> None:
    with pytest.raises(ValueError, match=sentence):
        mt.packed(build, members=2, alpha=1, example=example)


def test_a_function_that_sets_a_seed_is_told() -> None:
    def build(width: float) -> nn.Module:
        torch.manual_seed(0)
        return gated(width)

    with pytest.raises(ValueError, match="builds the same network in every call"):
        mt.packed(build, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gamma": 2}, "gamma=2 has no effect, since model is a function"),
        ({"min_channels": 8}, "min_channels=8 has no effect"),
        ({"layers": "one"}, "layers='one' has no effect"),
        ({"init": "pretrained"}, "init='pretrained' has no effect"),
        ({"heads": "head"}, "heads='head' has no effect"),
        ({"alpha": 5}, "alpha must be above 0 and at most 4, got 5"),
        ({"members": 0}, "members must be"),
        ({"seed": "a"}, "seed must be"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mt.packed(gated, **options)
    if "alpha" not in options and "members" not in options:
        with pytest.raises(ValueError, match=sentence):
            mt.narrow(gated, 0.5, **options)


def test_members_of_a_function_are_saved_and_loaded(tmp_path: Any) -> None:
    pytest.importorskip("safetensors")
    net = mt.packed(gated, 2, 1, seed=0).eval()
    again = mt.load(mt.save(net, tmp_path / "net.safetensors"), gated(0.5)).eval()
    assert torch.equal(again(IMAGES), net(IMAGES))
