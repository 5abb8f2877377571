"""The initial weights of converted networks: `init`, `heads` and frozen parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import multitudes as mt
from multitudes.methods.patching.conversion import family
from multitudes.surgery.output_layers import output_layers
from tests.zoo.of_parts import Of

INPUTS, CLASSES = 12, 3
X = torch.randn(16, INPUTS, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % CLASSES

METHODS: dict[str, Callable[..., Any]] = {
    "deep_ensemble": lambda model, **options: mt.deep_ensemble(model, 3, **options),
    "packed": lambda model, **options: mt.packed(model, 3, 2, example=X, **options),
    "batch_ensemble": lambda model, **options: mt.batch_ensemble(model, 3, **options),
    "masksembles": lambda model, **options: mt.masksembles(model, 3, 2.0, example=X, **options),
    "mimo": lambda model, **options: mt.mimo(model, 3, example=X, **options),
    "patched": lambda model, **options: mt.patched(model, 3, "output", example=X, **options),
    "family": lambda model, **options: family(model, 2, "element", **options),
    "variance": lambda model, **options: mt.variance(model, **options),
}


class Net(nn.Module):
    """Three linear layers and a norm; a task head at the end."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, wide), nn.BatchNorm1d(wide)
        self.second, self.head = nn.Linear(wide, wide), nn.Linear(wide, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.second(x)))


def frozen_first() -> Net:
    model = Net()
    with torch.no_grad():
        model.first.weight.mul_(3).add_(0.5)  # nothing that a rule would draw
        model.norm.running_mean.fill_(0.25)
    model.first.requires_grad_(False)
    model.norm.requires_grad_(False)
    return model


def networks(net: mt.Multitude) -> list[nn.Module]:
    """The networks of members that share no weight, or the one that all share."""
    return list(net.network) if isinstance(net, mt.Members) else [net.network]


def every(net: mt.Multitude, name: str) -> Tensor:
    """A parameter or buffer of each member, `[M, ...]`."""
    return torch.stack([network.get_parameter(name) for network in networks(net)])


def inner(network: nn.Module, name: str) -> nn.Module:
    """The user's own layer in a converted network."""
    layer = network.get_submodule(name)
    return layer.get_submodule("layer") if "layer" in layer._modules else layer


def quietly(function: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


# -- what is frozen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["fresh", "heads", "pretrained"])
@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_first_layer_is_kept_by_every_method_in_every_mode(method: str, init: str) -> None:
    model = frozen_first()
    options = {"perturb": 0.1} if (method, init) == ("deep_ensemble", "pretrained") else {}
    net = quietly(lambda: METHODS[method](model, init=init, **options))
    for network, name in product(networks(net), ("first", "norm")):
        layer = inner(network, name)
        for own, want in model.get_submodule(name).named_parameters():
            got = dict(layer.named_parameters()).get(own)
            if got is None:  # a bias that each member has for itself
                got = network.get_submodule(name).get_parameter("biases")
            assert not got.requires_grad, (name, own)
            if method == "mimo" and own == "weight" and name == "first":
                got = sum(got.unflatten(1, (3, -1)).unbind(1)[1:], got.unflatten(1, (3, -1)).unbind(1)[0])
            assert torch.equal(got, want.expand_as(got)), (name, own)
    for network in networks(net):
        mean = network.norm.running_mean
        assert torch.equal(mean, torch.full_like(mean, 0.25)), "the statistics of a frozen norm layer"
    assert any(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("options", [{}, {"init": "heads", "heads": "head"}, {"init": "pretrained"}])
@pytest.mark.parametrize("method", [mt.packed, mt.batch_ensemble, mt.masksembles, mt.variance])
def test_a_pretrained_embedding_is_kept(method: Callable[..., Any], options: dict[str, str]) -> None:
    tokens = torch.arange(20).view(4, 5)
    model = Of(
        lambda net, tokens: net.head(F.relu(net.hidden(net.words(tokens).mean(1)))),
        words=nn.Embedding.from_pretrained(torch.randn(20, 8)), hidden=nn.Linear(8, 16), head=nn.Linear(16, CLASSES),
    )  # fmt: skip
    example = {"example": tokens} if method in (mt.packed, mt.masksembles) else {}
    net = quietly(lambda: method(model, **options, **example, seed=0))
    for network in networks(net):
        weight = network.words.weight
        assert torch.equal(weight, model.words.weight.expand_as(weight))
        assert not weight.requires_grad
    assert net(tokens).shape[-2:] == (4, CLASSES)


def test_a_frozen_layer_in_the_middle_keeps_what_it_reads_whole() -> None:
    model = Net()
    model.second.requires_grad_(False)
    net = mt.packed(model, 4, 2, example=X)
    assert torch.equal(every(net, "second.weight"), model.second.weight.expand(4, 32, 32))
    assert every(net, "first.weight").shape == (4, 32, INPUTS)
    mt.check(net, X)


def test_frozen_layers_are_not_patched_and_not_replaced_by_variances() -> None:
    model = frozen_first()
    assert type(mt.patched(model, 3, "norm+output", example=X).network.norm) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="layer 'first' is frozen, but patching changes weights"):
        mt.patched(model, 3, ["first"])
    with pytest.raises(ValueError, match="'first' is frozen, but a zero-centered layer cannot keep its weights"):
        mt.variance(model, ["first"], "zero")
    drawn = mt.variance(model, ["first"], "layer").network.first
    assert torch.equal(drawn.weight, model.first.weight)
    assert not drawn.weight.requires_grad
    assert drawn.log_alpha.requires_grad


def test_mimo_tells_of_a_frozen_first_layer_and_refuses_a_frozen_last_one() -> None:
    model = Net()
    model.first.requires_grad_(False)
    with pytest.warns(UserWarning, match="layer 'first' is frozen, so it cannot learn to distinguish the inputs"):
        net = mt.mimo(model, 3, init="pretrained", example=X).eval()
    assert torch.equal(net.member(1).first.weight, model.first.weight)
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match="output layer 'head' is frozen, so all outputs would stay the same"):
        quietly(lambda: mt.mimo(model, 3, example=X))


