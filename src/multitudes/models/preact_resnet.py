"""Pre-activation residual networks (He et al., 2016, "Identity Mappings in Deep Residual Networks").

BatchNorm and ReLU come before each convolution instead of after it. So the path from a block's input to its output
has only sums, `y = x + F(relu(bn(x)))`. The first block follows the stem's BatchNorm and ReLU and has none before its
branches; another BatchNorm and ReLU follow the last block.

Wide residual networks (Zagoruyko & Komodakis, 2016, "Wide Residual Networks") use the same blocks: WRN-d-k has three
stages of `n = (d - 4) / 6` blocks with `16 k`, `32 k` and `64 k` channels. Convolutions have no biases, and there is no
dropout.
"""

from collections.abc import Sequence
from itertools import chain, repeat

from torch import Tensor, flatten, nn

from multitudes.models.blocks import Staged, Stem, build_stem, check_counts, conv1x1, conv3x3


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Conv2d | None:
    """Return the projection for a shortcut whose shape changes; `None` if the identity suffices."""
    return None if stride == 1 and inputs == outputs else conv1x1(inputs, outputs, stride)


class PreactivationBlock(nn.Module):
    """Two 3x3 convolutions, each after BatchNorm and ReLU: `[B, inputs, H, W] -> [B, width, H', W']`.

    `H' = H / stride` and `W' = W / stride`. A block with an `activated` input has no first BatchNorm.
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
        # A projection reads the activated input, the identity the raw one, so that blocks only add to it.
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


class PreactResNet(Staged):
    """A stem, stages of pre-activation blocks, BatchNorm and ReLU, global average pooling, a linear layer.

    Args:
        block: `PreactivationBlock` or `PreactivationBottleneck`.
        depths: Blocks in each stage.
        classes: Outputs of the last layer.
        stem: "small" for images of about 32 x 32, "imagenet" for images of about 224 x 224, as in ResNet.
        channels: Channels of the input image.
        width: Channels of the first stage, before the block's expansion.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

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
        check_counts(classes=classes, channels=channels, width=width)

        self.conv1, self.maxpool = build_stem(stem, channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

        activated = chain([True], repeat(False))  # the first block follows the stem's BatchNorm and ReLU

        def build(inputs: int, width: int, stride: int) -> nn.Module:
            return block(inputs, width, stride, next(activated))

        outputs = self.build_stages(build, depths, width, width)
        self.bn_final = nn.BatchNorm2d(outputs)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.relu(self.bn_final(self.run_stages(x))))
        return self.fc(flatten(x, 1))


class WideResNet(Staged):
    """A 3x3 convolution, three stages of pre-activation blocks, global average pooling and a linear layer.

    Args:
        depth: `d`, the number of layers in the paper's convention, `6 n + 4` for n blocks in each stage.
        width: `k`, the widening factor.
        classes: Outputs of the last layer.
        channels: Channels of the input image.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

    def __init__(self, depth: int, width: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 != 0:
            raise ValueError(f"depth must be 6 n + 4 with n at least 1 (10, 16, 22, 28, ...), got {depth}")
        check_counts(width=width, classes=classes, channels=channels)

        self.conv1 = conv3x3(channels, 16)
        outputs = self.build_stages(PreactivationBlock, [(depth - 4) // 6] * 3, 16, 16 * width)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.relu(self.bn1(self.run_stages(self.conv1(x)))))
        return self.fc(flatten(x, 1))


def preact_resnet18(classes: int = 10, stem: Stem = "small", channels: int = 3) -> PreactResNet:
    """Build a pre-activation ResNet-18, 11.17 M parameters; arguments as in `PreactResNet`.

    Example:
        >>> import torch
        >>> preact_resnet18(classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return PreactResNet(PreactivationBlock, (2, 2, 2, 2), classes, stem, channels)


def preact_resnet50(classes: int = 10, stem: Stem = "small", channels: int = 3) -> PreactResNet:
    """Build a pre-activation ResNet-50, 23.51 M parameters; arguments as in `PreactResNet`."""
    return PreactResNet(PreactivationBottleneck, (3, 4, 6, 3), classes, stem, channels)


def wide_resnet(depth: int, width: int, classes: int = 10, channels: int = 3) -> WideResNet:
    """Build a WRN-`depth`-`width`; arguments as in `WideResNet`.

    Example:
        >>> import torch
        >>> wide_resnet(depth=10, width=1, classes=5)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 5])
    """
    return WideResNet(depth, width, classes, channels)


def wide_resnet28_10(classes: int = 10, channels: int = 3) -> WideResNet:
    """Build a WRN-28-10, 36.48 M parameters; arguments as in `WideResNet`."""
    return WideResNet(28, 10, classes, channels)
