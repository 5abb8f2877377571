"""Where a network is smoothed: before each of its down-samplings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import multitudes as mt
from multitudes.methods.smoothing import Smooth, head, smooth
from multitudes.models.preact_resnet import PreactivationBottleneck
from multitudes.models.resnet import BasicBlock, Bottleneck
from multitudes.surgery.downsampling import LayerTrace, downsamplings
from tests.zoo.feature_map_networks import FOUR, STAGES, chain, noise, small_resnet
from tests.zoo.of_parts import Of

M = mt.models

# -- the library's own families ----------------------------------------------------------------------------


def bottlenecks(**options: Any) -> nn.Module:
    return M.ResNet(Bottleneck, (3, 4, 6, 3), width=8, **options)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "resnext50": (lambda: bottlenecks(groups=32, width_per_group=8), FOUR),
    "wide_resnet50_2": (lambda: bottlenecks(width_per_group=128), FOUR),
    "resnet18": (M.resnet18, FOUR),
    "resnet18, imagenet": (lambda: M.resnet18(stem="imagenet"), FOUR),
    "resnet50, imagenet": (lambda: bottlenecks(stem="imagenet"), FOUR),
    "resnet20": (M.resnet20, ["layer2.0", "layer3.0", "avgpool"]),
    "preact_resnet18": (M.preact_resnet18, STAGES),
    "preact_resnet50, imagenet": (
        lambda: M.PreactResNet(PreactivationBottleneck, (3, 4, 6, 3), width=8, stem="imagenet"),
        STAGES,
    ),
    "wide_resnet": (lambda: M.wide_resnet(10, 1), ["layer2.0", "layer3.0"]),
    "pyramidnet": (lambda: M.PyramidNet(8, 12), ["layer2.0", "layer3.0"]),
    "vgg16": (lambda: M.VGG((2, 2, 3, 3, 3), width=8), [f"features.{i}" for i in (6, 13, 23, 33, 43)]),
    "vgg19": (lambda: M.VGG((2, 2, 4, 4, 4), width=8), [f"features.{i}" for i in (6, 13, 26, 39, 52)]),
    "vgg_like": (lambda: M.VGGLike(width=8), [f"features.{i}" for i in (7, 15, 27, 39, 51)]),
    "unet": (lambda: M.unet(5, width=4), ["pool1", "pool2", "pool3", "pool4"]),
    "lenet5": (lambda: M.lenet5(channels=3, size=32), ["pool1", "pool2"]),
    "small_cnn": (M.small_cnn, ["features.2", "features.6", "features.10"]),
    "medium_cnn": (M.medium_cnn, ["features.2", "features.6", "features.10", "features.14"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_goes_before_each_down_sampling(family: str) -> None:
    build, want = FAMILIES[family]
    model, x = build().eval(), noise(2, 3, 32, 32)
    inputs: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: args[0]}))
        for name in want
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    smoothed = smooth(model, example=x)
    layers = [m for m in smoothed.modules() if isinstance(m, Smooth)]
    assert len(layers) == len(want)
    assert list(smoothed.state_dict()) == list(model.state_dict())
    assert sum(p.numel() for p in smoothed.parameters()) == sum(p.numel() for p in model.parameters())
    read: list[Tensor] = []
    layers[0].register_forward_pre_hook(lambda m, args: read.append(args[0]))
    with torch.no_grad():
        assert smoothed(x).shape == model(x).shape
    torch.testing.assert_close(read[0], inputs[want[0]])  # up to there, nothing has changed
    assert downsamplings(LayerTrace(model, x)) == want


def stages(net: Any, images: Tensor, after_stage: Callable[[Tensor], Tensor]) -> Tensor:
    """A ResNet as the paper's code has it: something after each of its four stages."""
    z = net.maxpool(net.relu(net.bn1(net.conv1(images))))
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        z = after_stage(stage(z))
    return net.fc(net.avgpool(z).flatten(1))


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
@pytest.mark.parametrize("stem", ["small", "imagenet"])
def test_growing_it_is_the_papers_resnet(block: Any, stem: Any) -> None:
    torch.manual_seed(0)
    net, x = M.ResNet(block, (1, 2, 1, 1), width=8, stem=stem).eval(), noise(2, 3, 64, 64)
    want = stages(net, x, lambda z: F.avg_pool2d(F.relu(10 * torch.tanh(z / 10)), 2, stride=1, padding=1))
    torch.testing.assert_close(smooth(net, growing=True)(x), want)


