"""Patched layers of every class, compared with the plain layers that they replace."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import RelaxedOneHotCategorical

import multitudes as mt
from multitudes.methods.patching import family, patched
from multitudes.methods.patching.layers import Patch
from tests.methods.patching.test_patching import assigned, mlp, patches
from tests.zoo.of_parts import Of


def everything() -> nn.Module:
    """All kinds of layers that can be patched, one after the other: `[B, 4, 9] -> [B, 3]`."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular", groups=2), nn.BatchNorm1d(6), nn.ReLU(),
        nn.Unflatten(2, (3, 3)), nn.Conv2d(6, 6, 3, padding="same", bias=False), nn.GroupNorm(3, 6), nn.ReLU(),
        nn.BatchNorm2d(6), nn.Flatten(), nn.LayerNorm(54), nn.Linear(54, 3),
    )  # fmt: skip


LAYERS: list[tuple[nn.Module, Sequence[int]]] = [
    (nn.Linear(4, 3), (5, 2, 4)),
    (nn.Linear(4, 3, bias=False), (5, 4)),
    (nn.Conv1d(4, 6, 3, stride=2, groups=2), (5, 4, 9)),
    (nn.Conv2d(4, 6, 3, padding=2, dilation=2, padding_mode="circular"), (5, 4, 8, 8)),
    (nn.Conv3d(4, 2, 3, padding="same", bias=False), (5, 4, 3, 3, 3)),
    (nn.LayerNorm(4), (5, 3, 4)),
    (nn.LayerNorm((3, 4), bias=False), (5, 3, 4)),
    (nn.GroupNorm(2, 4, eps=0.1), (5, 4, 3)),
    (nn.BatchNorm1d(4), (5, 4)),
    (nn.BatchNorm1d(4, momentum=None), (5, 4, 7)),
    (nn.BatchNorm2d(4, momentum=0.3, eps=0.1), (5, 4, 3, 3)),
    (nn.BatchNorm3d(4, track_running_stats=False), (5, 4, 2, 2, 2)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=[f"{i}-{type(a).__name__}" for i, (a, _) in enumerate(LAYERS)])
@pytest.mark.parametrize("assignment", ["network", "layer", "row", "element"])
def test_given_the_assignment_a_patched_layer_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, layer: nn.Module, shape: Sequence[int], assignment: str
) -> None:
    plain = copy.deepcopy(layer).train()
    net = family(plain, 3, assignment, init="pretrained", spread=0.5, seed=1)
    patch = patches(net)[""]
    for mode in (True, True, False):
        x = torch.randn(*shape) * 3 + 1
        numbers = [torch.randint(3, z) for z in z_shapes(patch, assignment)]
        assigned(monkeypatch, *numbers)
        for name, z in zip(("weight", "bias"), numbers * 2, strict=False):
            if getattr(patch, name) is not None:
                taken(getattr(plain, name).data, getattr(patch, name), z, getattr(layer, "groups", 1))
        net.train(mode), plain.train(mode)
        torch.testing.assert_close(net(x, draws=1)[0], plain(x), rtol=1e-4, atol=1e-5)
    for name, buffer in plain.named_buffers():  # the running statistics have moved as the plain layer's
        torch.testing.assert_close(patch.get_buffer(name), buffer)


def z_shapes(patch: Patch, assignment: str) -> list[Sequence[int]]:
    """The assignments that a layer draws, one after the other."""
    weight = patch.weight.shape[1:]
    if assignment == "row":
        return [weight if patch.map is None else (weight[1] * getattr(patch, "groups", 1),)]
    return [weight, *([] if patch.bias is None else [patch.bias.shape[1:]])] if assignment == "element" else [()]


def taken(target: Tensor, stack: Tensor, z: Tensor, groups: int) -> None:
    """Each of a tensor's elements from the component that its z says, one by one."""
    for index in itertools.product(*map(range, target.shape)):
        if len(stack) == 1:
            number = 0
        elif z.dim() == 1 and target.dim() > 1:  # rows: group g's inputs start at g I/G
            group = index[0] // (target.shape[0] // groups)
            number = z[group * target.shape[1] + index[1]]
        else:
            number = z if z.dim() == 0 else z[index]
        target[index] = stack[(number, *index)]


