"""The architectures of the papers, one family per page."""

from multitudes.models.cifar_resnet import CifarResNet, resnet20
from multitudes.models.cnn import CNN, medium_cnn, small_cnn
from multitudes.models.lenet import LeNet5, lenet5
from multitudes.models.perceptron import MLP, mlp
from multitudes.models.preact_resnet import PreactResNet, preact_resnet18, preact_resnet50
from multitudes.models.pyramidnet import PyramidNet, pyramidnet110
from multitudes.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101
from multitudes.models.resnext import resnext50
from multitudes.models.segmentation import UNet, unet
from multitudes.models.vgg import VGG, vgg16, vgg19
from multitudes.models.vgg_variant import VGGLike, vgg_like
from multitudes.models.wide import WideResNet, wide_resnet, wide_resnet28_10, wide_resnet50_2

__all__ = [
    "CNN",
    "MLP",
    "VGG",
    "CifarResNet",
    "LeNet5",
    "PreactResNet",
    "PyramidNet",
    "ResNet",
    "UNet",
    "VGGLike",
    "WideResNet",
    "lenet5",
    "medium_cnn",
    "mlp",
    "preact_resnet18",
    "preact_resnet50",
    "pyramidnet110",
    "resnet18",
    "resnet20",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnext50",
    "small_cnn",
    "unet",
    "vgg16",
    "vgg19",
    "vgg_like",
    "wide_resnet",
    "wide_resnet28_10",
    "wide_resnet50_2",
]