# -- heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("packed", "mimo")])
def test_heads_keeps_the_backbone_and_draws_the_output_layer_anew(method: str) -> None:
    model = Net()
    net = METHODS[method](model, init="heads", seed=0)
    for network, name in product(networks(net), ("first.weight", "second.weight")):
        layer, own = name.split(".")
        got = inner(network, layer).get_parameter(own)
        if method == "masksembles":  # which scales what a member sees less of
            torch.testing.assert_close(got / got.norm(), model.get_parameter(name) / model.get_parameter(name).norm())
        elif method == "family":
            torch.testing.assert_close(got.mean(0), model.get_parameter(name))
        else:
            assert torch.equal(got, model.get_parameter(name).expand_as(got)), name
    heads = (
        [net.member(i).head.weight for i in range(net.members)]
        if net.members > 1
        else [inner(net.network, "head").weight]
    )
    assert not any(torch.equal(head, model.head.weight) for head in heads)
    assert "new random weights" in net.summary()


def test_packed_and_mimo_draw_the_heads_anew() -> None:
    model = Net()
    net = mt.packed(model, 3, 3, init="heads", example=X, seed=0)  # as wide as the model
    torch.testing.assert_close(every(net, "second.weight"), model.second.weight.expand(3, 32, 32))
    heads = every(net, "head.weight")
    assert not any(torch.allclose(heads[i], heads[(i + 1) % 3]) for i in range(3))
    wide = mt.mimo(model, 3, init="heads", example=X, seed=0)
    assert torch.equal(wide.network.second.weight, model.second.weight)
    one, two, _ = wide.network.head.weight.unflatten(0, (3, -1))
    assert not torch.allclose(one, two)


def test_heads_are_found_by_running_the_network() -> None:
    two = Of(
        lambda net, x: net.norm(torch.cat([net.mean(h := F.relu(net.body(x))), F.softplus(net.scale(h))], 1)),
        mean=nn.Linear(8, 1), body=nn.Linear(INPUTS, 8), scale=nn.Linear(8, 1), norm=nn.LayerNorm(2),
    )  # fmt: skip
    assert output_layers(two, example=X) == ["mean", "scale"]
    residual = nn.Sequential(nn.Linear(INPUTS, 8), nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 2))
    assert output_layers(residual) == ["2"]
    normed = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(INPUTS, INPUTS)) for _ in range(3)))
    assert output_layers(normed, example=X) == ["2"]
    recurrent = nn.Sequential(nn.Linear(INPUTS, 8), nn.LSTM(8, 4))
    assert output_layers(recurrent, example=X) == ["1"]
    frozen = Net()
    frozen.first.requires_grad_(False)
    assert output_layers(frozen) == ["head"]
    assert not frozen.first.weight.requires_grad
    assert output_layers(mt.models.resnet18(classes=10)) == ["fc"]


def test_heads_can_be_selected_and_are_checked() -> None:
    model = Net()
    net = mt.deep_ensemble(model, 2, init="heads", heads="second|head")
    assert torch.equal(every(net, "first.weight"), model.first.weight.expand(2, 32, INPUTS))
    assert not torch.equal(net.member(0).second.weight, model.second.weight)
    assert not torch.equal(net.member(0).head.weight, model.head.weight)
    with pytest.raises(ValueError, match="heads='head' needs init='heads', got init=None"):
        mt.deep_ensemble(model, 2, heads="head")
    with pytest.raises(ValueError, match="heads='tail' selects nothing"):
        mt.deep_ensemble(model, 2, init="heads", heads="tail")
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match="heads must have trainable weights, and those of 'head' are frozen"):
        mt.deep_ensemble(model, 2, init="heads")


def test_heads_that_cannot_be_found_are_asked_for() -> None:
    odd = Of(
        lambda net, tokens: net.out(net.body(net.words(tokens).mean(1))),
        words=nn.Embedding(9, 4), out=nn.Linear(4, 2), body=nn.Linear(4, 4),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"cannot find the output layers of model \(Of\).*heads="):
        mt.deep_ensemble(odd, 2, init="heads")
    assert output_layers(odd, example=torch.zeros(2, 3, dtype=torch.long)) == ["out"]


