"""The architectures are those of the papers: sizes, names, shapes, initialisation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from multitudes.models import (
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    wide_resnet,
    wide_resnet28_10,
)
from multitudes.models.resnet import BasicBlock, Bottleneck
from multitudes.models.wide_resnet import PreactivationBlock

# One tiny network for each kind of block and stem.
TINY: dict[str, Callable[..., nn.Module]] = {
    "basic-small": lambda **kw: ResNet(BasicBlock, (1, 2, 1, 1), width=4, **kw),
    "basic-imagenet": lambda **kw: ResNet(BasicBlock, (1, 2, 1, 1), stem="imagenet", width=4, **kw),
    "bottleneck-small": lambda **kw: ResNet(Bottleneck, (1, 2, 1, 1), width=4, **kw),
    "bottleneck-imagenet": lambda **kw: ResNet(Bottleneck, (1, 2, 1, 1), stem="imagenet", width=4, **kw),
    "wide": lambda **kw: wide_resnet(depth=16, width=2, **kw),
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
        (wide_resnet28_10, {}, 36_479_194),
    ],
)
def test_parameter_counts_are_the_published_ones(
    build: Callable[..., nn.Module], arguments: dict[str, Any], parameters: int
) -> None:
    net = on_meta(build, **arguments)
    assert sum(p.numel() for p in net.parameters()) == parameters


def torchvision_shapes(kernels: list[int], depths: list[int], expansion: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every entry of a torchvision ResNet's state dict, in its order.

    `kernels` are the kernel sizes of a block's convolutions; all but the last have the stage's width.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def conv_and_norm(conv: str, norm: str, outputs: int, inputs: int, kernel: int) -> None:
        shapes[f"{conv}.weight"] = (outputs, inputs, kernel, kernel)
        for name in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{name}"] = (outputs,)
        shapes[f"{norm}.num_batches_tracked"] = ()

    conv_and_norm("conv1", "bn1", 64, 3, 7)
    channels = 64
    for stage, (width, depth) in enumerate(zip([64, 128, 256, 512], depths, strict=True), 1):
        for b in range(depth):
            block, block_inputs = f"layer{stage}.{b}", channels
            for i, kernel in enumerate(kernels, 1):
                outputs = width * expansion if i == len(kernels) else width
                conv_and_norm(f"{block}.conv{i}", f"{block}.bn{i}", outputs, channels, kernel)
                channels = outputs
            if block_inputs != channels:
                conv_and_norm(f"{block}.downsample.0", f"{block}.downsample.1", channels, block_inputs, 1)
    return {**shapes, "fc.weight": (1000, channels), "fc.bias": (1000,)}


@pytest.mark.parametrize(
    ("build", "kernels", "depths", "expansion", "entries"),
    [
        (resnet18, [3, 3], [2, 2, 2, 2], 1, 122),
        (resnet34, [3, 3], [3, 4, 6, 3], 1, 218),
        (resnet50, [1, 3, 1], [3, 4, 6, 3], 4, 320),
        (resnet101, [1, 3, 1], [3, 4, 23, 3], 4, 626),
    ],
)
def test_state_dicts_are_those_of_torchvision(
    build: Callable[..., nn.Module], kernels: list[int], depths: list[int], expansion: int, entries: int
) -> None:
    state = on_meta(build, classes=1000, stem="imagenet").state_dict()
    expected = torchvision_shapes(kernels, depths, expansion)
    assert len(expected) == entries
    assert [(name, tuple(value.shape)) for name, value in state.items()] == list(expected.items())


def test_the_stems_differ_in_the_first_convolution_alone() -> None:
    small = on_meta(resnet18, stem="small").state_dict()
    imagenet = on_meta(resnet18, stem="imagenet").state_dict()
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
    ],
)
def test_feature_maps_before_pooling(
    build: Callable[..., nn.Module], arguments: dict[str, Any], image: int, features: tuple[int, ...]
) -> None:
    net, seen = on_meta(build, **arguments), []
    net.avgpool.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    net(torch.empty(2, 3, image, image, device="meta"))
    assert seen == [(2, *features)]


def test_a_bottleneck_strides_in_its_3x3_convolution() -> None:
    block = Bottleneck(8, 4, stride=2)
    assert [conv.stride for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]


def test_a_residual_block_whose_branch_is_zero_is_its_shortcut() -> None:
    x = torch.randn(2, 8, 6, 6)
    basic, bottleneck, wide = BasicBlock(8, 8), Bottleneck(8, 2), PreactivationBlock(8, 8)
    for last in (basic.bn2, bottleneck.bn3, wide.conv2):
        nn.init.zeros_(last.weight)
    assert torch.equal(basic(x), x.relu())
    assert torch.equal(bottleneck(x), x.relu())
    assert torch.equal(wide(x), x)

    widening = PreactivationBlock(8, 12, stride=2)
    nn.init.zeros_(widening.conv2.weight)
    assert widening.shortcut is not None
    assert torch.equal(widening(x), widening.shortcut(widening.bn1(x).relu()))


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
    for layer in [*resnet18().modules(), *wide_resnet(16, 4).modules()]:
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.out_channels * layer.kernel_size[0] ** 2
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
        (lambda: ResNet(BasicBlock, (2, 2, 2)), r"^depths must be .* got \(2, 2, 2\)"),
        (lambda: ResNet(BasicBlock, (2, 2, 0, 2)), r"^depths must be .* got \(2, 2, 0, 2\)"),
        (lambda: ResNet(BasicBlock, (1, 1, 1, 1), width=0), r"^width must be .* got 0"),
        (lambda: wide_resnet(depth=27, width=10), r"^depth must be .* got 27"),
        (lambda: wide_resnet(depth=4, width=10), r"^depth must be .* got 4"),
        (lambda: wide_resnet(depth=28, width=0), r"^width must be .* got 0"),
        (lambda: wide_resnet28_10(classes=-1), r"^classes must be .* got -1"),
        (lambda: wide_resnet28_10(channels=0), r"^channels must be .* got 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
