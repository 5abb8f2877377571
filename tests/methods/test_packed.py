"""Packed-Ensembles: parameter counts, gamma, full width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multitudes as mt
from multitudes.surgery.narrowing.cuts import GroupedLinear
from tests.zoo.cases import NETWORKS, Cnn


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def all_but_first_of_block(name: str, module: nn.Module) -> bool:
    return not name.endswith("conv1")


@pytest.mark.slow
def test_parameter_counts_are_the_papers() -> None:
    r18, r50 = mt.models.resnet18(), mt.models.resnet50()
    assert f"{parameters(mt.deep_ensemble(r18, 4)) / 1e6:.2f}" == "44.70"
    assert f"{parameters(mt.deep_ensemble(r50, 4)) / 1e6:.2f}" == "94.08"
    assert f"{parameters(mt.batch_ensemble(r18, 4)) / 1e6:.2f}" == "11.21"
    assert f"{parameters(mt.mimo(r18, 4)) / 1e6:.2f}" == "11.19"
    packed = [mt.packed(model, 4, 2, 2, layers=all_but_first_of_block) for model in (r18, r50)]
    assert [f"{parameters(net) / 1e6:.2f}" for net in packed] == ["8.18", "14.55"]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("alpha", "members", "gamma"), [(2, 4, 1), (2, 4, 2), (3, 3, 2), (2, 8, 2), (1, 2, 4)])
def test_every_layer_has_the_weights_of_the_formula(alpha: int, members: int, gamma: int) -> None:
    model = mt.models.resnet18()
    net = mt.packed(model, members, alpha, gamma)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Conv2d) or name == "conv1":
            continue
        got = net.member(0).get_submodule(name)
        inputs, outputs = -(-alpha * layer.in_channels // members), -(-alpha * layer.out_channels // members)
        used = got.groups
        assert used <= gamma
        assert (
            sum(member.get_parameter(f"{name}.weight").numel() for member in net.network)
            == members * inputs * outputs * layer.kernel_size[0] ** 2 // used
        )
        if used < gamma:  # only where a subgroup would be too small, or does not divide
            assert inputs // gamma < 64 or inputs % gamma or outputs % gamma
        assert f"gamma {used}" in net.notes[name]
    assert net.member(0).conv1.groups == 1


def test_gamma_splits_linear_layers_too() -> None:
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
    net = mt.packed(model, 2, 2, 2)
    assert isinstance(net.member(0)[2], GroupedLinear)
    assert all(member[2].weight.numel() == 512 * 512 // 2 for member in net.network)
    layer = GroupedLinear(6, 4, 2)
    whole = torch.zeros(4, 6)
    whole[:2, :3], whole[2:, 3:] = layer.weight[:2], layer.weight[2:]
    x = torch.randn(7, 5, 6)
    torch.testing.assert_close(layer(x), F.linear(x, whole, layer.bias))


def test_full_width_members_are_a_deep_ensemble() -> None:
    case = NETWORKS["resnet"]
    net = mt.packed(case.model(), members=3, alpha=3, example=case.batch(2)[0]).eval()
    fused = mt.fuse([net.member(i) for i in range(3)])
    x, _ = case.batch()
    net.runner = fused.runner = "packed"
    assert torch.equal(net(x), fused(x))
    assert repr(net.member(0)) == repr(case.model())


def test_the_summary_shows_rounded_widths() -> None:
    net = mt.packed(Cnn(), members=4, alpha=2.5, example=torch.zeros(1, 3, 8, 8))
    assert "rounded up from 7.5" in net.summary()
    assert "alpha 2.5, gamma 1" in net.summary().splitlines()[-2]


@pytest.mark.parametrize(
    ("convert", "options", "sentence"),
    [
        (mt.packed, {"alpha": 0}, "alpha must be above 0 and at most 4, got 0"),
        (mt.packed, {"alpha": 5}, "alpha must be above 0 and at most 4, got 5"),
        (mt.packed, {"alpha": "2"}, "alpha must be above 0 and at most 4, got '2'"),
        (mt.packed, {"gamma": 0}, "gamma must be a whole number, 1 or more, got 0"),
        (mt.packed, {"layers": "none"}, "^layers='none' selects nothing"),
        (mt.narrow, {"factor": 0.5, "init": "foo"}, "init must be"),
        (mt.narrow, {"factor": 1.5}, "factor must be above 0 and at most 1, got 1.5"),
    ],
)
def test_bad_arguments_are_errors(convert: Callable[..., nn.Module], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        convert(Cnn(), example=torch.zeros(1, 3, 8, 8), **options)
