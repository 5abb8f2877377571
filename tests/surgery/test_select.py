"""Selecting, replacing, initialising anew, narrowing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multitudes as mt
from multitudes.ensemble.member_layer import MemberLayer
from multitudes.models.resnet import BasicBlock
from multitudes.surgery.initialize import reinitialize
from multitudes.surgery.narrowing.attention_heads import choose
from multitudes.surgery.observe import example_for
from multitudes.surgery.select import PRODUCTS, replace, select
from tests.zoo.cases import CLASSES, NETWORKS, Cnn, stacked_parameters
from tests.zoo.hard_networks import DenseBlock, UNet
from tests.zoo.of_parts import Of

# -- select ------------------------------------------------------------------------------------------------


def test_selectors_pick_layers() -> None:
    model = mt.models.resnet18()
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert list(select(model, None, (nn.Conv2d,))) == convolutions
    assert list(select(model, r"layer1\..*conv2", PRODUCTS)) == ["layer1.0.conv2", "layer1.1.conv2"]
    assert list(select(model, ["fc", "0.conv2"], PRODUCTS)) == [
        "layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2", "layer4.0.conv2", "fc",
    ]  # fmt: skip
    assert list(select(model, lambda name, m: m.kernel_size == (1, 1), (nn.Conv2d,))) == [
        f"layer{i}.0.downsample.0" for i in (2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("selector", "sentence"),
    [
        ("layer9.*", "layers='layer9.*' selects nothing; it could select: conv1, conv2, fc1, fc2"),
        (lambda name, module: False, "selects nothing"),
        ([], "selects nothing"),
        (["fc3"], "no layer is named 'fc3'; there are: conv1"),
        ("conv[", "is not a regular expression"),
        (["relu"], "layer 'relu' is a ReLU, which this method cannot convert"),
        (lambda name: True, "layers must be a function of (name, module), got one that fails"),
    ],
)
def test_a_selector_that_selects_nothing_lists_the_layers(selector: object, sentence: str) -> None:
    model = Cnn()
    model.relu = nn.ReLU()
    for method in (mt.batch_ensemble, mt.masksembles):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            method(model, layers=selector)


def test_arguments_of_every_method_are_checked() -> None:
    for method in (mt.packed, mt.batch_ensemble, mt.masksembles, mt.mimo):
        with pytest.raises(ValueError, match="model is a multitude"):
            method(mt.deep_ensemble(Cnn(), 2))
        example = {} if method is mt.batch_ensemble else {"example": torch.zeros(2, 3)}
        with pytest.raises(ValueError, match="model|input"):
            method(nn.Sequential(nn.ReLU()), **example)
        for seed in (1.5, "a", -1, True):
            with pytest.raises(ValueError, match="seed must be None or a whole number"):
                method(nn.Linear(3, 2), 2, seed=seed)


def test_layers_that_share_a_weight_are_named() -> None:
    tied = Of(lambda net, x: net.back(net.there(x)), there=nn.Linear(8, 8), back=nn.Linear(8, 8))
    tied.back.weight = tied.there.weight

    for method in (lambda model, members: mt.packed(model, members, 1), mt.batch_ensemble, mt.masksembles, mt.mimo):
        with pytest.raises(ValueError, match="layers 'back' and 'there' share a weight"):
            method(tied, 2)
    whole = mt.packed(tied, 2, 2).member(0)
    assert whole.back.weight is whole.there.weight


# -- replace and reinitialize ------------------------------------------------------------------------------------


def test_replacing_copies_and_reaches_every_use_of_a_layer() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared)).eval()
    new = nn.Linear(4, 4)
    replaced = replace(model, {"0": new})
    assert replaced[0] is replaced[1][1] is new
    assert model[0] is model[1][1] is shared
    assert not new.training
    assert replace(shared, {"": new}) is new


def test_batch_norm_statistics_start_anew() -> None:
    net = mt.deep_ensemble(NETWORKS["resnet"].model(), members=2)
    for member in net.network:
        assert not member.bn1.running_mean.any()
        assert not member.bn1.num_batches_tracked.any()


def test_attention_differs_between_fresh_members_and_what_has_no_rule_is_kept_and_told() -> None:
    model = NETWORKS["transformer"].model()
    with pytest.warns(UserWarning, match="kept the values of 'token', 'position'"):
        net = mt.deep_ensemble(model, members=3)
    for name, parameter in stacked_parameters(net).items():
        if name in ("token", "position"):
            assert torch.equal(parameter, model.get_parameter(name).expand_as(parameter))
        elif not ("norm" in name or "bias" in name):  # those start constant
            assert not torch.allclose(parameter[0], parameter[1]), name
            assert not torch.allclose(parameter[1], parameter[2]), name


def test_redraw_leaves_constants_and_frozen_parameters_that_stand_alone() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.full((8,), 1e-4))
    model.table = nn.Parameter(torch.randn(8), requires_grad=False)
    before = model.table.clone()
    reinitialize(model)
    assert torch.equal(model.scale, torch.full((8,), 1e-4))
    assert torch.equal(model.table, before)


def test_perturbed_copies_are_near_the_pretrained_network() -> None:
    model = NETWORKS["cnn"].model()
    net = mt.deep_ensemble(model, members=3, init="pretrained", perturb=0.01, seed=0)
    difference = (stacked_parameters(net)["conv1.weight"] - model.conv1.weight).std() / model.conv1.weight.std()
    torch.testing.assert_close(difference.item(), 0.01, rtol=0.1, atol=0)
    with pytest.raises(ValueError, match="perturb must be 0 or more, got -1"):
        mt.deep_ensemble(model, init="pretrained", perturb=-1)
    with pytest.raises(ValueError, match=r"perturb=0.1 needs init='pretrained'"):
        mt.deep_ensemble(model, perturb=0.1)


def test_a_nested_network_converts_whole_and_keeps_its_weights() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.ModuleList([nn.Linear(8, 8)])[0]), nn.Linear(8, 2)
    )
    net = mt.batch_ensemble(model, 2, init="pretrained")
    assert sum(isinstance(module, MemberLayer) for module in net.modules()) == 3
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            assert torch.equal(net.get_parameter(name.replace("weight", "layer.weight")), parameter)
    narrowed = mt.packed(model, 2, 1, example=torch.zeros(2, 4))
    assert widths(narrowed.member(0)) == {"0.weight": (4, 4), "1.1.weight": (4, 4), "2.weight": (2, 4)}


@pytest.mark.parametrize("method", [mt.packed, mt.masksembles, mt.mimo])
def test_linear_layers_over_sequences_work(method: Callable[..., mt.Multitude]) -> None:
    x = torch.randn(5, 7, 6)
    net = method(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), 2, example=x)
    assert net(x).shape == (2, 5, 7, 3)
    mt.check(net, x)


# -- examples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", list(NETWORKS))
def test_an_example_is_found_for_the_usual_networks(network: str) -> None:
    model = NETWORKS[network].model()
    assert model(example_for(model)).shape == (2, CLASSES)


def test_no_example_is_an_error_that_asks_for_one() -> None:
    odd = Of(lambda net, x, y: net.fc(x + y), fc=nn.Linear(3, 2))

    with pytest.raises(ValueError, match="pass one batch as example="):
        mt.packed(odd, 2)
    pair = (torch.randn(2, 3), torch.randn(2, 3))
    assert mt.deep_ensemble(odd, 2)(pair).shape == (2, 2, 2)


# -- narrow ------------------------------------------------------------------------------------------------


def widths(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape[:2]) for name, p in model.named_parameters() if p.dim() > 1}


def test_narrowing_scales_hidden_widths_and_keeps_input_and_output() -> None:
    model = mt.models.ResNet(BasicBlock, (1, 2, 1, 1), width=16)
    wide, narrow = widths(model), widths(mt.narrow(model, 0.25))
    assert narrow["conv1.weight"] == (4, 3)
    assert narrow["fc.weight"] == (10, 32)
    for name in wide.keys() - {"conv1.weight", "fc.weight"}:
        assert narrow[name] == (wide[name][0] // 4, wide[name][1] // 4)


def test_narrowing_follows_flatten_cat_and_depthwise_layers() -> None:
    cnn = mt.narrow(Cnn(), 0.3, example=torch.zeros(1, 3, 8, 8))  # 12 -> 3.6, 16 -> 4.8, 24 -> 7.2, rounded up
    assert widths(cnn) == {
        "conv1.weight": (4, 3), "conv2.weight": (5, 4), "fc1.weight": (8, 20), "fc2.weight": (CLASSES, 8),
    }  # fmt: skip
    dense = mt.narrow(DenseBlock(), 0.5, example=torch.zeros(1, 3, 8, 8))
    assert [conv.in_channels for conv in dense.grow] == [3, 5, 7]
    unet = mt.narrow(UNet(), 0.5, example=torch.zeros(1, 3, 8, 8))
    assert (unet.up.in_channels, unet.up.out_channels, unet.out.in_channels) == (8, 4, 4 + 4 + 3)
    separable = mt.narrow(NETWORKS["separable"].model(), 0.5)
    assert (separable[5].in_channels, separable[5].out_channels, separable[5].groups) == (12, 12, 12)


def test_norms_are_narrowed_and_their_groups_are_told() -> None:
    net = mt.packed(NETWORKS["group_norm"].model(), members=4, alpha=1)
    assert "4 groups -> 3" in net.summary()
    assert net.member(0)[5].num_groups == 3
    assert net.member(0)[6].num_parameters == 6


def test_grouped_convolutions_keep_their_groups_or_are_refused() -> None:
    def grouped(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 1),
            nn.Conv2d(width, width, 3, groups=4),
            nn.Flatten(),
            nn.Linear(width * 36, 2),
        )

    x = torch.randn(2, 3, 8, 8)
    assert mt.narrow(grouped(16), 0.5, example=x)[1].groups == 4
    with pytest.raises(ValueError, match="layer '1' has 4 groups, which do not divide its narrowed width, 6"):
        mt.narrow(grouped(12), 0.5, example=x)


def test_several_layers_may_give_the_output() -> None:
    parts = {"body": nn.Linear(6, 16), "mean": nn.Linear(16, 1), "variance": nn.Linear(16, 1)}
    two_heads = Of(
        lambda net, x: torch.cat([head(F.relu(net.body(x))) for head in (net.mean, net.variance)], 1), **parts
    )
    small = mt.narrow(two_heads, 0.25)
    assert widths(small) == {"body.weight": (4, 6), "mean.weight": (1, 4), "variance.weight": (1, 4)}
    net = mt.packed(two_heads, 4)
    x, y = torch.randn(5, 6), torch.randn(5, 1)
    assert net.loss(x, y, task="gaussian").isfinite()
    assert net.predict(x, task="gaussian").variance.shape == (5, 1)


def test_networks_that_fix_a_width_are_refused() -> None:
    x, scale = torch.zeros(2, 3, 8, 8), nn.Parameter(torch.ones(16, 1, 1))
    fixed_width = Of(
        lambda net, x: net.fc((net.conv(x) * net.scale).mean((2, 3))),
        conv=nn.Conv2d(3, 16, 1), fc=nn.Linear(16, 2), scale=scale,
    )  # fmt: skip
    fixed_view = Of(
        lambda net, x: net.fc(F.adaptive_avg_pool2d(net.conv(x), 2).view(-1, 16 * 4)),
        conv=nn.Conv2d(3, 16, 1), fc=nn.Linear(16 * 4, 2),
    )  # fmt: skip
    small = mt.narrow(fixed_width, 0.5, init="pretrained", example=x)  # the scale stands beside channels, and is cut
    assert small.scale.shape == (8, 1, 1)
    with pytest.raises(ValueError, match="fixes a hidden width"):
        mt.narrow(fixed_view, 0.5, example=x)


def test_channels_are_chosen_evenly() -> None:
    for width, count in ((64, 32), (10, 3), (7, 7), (512, 200)):
        kept = choose(width, count)
        assert len(kept.unique()) == count
        assert kept.max() < width
        for parts in (2, 4):
            if width % parts == 0 and count % parts == 0:
                shares = [
                    ((kept >= p * width // parts) & (kept < (p + 1) * width // parts)).sum() for p in range(parts)
                ]
                assert len({int(share) for share in shares}) == 1


def test_a_pretrained_member_computes_with_the_chosen_channels() -> None:
    """Brute force: the narrowed network is the whole one with its other channels set to zero, up to scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16, bias=False), nn.ReLU(), nn.Linear(16, 3, bias=False)).double()
    x = torch.randn(50, 5).double()
    small = mt.narrow(model, 0.25, init="pretrained", example=x, seed=0)
    rows = small[0].weight / small[0].weight.norm(dim=1, keepdim=True)
    originals = model[0].weight / model[0].weight.norm(dim=1, keepdim=True)
    kept = (rows @ originals.T).argmax(1)
    hidden = model[1](model[0](x))[:, kept]
    want = hidden @ model[2].weight[:, kept].T
    scale = model(x).square().mean().sqrt() / want.square().mean().sqrt()
    torch.testing.assert_close(small(x), want * scale)


