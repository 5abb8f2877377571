"""The architectures of the papers, one family per page."""

from multitudes.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101
from multitudes.models.wide_resnet import WideResNet, wide_resnet, wide_resnet28_10

__all__ = [
    "ResNet",
    "WideResNet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "wide_resnet",
    "wide_resnet28_10",
]
