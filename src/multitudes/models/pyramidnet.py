"""Pyramidal residual networks (Han et al., 2017, "Deep Pyramidal Residual Networks").

A ResNet doubles its channels at each down-sampling; a PyramidNet adds a few in every block. Of `N` blocks,
block `k` has

    D_k = 16 + alpha k / N

channels, rounded, up to `16 + alpha` in the last ("additive" widening). A block is BN-conv-BN-ReLU-conv-BN.
Its shortcut has no weights: average pooling if the block strides, zeros for new channels.
"""

from torch import Tensor, flatten, nn

from multitudes.models.blocks import check_counts, conv3x3, reset_he


class PyramidBlock(nn.Module):
    """Two 3x3 convolutions, `outputs - inputs` new channels: `[B, inputs, H, W] -> [B, outputs, H', W']`.

    `H' = H / stride` and `W' = W / stride`, rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(outputs, outputs)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.append(nn.AvgPool2d(stride, ceil_mode=True))
        if outputs > inputs:
            # Pads the last three dimensions of [B, C, H, W]: nothing around H and W, zeros after C.
            self.shortcut.append(nn.ZeroPad3d((0, 0, 0, 0, 0, outputs - inputs)))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn2(self.conv1(self.bn1(x))))
        return self.bn3(self.conv2(out)) + self.shortcut(x)


class PyramidNet(nn.Module):
    """A 3x3 convolution, three stages of pyramidal blocks, global average pooling and a linear layer.

    Args:
        depth: The number of layers in the paper's convention, `6 n + 2` for n blocks in each stage.
        widening: `alpha`, the channels that all blocks together add to the first 16.
        classes: Outputs of the last layer.
        channels: Channels of the input image.

    Shape: `[B, channels, H, W] -> [B, classes]`.
    """

    reset_parameters = reset_he

    def __init__(self, depth: int, widening: float, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6 != 0:
            raise ValueError(f"depth must be 6 n + 2 with n at least 1 (8, 14, 20, ..., 110), got {depth}")
        if not 0 <= widening < float("inf"):
            raise ValueError(f"widening must be 0 or more, got {widening}")
        check_counts(classes=classes, channels=channels)

        n = (depth - 2) // 6
        widths = [round(16 + widening * k / (3 * n)) for k in range(3 * n + 1)]

        def stage(first: int, stride: int) -> nn.Sequential:
            blocks = range(first, first + n)
            return nn.Sequential(*(PyramidBlock(widths[k], widths[k + 1], stride if k == first else 1) for k in blocks))

        self.conv1 = conv3x3(channels, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.layer1 = stage(0, stride=1)
        self.layer2 = stage(n, stride=2)
        self.layer3 = stage(2 * n, stride=2)
        self.bn_final = nn.BatchNorm2d(widths[-1])
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = self.avgpool(self.relu(self.bn_final(x)))
        return self.fc(flatten(x, 1))


def pyramidnet110(classes: int = 100, channels: int = 3, widening: float = 270) -> PyramidNet:
    """Build a PyramidNet-110 without bottlenecks, 28.51 M parameters; arguments as in `PyramidNet`.

    Example:
        >>> net = pyramidnet110(classes=100)
        >>> sum(p.numel() for p in net.parameters())
        28511307
    """
    return PyramidNet(110, widening, classes, channels)