def test_the_stages_grow_as_in_the_paper() -> None:
    sizes: list[int] = []
    net = smooth(mt.models.resnet18(), growing=True).eval()
    for module in net.modules():
        if isinstance(module, Smooth):
            module.register_forward_hook(lambda m, args, y: sizes.append(y.shape[-1]))
    with torch.no_grad():
        net(noise(1, 3, 32, 32))
    assert sizes == [33, 18, 10, 6]


def test_what_a_u_net_hands_across_is_not_smoothed() -> None:
    net = smooth(M.unet(3, width=4).eval(), example=noise(1, 3, 32, 32))
    seen: dict[str, Any] = {}
    net.down1.register_forward_hook(lambda m, args, y: seen.update(encoder=y))
    net.up1.register_forward_pre_hook(lambda m, args: seen.update(skip=args[1]))
    net.pool1.layer.register_forward_pre_hook(lambda m, args: seen.update(pooled=args[0]))
    net(noise(1, 3, 32, 32))
    assert torch.equal(seen["skip"], seen["encoder"])
    torch.testing.assert_close(seen["pooled"], Smooth()(seen["encoder"]))


# -- other people's networks -------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block whose shortcut is a plain function, and the stride on its second convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(inputs, inputs, 1), nn.Conv2d(inputs, outputs, 3, stride=2, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return F.relu(out + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, out.shape[1] - x.shape[1])))


def gate(width: int) -> nn.Module:
    """Squeeze and excitation, which pools a map only to weigh it."""
    parts = {"pool": nn.AdaptiveAvgPool2d(1), "fc": nn.Conv2d(width, width, 1)}
    return Of(lambda net, x: x * torch.sigmoid(net.fc(net.pool(x))), **parts)


def reduction(width: int) -> nn.Module:
    """Three branches that all make the map smaller, as in Inception networks."""
    return Of(
        lambda net, x: torch.cat([net.one(x), net.two(x), net.three(x)], 1),
        one=nn.Conv2d(width, width, 3, stride=2),
        two=nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2)),
        three=nn.MaxPool2d(3, stride=2),
    )


class Wrapped(nn.Module):
    """A network inside another, with a list of stages, each a Sequential that it walks through itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return x


def stems() -> nn.Module:
    """Two convolutions that read the image, the second one's strided."""
    parts = {"one": nn.Conv2d(3, 4, 1), "two": nn.Conv2d(3, 4, 2, stride=2), "pool": nn.MaxPool2d(2)}

    def forward(net: Any, x: Tensor) -> Tensor:
        one = net.one(x)
        return net.two(x) + net.pool(one)

    return Of(forward, **parts)


