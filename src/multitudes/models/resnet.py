"""Residual networks (He et al., 2016, "Deep Residual Learning for Image Recognition").

A block adds its result to its input, `y = relu(F(x) + shortcut(x))`. Stages of blocks, usually four, follow a stem.
Each stage but the first halves the feature map and doubles its channels.

    stem        first layers                        32 x 32 image ends as    224 x 224 image ends as
    small       3x3, stride 1                       4 x 4                    28 x 28
    imagenet    7x7, stride 2; 3x3 max-pool         1 x 1                    7 x 7

Two variants widen the bottlenecks inside:

- ResNeXt (Xie et al., 2017, "Aggregated Residual Transformations for Deep Neural Networks") adds many small
  bottlenecks of the same shape, `y = relu(x + sum_i T_i(x))`. Their sum is one bottleneck whose 3x3 convolution has a
  group for each `T_i`; "32x4d" means 32 groups of 4 channels each in the first stage.
- WRN-50-2 (Zagoruyko & Komodakis, 2016) is a ResNet-50 whose bottlenecks are twice as wide.

Names and shapes in the state dict are torchvision's, so its checkpoints load into `stem="imagenet"`.

For CIFAR (section 4.2 of the paper), ResNet-20, -32, -44, -56 and -110 are thinner and longer: three stages of
`n = (depth - 2) / 6` basic blocks with 16, 32 and 64 channels. A shortcut whose shape changes is a 1x1 convolution and
a BatchNorm (option B of the paper); the paper's CIFAR networks pad with zeros (option A). Parameter counts of ResNet-20
with 10 classes are therefore 272,474 here, 269,722 with zero padding, and 273,066 in Keras (274,442 with running
statistics), which has biases before BatchNorm and no BatchNorm in shortcuts.
"""

from collections.abc import Sequence

from torch import Tensor, flatten, nn

from multitudes.models.blocks import Staged, Stem, build_stem, check_counts, conv1x1, conv3x3


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Return the projection for a shortcut whose shape changes; `None` if the identity suffices."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions: `[B, inputs, H, W] -> [B, width, H / stride, W / stride]`."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1, groups: int = 1, width_per_group: int = 64) -> None:
        super().__init__()
        if (groups, width_per_group) != (1, 64):
            raise ValueError(f"groups and width_per_group need Bottleneck blocks, got {groups} and {width_per_group}")
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

    The stride is on the 3x3 convolution ("v1.5", as in torchvision) instead of the first 1x1 as in the paper. The 3x3
    convolution has `groups` groups of `width_per_group` channels if `width` is 64, and in proportion otherwise.
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


class ResNet(Staged):
    """A stem, stages of residual blocks, global average pooling and a linear layer.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depths: Blocks in each stage.
        classes: Outputs of the last layer.
        stem: "small" for images of about 32 x 32, "imagenet" for images of about 224 x 224.
        channels: Channels of the input image.
        width: Channels of the first stage, before the block's expansion.
        groups: Groups of each bottleneck's 3x3 convolution.
        width_per_group: Channels of such a group in a first stage of width 64.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

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
        check_counts(classes=classes, channels=channels, width=width, groups=groups, width_per_group=width_per_group)
        if width * width_per_group < 64:
            raise ValueError(f"width_per_group must be 64 / width or more, got {width_per_group} with width {width}")

        self.conv1, self.maxpool = build_stem(stem, channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

        def build(inputs: int, width: int, stride: int) -> nn.Module:
            return block(inputs, width, stride, groups, width_per_group)

        outputs = self.build_stages(build, depths, width, width)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(flatten(self.avgpool(self.run_stages(x)), 1))


class CifarResNet(ResNet):
    """A 3x3 convolution, three stages of basic blocks, global average pooling and a linear layer.

    Args:
        depth: The number of layers in the paper's convention, `6 n + 2` for n blocks in each stage.
        classes: Outputs of the last layer.
        channels: Channels of the input image.
        width: Channels of the first stage.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

    def __init__(self, depth: int, classes: int = 10, channels: int = 3, width: int = 16) -> None:
        if depth < 8 or (depth - 2) % 6 != 0:
            raise ValueError(f"depth must be 6 n + 2 with n at least 1 (8, 14, 20, 32, ...), got {depth}")
        super().__init__(BasicBlock, [(depth - 2) // 6] * 3, classes, "small", channels, width)


def resnet18(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """Build a ResNet-18, 11.17 M parameters; arguments as in `ResNet`.

    Example:
        >>> import torch
        >>> resnet18(classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, stem, channels)


def resnet34(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """Build a ResNet-34, 21.28 M parameters; arguments as in `ResNet`."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes, stem, channels)


def resnet50(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """Build a ResNet-50, 23.52 M parameters; arguments as in `ResNet`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, stem, channels)


def resnet101(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """Build a ResNet-101, 42.51 M parameters; arguments as in `ResNet`."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes, stem, channels)


def resnext50(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """Build a ResNeXt-50 32x4d, 22.99 M parameters; arguments as in `ResNet`.

    Example:
        >>> resnext50().layer1[0].conv2
        Conv2d(128, 128, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=32, bias=False)
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, stem, channels, groups=32, width_per_group=4)


def wide_resnet50_2(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """Build a WRN-50-2, 66.85 M parameters; arguments as in `ResNet`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, stem, channels, width_per_group=128)


def resnet20(classes: int = 10, channels: int = 3) -> CifarResNet:
    """Build a ResNet-20 for CIFAR, 0.27 M parameters; arguments as in `CifarResNet`."""
    return CifarResNet(20, classes, channels)
