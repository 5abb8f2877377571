"""LeNet-5 in Caffe's version (LeCun et al., 1998, "Gradient-Based Learning Applied to Document Recognition").

Caffe's layers are wider and simpler than the paper's: 20 and 50 filters of 5x5, each layer followed by
a 2x2 max-pool, then 500 hidden units. Caffe's example has only one ReLU, after the hidden units; here, as in
most work that cites this network, each convolution has one too.
"""

from torch import Tensor, nn

from multitudes.models.blocks import check_counts, reset_he


class LeNet5(nn.Module):
    """Two convolutions with a max-pool each, and two linear layers; 431,080 parameters for MNIST.

    Args:
        classes: Outputs of the last layer.
        channels: Channels of the input image.
        size: Height and width of the input image, at least 16.

    Shape: `[B, channels, size, size] -> [B, classes]`.

    Example:
        >>> import torch
        >>> lenet5(classes=10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    reset_parameters = reset_he

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        check_counts(classes=classes, channels=channels, size=size)
        if size < 16:
            raise ValueError(f"size must be 16 or more for two 5x5 convolutions and pools, got {size}")
        side = ((size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 20, kernel_size=5)
        self.relu1 = nn.ReLU(inplace=True)
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5)
        self.relu2 = nn.ReLU(inplace=True)
        self.pool2 = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(50 * side * side, 500)
        self.relu3 = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(500, classes)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(self.flatten(x))))


lenet5 = LeNet5
