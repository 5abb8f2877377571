"""Residual networks (He et al., 2016, "Deep Residual Learning for Image Recognition").

A block adds what it computes to what it was given, `y = relu(F(x) + shortcut(x))`. Four stages of blocks
follow a stem; each stage but the first halves the feature map and doubles its channels.

    stem        first layers                        32 x 32 image ends as    224 x 224 image ends as
    small       3x3, stride 1                       4 x 4                    28 x 28
    imagenet    7x7, stride 2; 3x3 max-pool         1 x 1                    7 x 7

Names and shapes of the state dict are torchvision's, so that its checkpoints load into `stem="imagenet"`.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, flatten, nn

from multitudes.models.checks import check_counts

Stem = Literal["small", "imagenet"]


def reset_he(module: nn.Module) -> None:
    """Draw all weights below `module` afresh: He et al. (2015) for convolutions, torch's own for the rest."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if reset is not None:
            reset()
        else:
            reset_he(child)
        if isinstance(child, nn.Conv2d):
            fan_out = child.weight[:, 0].numel() / child.groups  # torch's own count leaves groups out
            nn.init.normal_(child.weight, std=(2 / fan_out) ** 0.5)


def conv3x3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A 3x3 convolution `[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]`, without a bias."""
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, groups=groups, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution `[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]`, without a bias."""
    return nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)


def build_stem(stem: Stem, channels: int, width: int) -> tuple[nn.Conv2d, nn.Module]:
    """The first convolution, `channels` to `width`, and what pools after it."""
    if stem == "small":
        return conv3x3(channels, width), nn.Identity()
    if stem == "imagenet":
        conv = nn.Conv2d(channels, width, kernel_size=7, stride=2, padding=3, bias=False)
        return conv, nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    raise ValueError(f'stem must be "small" or "imagenet", got {stem!r}.')


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """The projection of a shortcut whose shape changes; `None` where the identity will do."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions: `[B, inputs, H, W] -> [B, width, H / stride, W / stride]`."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1, groups: int = 1, width_per_group: int = 64) -> None:
        super().__init__()
        if (groups, width_per_group) != (1, 64):
            raise ValueError(f"groups and width_per_group need Bottleneck blocks, got {groups} and {width_per_group}.")
        self.conv1 = conv3x3(inputs, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + identity)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1: `[B, inputs, H, W] -> [B, 4 * width, H / stride, W / stride]`.

    The stride is on the 3x3 convolution ("v1.5", as in torchvision), not on the first 1x1 as in the paper,
    where it would discard three quarters of the input. The 3x3 convolution has `groups` groups of
    `width_per_group` channels where `width` is 64, and in proportion elsewhere.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1, groups: int = 1, width_per_group: int = 64) -> None:
        super().__init__()
        inner, outputs = width * width_per_group // 64 * groups, width * self.expansion
        self.conv1 = conv1x1(inputs, inner)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = conv3x3(inner, inner, stride, groups)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = conv1x1(inner, outputs)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + identity)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, global average pooling and a linear layer.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depths: blocks in each of the four stages.
        classes: outputs of the last layer.
        stem: "small" for images of about 32 x 32, "imagenet" for images of about 224 x 224.
        channels: channels of the input image.
        width: channels of the first stage, before the block's expansion.
        groups: groups of each bottleneck's 3x3 convolution.
        width_per_group: channels of such a group in a first stage of width 64.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

    reset_parameters = reset_he

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        classes: int = 10,
        stem: Stem = "small",
        channels: int = 3,
        width: int = 64,
        groups: int = 1,
        width_per_group: int = 64,
    ) -> None:
        super().__init__()
        if len(depths) != 4 or min(depths) < 1:
            raise ValueError(f"depths must be four numbers of at least 1, got {tuple(depths)}.")
        check_counts(classes=classes, channels=channels, width=width, groups=groups, width_per_group=width_per_group)
        if width * width_per_group < 64:
            raise ValueError(f"width_per_group must be 64 / width or more, got {width_per_group} with width {width}.")

        self.conv1, self.maxpool = build_stem(stem, channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

        def stage(inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
            grouping = (groups, width_per_group)
            rest = (block(width * block.expansion, width, 1, *grouping) for _ in range(depth - 1))
            return nn.Sequential(block(inputs, width, stride, *grouping), *rest)

        wide = width * block.expansion
        self.layer1 = stage(width, width, depths[0], stride=1)
        self.layer2 = stage(wide, 2 * width, depths[1], stride=2)
        self.layer3 = stage(2 * wide, 4 * width, depths[2], stride=2)
        self.layer4 = stage(4 * wide, 8 * width, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * wide, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(flatten(self.avgpool(x), 1))


def resnet18(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """ResNet-18: `[B, channels, H, W] -> [B, classes]`, 11.17 M parameters.

    >>> import torch
    >>> resnet18(classes=10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, stem, channels)


def resnet34(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """ResNet-34: `[B, channels, H, W] -> [B, classes]`, 21.28 M parameters."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes, stem, channels)


def resnet50(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """ResNet-50: `[B, channels, H, W] -> [B, classes]`, 23.52 M parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, stem, channels)


def resnet101(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """ResNet-101: `[B, channels, H, W] -> [B, classes]`, 42.51 M parameters."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes, stem, channels)
