"""Layers, names and shapes of the architectures are the published ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.models import (
    MLP,
    VGG,
    PyramidNet,
    lenet5,
    medium_cnn,
    mlp,
    preact_resnet18,
    preact_resnet50,
    pyramidnet110,
    resnet18,
    resnet20,
    resnet34,
    resnet50,
    resnet101,
    resnext50,
    small_cnn,
    unet,
    vgg16,
    vgg19,
    vgg_like,
    wide_resnet,
    wide_resnet28_10,
    wide_resnet50_2,
)
from multitudes.models.preact_resnet import PreactivationBlock, PreactivationBottleneck, PreactResNet
from multitudes.models.pyramidnet import PyramidBlock
from multitudes.models.resnet import BasicBlock, Bottleneck
from tests.models.test_models import on_meta


def layers(net: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [layer for layer in net.modules() if isinstance(layer, kind)]


# -- residual networks -------------------------------------------------------------------------------------


def torchvision_shapes(
    kernels: list[int], depths: list[int], expansion: int, groups: int = 1, inner: float = 1
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every entry of a torchvision ResNet's state dict, in its order.

    `kernels` are the kernel sizes of a block's convolutions; all but the last have `inner` times the stage's
    width, and the second of three has `groups` groups.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def conv_and_norm(conv: str, norm: str, outputs: int, inputs: int, kernel: int) -> None:
        seen = inputs // groups if len(kernels) == 3 and conv.endswith("conv2") else inputs
        shapes[f"{conv}.weight"] = (outputs, seen, kernel, kernel)
        for name in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{name}"] = (outputs,)
        shapes[f"{norm}.num_batches_tracked"] = ()

    conv_and_norm("conv1", "bn1", 64, 3, 7)
    channels = 64
    for stage, (width, depth) in enumerate(zip([64, 128, 256, 512], depths, strict=True), 1):
        for b in range(depth):
            block, block_inputs = f"layer{stage}.{b}", channels
            for i, kernel in enumerate(kernels, 1):
                outputs = width * expansion if i == len(kernels) else int(width * inner)
                conv_and_norm(f"{block}.conv{i}", f"{block}.bn{i}", outputs, channels, kernel)
                channels = outputs
            if block_inputs != channels:
                conv_and_norm(f"{block}.downsample.0", f"{block}.downsample.1", channels, block_inputs, 1)
    return {**shapes, "fc.weight": (1000, channels), "fc.bias": (1000,)}


@pytest.mark.parametrize(
    ("build", "layout", "entries"),
    [
        (resnet18, ([3, 3], [2, 2, 2, 2], 1), 122),
        (resnet34, ([3, 3], [3, 4, 6, 3], 1), 218),
        (resnet50, ([1, 3, 1], [3, 4, 6, 3], 4), 320),
        (resnet101, ([1, 3, 1], [3, 4, 23, 3], 4), 626),
        (resnext50, ([1, 3, 1], [3, 4, 6, 3], 4, 32, 2), 320),
        (wide_resnet50_2, ([1, 3, 1], [3, 4, 6, 3], 4, 1, 2), 320),
    ],
)
def test_state_dicts_have_torchvisions_names_and_shapes(
    build: Callable[..., nn.Module], layout: tuple[Any, ...], entries: int
) -> None:
    state = on_meta(build, classes=1000, stem="imagenet").state_dict()
    expected = torchvision_shapes(*layout)
    assert len(expected) == entries
    assert [(name, tuple(value.shape)) for name, value in state.items()] == list(expected.items())


@pytest.mark.parametrize(
    ("build", "arguments", "image", "features"),
    [
        (resnet18, {"stem": "small"}, 32, (512, 4, 4)),
        (resnet50, {"stem": "small"}, 32, (2048, 4, 4)),
        (resnet18, {"stem": "imagenet"}, 224, (512, 7, 7)),
        (resnet50, {"stem": "imagenet"}, 224, (2048, 7, 7)),
        (wide_resnet28_10, {}, 32, (640, 8, 8)),
        (resnext50, {"stem": "imagenet"}, 224, (2048, 7, 7)),
        (preact_resnet18, {"stem": "small"}, 32, (512, 4, 4)),
        (preact_resnet50, {"stem": "imagenet"}, 224, (2048, 7, 7)),
        (resnet20, {}, 32, (64, 8, 8)),
        (pyramidnet110, {}, 32, (286, 8, 8)),
    ],
)
def test_feature_maps_before_pooling(
    build: Callable[..., nn.Module], arguments: dict[str, Any], image: int, features: tuple[int, ...]
) -> None:
    net, seen = on_meta(build, **arguments), []
    net.avgpool.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    net(torch.empty(2, 3, image, image, device="meta"))
    assert seen == [(2, *features)]


@pytest.mark.parametrize("kind", [Bottleneck, PreactivationBottleneck])
def test_a_bottleneck_strides_in_its_3x3_convolution(kind: Any) -> None:
    block = kind(8, 4, stride=2)
    assert [conv.stride for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]


def test_a_residual_block_with_a_zero_branch_is_its_shortcut() -> None:
    x = torch.randn(2, 8, 6, 6)
    basic, bottleneck, pyramid = BasicBlock(8, 8), Bottleneck(8, 2), PyramidBlock(8, 8)
    before, before3 = PreactivationBlock(8, 8), PreactivationBottleneck(8, 2)
    for last in (basic.bn2, bottleneck.bn3, pyramid.bn3, before.conv2, before3.conv3):
        nn.init.zeros_(last.weight)
    assert torch.equal(basic(x), x.relu())
    assert torch.equal(bottleneck(x), x.relu())
    assert torch.equal(pyramid(x), x)
    assert torch.equal(before(x), x)
    assert torch.equal(before3(x), x)

    widening = PreactivationBlock(8, 12, stride=2)
    nn.init.zeros_(widening.conv2.weight)
    assert widening.shortcut is not None
    assert widening.bn1 is not None
    assert torch.equal(widening(x), widening.shortcut(widening.bn1(x).relu()))


def test_a_preactivation_network_activates_after_stem_and_last_block() -> None:
    net = PreactResNet(PreactivationBlock, (1, 2, 1, 1), width=4).eval()
    for block in [*net.layer1, *net.layer2]:
        nn.init.zeros_(block.conv2.weight)
    # The only block without a norm of its own is the first, whose two branches read the stem's activation.
    assert [name for name, block in net.named_modules() if getattr(block, "bn1", 0) is None] == ["layer1.0"]
    seen = {}
    for name in ("layer1", "fc"):
        layer = net.get_submodule(name)
        layer.register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0].clone(), y)}))
    net(torch.randn(2, 3, 16, 16))
    x, y = seen["layer1"]
    assert x.min() == 0
    assert torch.equal(x, y)
    assert seen["fc"][0].min() >= 0


def test_a_pyramid_shortcut_averages_and_pads_with_zeros() -> None:
    x = torch.randn(2, 8, 6, 6)
    block = PyramidBlock(8, 11, stride=2)
    nn.init.zeros_(block.bn3.weight)
    averages = x.unflatten(3, (3, 2)).unflatten(2, (3, 2)).mean((3, 5))
    torch.testing.assert_close(block(x), torch.cat([averages, torch.zeros(2, 3, 3, 3)], 1))
    assert block(torch.randn(2, 8, 5, 7)).shape == (2, 11, 3, 4)


def test_a_pyramid_adds_the_same_number_of_channels_in_each_block() -> None:
    net = on_meta(pyramidnet110)
    widths = [block.conv2.out_channels for stage in (net.layer1, net.layer2, net.layer3) for block in stage]
    assert widths == [16 + 5 * k for k in range(1, 55)]  # 270 over 54 blocks
    uneven = on_meta(PyramidNet, depth=14, widening=10)  # 10 / 6 a block
    widths = [block.conv2.out_channels for stage in (uneven.layer1, uneven.layer2, uneven.layer3) for block in stage]
    assert widths == [18, 19, 21, 23, 24, 26]
    assert uneven.fc.in_features == 26


def test_resnet20_has_the_published_size_up_to_shortcuts_and_biases() -> None:
    net = on_meta(resnet20)
    total = sum(p.numel() for p in net.parameters())
    shortcuts = [block.downsample for block in net.modules() if getattr(block, "downsample", None) is not None]
    assert len(shortcuts) == 2
    padded = total - sum(p.numel() for shortcut in shortcuts for p in shortcut.parameters())
    assert padded == 269_722  # He et al., option A
    biases = sum(conv.out_channels for conv in net.modules() if isinstance(conv, nn.Conv2d))
    norms = sum(p.numel() for shortcut in shortcuts for p in shortcut[1].parameters())
    assert total + biases - norms == 273_066  # Keras


def test_a_resnext_block_is_a_sum_of_small_bottlenecks() -> None:
    block = Bottleneck(16, 4, groups=2, width_per_group=32).eval()
    x = torch.randn(2, 16, 5, 5)
    y = torch.zeros(2, 16, 5, 5)
    for own in (slice(0, 2), slice(2, 4)):  # two paths of two channels
        path = block.bn1(block.conv1(x)).relu()[:, own]
        path = nn.functional.conv2d(path, block.conv2.weight[own], padding=1)
        path = path / (1 + block.bn2.eps) ** 0.5  # what a new norm does in evaluation
        y += nn.functional.conv2d(path.relu(), block.conv3.weight[:, own])
    torch.testing.assert_close(block(x), (block.bn3(y) + x).relu())


@pytest.mark.parametrize("depth", [10, 16, 28])
def test_a_wide_resnet_has_as_many_convolutions_as_its_depth(depth: int) -> None:
    net = on_meta(wide_resnet, depth=depth, width=2)
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == depth
    assert all(conv.bias is None for conv in convolutions)


def test_convolutions_start_from_he_initialisation() -> None:
    torch.manual_seed(0)
    for layer in [*resnet18().modules(), *wide_resnet(16, 4).modules(), *resnext50().layer4.modules()]:
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.out_channels * layer.kernel_size[0] ** 2 / layer.groups
            assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


# -- VGG and VGG-like --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "depth"), [(vgg16, 16), (vgg19, 19)])
def test_a_vgg_has_all_its_convolutions_and_five_pools(build: Callable[..., nn.Module], depth: int) -> None:
    net = on_meta(build)
    assert len(layers(net, nn.Conv2d)) == depth - 3  # the paper counts three linear layers, CIFAR has one
    assert len(layers(net, nn.MaxPool2d)) == 5
    assert net.features(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 512, 1, 1)
    assert net.features(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 512, 7, 7)


def test_features_have_torchvisions_names() -> None:
    features = on_meta(vgg16).features
    convolutions = [i for i, layer in enumerate(features) if isinstance(layer, nn.Conv2d)]
    assert convolutions == [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40]  # as in vgg16_bn
    assert all(isinstance(features[i + 1], nn.BatchNorm2d) for i in convolutions)
    assert len(features) == 44


def test_a_vgg_averages_the_features_of_larger_images() -> None:
    net = VGG((1, 1, 1, 1, 1), classes=3, width=2).eval()
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(net(x), net.fc(net.features(x).mean((2, 3))))


def test_the_vgg_like_network_is_vgg16_with_dropout_and_a_hidden_layer() -> None:
    net, vgg = on_meta(vgg_like), on_meta(vgg16)
    kept = [layer for layer in net.features if not isinstance(layer, nn.Dropout)]
    assert [type(layer) for layer in kept] == [type(layer) for layer in vgg.features]
    shapes = [p.shape for p in net.features.parameters()]
    assert shapes == [p.shape for p in vgg.features.parameters()]
    assert [layer.p for layer in layers(net, nn.Dropout)] == [0.3, *[0.4] * 7, 0.5, 0.5]
    # Dropout follows each activation but those before a pool.
    after = [type(b).__name__ for a, b in zip(net.features, net.features[1:], strict=False) if isinstance(a, nn.ReLU)]
    assert after == ["Dropout", "MaxPool2d"] * 2 + ["Dropout", "Dropout", "MaxPool2d"] * 3


# -- LeNet, SmallCNN, MediumCNN ----------------------------------------------------------------------------


def test_lenet_step_by_step() -> None:
    net = lenet5()
    x = torch.randn(2, 1, 28, 28)
    y = F.max_pool2d(F.conv2d(x, net.conv1.weight, net.conv1.bias).relu(), 2)
    assert y.shape == (2, 20, 12, 12)
    y = F.max_pool2d(F.conv2d(y, net.conv2.weight, net.conv2.bias).relu(), 2)
    assert y.shape == (2, 50, 4, 4)
    y = (y.flatten(1) @ net.fc1.weight.T + net.fc1.bias).relu()
    torch.testing.assert_close(net(x), y @ net.fc2.weight.T + net.fc2.bias)


@pytest.mark.parametrize(
    ("build", "widths", "features"),
    [(small_cnn, [16, 32, 32], (32, 4, 4)), (medium_cnn, [64, 128, 256, 256], (256, 2, 2))],
)
def test_the_cnns_have_the_papers_channels(
    build: Callable[..., nn.Module], widths: list[int], features: tuple[int, ...]
) -> None:
    net = on_meta(build)
    assert [conv.out_channels for conv in layers(net, nn.Conv2d)] == widths
    assert net.features(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, *features)
    assert [layer.p for layer in layers(net, nn.Dropout)] == [0.1] * len(widths)
    assert [layer.p for layer in layers(on_meta(build, dropout=0.3), nn.Dropout)] == [0.3] * len(widths)


def test_the_layers_of_a_cnn_are_convolution_dropout_pool_and_relu() -> None:
    names = [type(layer).__name__ for layer in small_cnn().features]
    assert names == ["Conv2d", "Dropout", "MaxPool2d", "ReLU"] * 2 + ["Conv2d", "Dropout", "MaxPool2d"]


# -- U-Net -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 48), (33, 47), (90, 121), (16, 1), (1, 1)])
def test_a_unet_accepts_images_of_any_size(size: tuple[int, int]) -> None:
    net = unet(classes=3, width=2).eval()
    assert net(torch.randn(2, 3, *size)).shape == (2, 3, *size)


def test_the_dropouts_of_a_unet_are_in_its_deepest_six_parts() -> None:
    net, seen = unet(classes=3, width=2), []
    for layer in layers(net, nn.Dropout):
        layer.register_forward_hook(lambda _, x, y: seen.append(tuple(y.shape[1:])))
    net(torch.randn(2, 3, 64, 64))
    encoder = [(8, 16, 16), (16, 8, 8), (32, 4, 4)]
    decoder = [(16, 8, 8), (8, 16, 16), (4, 32, 32)]
    assert seen == encoder + decoder
    assert len(layers(net, nn.MaxPool2d)) == 4


def test_skip_connections_of_a_unet_have_no_dropout() -> None:
    net, made, read = unet(classes=3, width=2), {}, {}

    def keep(store: dict[str, Tensor], name: str) -> Callable[..., None]:
        return lambda _, x, y: store.update({name: (y if store is made else x[1]).clone()})

    for level in "1234":
        net.get_submodule(f"down{level}").register_forward_hook(keep(made, level))
        net.get_submodule(f"up{level}").register_forward_hook(keep(read, level))
    net(torch.randn(2, 3, 40, 24))
    assert all(torch.equal(made[level], read[level]) for level in "1234")


def test_the_last_convolution_of_a_unet_starts_like_a_linear_layer() -> None:
    net = unet(classes=50, width=16)
    assert 0.9 / 4 < net.fc.weight.abs().max() <= 1 / 4  # uniform within 1 / sqrt(inputs)


# -- MLP ---------------------------------------------------------------------------------------------------


def test_a_hidden_layer_has_linear_norm_activation_and_dropout() -> None:
    net = MLP(6, 3, hidden=(5, 4), norm="layer", activation="tanh", dropout=0.2)
    assert [type(layer).__name__ for layer in net.layers] == ["Linear", "LayerNorm", "Tanh", "QuickDropout"] * 2
    assert [type(layer).__name__ for layer in mlp(6, 3, hidden=(5,)).layers] == ["Linear", "ReLU"]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "softplus", "tanh", "sigmoid"])
def test_activations_are_selected_by_name(activation: str) -> None:
    net = mlp(6, 3, hidden=(5,), activation=activation)
    x = torch.randn(4, 6)
    function = getattr(F, activation) if hasattr(F, activation) else getattr(torch, activation)
    torch.testing.assert_close(net(x), net.fc(function(net.layers[0](x))))
