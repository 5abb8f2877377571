"""The VGG-like network for CIFAR (Zagoruyko, 2015, "92.45% on CIFAR-10 in Torch").

VGG-16's thirteen convolutions, each followed by BatchNorm and ReLU, with dropout between those of a stage: 0.3
in the first, 0.4 in the others. The classifier has one hidden layer of 512 units, with BatchNorm, and dropout
0.5 before each of its linear layers.
"""

from torch import Tensor, nn

from multitudes.models.checks import check_counts
from multitudes.models.resnet import reset_he


class VGGLike(nn.Module):
    """Five stages of convolutions with dropout, and a max-pool each; then two linear layers.

    Args:
        classes: outputs of the last layer.
        channels: channels of the input image.
        width: channels of the first stage; the others have 2, 4, 8 and 8 times as many, the hidden layer 8 times.

    Shape: `[B, channels, H, W] -> [B, classes]`, for images of at most 32 x 32.
    """

    reset_parameters = reset_he

    def __init__(self, classes: int = 10, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        check_counts(classes=classes, channels=channels, width=width)
        layers: list[nn.Module] = []
        inputs = channels
        for depth, factor, dropout in ((2, 1, 0.3), (2, 2, 0.4), (3, 4, 0.4), (3, 8, 0.4), (3, 8, 0.4)):
            for position in range(depth):
                outputs = factor * width
                layers += [
                    nn.Conv2d(inputs, outputs, 3, padding=1),
                    nn.BatchNorm2d(outputs, eps=1e-3),
                    nn.ReLU(inplace=True),
                ]
                if position < depth - 1:
                    layers.append(nn.Dropout(dropout))
                inputs = outputs
            layers.append(nn.MaxPool2d(2, ceil_mode=True))  # so that images below 32 x 32 end as 1 x 1, too
        self.features = nn.Sequential(*layers)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(inputs, 8 * width),
            nn.BatchNorm1d(8 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(8 * width, classes),
        )
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(self.features(x)))


def vgg_like(classes: int = 10, channels: int = 3) -> VGGLike:
    """The VGG-like network: `[B, channels, 32, 32] -> [B, classes]`, 14.99 M parameters.

    >>> import torch
    >>> vgg_like(classes=10).eval()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return VGGLike(classes, channels)