def test_running_statistics_are_shared_and_keep_their_names() -> None:
    model = mlp()
    net = patched(model, 3, init="pretrained")
    assert net.state_dict()["1.weight"].shape == (3, 6)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert net.state_dict()[name].shape == model.state_dict()[name].shape
    x = torch.randn(64, 4) + 3
    torch.optim.swa_utils.update_bn([x], net.network)
    torch.testing.assert_close(net.network[1].running_mean, model[0](x).mean(0))


# -- learned probabilities ---------------------------------------------------------------------------------


def test_straight_through_takes_one_component_and_learns_by_the_softmax() -> None:
    net = family(nn.Linear(3, 2, bias=False), 4, "layer", mixing="learned", seed=0)
    layer, x = net.network, torch.randn(5, 3)
    with torch.no_grad():
        layer.mixing.logits.copy_(torch.randn(4))
    answer = net.train()(x)[0]
    assert sum(torch.allclose(answer, x @ component.T, atol=1e-6) for component in layer.weight) == 1
    upstream = torch.randn(5, 2)
    got = torch.autograd.grad((answer * upstream).sum(), layer.mixing.logits)[0]
    logits = layer.mixing.logits.detach().requires_grad_()  # as if the weight were sum_k p_k M_k
    mean = torch.einsum("k,koi->oi", logits.softmax(0), layer.weight.detach())
    torch.testing.assert_close(got, torch.autograd.grad((x @ mean.T * upstream).sum(), logits)[0])


def test_weighted_draws_average_the_components_by_a_gumbel_softmax() -> None:
    logits, temperature = torch.tensor([0.5, -0.3, 0.0]), 0.7
    options = {"mixing": "learned", "relaxation": "weighted", "temperature": temperature}
    net = family(nn.Linear(1, 3, bias=False), 3, "layer", **options).eval()
    with torch.no_grad():
        net.network.mixing.logits.copy_(logits)
        net.network.weight.copy_(torch.eye(3).unsqueeze(2))  # the answers to 1 are the weights themselves
        torch.manual_seed(0)
        drawn = net(torch.ones(1, 1), draws=4000, seed=0)[:, 0]
        want = RelaxedOneHotCategorical(torch.tensor(temperature), logits=logits).sample((4000,))
    torch.testing.assert_close(drawn.sum(1), torch.ones(4000))
    for power in (1, 2, 3):
        one, other = drawn**power, want**power
        error = ((one.var(0) + other.var(0)) / 4000).sqrt()
        assert ((one.mean(0) - other.mean(0)).abs() < 5 * error).all()


def test_the_noise_of_a_weighted_draw_is_the_weighted_sum_of_the_components_noise() -> None:
    options = {"mixing": "learned", "relaxation": "weighted", "temperature": 2.0}
    net = family(nn.Linear(1, 1, bias=False), 3, "layer", 0.5, **options).eval()
    torch.manual_seed(0)
    weights = RelaxedOneHotCategorical(torch.tensor(2.0), logits=torch.zeros(3)).sample((4000,))
    with torch.no_grad():
        net.network.weight.zero_()
        squared = net(torch.ones(1, 1), draws=4000, seed=0).flatten().square()
    want = 0.5**2 * weights.square().sum(1)
    error = ((squared.var() + want.var()) / 4000).sqrt()
    assert (squared.mean() - want.mean()).abs() < 5 * error


