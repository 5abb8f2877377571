"""VGG networks with batch norm (Simonyan & Zisserman, 2015, "Very Deep Convolutional Networks ...").

Five stages of 3x3 convolutions, each followed by BatchNorm and ReLU, with a max-pool after each stage. VGG-16 and
VGG-19 are named after their number of layers with weights, three of which are the paper's classifier.

The classifier is that of CIFAR networks: global average pooling and a single linear layer. A 32 x 32 image ends as
1 x 1; the pooling supports larger images. The paper's classifier, two hidden layers of 4096 units with dropout, is for
224 x 224 images. `features` has the names and shapes of torchvision's `vgg16_bn` and `vgg19_bn`.

The VGG-like network for CIFAR (Zagoruyko, 2015, "92.45% on CIFAR-10 in Torch") is VGG-16 with dropout between the
convolutions of a stage, 0.3 in the first and 0.4 in the others. Its classifier has one hidden layer of 512 units
with BatchNorm, and dropout 0.5 before each linear layer.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from multitudes.models.blocks import check_counts, reset_he


def _features(
    channels: int,
    width: int,
    depths: Sequence[int],
    dropouts: Sequence[float] = (0, 0, 0, 0, 0),
    eps: float = 1e-5,
    ceil_mode: bool = False,
) -> nn.Sequential:
    """Build five stages of convolutions and dropout: `[B, channels, H, W] -> [B, 8 width, H / 32, W / 32]`."""
    layers, inputs = nn.Sequential(), channels
    for depth, factor, dropout in zip(depths, (1, 2, 4, 8, 8), dropouts, strict=True):
        for position in range(depth):
            outputs = factor * width
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            layers.append(nn.BatchNorm2d(outputs, eps=eps))
            layers.append(nn.ReLU(inplace=True))
            if dropout and position < depth - 1:
                layers.append(nn.Dropout(dropout))
            inputs = outputs
        layers.append(nn.MaxPool2d(2, ceil_mode=ceil_mode))
    return layers


class VGG(nn.Module):
    """Five stages of convolutions with a max-pool each, global average pooling and a linear layer.

    Args:
        depths: Convolutions in each of the five stages.
        classes: Outputs of the last layer.
        channels: Channels of the input image.
        width: Channels of the first stage; the others have 2, 4, 8 and 8 times as many.

    Shape: `[B, channels, H, W] -> [B, classes]`, for images of 32 x 32 or more.
    """

    reset_parameters = reset_he

    def __init__(self, depths: Sequence[int], classes: int = 10, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        if len(depths) != 5 or min(depths) < 1:
            raise ValueError(f"depths must be five numbers of at least 1, got {tuple(depths)}")
        check_counts(classes=classes, channels=channels, width=width)

        self.features = _features(channels, width, depths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(8 * width, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.avgpool(self.features(x))))


class VGGLike(nn.Module):
    """Five stages of convolutions with dropout and a max-pool each, then two linear layers.

    Args:
        classes: Outputs of the last layer.
        channels: Channels of the input image.
        width: Channels of the first stage; the others have 2, 4, 8 and 8 times as many, the hidden layer 8 times.

    Shape: `[B, channels, H, W] -> [B, classes]`, for images of at most 32 x 32.
    """

    reset_parameters = reset_he

    def __init__(self, classes: int = 10, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        check_counts(classes=classes, channels=channels, width=width)
        # Pools round up, so that images below 32 x 32 also end as 1 x 1.
        self.features = _features(channels, width, (2, 2, 3, 3, 3), (0.3, 0.4, 0.4, 0.4, 0.4), 1e-3, ceil_mode=True)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(8 * width, 8 * width),
            nn.BatchNorm1d(8 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(8 * width, classes),
        )
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(self.features(x)))


def vgg16(classes: int = 10, channels: int = 3) -> VGG:
    """Build a VGG-16 with batch norm, 14.73 M parameters; arguments as in `VGG`.

    Example:
        >>> import torch
        >>> vgg16(classes=10).eval()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return VGG((2, 2, 3, 3, 3), classes, channels)


def vgg19(classes: int = 10, channels: int = 3) -> VGG:
    """Build a VGG-19 with batch norm, 20.04 M parameters; arguments as in `VGG`."""
    return VGG((2, 2, 4, 4, 4), classes, channels)


def vgg_like(classes: int = 10, channels: int = 3) -> VGGLike:
    """Build the VGG-like network, 14.99 M parameters; arguments as in `VGGLike`.

    Example:
        >>> import torch
        >>> vgg_like(classes=10).eval()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return VGGLike(classes, channels)
