"""Patching of norms and layers of any class."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.methods.patching.conversion import family
from multitudes.methods.patching.layers import Patch, is_affine_norm
from tests.zoo.of_parts import Of


class LayerNorm2d(nn.LayerNorm):
    """As in ConvNeXt: over the channels of an image, by permuting."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ShiftedRMSNorm(nn.Module):
    """As Gemma's: a weight around zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * (1 + self.weight)


class SquashedNorm(ShiftedRMSNorm):
    """Not affine in its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Norms(nn.Module):
    """One of each kind of norm, and layers between."""

    def __init__(self, last: type[nn.Module] = ShiftedRMSNorm) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 3), LayerNorm2d(6)
        self.second, self.third = nn.InstanceNorm2d(6, affine=True), nn.RMSNorm(6)
        self.fourth, self.fifth, self.head = nn.LayerNorm(6), last(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(self.first(self.stem(x)))).mean((2, 3))
        return self.head(self.fifth(self.fourth(self.third(x))))


def test_all_norms_that_are_affine_in_their_weight_are_patched() -> None:
    torch.manual_seed(0)
    model, x = Norms().eval(), torch.randn(4, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = mt.patched(model, 3, init="pretrained", spread=0.3, example=x, seed=0).eval()
    names = {"first", "second", "third", "fourth", "fifth", "head"}
    assert {name for name in net.notes if "components" in net.notes[name]} == names
    assert isinstance(net.first, Patch)
    drawn, frozen = net(x, draws=4, seed=3), mt.freeze(net, 4, seed=3)
    for i in range(4):
        plain = frozen.member(i)
        assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]
        torch.testing.assert_close(drawn[i], plain(x), rtol=1e-4, atol=1e-5)
        for name in names - {"head"}:  # every drawn weight is one of the components
            stack = net.get_parameter(f"{name}.weight")
            assert any(torch.equal(plain.get_parameter(f"{name}.weight"), component) for component in stack)
    torch.testing.assert_close(net(x, draws=0)[0], model(x), rtol=1e-4, atol=1e-5)  # the components' mean
    assert not torch.allclose(drawn[0], drawn[1])


def test_a_norm_that_is_not_affine_is_left_and_told() -> None:
    x = torch.randn(4, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"4 of 5 norm layers are patched, but not SquashedNorm \(1\)"):
        net = mt.patched(Norms(SquashedNorm), 3, init="pretrained", example=x)
    assert isinstance(net.network.fifth, SquashedNorm)
    assert not is_affine_norm(SquashedNorm(6), (torch.randn(4, 6),), {})
    assert is_affine_norm(ShiftedRMSNorm(6), (torch.randn(4, 6),), {})


class OwnLinear(nn.Linear):
    """A subclass that inherits its forward."""


class InputsFirst(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


ANY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "subclass": (lambda: OwnLinear(5, 4), (5,)),
    "inputs_first": (lambda: InputsFirst(5, 4), (5,)),
    "transposed": (lambda: nn.ConvTranspose1d(5, 4, 3, stride=2), (5, 6)),
}


@pytest.mark.parametrize("assignment", ["network", "layer", "row", "element"])
@pytest.mark.parametrize("kind", list(ANY))
def test_layers_of_any_class_are_drawn_by_the_equation(kind: str, assignment: str) -> None:
    torch.manual_seed(0)
    build, shape = ANY[kind]
    model, x = nn.Sequential(build()), torch.randn(3, *shape)
    net = family(model, 3, assignment, init="pretrained", spread=0.5, seed=0).eval()
    layer: Any = net.network[0]
    assert isinstance(layer, Patch)
    frozen = mt.freeze(net, 3, seed=1)
    torch.testing.assert_close(net(x, draws=3, seed=1), frozen(x), rtol=1e-4, atol=1e-5)
    for i in range(3):
        weight = frozen.member(i)[0].weight
        assert type(frozen.member(i)[0]) is type(model[0])
        which = (layer.weight == weight).float().argmax(0)
        assert torch.equal(layer.weight.gather(0, which[None])[0], weight)
        if assignment in ("network", "layer"):
            assert len(which.unique()) == 1
        if assignment == "row":  # one component for each input
            axis = 1 if kind == "subclass" else 0
            by_input = which.movedim(axis, 0).flatten(1)
            assert torch.equal(by_input, by_input[:, :1].expand_as(by_input))


def test_patches_of_any_class_are_saved(tmp_path: Path) -> None:
    x = torch.randn(4, 3, 8, 8)
    net = mt.patched(Norms(), 3, init="pretrained", example=x).eval()
    mt.save(net, tmp_path / "net.safetensors")
    again = mt.load(tmp_path / "net.safetensors", Norms()).eval()
    torch.testing.assert_close(again(x, draws=3, seed=1), net(x, draws=3, seed=1))


def test_norms_of_a_hugging_face_convnext_are_patched() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5)
    model, x = transformers.ConvNextForImageClassification(config).eval(), {"pixel_values": torch.randn(2, 3, 16, 16)}
    norms = [name for name, module in model.named_modules() if "Norm" in type(module).__name__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = mt.patched(model, 3, init="pretrained", example=x).eval()
    assert len(norms) == 5
    assert all("components" in net.notes[name] for name in norms)
    torch.testing.assert_close(mt.freeze(net, 2, seed=0)(x), net(x, draws=2, seed=0), rtol=1e-4, atol=1e-5)


def test_nothing_but_norms_is_asked_of_words() -> None:
    model = Of(lambda net, x: net.head(net.body(x)), body=nn.Linear(4, 6), head=nn.Linear(6, 2))
    with pytest.raises(ValueError, match="'norm' selects nothing"):
        mt.patched(model, 3)