def test_a_head_that_shares_its_weight_with_the_backbone_is_not_reinitialized() -> None:
    parts = {"there": nn.Linear(INPUTS, INPUTS), "back": nn.Linear(INPUTS, INPUTS)}
    parts["back"].weight = parts["there"].weight
    tied = Of(lambda net, x: net.back(F.relu(net.there(x))), **parts)
    with pytest.raises(ValueError, match="heads: 'back' would get new weights, and so would 'weight' of layer 'there'"):
        mt.deep_ensemble(tied, 2, init="heads")
    net = mt.deep_ensemble(tied, 2, seed=0)
    assert all(member.back.weight is member.there.weight for member in net.network)
    assert not torch.equal(net.member(0).back.weight, net.member(1).back.weight)


# -- members that would be one -----------------------------------------------------------------------------


SAME: dict[str, tuple[Callable[[], Any], str]] = {
    "pretrained": (
        lambda: mt.deep_ensemble(Net(), 3, init="pretrained"),
        r"init='pretrained' keeps the weights, so all members would be the same network.*init='heads'.*perturb=0\.01",
    ),
    "dropout": (
        lambda: mt.deep_ensemble(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), 3, init="pretrained"),
        "so all members would be the same network",
    ),
    "packed": (
        lambda: mt.packed(Net(), 3, 3, init="pretrained", example=X),
        "init='pretrained' keeps the weights.*init='heads'.*smaller alpha",
    ),
    "batch_ensemble": (
        lambda: mt.batch_ensemble(Net(), 3, spread=0, init="pretrained"),
        "spread=0 gives all members the same factors",
    ),
    "masksembles": (
        lambda: mt.masksembles(Net(), 3, 1, init="pretrained", example=X),
        "scale=1 gives all members all inputs.*use a larger scale",
    ),
    "hardly masked": (
        lambda: mt.masksembles(Net(), 3, 1.001, example=X), "scale=1.001 gives all members all inputs",
    ),
    "mimo": (
        lambda: mt.mimo(Net(), 3, 1.0, init="pretrained", example=X),
        "init='pretrained' keeps the weights.*init='heads'.*repetition below 1",
    ),
    "frozen": (
        lambda: mt.deep_ensemble(Net().requires_grad_(False), 3),
        "no parameter that its layers reinitialize, so all members would be the same.*a function that builds",
    ),
    "no rule": (lambda: quietly(lambda: mt.deep_ensemble(alone(), 2)), "no parameter that its layers reinitialize"),
    "factory": (lambda: mt.deep_ensemble(zeros, 2), "model builds the same network in every call"),
}  # fmt: skip


def alone() -> nn.Module:
    return Of(lambda net, x: x @ net.weight, weight=nn.Parameter(torch.randn(INPUTS, CLASSES)))


def zeros() -> nn.Module:
    layer = nn.Linear(INPUTS, CLASSES)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.parametrize("case", SAME)
def test_members_that_would_stay_one_network_are_refused(case: str) -> None:
    make, message = SAME[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_members_that_differ_by_perturbation_or_by_draws_are_accepted() -> None:
    assert mt.deep_ensemble(Net(), 1, init="pretrained").members == 1
    moved = mt.deep_ensemble(Net(), 2, init="pretrained", perturb=0.01)
    assert not torch.equal(*every(moved, "head.weight"))
    drawing = mt.mc_dropout(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
    assert mt.deep_ensemble(drawing, 2, init="pretrained").members == 2
    copies = mt.fuse([Net()] * 2)
    assert torch.equal(*every(copies, "head.weight")), "fused networks are as given"


def test_ensembles_of_ensembles_are_drawn_anew_member_by_member() -> None:
    layer = nn.Linear(400, 300)
    layer.bias.requires_grad_(False)
    net = mt.deep_ensemble(mt.deep_ensemble(layer, 3, seed=0), 2, seed=1)
    weight = torch.stack([every(member, "weight") for member in net.network])
    assert weight.shape == (2, 3, 300, 400)
    assert weight.abs().max() <= 400**-0.5
    torch.testing.assert_close(weight.std((2, 3)), torch.full((2, 3), (3 * 400) ** -0.5), rtol=0.02, atol=0)
    assert torch.corrcoef(weight.flatten(0, 1).flatten(1)).sub(torch.eye(6)).abs().max() < 0.02
    assert all(torch.equal(member.bias, layer.bias) for inner in net.network for member in inner.network)


def test_finding_the_output_layers_leaves_nothing_behind() -> None:
    def count(net: Any, x: Tensor) -> Tensor:
        net.steps += 1
        net.hidden = net.body(x)
        return net.head(net.hidden)

    network = Of(count, body=nn.Linear(3, 4), head=nn.Linear(4, 2), steps=0)
    assert output_layers(network, example=torch.ones(2, 3)) == ["head"]
    assert network.steps == 0 and not hasattr(network, "hidden")