def deep() -> nn.Module:
    return Of(lambda net, x: net.fc(net.net((x - 0.5) / 0.2).mean((2, 3))), net=Wrapped(), fc=nn.Linear(4, 5))


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a functional shortcut": (lambda: chain(Block(4, 6), Block(6, 8)), ["3", "4"]),
    "gates": (lambda: chain(gate(4), nn.MaxPool2d(2), gate(4), nn.AdaptiveAvgPool2d(1)), ["4", "6"]),
    "branches": (lambda: chain(reduction(4), nn.ReLU()), ["3"]),
    "networks in networks": (deep, ["net.stages.0.2", "net.stages.1.2"]),
    "poolings in a row": (lambda: chain(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.AdaptiveAvgPool2d(1)), ["3"]),
    "a strided image": (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(3, 4, 2, stride=2), nn.MaxPool2d(2),
                                              nn.Conv2d(4, 4, 2, stride=2), nn.AdaptiveAvgPool2d(1)), ["3", "4"]),
    "nothing but a stem": (lambda: nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), nn.AdaptiveAvgPool2d(1)), ["1"]),
    "two stems": (stems, ["pool"]),
    "a padded stem": (lambda: nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), nn.PReLU(4), nn.ConstantPad2d(1, 0.0),
                                            nn.MaxPool2d(3, stride=2), nn.Conv2d(4, 4, 2, stride=2)), ["4"]),
    "a residual block on the image": (lambda: nn.Sequential(Block(3, 6), Block(6, 8)), ["1"]),
    "parametrised layers": (lambda: chain(weight_norm(nn.Conv2d(4, 4, 2, stride=2))), ["3"]),
    "dropout before a norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(), nn.BatchNorm2d(4), nn.ReLU(),
                                                    nn.AdaptiveAvgPool2d(1)), ["4"]),
    "no shrinking": (lambda: chain(nn.MaxPool2d(3, stride=1), nn.Conv2d(4, 4, 3), nn.AdaptiveMaxPool2d(64),
                                   nn.AdaptiveMaxPool2d(8)), ["6"]),
    "indices": (lambda: nn.Sequential(chain(nn.MaxPool2d(2, return_indices=True)),
                                      Of(lambda net, pooled: F.max_unpool2d(*pooled, 2))), ["0.3"]),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSUAL)
def test_it_finds_the_down_samplings_of_unusual_networks(case: str) -> None:
    build, want = UNUSUAL[case]
    model, x = build().eval(), noise(2, 3, 32, 32)
    assert downsamplings(LayerTrace(model, x)) == want
    assert sum(isinstance(m, Smooth) for m in smooth(model, example=x).modules()) == len(want)
    same = smooth(model, (1,), "none", example=x)  # does nothing, wherever it is
    torch.testing.assert_close(same(x), model(x))


def test_a_block_that_reads_the_image_once_is_never_smoothed() -> None:
    block = Block(3, 3)
    assert downsamplings(LayerTrace(nn.Sequential(block, block), noise(2, 3, 32, 32))) == []


def test_parallel_paths_all_read_the_smoothed_map() -> None:
    model, x = chain(Block(4, 6)).eval(), noise(2, 3, 16, 16)
    torch.testing.assert_close(smooth(model, example=x)(x), model[3](Smooth()(model[:3](x))))


def test_a_single_pixel_is_smoothed_before_the_same_layers() -> None:
    tiny = downsamplings(LayerTrace(small_resnet(stem="imagenet"), noise(2, 3, 8, 8)))
    assert tiny == FOUR


def test_layers_selects_other_places() -> None:
    net, x = small_resnet(), noise(2, 3, 16, 16)
    smoothed = smooth(net, layers=["layer3.0", "layer3.0.bn2"], example=x)
    names = [name for name, m in smoothed.named_modules() if isinstance(m, Smooth)]
    assert names == ["layer3.smooth", "layer3.0.bn2.smooth"]
    smoothed = smooth(net, layers=r"layer\d", example=x)
    want = stages(net, x, lambda z: z)
    assert not torch.allclose(smoothed(x), want)
    z = net.relu(net.bn1(net.conv1(x)))
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        z = stage(Smooth()(z))
    torch.testing.assert_close(smoothed(x), net.fc(net.avgpool(z).flatten(1)))


def test_a_pooling_to_as_many_points_is_no_down_sampling() -> None:
    swapped = head(small_resnet(), "mlp", hidden=8)
    assert downsamplings(LayerTrace(swapped, noise(2, 3, 32, 32))) == STAGES  # 4 x 4 to 7 x 7
    assert downsamplings(LayerTrace(swapped, noise(2, 3, 64, 64)))[-1] == "avgpool"  # 8 x 8 to 7 x 7
