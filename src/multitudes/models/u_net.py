"""U-Net (Ronneberger et al., 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation").

An encoder halves the image four times and doubles its channels, a decoder reverses this, and at each size the decoder
also reads the encoder's features. So each output pixel depends on both a wide context and fine detail. Convolutions are
padded, so that the output has the size of the image, and followed by BatchNorm.

The six dropouts are placed as in Bayesian SegNet (Kendall et al., 2017): in the three deepest parts of the encoder
and of the decoder, on single values, at rate 0.5. Skip connections have no dropout.
"""

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_number
from multitudes.models.blocks import check_counts, conv3x3, reset_he


def _convolve(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions with BatchNorm and ReLU: `[B, inputs, H, W] -> [B, outputs, H, W]`."""
    return nn.Sequential(
        conv3x3(inputs, outputs),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        conv3x3(outputs, outputs),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Up(nn.Module):
    """Decoder step: `x [B, 2 C, H, W]` and the encoder's `skip [B, C, H', W']` to `[B, C, H', W']`.

    `H'` and `W'` are at most twice `H` and `W`; a surplus from rounding in the encoder is removed.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * outputs, outputs, kernel_size=2, stride=2)
        self.convolve = _convolve(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)[:, :, : skip.shape[2], : skip.shape[3]]
        return self.convolve(torch.cat([skip, x], 1))


class UNet(nn.Module):
    """Four steps down, four steps up, and a 1x1 convolution; 31.04 M parameters.

    Args:
        classes: Channels of the output.
        channels: Channels of the input image.
        width: Channels at the image's own size; 16 times as many at the bottom.
        dropout: Rate of the six dropouts.

    Shape: `[B, channels, H, W] -> [B, classes, H, W]`, for any `H` and `W`.

    Example:
        >>> unet(classes=5, width=8)(torch.zeros(2, 3, 36, 48)).shape
        torch.Size([2, 5, 36, 48])
    """

    def __init__(self, classes: int, channels: int = 3, width: int = 64, dropout: float = 0.5) -> None:
        super().__init__()
        check_counts(classes=classes, channels=channels, width=width)
        check_number("dropout", dropout, 0, below=1)
        self.down1 = _convolve(channels, width)
        self.pool1 = nn.MaxPool2d(2, ceil_mode=True)
        self.down2 = _convolve(width, 2 * width)
        self.pool2 = nn.MaxPool2d(2, ceil_mode=True)
        self.down3 = _convolve(2 * width, 4 * width)
        self.drop3 = nn.Dropout(dropout)
        self.pool3 = nn.MaxPool2d(2, ceil_mode=True)
        self.down4 = _convolve(4 * width, 8 * width)
        self.drop4 = nn.Dropout(dropout)
        self.pool4 = nn.MaxPool2d(2, ceil_mode=True)
        self.down5 = _convolve(8 * width, 16 * width)
        self.drop5 = nn.Dropout(dropout)
        self.up4 = Up(8 * width)
        self.drop_up4 = nn.Dropout(dropout)
        self.up3 = Up(4 * width)
        self.drop_up3 = nn.Dropout(dropout)
        self.up2 = Up(2 * width)
        self.drop_up2 = nn.Dropout(dropout)
        self.up1 = Up(width)
        self.fc = nn.Conv2d(width, classes, kernel_size=1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset as in ResNet, but the last convolution by torch's rules: it has few outputs and no ReLU after it."""
        reset_he(self)
        self.fc.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(self.pool1(skip1))
        skip3 = self.down3(self.pool2(skip2))
        skip4 = self.down4(self.pool3(self.drop3(skip3)))
        x = self.drop5(self.down5(self.pool4(self.drop4(skip4))))
        x = self.drop_up4(self.up4(x, skip4))
        x = self.drop_up3(self.up3(x, skip3))
        x = self.drop_up2(self.up2(x, skip2))
        return self.fc(self.up1(x, skip1))


unet = UNet
