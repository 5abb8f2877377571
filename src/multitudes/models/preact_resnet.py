"""Pre-activation residual networks (He et al., 2016, "Identity Mappings in Deep Residual Networks").

BatchNorm and ReLU come before each convolution, not after it, so that nothing but sums lies on the way from
a block's input to its output, `y = x + F(relu(bn(x)))`, and the sum of all blocks runs through the network
untouched. The first block follows the stem's own BatchNorm and ReLU and has none of its own before
its branches part; one more BatchNorm and ReLU follow the last block.
"""

from collections.abc import Sequence

from torch import Tensor, flatten, nn

from multitudes.models.checks import check_counts
from multitudes.models.resnet import Stem, build_stem, conv1x1, conv3x3, reset_he


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Conv2d | None:
    """The projection of a shortcut whose shape changes; `None` where the identity will do."""
    return None if stride == 1 and inputs == outputs else conv1x1(inputs, outputs, stride)


class PreactivationBlock(nn.Module):
    """Two 3x3 convolutions, each after BatchNorm and ReLU: `[B, inputs, H, W] -> [B, width, H', W']`.

    `H' = H / stride` and `W' = W / stride`. A block whose input is `activated` already has no first BatchNorm.
    """

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1, activated: bool = False) -> None:
        super().__init__()
        self.bn1 = None if activated else nn.BatchNorm2d(inputs)
        self.conv1 = conv3x3(inputs, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.bn1 is None else self.relu(self.bn1(x))
        # A projection reads the activated input, but the identity must stay the raw one: the sum of all
        # blocks then runs through the network untouched.
        identity = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(self.relu(self.bn2(self.conv1(out))))
        return out + identity


class PreactivationBottleneck(nn.Module):
    """1x1, 3x3, 1x1, each after BatchNorm and ReLU: `[B, inputs, H, W] -> [B, 4 * width, H', W']`.

    The stride is on the 3x3 convolution. The rest is as in `PreactivationBlock`.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1, activated: bool = False) -> None:
        super().__init__()
        self.bn1 = None if activated else nn.BatchNorm2d(inputs)
        self.conv1 = conv1x1(inputs, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width, stride)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = conv1x1(width, width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.bn1 is None else self.relu(self.bn1(x))
        identity = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(self.relu(self.bn2(self.conv1(out))))
        out = self.conv3(self.relu(self.bn3(out)))
        return out + identity


class PreactResNet(nn.Module):
    """A stem, four stages of pre-activation blocks, BatchNorm and ReLU, global average pooling, a linear layer.

    Args:
        block: `PreactivationBlock` or `PreactivationBottleneck`.
        depths: blocks in each of the four stages.
        classes: outputs of the last layer.
        stem: "small" for images of about 32 x 32, "imagenet" for images of about 224 x 224, as in ResNet.
        channels: channels of the input image.
        width: channels of the first stage, before the block's expansion.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

    reset_parameters = reset_he

    def __init__(
        self,
        block: type[PreactivationBlock] | type[PreactivationBottleneck],
        depths: Sequence[int],
        classes: int = 10,
        stem: Stem = "small",
        channels: int = 3,
        width: int = 64,
    ) -> None:
        super().__init__()
        if len(depths) != 4 or min(depths) < 1:
            raise ValueError(f"depths must be four numbers of at least 1, got {tuple(depths)}.")
        check_counts(classes=classes, channels=channels, width=width)

        self.conv1, self.maxpool = build_stem(stem, channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

        def stage(inputs: int, width: int, depth: int, stride: int, activated: bool = False) -> nn.Sequential:
            rest = (block(width * block.expansion, width) for _ in range(depth - 1))
            return nn.Sequential(block(inputs, width, stride, activated), *rest)

        wide = width * block.expansion
        self.layer1 = stage(width, width, depths[0], stride=1, activated=True)
        self.layer2 = stage(wide, 2 * width, depths[1], stride=2)
        self.layer3 = stage(2 * wide, 4 * width, depths[2], stride=2)
        self.layer4 = stage(4 * wide, 8 * width, depths[3], stride=2)
        self.bn_final = nn.BatchNorm2d(8 * wide)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * wide, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.avgpool(self.relu(self.bn_final(x)))
        return self.fc(flatten(x, 1))


def preact_resnet18(classes: int = 10, stem: Stem = "small", channels: int = 3) -> PreactResNet:
    """Pre-activation ResNet-18: `[B, channels, H, W] -> [B, classes]`, 11.17 M parameters.

    >>> import torch
    >>> preact_resnet18(classes=10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return PreactResNet(PreactivationBlock, (2, 2, 2, 2), classes, stem, channels)


def preact_resnet50(classes: int = 10, stem: Stem = "small", channels: int = 3) -> PreactResNet:
    """Pre-activation ResNet-50: `[B, channels, H, W] -> [B, classes]`, 23.51 M parameters."""
    return PreactResNet(PreactivationBottleneck, (3, 4, 6, 3), classes, stem, channels)
