"""The residual architectures are those of the papers: sizes, names, shapes, initialisation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from multitudes.models import (
    CifarResNet,
    PreactResNet,
    PyramidNet,
    ResNet,
    preact_resnet18,
    preact_resnet50,
    pyramidnet110,
    resnet18,
    resnet20,
    resnet34,
    resnet50,
    resnet101,
    resnext50,
    wide_resnet,
    wide_resnet28_10,
    wide_resnet50_2,
)
from multitudes.models.preact_resnet import PreactivationBlock, PreactivationBottleneck
from multitudes.models.pyramidnet import PyramidBlock
from multitudes.models.resnet import BasicBlock, Bottleneck

# One tiny network for each kind of block and stem.
TINY: dict[str, Callable[..., nn.Module]] = {
    "basic-small": lambda **kw: ResNet(BasicBlock, (1, 2, 1, 1), width=4, **kw),
    "basic-imagenet": lambda **kw: ResNet(BasicBlock, (1, 2, 1, 1), stem="imagenet", width=4, **kw),
    "bottleneck-small": lambda **kw: ResNet(Bottleneck, (1, 2, 1, 1), width=4, **kw),
    "bottleneck-imagenet": lambda **kw: ResNet(Bottleneck, (1, 2, 1, 1), stem="imagenet", width=4, **kw),
    "grouped": lambda **kw: ResNet(Bottleneck, (1, 2, 1, 1), width=8, groups=2, width_per_group=32, **kw),
    "wide": lambda **kw: wide_resnet(depth=16, width=2, **kw),
    "preact-small": lambda **kw: PreactResNet(PreactivationBlock, (1, 2, 1, 1), width=4, **kw),
    "preact-imagenet": lambda **kw: PreactResNet(PreactivationBlock, (1, 2, 1, 1), stem="imagenet", width=4, **kw),
    "preact-bottleneck": lambda **kw: PreactResNet(PreactivationBottleneck, (2, 1, 1, 1), width=4, **kw),
    "cifar": lambda **kw: CifarResNet(depth=14, width=4, **kw),
    "pyramid": lambda **kw: PyramidNet(depth=14, widening=11, **kw),
}
tiny = pytest.mark.parametrize("build", TINY.values(), ids=TINY.keys())


def on_meta(build: Callable[..., nn.Module], **arguments: Any) -> nn.Module:
    """The network without its numbers, for tests that look at shapes alone."""
    with torch.device("meta"):
        return build(**arguments)


@pytest.mark.parametrize(
    ("build", "arguments", "parameters"),
    [
        (resnet18, {}, 11_173_962),
        (resnet50, {}, 23_520_842),
        (resnet18, {"classes": 1000, "stem": "imagenet"}, 11_689_512),
        (resnet34, {"classes": 1000, "stem": "imagenet"}, 21_797_672),
        (resnet50, {"classes": 1000, "stem": "imagenet"}, 25_557_032),
        (resnet101, {"classes": 1000, "stem": "imagenet"}, 44_549_160),
        (resnext50, {"classes": 1000, "stem": "imagenet"}, 25_028_904),
        (wide_resnet50_2, {"classes": 1000, "stem": "imagenet"}, 68_883_240),
        (wide_resnet28_10, {}, 36_479_194),
        (preact_resnet18, {}, 11_172_170),
        (preact_resnet50, {}, 23_513_162),
        (preact_resnet50, {"classes": 1000, "stem": "imagenet"}, 25_549_352),
        (pyramidnet110, {"classes": 100}, 28_511_307),
    ],
)
def test_parameter_counts_are_the_published_ones(
    build: Callable[..., nn.Module], arguments: dict[str, Any], parameters: int
) -> None:
    net = on_meta(build, **arguments)
    assert sum(p.numel() for p in net.parameters()) == parameters


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
def test_state_dicts_are_those_of_torchvision(
    build: Callable[..., nn.Module], layout: tuple[Any, ...], entries: int
) -> None:
    state = on_meta(build, classes=1000, stem="imagenet").state_dict()
    expected = torchvision_shapes(*layout)
    assert len(expected) == entries
    assert [(name, tuple(value.shape)) for name, value in state.items()] == list(expected.items())


@pytest.mark.parametrize("build", [resnet18, preact_resnet18])
def test_the_stems_differ_in_the_first_convolution_alone(build: Callable[..., nn.Module]) -> None:
    small = on_meta(build, stem="small").state_dict()
    imagenet = on_meta(build, stem="imagenet").state_dict()
    assert list(small) == list(imagenet)
    assert [name for name in small if small[name].shape != imagenet[name].shape] == ["conv1.weight"]


@tiny
def test_an_image_becomes_one_score_per_class(build: Callable[..., nn.Module]) -> None:
    net = build(classes=7, channels=1)
    assert net(torch.randn(3, 1, 40, 33)).shape == (3, 7)
    assert net.eval()(torch.randn(1, 1, 32, 32)).shape == (1, 7)


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


def test_a_residual_block_whose_branch_is_zero_is_its_shortcut() -> None:
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


def test_a_pre_activation_network_activates_after_its_stem_and_after_its_last_block() -> None:
    net = TINY["preact-small"]().eval()
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


def test_a_pyramid_widens_by_the_same_number_of_channels_in_each_block() -> None:
    net = on_meta(pyramidnet110)
    widths = [block.conv2.out_channels for stage in (net.layer1, net.layer2, net.layer3) for block in stage]
    assert widths == [16 + 5 * k for k in range(1, 55)]  # 270 over 54 blocks
    uneven = on_meta(PyramidNet, depth=14, widening=10)  # 10 / 6 a block
    widths = [block.conv2.out_channels for stage in (uneven.layer1, uneven.layer2, uneven.layer3) for block in stage]
    assert widths == [18, 19, 21, 23, 24, 26]
    assert uneven.fc.in_features == 26


def test_five_components_of_a_pyramids_norms_and_output_make_the_published_count() -> None:
    net = on_meta(pyramidnet110)
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    patched = sum(p.numel() for layer in [*norms, net.fc] for p in layer.parameters())
    assert patched == 78_498
    assert 28_511_307 + 4 * patched == 28_825_299


def test_resnet20_is_the_published_one_but_for_its_shortcuts_and_idle_biases() -> None:
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


@tiny
def test_networks_can_be_traced(build: Callable[..., nn.Module]) -> None:
    net = build().eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(fx.symbolic_trace(net)(x), net(x))


@tiny
def test_gradients_reach_every_parameter(build: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    net = build()
    net(torch.randn(4, 3, 64, 64)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_convolutions_start_from_he_initialisation() -> None:
    torch.manual_seed(0)
    for layer in [*resnet18().modules(), *wide_resnet(16, 4).modules(), *resnext50().layer4.modules()]:
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.out_channels * layer.kernel_size[0] ** 2 / layer.groups
            assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


@tiny
def test_reset_parameters_builds_the_network_anew(build: Callable[..., nn.Module]) -> None:
    net = build()
    net(torch.randn(8, 3, 32, 32))  # moves the running statistics
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(7.0)
    net.reset_parameters()

    fresh = build()
    for (name, value), expected in zip(net.state_dict().items(), fresh.state_dict().values(), strict=True):
        if name.startswith("fc.") or value.ndim == 4:
            assert 0 < value.std() < 1, name
            assert not torch.equal(value, expected), name
        else:
            assert torch.equal(value, expected), name


def test_one_seed_gives_one_network() -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(TINY["basic-small"]().parameters())

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: resnet18(stem="big"), r"^stem must be .* got 'big'"),
        (lambda: resnet18(classes=0), r"^classes must be .* got 0"),
        (lambda: resnet50(channels=0), r"^channels must be .* got 0"),
        (lambda: ResNet(BasicBlock, ()), r"^depths must be .* got \(\)"),
        (lambda: ResNet(BasicBlock, (2, 2, 0, 2)), r"^depths must be .* got \(2, 2, 0, 2\)"),
        (lambda: ResNet(BasicBlock, (1, 1, 1, 1), width=0), r"^width must be .* got 0"),
        (lambda: wide_resnet(depth=27, width=10), r"^depth must be .* got 27"),
        (lambda: wide_resnet(depth=4, width=10), r"^depth must be .* got 4"),
        (lambda: wide_resnet(depth=28, width=0), r"^width must be .* got 0"),
        (lambda: wide_resnet28_10(classes=-1), r"^classes must be .* got -1"),
        (lambda: wide_resnet28_10(channels=0), r"^channels must be .* got 0"),
        (lambda: resnet18(classes=2.5), r"^classes must be a whole number.* got 2.5"),
        (lambda: ResNet(Bottleneck, (1, 1, 1, 1), groups=0), r"^groups must be .* got 0"),
        (lambda: ResNet(Bottleneck, (1, 1, 1, 1), width_per_group=0), r"^width_per_group must be .* got 0"),
        (lambda: ResNet(Bottleneck, (1, 1, 1, 1), width=4, width_per_group=4), r"^width_per_group must be .* got 4"),
        (lambda: ResNet(BasicBlock, (1, 1, 1, 1), groups=2), r"^groups .* need Bottleneck blocks, got 2 and 64"),
        (lambda: preact_resnet18(stem="big"), r"^stem must be .* got 'big'"),
        (lambda: preact_resnet50(classes=0), r"^classes must be .* got 0"),
        (lambda: PreactResNet(PreactivationBlock, (1, 0)), r"^depths must be .* got \(1, 0\)"),
        (lambda: CifarResNet(18), r"^depth must be .* got 18"),
        (lambda: resnet20(channels=0), r"^channels must be .* got 0"),
        (lambda: PyramidNet(112, 48), r"^depth must be .* got 112"),
        (lambda: pyramidnet110(widening=-1), r"^widening must be .* got -1"),
        (lambda: pyramidnet110(classes=0), r"^classes must be .* got 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
