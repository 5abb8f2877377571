"""VGG networks with batch norm (Simonyan & Zisserman, 2015, "Very Deep Convolutional Networks ...").

Five stages of 3x3 convolutions, each followed by BatchNorm and ReLU, with a max-pool after each stage. VGG-16 and
VGG-19 are named after their layers with weights, of which the paper's classifier has three.

The classifier here is the one of CIFAR: global average pooling and a single linear layer. A 32 x 32 image ends
as 1 x 1, so that the pooling does nothing there; it makes room for larger images. The paper's own, of two hidden
layers of 4096 units with dropout, is for 224 x 224 images. `features` has the names and shapes of torchvision's
`vgg16_bn` and `vgg19_bn`.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from multitudes.models.checks import check_counts
from multitudes.models.resnet import reset_he


class VGG(nn.Module):
    """Five stages of convolutions and a max-pool each, global average pooling and a linear layer.

    Args:
        depths: convolutions in each of the five stages.
        classes: outputs of the last layer.
        channels: channels of the input image.
        width: channels of the first stage; the others have 2, 4, 8 and 8 times as many.

    Shape: `[B, channels, H, W] -> [B, classes]`, for images of 32 x 32 or more.
    """

    reset_parameters = reset_he

    def __init__(self, depths: Sequence[int], classes: int = 10, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        if len(depths) != 5 or min(depths) < 1:
            raise ValueError(f"depths must be five numbers of at least 1, got {tuple(depths)}.")
        check_counts(classes=classes, channels=channels, width=width)

        layers: list[nn.Module] = []
        inputs = channels
        for depth, factor in zip(depths, (1, 2, 4, 8, 8), strict=True):
            for _ in range(depth):
                outputs = factor * width
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(inputs, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.avgpool(self.features(x))))


def vgg16(classes: int = 10, channels: int = 3) -> VGG:
    """VGG-16 with batch norm: `[B, channels, H, W] -> [B, classes]`, 14.73 M parameters.

    >>> import torch
    >>> vgg16(classes=10).eval()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return VGG((2, 2, 3, 3, 3), classes, channels)


def vgg19(classes: int = 10, channels: int = 3) -> VGG:
    """VGG-19 with batch norm: `[B, channels, H, W] -> [B, classes]`, 20.04 M parameters."""
    return VGG((2, 2, 4, 4, 4), classes, channels)
