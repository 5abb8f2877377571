"""Wide residual networks (Zagoruyko & Komodakis, 2016, "Wide Residual Networks").

WRN-d-k has pre-activation blocks, `y = shortcut(x) + conv(relu(bn(conv(relu(bn(x))))))`, in three stages
of `n = (d - 4) / 6` blocks with `16 k`, `32 k` and `64 k` channels: shallow and wide where a ResNet is deep
and narrow. Convolutions have no biases, and there is no dropout.

The paper's network for ImageNet, WRN-50-2, is a ResNet-50 whose bottlenecks are twice as wide inside.
"""

from torch import Tensor, flatten, nn

from multitudes.models.checks import check_counts
from multitudes.models.preact_resnet import PreactivationBlock
from multitudes.models.resnet import Bottleneck, ResNet, Stem, conv3x3, reset_he


class WideResNet(nn.Module):
    """A 3x3 convolution, three stages of pre-activation blocks, global average pooling and a linear layer.

    Args:
        depth: `d`, the number of layers as the paper counts them, `6 n + 4` for n blocks in each stage.
        width: `k`, the widening factor.
        classes: outputs of the last layer.
        channels: channels of the input image.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

    reset_parameters = reset_he

    def __init__(self, depth: int, width: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 != 0:
            raise ValueError(f"depth must be 6 n + 4 with n at least 1 (10, 16, 22, 28, ...), got {depth}.")
        check_counts(width=width, classes=classes, channels=channels)

        def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            rest = (PreactivationBlock(outputs, outputs) for _ in range((depth - 4) // 6 - 1))
            return nn.Sequential(PreactivationBlock(inputs, outputs, stride), *rest)

        self.conv1 = conv3x3(channels, 16)
        self.layer1 = stage(16, 16 * width, stride=1)
        self.layer2 = stage(16 * width, 32 * width, stride=2)
        self.layer3 = stage(32 * width, 64 * width, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64 * width, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        x = self.avgpool(self.relu(self.bn1(x)))
        return self.fc(flatten(x, 1))


def wide_resnet(depth: int, width: int, classes: int = 10, channels: int = 3) -> WideResNet:
    """WRN-`depth`-`width`: `[B, channels, H, W] -> [B, classes]`.

    >>> import torch
    >>> wide_resnet(depth=10, width=1, classes=5)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """
    return WideResNet(depth, width, classes, channels)


def wide_resnet28_10(classes: int = 10, channels: int = 3) -> WideResNet:
    """WRN-28-10: `[B, channels, H, W] -> [B, classes]`, 36.48 M parameters."""
    return WideResNet(28, 10, classes, channels)


def wide_resnet50_2(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """WRN-50-2: `[B, channels, H, W] -> [B, classes]`, 66.85 M parameters; names and shapes are torchvision's."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, stem, channels, width_per_group=128)
