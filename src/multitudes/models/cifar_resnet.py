"""Residual networks for CIFAR (He et al., 2016, "Deep Residual Learning for Image Recognition", section 4.2).

ResNet-20, -32, -44, -56 and -110 are thinner and longer than ResNet-18: a 3x3 convolution, then three stages of
`n = (depth - 2) / 6` basic blocks with 16, 32 and 64 channels, global average pooling and a linear layer.

A shortcut whose shape changes is a 1x1 convolution and a BatchNorm, as in this library's other ResNets
(option B of the paper), where the paper's own CIFAR networks pad with zeros (option A). Of ResNet-20 with
10 classes there are thus four counts:

    shortcuts padded with zeros                                                       269,722
    here: two projections with BatchNorm                                              272,474
    Keras's "ResNet20v1": a bias in each convolution, no BatchNorm in shortcuts       273,066
    the same, with the running statistics that Keras counts as well                   274,442

A bias in front of a BatchNorm changes nothing, so that Keras's network is this one but for the shortcuts' norm.
"""

from torch import Tensor, flatten, nn

from multitudes.models.checks import check_counts
from multitudes.models.resnet import BasicBlock, conv3x3, reset_he


class CifarResNet(nn.Module):
    """A 3x3 convolution, three stages of basic blocks, global average pooling and a linear layer.

    Args:
        depth: the number of layers as the paper counts them, `6 n + 2` for n blocks in each stage.
        classes: outputs of the last layer.
        channels: channels of the input image.
        width: channels of the first stage.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

    reset_parameters = reset_he

    def __init__(self, depth: int, classes: int = 10, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6 != 0:
            raise ValueError(f"depth must be 6 n + 2 with n at least 1 (8, 14, 20, 32, ...), got {depth}.")
        check_counts(classes=classes, channels=channels, width=width)

        def stage(inputs: int, width: int, stride: int) -> nn.Sequential:
            rest = (BasicBlock(width, width) for _ in range((depth - 2) // 6 - 1))
            return nn.Sequential(BasicBlock(inputs, width, stride), *rest)

        self.conv1 = conv3x3(channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = stage(width, width, stride=1)
        self.layer2 = stage(width, 2 * width, stride=2)
        self.layer3 = stage(2 * width, 4 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(flatten(self.avgpool(x), 1))


def resnet20(classes: int = 10, channels: int = 3) -> CifarResNet:
    """ResNet-20: `[B, channels, H, W] -> [B, classes]`, 0.27 M parameters.

    >>> import torch
    >>> resnet20(classes=10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return CifarResNet(20, classes, channels)
