"""Layers of affine maps of every class: members and draws against plain layers with the formula's weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import multitudes as mt
from multitudes.methods.batch_ensemble import RankOne
from multitudes.methods.masksembles import Masked, masked
from multitudes.networks.views import RUNNING, Running, view
from multitudes.networks.vmap import LazyVmap
from multitudes.surgery.affine import maps_of
from tests.zoo.of_parts import Of


class OwnConv(nn.Conv2d):
    """A subclass with a constructor of its own and the forward of its parent."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1, bias=False)
        self.note = "own"


class Scaled(nn.Linear):
    """A subclass whose forward is its own: what it computes is not known."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Conv1D(nn.Module):
    """As Hugging Face's: a linear layer whose weight is `[inputs, outputs]`."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Rectified(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def old_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.weight_norm(layer)


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.4)


ONE_MAP: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "subclass": (lambda: OwnConv(6, 8), (6, 5, 5)),
    "conv1d_of_gpt": (lambda: Conv1D(8, 6), (4, 6)),
    "square_conv1d": (lambda: Conv1D(6, 6), (6,)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 8)), (6,)),
    "weight_norm_conv": (lambda: parametrizations.weight_norm(nn.Conv1d(6, 8, 3, groups=2)), (6, 7)),
    "weight_norm_transposed": (
        lambda: parametrizations.weight_norm(nn.ConvTranspose1d(6, 8, 4, stride=2, groups=2)), (6, 7),
    ),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 8)), (6,)),
    "old_weight_norm": (lambda: old_norm(nn.Conv2d(6, 8, 3)), (6, 5, 5)),
    "old_spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(6, 8)), (6,)),
    "pruned": (lambda: pruned(nn.Linear(6, 8)), (6,)),
}  # fmt: skip


def factor(layer: nn.Module, r: Tensor, s: Tensor, weight: Tensor) -> Tensor:
    """Return `s_o r_i` at the place of the weight from input i to output o, by blocks of groups."""
    groups = getattr(layer, "groups", 1)
    first, second = (r, s) if isinstance(layer, nn.ConvTranspose1d | Conv1D) else (s, r)
    blocks = [torch.outer(a, b) for a, b in zip(first.chunk(groups), second.chunk(groups), strict=True)]
    return torch.cat(blocks).view(*weight.shape[:2], *[1] * (weight.dim() - 2))


