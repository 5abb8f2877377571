"""SmallCNN and MediumCNN (Fort et al., 2019, "Deep Ensembles: A Loss Landscape Perspective").

Plain 3x3 convolutions, each followed by dropout, a 2x2 max-pool and a ReLU, then a linear layer on the remaining
feature map. As in the authors' code, dropout comes before the pool and ReLU after it, and the last
convolution has no ReLU.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from multitudes.base.checks import check_number
from multitudes.models.blocks import check_counts, reset_he


class CNN(nn.Module):
    """A convolution and a max-pool for each of `widths`, then a linear layer.

    Args:
        widths: Channels of each convolution.
        classes: Outputs of the last layer.
        channels: Channels of the input image.
        size: Height and width of the input image.
        dropout: Rate of the dropout after each convolution.

    Shape: `[B, channels, size, size] -> [B, classes]`.
    """

    reset_parameters = reset_he

    def __init__(
        self, widths: Sequence[int], classes: int = 10, channels: int = 3, size: int = 32, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if not widths or min(widths) < 1:
            raise ValueError(f"widths must be one or more numbers of at least 1, got {tuple(widths)}")
        check_counts(classes=classes, channels=channels, size=size)
        check_number("dropout", dropout, 0, below=1)

        layers: list[nn.Module] = []
        side = size
        for inputs, outputs in zip((channels, *widths), widths, strict=False):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.Dropout(dropout)]
            layers += [nn.MaxPool2d(2, ceil_mode=True), nn.ReLU(inplace=True)]
            side = (side + 1) // 2
        self.features = nn.Sequential(*layers[:-1])
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(widths[-1] * side * side, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.features(x)))


def small_cnn(classes: int = 10, channels: int = 3, size: int = 32, dropout: float = 0.1) -> CNN:
    """Build SmallCNN, a `CNN` with widths (16, 32, 32) and 19,466 parameters for CIFAR-10.

    Example:
        >>> import torch
        >>> small_cnn(classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return CNN((16, 32, 32), classes, channels, size, dropout)


def medium_cnn(classes: int = 10, channels: int = 3, size: int = 32, dropout: float = 0.1) -> CNN:
    """Build MediumCNN, a `CNN` with widths (64, 128, 256, 256) and 971,146 parameters for CIFAR-10."""
    return CNN((64, 128, 256, 256), classes, channels, size, dropout)