@pytest.mark.parametrize("relaxation", ["straight-through", "weighted"])
@pytest.mark.parametrize("assignment", ["network", "layer", "element"])
def test_learned_probabilities_find_the_better_component(assignment: str, relaxation: str) -> None:
    torch.manual_seed(0)
    right = nn.Linear(3, 1, bias=False)
    net = family(right, 2, assignment, mixing="learned", relaxation=relaxation, init="pretrained").train()
    with torch.no_grad():
        net.network.weight.copy_(torch.stack([right.weight, right.weight + 1]))
    optimizer = torch.optim.Adam([net.network.mixing.logits], 0.1)
    for _ in range(60):
        x = torch.randn(16, 3)
        optimizer.zero_grad()
        net.loss(x, right(x).detach(), task="regression").backward()
        optimizer.step()
    assert net.network.mixing.probabilities(x)[0] > 0.9


# -- what a module must do ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.bfloat16, 0.1)])
def test_casts_draw_the_same_assignments(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(3, 4, 9)
    for options in ({}, {"assignment": "network", "mixing": "learned"}):
        net = family(everything(), 3, **options, seed=0).eval()
        cast = copy.deepcopy(net).to(dtype)(x.to(dtype), draws=4, seed=1)
        assert cast.dtype == dtype
        torch.testing.assert_close(cast.float(), net(x, draws=4, seed=1), rtol=tolerance, atol=tolerance)


def test_a_failed_forward_leaves_no_assignment_behind() -> None:
    net = family(everything(), 3, "network", seed=0).eval()
    with pytest.raises(ValueError, match="does not fit"):
        net(torch.randn(3, 5, 9), draws=4)
    want = net(torch.ones(1, 4, 9), draws=4, seed=0)
    assert torch.equal(pickle.loads(pickle.dumps(net))(torch.ones(1, 4, 9), draws=4, seed=0), want)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, partial(nn.GroupNorm, 2)])
def test_autocast_gives_the_dtype_that_the_model_gives(norm: Callable[[int], nn.Module]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), norm(6)).eval(), torch.randn(8, 4)
    net = patched(model, 3, None, init="pretrained", spread=0.01).eval()
    with torch.autocast("cpu", torch.bfloat16):
        mean, plain = net(x, draws=0)[0], model(x)
        assert mean.dtype == plain.dtype
        torch.testing.assert_close(mean, plain, rtol=0.05, atol=0.05)
        assert net.train()(x).dtype == model.train()(x).dtype


# -- norms and layers of any class -------------------------------------------------------------------------


class LayerNorm2d(nn.LayerNorm):
    """ConvNeXt's norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RootMeanSquareNorm(nn.Module):
    """Gemma's norm, with a weight around zero; with `squash` it is not affine in its weight."""

    def __init__(self, width: int, squash: bool = False) -> None:
        super().__init__()
        self.weight, self.squash = nn.Parameter(torch.zeros(width)), squash

    def forward(self, x: Tensor) -> Tensor:
        y = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * (1 + self.weight)
        return y.tanh() if self.squash else y


class Norms(nn.Module):
    """One of each kind of norm, and layers between."""

    def __init__(self, squash: bool = False) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 3), LayerNorm2d(6)
        self.second, self.third = nn.InstanceNorm2d(6, affine=True), nn.RMSNorm(6)
        self.fourth, self.fifth, self.head = nn.LayerNorm(6), RootMeanSquareNorm(6, squash), nn.Linear(6, 4)

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


def test_a_norm_that_is_not_affine_is_skipped_with_a_warning() -> None:
    x = torch.randn(4, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"4 of 5 norm layers are patched, but not RootMeanSquareNorm \(1\)"):
        net = mt.patched(Norms(squash=True), 3, init="pretrained", example=x)
    assert isinstance(net.network.fifth, RootMeanSquareNorm)


def inputs_first() -> nn.Module:
    parts = {"weight": nn.Parameter(torch.randn(5, 4)), "bias": nn.Parameter(torch.randn(4))}
    return Of(lambda net, x: x @ net.weight + net.bias, **parts)


class OwnLinear(nn.Linear):
    """A subclass that inherits its forward."""


ANY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "subclass": (lambda: OwnLinear(5, 4), (5,)),
    "inputs_first": (inputs_first, (5,)),
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
