"""Aggregated residual networks (Xie et al., 2017, "Aggregated Residual Transformations for Deep Neural Networks").

A ResNeXt block adds up many small bottlenecks of the same shape, `y = relu(x + sum_i T_i(x))`. That sum is one
bottleneck whose 3x3 convolution has a group for each `T_i`, so that a ResNeXt is a ResNet with grouped
bottlenecks. "32x4d" means 32 groups of 4 channels each in the first stage, and of twice as many in each of
the next ones.
"""

from multitudes.models.resnet import Bottleneck, ResNet, Stem


def resnext50(classes: int = 10, stem: Stem = "small", channels: int = 3) -> ResNet:
    """ResNeXt-50 32x4d: `[B, channels, H, W] -> [B, classes]`, 22.99 M parameters.

    Names and shapes of the state dict are torchvision's, so that its checkpoints load into `stem="imagenet"`.

    >>> resnext50().layer1[0].conv2
    Conv2d(128, 128, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=32, bias=False)
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, stem, channels, groups=32, width_per_group=4)