@pytest.mark.parametrize("network", ["mlp", "cnn", "resnet", "group_norm", "separable"])
@pytest.mark.parametrize("method", [mt.packed, mt.masksembles])
def test_pretrained_activations_keep_their_scale(network: str, method: object) -> None:
    model = NETWORKS[network].model()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.bias.data.zero_()  # biases are kept, and are no part of the scale
    x, _ = NETWORKS[network].batch(64)
    net = method(model, 4, 2.0, init="pretrained", example=x, seed=0).eval()
    predictions = net(x)
    if method is mt.masksembles:  # its members share their weights, and so their scale
        predictions = predictions.flatten(0, 1).unsqueeze(0)
    ratio = predictions.square().mean((1, 2)).sqrt() / model(x).square().mean().sqrt()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.25, atol=0)


@pytest.mark.parametrize(
    "convert", [mt.packed, mt.masksembles, mt.mimo, lambda model, **given: mt.patched(model, 3, "output", **given)]
)
def test_an_example_changes_no_member_and_a_search_for_one_no_random_state(convert: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 5))
    state = torch.get_rng_state()
    without, given = convert(model, seed=0), convert(model, seed=0, example=torch.ones(2, 6))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in given.state_dict().items():
        assert torch.equal(tensor, without.state_dict()[name]), name