def with_tensors(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer's equation, by torch's functions."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        function = F.conv1d if weight.dim() == 3 else F.conv2d
        return function(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    if isinstance(layer, nn.ConvTranspose1d):
        return F.conv_transpose1d(x, weight, bias, layer.stride, groups=layer.groups)
    return F.linear(x, weight.T if isinstance(layer, Conv1D) else weight, bias)


@pytest.mark.parametrize("rows", [1, 60])
@pytest.mark.parametrize("kind", list(ONE_MAP))
def test_rank_one_layers_of_any_class_are_the_paper_equation(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    build, shape = ONE_MAP[kind]
    layer = build().eval()
    x = torch.randn(rows, *shape)
    layer(x)
    weight, bias = layer.weight.detach().clone(), layer.bias  # as the layer computes it
    ensemble = RankOne(layer, 3).eval()
    with torch.no_grad():
        for values in ensemble.factors():
            values.normal_(1, 0.5)
        if ensemble.biases is not None:
            ensemble.biases.normal_()
    together = ensemble(x.repeat(3, *[1] * len(shape))).unflatten(0, (3, rows))
    for i in range(3):
        own = weight * factor(layer, ensemble.r[i], ensemble.s[i], weight)
        want = with_tensors(layer, x, own, None if bias is None else ensemble.biases[i])
        torch.testing.assert_close(together[i], want, rtol=1e-4, atol=1e-5)
        alone = ensemble.fold(i)
        torch.testing.assert_close(alone(x), want, rtol=1e-4, atol=1e-5)
        assert isinstance(alone, type(layer).__mro__[1] if parametrize.is_parametrized(layer) else type(layer))
        assert not parametrize.is_parametrized(alone)
        assert not alone._forward_pre_hooks
        assert {name for name, _ in alone.named_parameters()} == {"weight"} | ({"bias"} if bias is not None else set())


@pytest.mark.parametrize("kind", list(ONE_MAP))
@pytest.mark.parametrize("rows", [1, 60])
def test_masked_layers_of_any_class_see_some_inputs_only(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    build, shape = ONE_MAP[kind]
    layer = build().eval()
    x = torch.randn(rows, *shape)
    axis = 1 if hasattr(layer, "kernel_size") else -1
    ensemble = masked(layer, 3, 2.0).eval()
    assert isinstance(ensemble, Masked)
    together = ensemble(x.repeat(3, *[1] * len(shape))).unflatten(0, (3, rows))
    for i in range(3):
        seen = x.movedim(axis, -1) * ensemble.masks[i]
        want = layer(seen.movedim(-1, axis).contiguous())
        torch.testing.assert_close(together[i], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ensemble.fold(i)(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", list(ONE_MAP))
def test_gradients_of_a_rank_one_layer_are_those_of_the_formula(kind: str) -> None:
    torch.manual_seed(0)
    build, shape = ONE_MAP[kind]
    layer = build().double().eval()
    ensemble = RankOne(layer, 2).eval()
    for values in ensemble.factors():
        values.data.normal_(1, 0.5)
    x = torch.randn(40, *shape).double()
    ensemble(x.repeat(2, *[1] * len(shape))).square().sum().backward()
    r, s = ensemble.r.detach().requires_grad_(), ensemble.s.detach().requires_grad_()
    layer(x)
    weight = layer.weight
    outers = [factor(layer, r[i], s[i], weight) for i in range(2)]
    biases = None if layer.bias is None else layer.bias.detach().expand(2, -1)
    total = sum(
        with_tensors(layer, x, weight * outer, None if biases is None else biases[i]).square().sum()
        for i, outer in enumerate(outers)
    )
    mine = [p for name, p in layer.named_parameters() if name != "bias"]
    theirs = [p for name, p in ensemble.layer.named_parameters()]
    gradients = torch.autograd.grad(total, [r, s, *mine])
    assert len(mine) == len(theirs)
    for want, got in zip(gradients, [ensemble.r, ensemble.s, *theirs], strict=True):
        torch.testing.assert_close(got.grad, want)


@pytest.mark.parametrize("kind", list(ONE_MAP))
def test_dropped_connections_are_those_of_the_folded_layer(kind: str) -> None:
    torch.manual_seed(0)
    build, shape = ONE_MAP[kind]
    net = mt.drop_connect(nn.Sequential(build()), 0.4).eval()
    x = torch.randn(9, *shape)
    plain = nn.Sequential(build()).eval()
    plain[0].load_state_dict(net.network[0].state_dict() if "layer" not in net.network[0]._modules
                             else net.network[0].layer.state_dict())  # fmt: skip
    torch.testing.assert_close(net(x, draws=0)[0], plain(x), rtol=1e-4, atol=1e-5)
    drawn, frozen = net(x, draws=3, seed=5), mt.freeze(net, draws=3, seed=5)
    torch.testing.assert_close(frozen(x), drawn, rtol=1e-4, atol=1e-5)
    weight = plain[0].weight
    kept = frozen.member(0)[0].weight / weight * 0.6
    assert torch.all(kept.isnan() | torch.isclose(kept, torch.ones(())) | (kept == 0))
    assert 0.1 < (kept == 0).float().mean() < 0.75


# -- attention, recurrence, bilinear -----------------------------------------------------------------------


def attention(first: bool, **options: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=first, **options)


def batch_first(layer: Any) -> bool:
    return bool(layer.batch_first)


SEVERAL: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "attention": (lambda: attention(True), lambda b: (torch.randn(b, 5, 8),) * 3),
    "attention_sequence_first": (lambda: attention(False, bias=False), lambda b: (torch.randn(5, b, 8),) * 3),
    "cross_attention": (
        lambda: attention(True, kdim=6, vdim=4, add_bias_kv=True),
        lambda b: (torch.randn(b, 5, 8), torch.randn(b, 7, 6), torch.randn(b, 7, 4)),
    ),
    "lstm": (lambda: nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True), lambda b: (torch.randn(b, 5, 8),)),
    "lstm_with_states": (
        lambda: nn.LSTM(8, 6, proj_size=3),
        lambda b: (torch.randn(5, b, 8), (torch.randn(1, b, 3), torch.randn(1, b, 6))),
    ),
    "gru": (lambda: nn.GRU(8, 6), lambda b: (torch.randn(5, b, 8), torch.randn(1, b, 6))),
    "bilinear": (lambda: nn.Bilinear(8, 6, 4), lambda b: (torch.randn(b, 8), torch.randn(b, 6))),
}  # fmt: skip


def tensors(value: Any) -> list[Tensor]:
    return [] if value is None else [value] if isinstance(value, Tensor) else [t for v in value for t in tensors(v)]


def side_by_side(layer: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """All members' answers to the same arguments, `[M, ...]` each."""
    whole = view(layer, {"": layer.as_all()})
    with LazyVmap(layer.members) as lazy_vmap:
        token = RUNNING.set(Running(is_view=True, lazy_vmap=lazy_vmap))
        try:
            return [lazy_vmap.whole(answer) for answer in tensors(whole(*args))]
        finally:
            RUNNING.reset(token)


@pytest.mark.parametrize("method", ["rank_one", "masked"])
@pytest.mark.parametrize("kind", list(SEVERAL))
def test_a_whole_layer_gives_each_member_its_own_weights(kind: str, method: str) -> None:
    torch.manual_seed(0)
    build, batch = SEVERAL[kind]
    layer, args = build().eval(), batch(3)
    ensemble = (RankOne(layer, 2) if method == "rank_one" else masked(layer, 2, 2.0)).eval()
    with torch.no_grad():
        for parameter in ensemble.parameters(recurse=False):
            parameter.normal_(1, 0.5)
    together = side_by_side(ensemble, args)
    plain = [ensemble.fold(i) for i in range(2)]
    for i in range(2):
        assert type(plain[i]) is type(layer)
        assert [name for name, _ in plain[i].named_parameters()] == [name for name, _ in layer.named_parameters()]
        ensemble.member = i
        for alone, want in zip(tensors(ensemble(*args)), tensors(plain[i](*args)), strict=True):
            torch.testing.assert_close(alone, want)
    ensemble.member = None
    for place, each in enumerate(zip(*(tensors(one(*args)) for one in plain), strict=True)):
        torch.testing.assert_close(together[place], torch.stack(each), rtol=1e-4, atol=1e-5)
    if method == "rank_one":  # the formula, for the first map
        name = ensemble.affine_maps()[0].weight
        own = name.replace(".", "_")
        r, s = getattr(ensemble, f"{own}_r")[1], getattr(ensemble, f"{own}_s")[1]
        outer = torch.outer(s, r)
        weight = layer.get_parameter(name)
        torch.testing.assert_close(
            plain[1].get_parameter(name), weight * outer.view(*outer.shape, *[1] * (weight.dim() - 2))
        )


@pytest.mark.parametrize("kind", list(SEVERAL))
def test_connections_of_a_whole_layer_are_dropped(kind: str) -> None:
    torch.manual_seed(0)
    build, batch = SEVERAL[kind]
    sequence_first = kind in ("attention_sequence_first", "lstm_with_states", "gru")

    def run(net: Any, *args: Tensor) -> Tensor:
        args = tuple(a.transpose(0, 1) for a in args) if sequence_first else args
        y = tensors(net.part(*args))[0]
        return (y.transpose(0, 1) if sequence_first else y).flatten(1)

    model, args = Of(run, part=build()).eval(), batch(3)
    if kind in ("lstm_with_states", "gru"):
        args = args[:1]
    x = tuple(a.transpose(0, 1) for a in args) if sequence_first else args
    net = mt.drop_connect(model, 0.3).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cannot run under vmap
        drawn = net(x, draws=3, seed=1)
    frozen = mt.freeze(net, 3, seed=1)
    torch.testing.assert_close(drawn, frozen(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(drawn[0], drawn[1])
    for affine in maps_of(model.part):
        ratio = frozen.member(0).part.get_parameter(affine.weight) / model.part.get_parameter(affine.weight) * 0.7
        assert torch.all(torch.isclose(ratio, torch.ones(())) | (ratio == 0))
        assert 0.05 < (ratio == 0).float().mean() < 0.7
