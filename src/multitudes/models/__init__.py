"""Architectures of the papers, one family per file, with shared blocks in `blocks.py`.

Imports `base` and `ensemble`. A new architecture is a file here, or a function in its family's file, and a line below.
"""

from multitudes.models.cnn import CNN, medium_cnn, small_cnn
from multitudes.models.huggingface import FromTokens
from multitudes.models.lenet import LeNet5, lenet5
from multitudes.models.perceptron import MLP, mlp
from multitudes.models.preact_resnet import (
    PreactResNet,
    WideResNet,
    preact_resnet18,
    preact_resnet50,
    wide_resnet,
    wide_resnet28_10,
)
from multitudes.models.pyramidnet import PyramidNet, pyramidnet110
from multitudes.models.resnet import (
    CifarResNet,
    ResNet,
    resnet18,
    resnet20,
    resnet34,
    resnet50,
    resnet101,
    resnext50,
    wide_resnet50_2,
)
from multitudes.models.table_network import Tabular, tabular
from multitudes.models.u_net import UNet, unet
from multitudes.models.vgg import VGG, VGGLike, vgg16, vgg19, vgg_like
from multitudes.models.vision_transformer import ViT, vit, vit_tiny

__all__ = [
    "CNN",
    "MLP",
    "VGG",
    "CifarResNet",
    "FromTokens",
    "LeNet5",
    "PreactResNet",
    "PyramidNet",
    "ResNet",
    "Tabular",
    "UNet",
    "VGGLike",
    "ViT",
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
    "tabular",
    "unet",
    "vgg16",
    "vgg19",
    "vgg_like",
    "vit",
    "vit_tiny",
    "wide_resnet",
    "wide_resnet28_10",
    "wide_resnet50_2",
]
